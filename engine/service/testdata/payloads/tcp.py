"""Connections over the loopback: both ends inside, one with bytes on their way; a listener; UDP."""
import os, socket
from lib import serve

listener = socket.create_server(("127.0.0.1", 4000))
client = socket.create_connection(("127.0.0.1", 4000))
server, _ = listener.accept()
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


def step():
    global n
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
