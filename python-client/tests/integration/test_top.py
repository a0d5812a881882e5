"""`boxwood top` and the metrics of a real daemon, as a terminal and as Prometheus see them."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import boxwood

from .conftest import REPOSITORY, missing

pytestmark = pytest.mark.integration


@pytest.fixture
def binary() -> str:
    found = Path(os.environ.get("BOXWOOD_BIN") or REPOSITORY / "bin" / "boxwood")
    if not found.exists():
        missing(f"no {found}")
    return str(found)


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, command: list[str], rows: int, columns: int) -> None:
        self.ours, theirs = os.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.theirs = theirs
        self.seen = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, pattern: bytes) -> re.Match[bytes]:
        """Reads on until the pattern is in what came since the last call; 30 s at most."""
        end = time.monotonic() + 30
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            left = end - time.monotonic()
            ready = select.select([self.ours], [], [], max(0, left))[0]
            assert ready, (pattern, self.seen[-4000:])
            self.seen += os.read(self.ours, 1 << 16)
        self.seen = self.seen[found.end() :]
        return found

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def top(binary: str, socket_path: str) -> Iterator[Terminal]:
    terminal = Terminal([binary, "--address", socket_path, "top", "--every", "100ms"], 40, 200)
    yield terminal
    terminal.close()


def frame(top: Terminal) -> list[str]:
    """The next whole picture, as lines."""
    text = top.until(rb"\x1b\[H(.*?)\x1b\[J").group(1).decode()
    return [line.removesuffix("\x1b[K") for line in text.split("\r\n")]


def frame_with(top: Terminal, holds: Callable[[list[str]], bool]) -> list[str]:
    """The next picture of which it holds."""
    end = time.monotonic() + 60
    while not holds(lines := frame(top)):
        assert time.monotonic() < end, lines
    return lines


def test_top_on_a_terminal(top: Terminal, tree: boxwood.Tree) -> None:
    top.until(rb"\x1b\[\?1049h")
    node = tree.sandbox.run("echo x > /tmp/a").node
    with node.fork(4, min_ready=4):
        frame_with(top, lambda lines: any(re.match(r"boxes +fork +\d+ of \d+ ", line) for line in lines))
        lines = frame_with(
            top, lambda lines: sum(line.startswith("sb_") and tree.id in line for line in lines) == 5
        )
    assert re.search("pressure .*; memory ", lines[1]), lines
    assert any(line.startswith(tree.id) for line in lines), lines
    assert not any("\x1b" in line for line in lines), lines

    top.resize(7, 60)
    os.kill(top.process.pid, signal.SIGWINCH)
    lines = frame_with(top, lambda lines: len(lines) == 7)
    assert all(len(line) <= 60 for line in lines), lines
    assert "more lines" in lines[-1], lines

    during = termios.tcgetattr(top.theirs)
    assert not during[3] & (termios.ECHO | termios.ICANON)
    top.type(b"xq")
    top.until(rb"\x1b\[\?25h\x1b\[\?1049l")
    assert top.process.wait(30) == 0
    assert termios.tcgetattr(top.theirs) == top.before


def test_top_ends_by_an_interrupt(top: Terminal) -> None:
    frame(top)
    top.type(b"\x03")
    top.until(rb"\x1b\[\?1049l")
    assert top.process.wait(30) == 0
    assert termios.tcgetattr(top.theirs) == top.before


def test_top_in_a_pipe(binary: str, socket_path: str, tree: boxwood.Tree) -> None:
    command = [binary, "--address", socket_path, "top", "--every", "100ms"]
    for flags in ([], ["--once"]):
        done = subprocess.run([*command, *flags], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        lines = done.stdout.decode().splitlines()
        assert (done.returncode, done.stderr) == (0, b""), done
        assert lines[0].startswith("boxwood "), lines
        assert "\x1b" not in done.stdout.decode(), lines
        assert any(line.startswith(tree.id) for line in lines), lines


def test_metrics(socket_path: str, tree: boxwood.Tree) -> None:
    log = Path(socket_path).parent / "log"
    if os.environ.get("BOXWOOD_SOCKET") or not log.exists():
        missing("the daemon isn't one that was started with --metrics for these tests")
    found = re.search(r"url=(http://127\.0\.0\.1:\d+/metrics)", log.read_text())
    assert found, log.read_text()
    with tree.sandbox.run("echo x > /tmp/a").node.fork(3, min_ready=3):
        with urllib.request.urlopen(found.group(1), timeout=30) as reply:
            text = reply.read().decode()
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    boxes = 'line="boxes"'
    assert values["boxwood_sandboxes"] >= 4
    assert values[f'boxwood_sched_added_total{{class="fork",{boxes}}}'] >= 3
    assert values[f'boxwood_sched_wait_seconds_bucket{{class="fork",{boxes},le="+Inf"}}'] >= 3
    assert values[f'boxwood_sched_took_seconds_sum{{class="fork",{boxes}}}'] > 0
    assert 0 < values["boxwood_host_memory_available_bytes"] <= values["boxwood_host_memory_bytes"]
    assert "tr_" not in text, "a series names a tree"
    # Nothing but a GET of the one path is answered.
    for path, data in (("/debug/pprof", None), ("/metrics", b"x")):
        other = urllib.request.Request(found.group(1).replace("/metrics", path), data=data)
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(other, timeout=30)
