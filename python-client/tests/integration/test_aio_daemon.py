"""The asyncio face against a real daemon: what only it does."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

import boxwood
import boxwood.aio
from boxwood import TurnStatus, Verdict

pytestmark = pytest.mark.integration


def test_a_rollout(socket_path: str, image: str, tmp_path: Path) -> None:
    """Turns, a fork in each of its ways, transfers, statistics: all in one loop."""

    async def main() -> None:
        async with (
            boxwood.aio.connect(socket_path, timeout=60) as client,
            client.create_tree(image=image, lease=600) as tree,
        ):
            turn = await tree.sandbox.run("echo base > /tmp/a", ack="captured")
            assert turn.verdict is Verdict.FILES
            assert turn.node.captured
            async with turn.node.fork(8, min_ready=8) as children:
                outs = await asyncio.gather(
                    *(child.run(f"echo {n} >> /tmp/a; cat /tmp/a") for n, child in enumerate(children.ready))
                )
                assert [o.stdout for o in outs] == [b"base\n%d\n" % n for n in range(8)]
            async for child in turn.node.fork(3):
                assert isinstance(child, boxwood.aio.Sandbox)
                async with child:
                    assert (await child.run("cat /tmp/a")).stdout == b"base\n"
            assert len(await turn.node.children()) == 11
            (tmp_path / "up").write_bytes(os.urandom(5_000_000))
            await tree.sandbox.upload(tmp_path / "up", "/tmp/up")
            await tree.sandbox.download("/tmp/up", tmp_path / "down")
            assert (tmp_path / "down").read_bytes() == (tmp_path / "up").read_bytes()
            assert (await client.stats("turns", tree=tree)).num_rows >= 12

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_cancelled_task_ends_its_turn(socket_path: str, image: str, streamed: bool) -> None:
    async def main() -> None:
        async with (
            boxwood.aio.connect(socket_path, timeout=60) as client,
            client.create_tree(image=image, lease=600) as tree,
        ):
            begun = asyncio.Event()
            if streamed:
                task = asyncio.create_task(
                    tree.sandbox.run("echo begun; sleep 600", on_stdout=lambda _: begun.set())
                )
                await begun.wait()
            else:
                task = asyncio.create_task(tree.sandbox.run("sleep 600", busy_wait=60))
                # Busy means that the turn was taken up.
                while True:
                    try:
                        await tree.sandbox.read_file("/etc/passwd")
                    except boxwood.Busy:
                        break
                    await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await tree.sandbox.run("true", busy_wait=30)).ok
            statuses = [n.turn_status async for n in tree.nodes()]
            assert TurnStatus.CANCELLED in statuses

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_command_of_an_open_turn_is_cancelled_with_it(socket_path: str, image: str) -> None:
    async def main() -> None:
        async with (
            boxwood.aio.connect(socket_path, timeout=60) as client,
            client.create_tree(image=image, lease=600) as tree,
        ):
            begun = asyncio.Event()

            async def several() -> None:
                async with tree.sandbox.turn() as t:
                    await t.write_file("/tmp/a", "alpha")
                    await t.exec("echo begun; sleep 600", on_stdout=lambda _: begun.set())

            task = asyncio.create_task(several())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await tree.sandbox.run("cat /tmp/a", busy_wait=30)).stdout == b"alpha"

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_session_can_be_interrupted(socket_path: str, image: str) -> None:
    async def main() -> None:
        async with (
            boxwood.aio.connect(socket_path, timeout=60) as client,
            client.create_tree(image=image, lease=600) as tree,
        ):
            shell = await tree.sandbox.session("main")
            begun = asyncio.Event()
            task = asyncio.create_task(
                shell.run("x=1; echo on; while :; do :; done", on_stdout=lambda _: begun.set())
            )
            await begun.wait()
            assert await shell.interrupt()
            turn = await task
            assert turn.exit_code == 130
            assert not turn.session_ended
            assert (await shell.run("echo $x")).stdout == b"1\n"

    asyncio.run(asyncio.wait_for(main(), 120))
