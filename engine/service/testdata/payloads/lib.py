"""What payloads have in common: a socket on which they take one step after the other.

A payload's step changes its state and returns how many steps it has taken, or raises
what is wrong with its state."""
import os
import socket
import sys


def serve(step):
    s = socket.socket(socket.AF_UNIX)
    s.bind("/tmp/p.sock")
    s.listen()
    open("/tmp/ready", "w").close()
    while True:
        c, _ = s.accept()
        c.recv(10)
        try:
            answer = str(step())
        except BaseException as e:
            answer = repr(e)
        c.sendall(answer.encode())
        c.close()


def ask():
    s = socket.socket(socket.AF_UNIX)
    s.connect("/tmp/p.sock")
    s.sendall(b"step")
    answer = b""
    while b := s.recv(4096):
        answer += b
    print(answer.decode())


if __name__ == "__main__":
    ask()
