"""As many MiB as the environment says, each page with bytes of its own."""
import hashlib, os
from lib import serve

MIB = int(os.environ.get("MIB", "64"))
memory = bytearray(MIB << 20)
for at in range(0, len(memory), 4096):
    memory[at : at + 8] = at.to_bytes(8, "little")
n = 0


def step():
    global n
    for at in range(0, len(memory), 4096):
        want = at + (1 if at // 4096 < n else 0)
        got = int.from_bytes(memory[at : at + 8], "little")
        assert got == want, (at, got, want)
    at = n * 4096
    memory[at : at + 8] = (at + 1).to_bytes(8, "little")
    n += 1
    return n


serve(step)
