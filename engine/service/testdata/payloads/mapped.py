"""Memory of every kind, shared and private, by file and without; a file that has no name any more."""
import mmap, os, tempfile
from lib import serve

PAGES = 64
f = open("/tmp/mapped", "w+b")
f.truncate(PAGES * 4096)
by_file = mmap.mmap(f.fileno(), 0)
private = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE)
shared = mmap.mmap(-1, PAGES * 4096)
memfd = os.memfd_create("payload")
os.ftruncate(memfd, 4096)
by_memfd = mmap.mmap(memfd, 4096)
nameless = open("/tmp/nameless", "w+b")
os.unlink("/tmp/nameless")
ask_r, ask_w = os.pipe()
done_r, done_w = os.pipe()
if os.fork() == 0:
    while os.read(ask_r, 1):
        n = shared[0] + 1
        for m in (shared, by_file, by_memfd):
            m[0] = n
        nameless.seek(0)
        nameless.write(b"%d" % n)
        nameless.flush()
        os.write(done_w, b"x")
    os._exit(0)
private[4096] = 200


def step():
    before = shared[0]
    os.write(ask_w, b"x")
    os.read(done_r, 1)
    n = shared[0]
    assert n == before + 1 == by_file[0] == by_memfd[0], (n, before, by_file[0], by_memfd[0])
    assert os.pread(f.fileno(), 1, 0)[0] == n, "the file behind the mapping"
    assert private[4096] == 200 and by_file[4096] == 0, "a private page"
    assert os.pread(nameless.fileno(), 10, 0) == b"%d" % n, "the file without a name"
    return n


serve(step)
