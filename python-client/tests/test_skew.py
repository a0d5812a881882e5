"""Versions that differ: this package with a daemon of 0.1, and with one that is newer."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import boxwood
from boxwood import _wire
from boxwood import node as nodes
from boxwood._proto import boxwood_pb2 as pb

from fakeserver import FakeDaemon

HERE = Path(__file__).parent


@pytest.fixture
def old_daemon() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="bw-"))
    program = [sys.executable, str(HERE / "old_daemon.py"), str(folder)]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        socket = process.stdout.readline().strip()
        assert socket, process.stderr.read()
        yield socket
        process.communicate("", timeout=30)
    shutil.rmtree(folder)


def test_an_old_daemon_does_what_it_can(old_daemon: str, tmp_path: Path) -> None:
    (tmp_path / "root" / "work").mkdir(parents=True)
    with boxwood.connect(old_daemon, timeout=20) as client:
        image = client.images.import_(tmp_path / "root", "base:latest")
        with client.create_tree(image=image) as tree:
            turn = tree.sandbox.run("echo out; echo x > a")
            assert (turn.stdout, turn.verdict) == (b"out\n", "files")
            turn.node.annotate(reward=1.0)
            with turn.node.fork(2) as children:
                assert [c.run("cat a").stdout for c in children.ready] == [b"x\n"] * 2
            tree.sandbox.write_file("/work/b", "y")
            assert len(list(tree.nodes())) == 5
            with pytest.raises(boxwood.NotFound):
                client.node("none")
            # What came after 0.1 is refused, and the line says why.
            with pytest.raises(boxwood.Unsupported, match="doesn't know Evaluate: it is older") as caught:
                turn.node.evaluate(boxwood.Grader("true"))
            assert isinstance(caught.value, boxwood.InfrastructureError)
            assert not caught.value.retryable
            assert client.info().version == "fake"


def test_an_old_client_with_this_service(daemon: FakeDaemon, image: boxwood.Image) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "old_client.py"), daemon.socket, image.digest],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=HERE,
    )
    assert done.stdout == "done\n", done.stderr


def test_what_a_newer_daemon_says_is_read_as_unknown(client: boxwood.Client) -> None:
    # A field 999 of bytes, and enumerations' values that nobody knows yet.
    newer = pb.Node(id="nd", verdict=77, capture=78, turn_status=79, process_kind=80)  # type: ignore[arg-type]
    data = newer.SerializeToString() + b"\xba\x3e\x03new"
    node = nodes.from_message(client, pb.Node.FromString(data))
    words = (node.verdict, node.capture, node.turn_status, node.process_kind)
    assert words == ("unknown", "unknown", "unknown", "unknown")
    assert not node.captured
    assert _wire.effects([pb.Effect(kind=99, subject=b"x")])[0].kind == "unknown"  # type: ignore[arg-type]
    assert "unknown" in repr(node)
    assert node._repr_html_()
