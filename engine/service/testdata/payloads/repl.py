"""A Python in a terminal of its own, in which somebody has been typing."""
import os, pty, select
from lib import serve

pid, fd = pty.fork()
if pid == 0:
    os.environ["TERM"] = "dumb"
    os.execvp("python3", ["python3", "-q", "-i", "-c", "n = 0; import math; f = lambda: math.floor(n)"])


def until(mark):
    out = b""
    while mark not in out:
        if not select.select([fd], [], [], 20)[0]:
            raise TimeoutError(out)
        out += os.read(fd, 4096)
    return out


until(b">>> ")


def step():
    os.write(fd, b"n += 1; print('n' + '=%d;' % f())\n")
    out = until(b">>> ")
    return int(out.split(b"n=")[1].split(b";")[0])


serve(step)
