"""What the asyncio face has of its own: loops, cancellation, pending answers, callbacks, forked processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import boxwood
import boxwood.aio
from boxwood import TurnStatus

from fakeserver import FakeDaemon, Fault

T = TypeVar("T")


@contextlib.asynccontextmanager
async def connected(daemon: FakeDaemon, tmp_path: Path) -> AsyncIterator[boxwood.aio.Tree]:
    """A tree of a fresh client."""
    root = tmp_path / "root"
    (root / "work").mkdir(parents=True, exist_ok=True)
    async with boxwood.aio.connect(daemon.socket, timeout=20) as client:
        image = await client.images.import_(root, "base:latest")
        async with client.create_tree(image=image) as tree:
            yield tree


Play = Callable[[Callable[[boxwood.aio.Tree], Awaitable[T]]], T]


@pytest.fixture
def play(daemon: FakeDaemon, tmp_path: Path) -> Iterator[Play[Any]]:
    """Runs a coroutine function on a fresh tree, in a fresh loop."""

    def run(act: Callable[[boxwood.aio.Tree], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            async with connected(daemon, tmp_path) as tree:
                return await act(tree)

        return asyncio.run(asyncio.wait_for(main(), 60))

    yield run
    gc.collect()


def test_turns_and_nodes(play: Play[None]) -> None:
    async def act(tree: boxwood.aio.Tree) -> None:
        turn = await tree.sandbox.run("echo out; echo err >&2; echo x > made", labels={"a": "b"})
        assert (turn.stdout, turn.stderr, turn.ok) == (b"out\n", b"err\n", True)
        assert isinstance(turn.node, boxwood.aio.Node)
        assert turn.node.labels == {"a": "b"}
        assert await tree.sandbox.head == turn.node
        root = await tree.root
        assert [n async for n in tree.nodes()] == [root, turn.node]
        assert await turn.node.path() == [root, turn.node]
        await turn.node.annotate(reward=1.0, payload=b"p")
        assert (await turn.node.refresh()).rewards == {"reward": 1.0}
        assert await turn.node.payload() == b"p"
        assert turn.node.id in await tree.show()
        with pytest.raises(boxwood.CommandFailed):
            await tree.sandbox.run("false", check=True)
        with pytest.raises(boxwood.NotFound):
            await tree.sandbox.read_file("/work/none")

    play(act)


def test_the_three_ways_to_have_a_fork(play: Play[None]) -> None:
    async def act(tree: boxwood.aio.Tree) -> None:
        node = (await tree.sandbox.run("echo base > a")).node
        children = await node.fork(3)
        assert len(children.ready) == 3
        await children.release()
        async with node.fork(2, labels={"g": "1"}) as children:
            outs = await asyncio.gather(*(child.run("cat a") for child in children.ready))
            assert [o.stdout for o in outs] == [b"base\n"] * 2
        assert all(child.released for child in children.ready)
        seen = []
        async for child in node.fork(4):
            assert isinstance(child, boxwood.aio.Sandbox)
            seen.append(child)
        assert len({child.id for child in seen}) == 4
        await tree._client.release(seen)
        task = asyncio.create_task(tree.sandbox.fork(2))  # it is a coroutine, too
        await (await task).release()

    play(act)


def test_children_come_in_the_order_of_readiness(daemon: FakeDaemon, play: Play[None]) -> None:
    async def act(tree: boxwood.aio.Tree) -> None:
        daemon.fake.failing_children[1] = Fault("RESOURCE_EXHAUSTED", "no room")
        root = await tree.root
        kinds = [type(child) async for child in root.fork(3)]  # the daemon answers from the last one on
        assert kinds == [boxwood.aio.Sandbox, boxwood.ForkError, boxwood.aio.Sandbox]
        mine = [s for s in await tree._client.sandboxes(tree) if s.id != tree.sandbox.id]
        await tree._client.release(mine)

    with pytest.warns(ResourceWarning, match="never released"):
        play(act)


def test_a_broken_fork_releases_what_was_ready(daemon: FakeDaemon, play: Play[None]) -> None:
    async def act(tree: boxwood.aio.Tree) -> None:
        daemon.fake.faults["Fork"].append((Fault("INTERNAL", "broken"), 2))
        root = await tree.root
        with pytest.raises(boxwood.InternalError):
            await root.fork(4)
        released = [request for _, request, _, _ in daemon.fake.named("Release")]
        assert sum(len(request.sandbox_ids) for request in released) == 2

    play(act)


def test_output_streams_to_functions_and_coroutine_functions(play: Play[None]) -> None:
    async def act(tree: boxwood.aio.Tree) -> None:
        out: list[bytes] = []
        err = bytearray()

        async def on_stdout(piece: bytes) -> None:
            await asyncio.sleep(0)
            out.append(piece)

        await tree.sandbox.run("echo a; echo b >&2; echo c", on_stdout=on_stdout, on_stderr=err.extend)
        assert b"".join(out) == b"a\nc\n"
        assert err == b"b\n"

    play(act)


@pytest.mark.parametrize("streamed", [False, True])
def test_cancelling_a_task_cancels_its_turn(daemon: FakeDaemon, play: Play[None], streamed: bool) -> None:
    async def act(tree: boxwood.aio.Tree) -> None:
        on_stdout = (lambda piece: None) if streamed else None
        task = asyncio.create_task(tree.sandbox.run("exec sleep 600", on_stdout=on_stdout))
        assert await asyncio.to_thread(daemon.fake.started.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert daemon.fake.named("CancelTurn")
        assert (await tree.sandbox.run("true", busy_wait=10)).ok

    play(act)


def test_a_timeout_around_a_turn_cancels_it(daemon: FakeDaemon, play: Play[None]) -> None:
    async def act(tree: boxwood.aio.Tree) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(tree.sandbox.run("exec sleep 600"), 0.3)
        assert (await tree.sandbox.run("true", busy_wait=10)).ok

    play(act)


def test_a_cancelled_block_ends_its_turn(daemon: FakeDaemon, play: Play[None]) -> None:
    async def act(tree: boxwood.aio.Tree) -> None:
        async def several() -> None:
            async with tree.sandbox.turn() as t:
                await t.write_file("/work/a", "alpha")
                await t.exec("exec sleep 600")

        task = asyncio.create_task(several())
        assert await asyncio.to_thread(daemon.fake.started.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await tree.sandbox.run("true", busy_wait=10)).ok
        (cancelled,) = [n async for n in tree.nodes() if n.turn_status is TurnStatus.CANCELLED]
        assert cancelled.depth == 1

    play(act)


def test_files_go_both_ways(play: Play[None], tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "sub").mkdir(parents=True)
    (here / "sub" / "data").write_bytes(os.urandom(3_000_000))

    async def act(tree: boxwood.aio.Tree) -> None:
        await tree.sandbox.upload(here, "/work/new")
        assert await tree.sandbox.download("/work/new", tmp_path / "back") == []
        assert (tmp_path / "back/sub/data").read_bytes() == (here / "sub/data").read_bytes()
        big = os.urandom(9_000_000)
        await tree.sandbox.write_file("/work/big", big)
        assert await tree.sandbox.read_file("/work/big") == big
        with pytest.raises(boxwood.InvalidArgument):
            await tree.sandbox.upload("/no/such", "/work")

    play(act)


def test_a_failing_upload_raises_its_own_reason(
    play: Play[None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(3 << 20))

    async def act(tree: boxwood.aio.Tree) -> None:
        monkeypatch.setattr(os, "fstat", lambda fd: type("S", (), {"st_size": 4 << 20})())
        with pytest.raises(boxwood.InvalidArgument, match="shrank"):
            await tree.sandbox.upload(tmp_path / "file", "/work/")
        monkeypatch.undo()
        assert (await tree.sandbox.run("true")).ok

    play(act)


def test_a_cancelled_download_leaves_nothing(daemon: FakeDaemon, play: Play[None], tmp_path: Path) -> None:
    async def act(tree: boxwood.aio.Tree) -> None:
        await tree.sandbox.write_file("/work/big", os.urandom(2_000_000))
        begun = asyncio.Event()
        task = asyncio.create_task(tree.sandbox.download("/work", tmp_path / "target"))

        async def watch() -> None:
            while not list(tmp_path.glob(".boxwood-*")):
                await asyncio.sleep(0)
            begun.set()

        await asyncio.wait_for(watch(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not list(tmp_path.glob(".boxwood-*"))
        assert not (tmp_path / "target").exists()

    play(act)


def test_a_lost_answer_runs_nothing_twice(daemon: FakeDaemon, play: Play[None]) -> None:
    async def act(tree: boxwood.aio.Tree) -> None:
        await tree.sandbox.run("true")
        for method in ("RunTurn", "Fork", "Annotate"):
            daemon.fake.faults[method].append((Fault("UNAVAILABLE", "socket closed"), "after"))
        turn = await tree.sandbox.run("echo x >> log; cat log")
        assert turn.stdout == b"x\n"
        async with turn.node.fork(3) as children:
            assert len({c.id for c in children.ready}) == 3
            assert len(await tree._client.sandboxes(tree)) == 4
        await turn.node.annotate(reward=1)
        one, two = daemon.fake.named("Annotate")
        assert one[1].idempotency_key == two[1].idempotency_key

    play(act)


def test_each_loop_has_its_own_channel(daemon: FakeDaemon) -> None:
    client = boxwood.aio.connect(daemon.socket)

    async def ask() -> str:
        return (await client.info()).version

    assert [asyncio.run(ask()) for _ in range(3)] == ["fake"] * 3
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(asyncio.run(ask()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["fake"] * 3

    async def last() -> str:
        async with client:
            return await ask()

    assert asyncio.run(last()) == "fake"
    assert not client._caller.connected


def test_use_after_close(daemon: FakeDaemon, tmp_path: Path) -> None:
    async def main() -> None:
        client = boxwood.aio.connect(daemon.socket)
        image = await client.images.import_(tmp_path, "base:latest")
        tree = await client.create_tree(image=image)
        sandbox = tree.sandbox
        running = asyncio.create_task(sandbox.run("exec sleep 600"))
        assert await asyncio.to_thread(daemon.fake.started.wait, 10)
        await client.close()
        await client.close()
        with pytest.raises(boxwood.FailedPrecondition, match="closed"):
            await running
        for call in (client.info, tree.close, lambda: sandbox.run("true"), tree.show):
            with pytest.raises(boxwood.FailedPrecondition, match="closed"):
                await call()
        sandbox.released = True
        daemon.fake.CancelTurn(_cancel(sandbox.id), _Context())

    asyncio.run(asyncio.wait_for(main(), 30))


def _cancel(sandbox_id: str) -> Any:
    from boxwood._proto import boxwood_pb2 as pb

    return pb.CancelTurnRequest(sandbox_id=sandbox_id)


class _Context:
    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()

    def time_remaining(self) -> float:
        return 1.0


def test_no_daemon_says_what_to_do(tmp_path: Path) -> None:
    async def main() -> None:
        async with boxwood.aio.connect(str(tmp_path / "none.sock")) as client:
            with pytest.raises(boxwood.ConnectionFailed, match="there is no Boxwood socket"):
                await client.info()

    asyncio.run(main())


def test_a_daemon_that_stays_away(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boxwood._channel.RETRY_FOR", 0.2)

    async def main() -> None:
        async with boxwood.aio.connect(daemon.socket) as client:
            await client.info()
            daemon.stop()
            with pytest.raises(boxwood.Unavailable):
                await client.info()

    asyncio.run(main())


def test_handles_that_nobody_closed_warn(daemon: FakeDaemon, tmp_path: Path) -> None:
    async def main() -> None:
        client = boxwood.aio.connect(daemon.socket)
        await client.info()
        with pytest.warns(ResourceWarning, match="never closed"):
            del client
            gc.collect()
        await asyncio.sleep(0)

    asyncio.run(main())


def test_pickling(daemon: FakeDaemon, play: Play[None]) -> None:
    async def act(tree: boxwood.aio.Tree) -> None:
        turn = await tree.sandbox.run("echo x > a; echo out")
        copied = pickle.loads(pickle.dumps(turn))
        assert copied.stdout == b"out\n"
        sandbox = pickle.loads(pickle.dumps(tree.sandbox))
        assert (await sandbox.run("cat a")).stdout == b"x\n"
        await sandbox._client.close()
        await copied.node._client.close()
        code = (
            "import asyncio, pickle, sys\n"
            "sandbox = pickle.load(sys.stdin.buffer)\n"
            "async def main():\n"
            "    async with sandbox._client:\n"
            "        print((await sandbox.run('cat a')).stdout.text, end='')\n"
            "asyncio.run(main())\n"
        )
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", code],
            input=pickle.dumps(tree.sandbox),
            capture_output=True,
            timeout=60,
        )
        assert done.stdout == b"x\n", done.stderr

    play(act)


FORKED = """
import asyncio, os, sys, boxwood, boxwood.aio
async def ask(client):
    async with client:
        return (await client.info()).version
async def main():
    async with boxwood.aio.connect(sys.argv[1]) as client:
        await client.info()
        pid = os.fork()
        if pid == 0:
            asyncio.events._set_running_loop(None)
            try:
                asyncio.run(ask(boxwood.aio.connect(sys.argv[1])))
            except boxwood.Unsupported as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        print((await client.info()).version, flush=True)
asyncio.run(main())
pid = os.fork()  # every channel is closed: a child may use this face
if pid == 0:
    print(asyncio.run(ask(boxwood.aio.connect(sys.argv[1]))), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_forked_processes(daemon: FakeDaemon) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, daemon.socket], capture_output=True, text=True, timeout=60
    )
    said, *versions = done.stdout.splitlines()
    assert "forked while its parent used boxwood.aio" in said, done.stderr
    assert versions == ["fake"] * 2, done.stderr


def test_many_at_once(play: Play[None]) -> None:
    async def act(tree: boxwood.aio.Tree) -> None:
        root = await tree.root
        async with root.fork(24) as children:
            begun = time.monotonic()
            turns = await asyncio.gather(
                *(child.run(f"echo {n} > a; cat a") for n, child in enumerate(children.ready))
            )
            assert [t.stdout for t in turns] == [b"%d\n" % n for n in range(24)]
            assert time.monotonic() - begun < 60

    play(act)


def test_a_watch_ends_with_its_loop(play: Play[None]) -> None:
    async def act(tree: boxwood.aio.Tree) -> None:
        seen = []
        async with contextlib.aclosing(tree.watch()) as changes:
            await tree.sandbox.run("true")
            async for change in changes:
                seen.append(change)
                if len([c for c in seen if c.node is not None]) == 2:
                    break
        assert isinstance(seen[-1].node, boxwood.aio.Node)
        assert [c async for c in tree.watch(seen[-1].index, timeout=0.2)] == []

    play(act)
