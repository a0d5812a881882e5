"""System V shared memory, a semaphore and a message queue."""
import ctypes, os, struct
from lib import serve

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p


def check(v):
    if v in (-1, None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return v


CREATE = 0o1000 | 0o600
shm = check(libc.shmget(77, 8192, CREATE))
at = check(libc.shmat(shm, None, 0))
number = ctypes.c_int.from_address(at)
sem = check(libc.semget(78, 2, CREATE))
queue = check(libc.msgget(79, CREATE))
check(libc.msgsnd(queue, struct.pack("l4s", 1, b"wait"), 4, 0))


def step():
    number.value += 1
    n = number.value
    op = struct.pack("HhH", 1, 1, 0)  # semaphore 1, up by one
    check(libc.semop(sem, op, 1))
    assert check(libc.semctl(sem, 1, 12)) == n, "semaphore"  # GETVAL
    buf = ctypes.create_string_buffer(64)
    check(libc.msgrcv(queue, buf, 16, 0, 0o4000))  # IPC_NOWAIT
    assert struct.unpack_from("l4s", buf.raw) == (1, b"wait"), buf.raw[:12]
    check(libc.msgsnd(queue, struct.pack("l4s", 1, b"wait"), 4, 0))
    assert check(libc.shmget(77, 8192, 0o600)) == shm, "shm id"
    return n


serve(step)
