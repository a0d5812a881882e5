"""Connections over the loopback: both ends inside, one with bytes on their way; a listener; UDP. Some belong to another user."""
import os, socket
from lib import serve

os.seteuid(1000)
listener = socket.create_server(("127.0.0.1", 4000))
client = socket.create_connection(("127.0.0.1", 4000))
server, _ = listener.accept()
os.seteuid(0)
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 4001))
six = socket.create_server(("::1", 4002), family=socket.AF_INET6)
n = 0
if os.fork() == 0:
    server.close()
    while True:
        got = client.recv(100)
        client.sendall(got + b"!")
client.close()
server.sendall(b"0")
server_waits = True


def owners():
    """Of what the kernel lists for port 4000."""
    lines = [line.split() for line in open("/proc/net/tcp")][1:]
    return {(f[3], f[7]) for f in lines if ":0FA0" in f[1] + f[2] and f[3] in ("0A", "01")}


def step():
    global n
    assert os.fstat(listener.fileno()).st_uid == os.fstat(server.fileno()).st_uid == 1000
    assert os.fstat(udp.fileno()).st_uid == 0
    assert owners() == {("0A", "1000"), ("01", "1000")}, owners()
    # The answer to the last step has been lying in the socket since then.
    got = server.recv(100)
    assert got == b"%d!" % n, (got, n)
    n += 1
    server.sendall(b"%d" % n)
    fresh = socket.create_connection(("127.0.0.1", 4000))
    other, _ = listener.accept()
    fresh.sendall(b"hi")
    assert other.recv(10) == b"hi"
    fresh.close()
    other.close()
    v6 = socket.create_connection(("::1", 4002))
    six.accept()[0].close()
    v6.close()
    udp.sendto(b"u", ("127.0.0.1", 4001))
    assert udp.recv(10) == b"u"
    return n


serve(step)
