"""Ways of changing something, and of changing nothing, as Python programs do it.

The names and options are those of ways.c; what Python can't do is left out.
"""
import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import struct
import sys
import threading

libc = ctypes.CDLL(None, use_errno=True)
HELD = {}
MAPPED = None
RACING = False


def raced(fd):
    null, at = os.open("/dev/null", os.O_RDWR), os.dup(fd)

    def swap():
        while True:
            os.dup2(null, at)
            os.dup2(fd, at)

    threading.Thread(target=swap, daemon=True).start()
    return at


def rw(path):
    fd = os.dup(HELD[path]) if path in HELD else os.open(path, os.O_RDWR)
    return raced(fd) if RACING else fd


def hold():
    global MAPPED
    for name in ("old", "other", "big", "empty", "x"):
        HELD[name] = os.open(name, os.O_RDWR)
    MAPPED = mmap.mmap(HELD["old"], 4096)


def call(number, *args):
    libc.syscall.restype = ctypes.c_long
    r = libc.syscall(ctypes.c_long(number), *args)
    if r == -1:
        raise OSError(ctypes.get_errno(), "call")
    return r


def made(name):
    return os.open(name, os.O_CREAT | os.O_RDWR, 0o600)


def mapping(path, store):
    fd = rw(path)
    m = mmap.mmap(fd, 4096)
    store(m)
    m.close()


def mapped_store():
    global MAPPED
    MAPPED = MAPPED or mmap.mmap(rw("old"), 4096)
    MAPPED[9] = (MAPPED[9] + 1) % 256


def bump(m):
    m[7] = (m[7] + 1) % 256


def tmpfile_link():
    fd = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o644)
    call(265, -100, b"/proc/self/fd/%d" % fd, -100, b"new", 0x400)


def splice_():
    r, w = os.pipe()
    os.write(w, b"hello")
    os.splice(r, rw("old"), 5)


def passed():
    a, b = socket.socketpair()
    if os.fork() == 0:
        _, fds, _, _ = socket.recv_fds(b, 1, 1)
        os.write(fds[0], b"hello")
        os._exit(0)
    socket.send_fds(a, [b"x"], [rw("old")])
    os.wait()


def double_fork():
    r, w = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(rw("old"), b"hello")
        os._exit(0)
    os.close(w)
    os.read(r, 1)


def concurrent():
    def write(c):
        fd = rw("big")
        for i in range(16):
            os.pwrite(fd, b"c", (c + 4 * i) * 1000)

    crowd = [threading.Thread(target=write, args=(c,)) for c in range(4)]
    [t.start() for t in crowd]
    [t.join() for t in crowd]


def bind_(name, gone=False):
    s = socket.socket(socket.AF_UNIX)
    s.bind(name)
    if gone:
        os.unlink(name)


def create_unlink():
    os.write(made("t"), b"x")
    os.unlink("t")


def rename_new():
    os.close(made("a"))
    os.rename("a", "b")
    os.rename("b", "a")
    os.unlink("a")


def tempdir():
    os.mkdir("td")
    os.close(made("td/f"))
    os.chmod("td/f", 0o644)
    os.unlink("td/f")
    os.rmdir("td")


def failed():
    for do in (
        lambda: os.open("none/x", os.O_CREAT | os.O_RDWR),
        lambda: os.chmod("none", 0),
        lambda: os.mkdir("d"),
        lambda: os.rmdir("d"),
        lambda: os.rename("none", "x"),
        lambda: os.truncate("d", 0),
    ):
        try:
            do()
        except OSError as e:
            assert e.errno in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR)
        else:
            raise AssertionError("it worked")


def threads():
    crowd = [threading.Thread(target=lambda: open("old", "rb").read()) for _ in range(8)]
    [t.start() for t in crowd]
    [t.join() for t in crowd]


def children():
    for _ in range(5):
        if os.fork() == 0:
            os._exit(0)
        os.wait()


def survivor():
    r, w = os.pipe()
    if os.fork() == 0:
        os.close(r)
        os.setsid()
        os.write(w, b"x")
        for fd in (0, 1, 2, w):
            os.close(fd)
        while True:
            signal.pause()
    os.close(w)
    os.read(r, 1)


def flags(fd, add):
    b = struct.unpack("l", fcntl.ioctl(fd, 0x80086601, b"\0" * 8))[0]
    fcntl.ioctl(fd, 0x40086602, struct.pack("l", (b & 0xFFFFFFFF) | add))


WAYS = {
    "write_": lambda: os.write(rw("old"), b"hello"),
    "pwrite_": lambda: os.pwrite(rw("old"), b"hello", 100),
    "writev_": lambda: os.writev(rw("old"), [b"hel", b"lo"]),
    "pwritev_": lambda: os.pwritev(rw("old"), [b"hello"], 9),
    "append": lambda: open("old", "ab", 0).write(b"x"),
    "buffered": lambda: open("old", "r+").write("hello"),
    "sendfile_": lambda: os.sendfile(rw("old"), rw("other"), 0, 4096),
    "splice_": splice_,
    "copy_file_range_": lambda: os.copy_file_range(rw("other"), rw("old"), 8192, 0, 0),
    "ficlone": lambda: fcntl.ioctl(rw("old"), 0x40049409, rw("other")),
    "fallocate_": lambda: os.posix_fallocate(rw("old"), 0, 1 << 20),
    "punch": lambda: call(285, rw("big"), 3, ctypes.c_long(0), ctypes.c_long(65536)),
    "truncate_": lambda: os.truncate("old", 0),
    "ftruncate_": lambda: os.ftruncate(rw("old"), 4096),
    "o_trunc": lambda: open("old", "w").close(),
    "mmap_store": lambda: mapping("old", bump),
    "mapped_store": mapped_store,
    "stdout_": lambda: (os.dup2(rw("old"), 1), os.write(1, b"hello")),
    "proc_self_fd": lambda: os.write(os.open(f"/proc/self/fd/{rw('old')}", os.O_WRONLY), b"hello"),
    "passed": passed,
    "double_fork": double_fork,
    "concurrent": concurrent,
    "create": lambda: open("new", "w").close(),
    "tmpfile_link": tmpfile_link,
    "rename_": lambda: os.rename("old", "new"),
    "rename_over": lambda: (os.close(made("t")), os.replace("t", "old")),
    "rename_dir": lambda: os.rename("d", "d2"),
    "rename_into": lambda: os.rename("old", "e/old"),
    "exchange": lambda: call(316, -100, b"old", -100, b"other", 2),
    "link_": lambda: os.link("old", "new"),
    "symlink_": lambda: os.symlink("old", "new"),
    "mkfifo_": lambda: os.mkfifo("new"),
    "mknod_": lambda: os.mknod("new"),
    "bind_": lambda: bind_("new"),
    "mkdir_": lambda: os.mkdir("new"),
    "rmdir_": lambda: os.rmdir("e"),
    "unlink_": lambda: os.unlink("old"),
    "chmod_": lambda: os.chmod("old", 0o600),
    "fchmod_": lambda: os.fchmod(rw("old"), 0o600),
    "fchmodat2_": lambda: call(452, -100, b"old", 0o600, 0),
    "chmod_dir": lambda: os.chmod("d", 0o700),
    "chown_": lambda: os.chown("old", 5, 5),
    "lchown_": lambda: os.lchown("old", 5, 5),
    "fchown_": lambda: os.fchown(rw("old"), 5, 5),
    "utimensat_": lambda: os.utime("old", ns=(10**9, 10**9)),
    "utimensat_dir": lambda: os.utime("d", ns=(10**9, 10**9)),
    "futimens_": lambda: os.utime(rw("old"), ns=(10**9, 10**9)),
    "touch": lambda: os.utime("old"),
    "setxattr_": lambda: os.setxattr("old", "user.a", b"1"),
    "fsetxattr_": lambda: os.setxattr(rw("old"), "user.a", b"1"),
    "removexattr_": lambda: os.removexattr("x", "user.k"),
    "setflags": lambda: flags(rw("old"), 0x40),
    "shm": lambda: call(29, 0, ctypes.c_long(4096), 0o1600),
    "msg": lambda: call(68, 0, 0o600),
    "sem": lambda: call(64, 0, 1, 0o600),
    "hostname": lambda: socket.sethostname("x"),
    "mount_": lambda: call(165, b"t", b"e", b"tmpfs", 0, 0),
    "survivor": survivor,
    # nothing
    "quiet": lambda: None,
    "reads": lambda: (open("old", "rb").read(), os.stat("d"), os.listdir(".")),
    "open_rdwr": lambda: rw("old"),
    "create_unlink": create_unlink,
    "mkdtemp_": tempdir,
    "tmpfile_gone": lambda: os.write(os.open(".", os.O_TMPFILE | os.O_RDWR), b"x"),
    "rename_new": rename_new,
    "rename_back": lambda: (os.rename("old", "t"), os.rename("t", "old")),
    "link_unlink": lambda: (os.link("old", "t"), os.unlink("t")),
    "failed": failed,
    "threads": threads,
    "children": children,
    "bound_gone": lambda: bind_("t", True),
    "private_map": lambda: bump(mmap.mmap(rw("old"), 4096, mmap.MAP_PRIVATE)),
    "lock": lambda: fcntl.flock(rw("old"), fcntl.LOCK_EX),
}


def stay():
    r, w = os.pipe()
    if os.fork():
        os.close(w)
        sys.exit(os.read(r, 1) != b"x")
    os.setsid()
    hold()
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.bind("\0ways.py")
    s.listen()
    for fd in (0, 1, 2):
        os.close(fd)
    os.write(w, b"x")
    os.close(w)
    while True:
        c, _ = s.accept()
        while name := c.recv(64):
            try:
                WAYS[name.decode()]()
            except OSError:
                pass
            c.send(b"k")


def ask(names):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect("\0ways.py")
    for name in names:
        s.send(name.encode())
        if s.recv(1) != b"k":
            sys.exit(1)


def main(args):
    global RACING
    while args and args[0][0] == "-":
        option = args.pop(0)
        if option == "-r":
            RACING = True
        elif option == "-t":
            threading.Thread(target=signal.pause, daemon=True).start()
        elif option == "-i":
            hold()
            if os.fork():
                sys.exit(os.wait()[1] != 0)
        elif option == "-s":
            return stay()
        elif option == "-S":
            return ask(args)
    for name in args:
        WAYS[name]()
    sys.stdout.flush()
    os._exit(0)  # a thread may still be swapping


main(sys.argv[1:])
