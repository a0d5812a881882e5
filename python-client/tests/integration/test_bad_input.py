"""What goes wrong between a trainer and a real daemon: one clear exception, no hang, nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import boxwood
import boxwood.aio

from .conftest import REPOSITORY, missing, small_root, wait_for_daemon

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent.parent


def test_a_client_of_0_1(socket_path: str, image: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "old_client.py"), socket_path, image],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=HERE,
    )
    assert done.stdout == "done\n", done.stderr


class Restarting:
    """A daemon of one's own, to be killed."""

    def __init__(self, binary: Path, folder: Path) -> None:
        self.folder, self.socket = folder, folder / "s"
        self._command = [str(binary), "serve", "--state", str(folder / "state"), "--socket", str(self.socket)]
        self._command += [
            "--cgroup",
            f"boxwood-it2-{os.getpid()}",
            "--pool-size",
            "2G",
            "--log-level",
            "warn",
        ]
        self.start()

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_for_daemon(self.process, self.socket, self.folder / "log")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


@pytest.fixture
def restarting() -> Iterator[Restarting]:
    binary = Path(os.environ.get("BOXWOOD_BIN") or REPOSITORY / "bin" / "boxwood")
    if not binary.exists():
        missing(f"no {binary}")
    if os.geteuid() != 0:
        missing("starting a daemon needs root")
    with tempfile.TemporaryDirectory(prefix="bw-it-") as folder:
        daemon = Restarting(binary, Path(folder))
        yield daemon
        daemon.stop()


def test_a_daemon_killed_in_the_middle_of_calls(restarting: Restarting, tmp_path: Path) -> None:
    """What was answered is there after the restart; what wasn't ends in a clear error, and the client goes on."""
    small_root(tmp_path / "root")
    with boxwood.connect(str(restarting.socket), timeout=60) as client:
        client.images.import_(tmp_path / "root", "boxwood-test/small:latest")
        tree = client.create_tree(image="boxwood-test/small:latest")
        node = tree.sandbox.run("echo x > /tmp/a", ack="captured").node
        begun, outcome = threading.Event(), []

        def work() -> None:
            try:
                outcome.append(tree.sandbox.run("echo begun; sleep 600", on_stdout=lambda _: begun.set()))
            except boxwood.BoxwoodError as error:
                outcome.append(error)

        async def main() -> boxwood.BoxwoodError | None:
            async with boxwood.aio.connect(str(restarting.socket), timeout=60) as other:
                sandbox = await other.sandbox(second.id)
                runs = threading.Event()
                running = asyncio.create_task(
                    sandbox.run("echo begun; sleep 600", on_stdout=lambda _: runs.set())
                )
                await asyncio.to_thread(begun.wait, 60)
                await asyncio.to_thread(runs.wait, 60)
                await asyncio.to_thread(restarting.kill)
                await asyncio.to_thread(restarting.start)
                try:
                    await running
                except boxwood.BoxwoodError as error:
                    return error
            return None

        second = node.fork().ready[0]
        thread = threading.Thread(target=work)
        thread.start()
        failures = [asyncio.run(asyncio.wait_for(main(), 120))]
        thread.join(60)
        failures += outcome
        for failure in failures:
            # Their sandboxes went with the daemon, which says so, or the call had no time to ask again.
            assert isinstance(failure, (boxwood.NotFound, boxwood.Unavailable)), failure
            assert failure.request_id
        assert client.node(node.id).captured
        with node.fork(2, min_ready=2) as children:
            assert [child.run("cat /tmp/a").stdout for child in children.ready] == [b"x\n"] * 2
        for handle in (tree.sandbox, second):
            handle.released = True
        tree.close()


UPLOAD = """
import os, resource, sys, boxwood
socket, image, path, size = sys.argv[1:]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with boxwood.connect(socket, timeout=60) as client:
    limits = boxwood.Limits(disk_bytes=2 * int(size))
    with client.create_tree(image=image, limits=limits) as tree:
        tree.sandbox.upload(path, "/tmp/big", timeout=1800)
        print(tree.sandbox.run("stat -c %s /tmp/big; tail -c 4 /tmp/big || true").stdout.text.split()[0])
        tree.sandbox.download("/tmp/big", path + ".back", timeout=1800)
print(os.path.getsize(path + ".back"))
with open(path + ".back", "rb") as file:
    file.seek(-4, 2)
    print(file.read().decode())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_large_upload_is_streamed(socket_path: str, image: str, tmp_path: Path) -> None:
    """There and back through a client whose memory doesn't grow with it; 5 GiB in the nightly run (LONG=1)."""
    size = 5 << 30 if os.environ.get("LONG") else 400 << 20
    path = tmp_path / "big"
    with open(path, "wb") as file:
        file.truncate(size - 4)  # sparse: it takes no room here
        file.seek(0, 2)
        file.write(b"last")
    done = subprocess.run(
        [sys.executable, "-c", UPLOAD, socket_path, image, str(path), str(size)],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr
    there, back, end, grown = done.stdout.split()
    assert int(there) == int(back) == size
    assert end == "last"
    assert int(grown) < 150_000, "KiB that the client's memory grew by"


def test_an_upload_beyond_the_limit_is_told(client: boxwood.Client, image: str, tmp_path: Path) -> None:
    path = tmp_path / "big"
    with open(path, "wb") as file:
        file.truncate(64 << 20)
    with client.create_tree(image=image, limits=boxwood.Limits(disk_bytes=16 << 20)) as tree:
        with pytest.raises(boxwood.BoxwoodError) as caught:
            tree.sandbox.upload(path, "/tmp/big")
        assert caught.value.reason, caught.value
        assert tree.sandbox.run("echo alive", busy_wait=30).stdout == b"alive\n"
