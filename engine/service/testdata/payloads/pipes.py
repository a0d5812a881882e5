"""A ring of processes, each in a session of its own, with pipes, unix sockets, an eventfd and an epoll;
bytes that nobody has read yet; a zombie."""
import array, os, select, socket
from lib import serve

r0, w0 = os.pipe()
a, b = socket.socketpair()
c, d = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
r1, w1 = os.pipe()
if os.fork() == 0:
    os.setsid()
    while x := os.read(r0, 100):
        a.sendall(x)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while x := b.recv(100):
            c.send(x)
    os.wait()
if os.fork() == 0:
    while x := d.recv(100):
        os.write(w1, x)
if os.fork() == 0:
    os._exit(7)  # nobody waits for it yet
unread_r, unread_w = os.pipe()
os.write(unread_w, b"unread")
event = os.eventfd(5)
poll = select.epoll()
poll.register(event, select.EPOLLIN)
passed = socket.socketpair()
socket.send_fds(passed[0], [b"f"], [os.open("/etc/passwd", os.O_RDONLY)])
n = 0


def step():
    global n
    n += 1
    os.write(w0, b"%d" % n)
    got = os.read(r1, 100)
    assert got == b"%d" % n, got
    got = os.read(unread_r, 100)
    assert got == b"unread", got
    os.write(unread_w, got)
    assert poll.poll(0) == [(event, select.EPOLLIN)], "epoll"
    assert os.eventfd_read(event) == 4 + n, "eventfd"
    os.eventfd_write(event, 5 + n)
    return n


serve(step)
