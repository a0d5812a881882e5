"""Calls that wait, as C programs make them: Python itself would make them again. A capture
ends none of them for good but those that docs/PROCESS-STATE.md names, and these with EINTR."""
import ctypes
import errno
import os
import select
import socket
import threading

from lib import serve

libc = ctypes.CDLL(None, use_errno=True)
ended = []
MAY_END = {(name, -1, "EINTR") for name in ("epoll_wait", "poll", "nanosleep")}


def waits(name, call):
    def loop():
        while True:
            ctypes.set_errno(0)
            result = call()
            ended.append((name, result, errno.errorcode.get(ctypes.get_errno(), "")))

    threading.Thread(target=loop, daemon=True).start()


class PollFD(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]


class Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


quiet, _other = os.pipe()
listener = socket.create_server(("127.0.0.1", 4321))
datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
datagrams.bind("/tmp/datagrams")
epoll = select.epoll()
epoll.register(quiet, select.EPOLLIN)
child = os.fork()
if child == 0:
    libc.pause()
waits("epoll_wait", lambda: libc.epoll_wait(epoll.fileno(), ctypes.create_string_buffer(12), 1, -1))
waits("poll", lambda: libc.poll(ctypes.byref(PollFD(quiet, 1, 0)), 1, -1))
waits("read", lambda: libc.read(quiet, ctypes.create_string_buffer(1), 1))
waits("accept", lambda: libc.accept(listener.fileno(), None, None))
waits("recv", lambda: libc.recv(datagrams.fileno(), ctypes.create_string_buffer(1), 1, 0))
waits("nanosleep", lambda: libc.nanosleep(ctypes.byref(Timespec(1000000, 0)), None))
waits("waitpid", lambda: libc.waitpid(child, None, 0))

taken = 0


def step():
    global taken
    taken += 1
    others = set(ended) - MAY_END
    assert not others, others
    return taken


serve(step)
