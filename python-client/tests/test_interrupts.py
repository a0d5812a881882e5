"""Ctrl-C in any call, and calls whose loop, client or handle is gone: an exception at once, no hang, no leak."""

from __future__ import annotations

import _thread
import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import boxwood
import boxwood.aio

from fakeserver import FakeDaemon

Act = Callable[[boxwood.Client, boxwood.Tree, Path], object]


def _open_turn(c: boxwood.Client, t: boxwood.Tree, p: Path) -> None:
    with t.sandbox.turn() as turn:
        turn.exec("true")


# By the call in which it comes.
CALLS: dict[str, Act] = {
    "GetInfo": lambda c, t, p: c.info(),
    "ImportImage": lambda c, t, p: c.images.import_(p, "x:latest"),
    "ListImages": lambda c, t, p: c.images.list(),
    "CreateTree": lambda c, t, p: c.create_tree(image=t.image),
    "ListTrees": lambda c, t, p: c.trees(),
    "RunTurn": lambda c, t, p: t.sandbox.run("true"),
    "BeginTurn": _open_turn,
    "Exec": _open_turn,
    "EndTurn": _open_turn,
    "ReadFile": lambda c, t, p: t.sandbox.read_file("/work/start"),
    "WriteFile": lambda c, t, p: t.sandbox.write_file("/work/x", "x"),
    "Upload": lambda c, t, p: t.sandbox.upload(p, "/work/new"),
    "Download": lambda c, t, p: t.sandbox.download("/work", p / "back"),
    "Fork": lambda c, t, p: t.root.fork(4),
    "Rollback": lambda c, t, p: t.sandbox.rollback(t.root),
    "Renew": lambda c, t, p: t.sandbox.renew(60),
    "ListSandboxes": lambda c, t, p: c.sandboxes(),
    "WaitCaptured": lambda c, t, p: t.root.wait_captured(),
    "GetNode": lambda c, t, p: t.root.refresh(),
    "ListNodes": lambda c, t, p: list(t.nodes()),
    "WatchTree": lambda c, t, p: next(t.watch()),
    "Annotate": lambda c, t, p: t.root.annotate(reward=1),
    "Backup": lambda c, t, p: c.backup({t.root: 1.0}),
    "GetPayload": lambda c, t, p: t.root.payload(),
    "ListTables": lambda c, t, p: c.tables(),
    "ExportStats": lambda c, t, p: c.stats("turns"),
}


@pytest.mark.parametrize("call", CALLS)
def test_interrupts(
    daemon: FakeDaemon, tree: boxwood.Tree, client: boxwood.Client, call: str, tmp_path: Path
) -> None:
    """Ctrl-C while the daemon doesn't answer."""
    daemon.fake.stalled.add(call)
    if call == "ExportStats":
        pytest.importorskip("pyarrow")

    def interrupt() -> None:
        daemon.fake.stalling.wait(10)
        daemon.fake.stalled.clear()
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            CALLS[call](client, tree, tmp_path)
        assert time.monotonic() - begun < 20
    finally:
        daemon.fake.unstalled.set()
        thread.join()
    # It goes on, and nothing that the call had taken is held.
    assert client.info().version == "fake"
    assert tree.sandbox.run("true", busy_wait=20).ok


@pytest.mark.parametrize("call", ["RunTurn", "Fork", "CreateTree", "Upload", "Download", "WatchTree"])
def test_ctrl_c_in_asyncio(daemon: FakeDaemon, image: boxwood.Image, tmp_path: Path, call: str) -> None:
    """As a program sees it: SIGINT while asyncio.run waits for a call ends it with KeyboardInterrupt."""
    program = """
import asyncio, pathlib, sys, boxwood.aio
socket, image, call, here = sys.argv[1:]
async def main():
    async with boxwood.aio.connect(socket, timeout=30) as client:
        async with client.create_tree(image=image) as tree:
            root = await tree.root
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            if call == "RunTurn": await tree.sandbox.run("true")
            if call == "Fork": await root.fork(4)
            if call == "CreateTree": await client.create_tree(image=image)
            if call == "Upload": await tree.sandbox.upload(here, "/work/new")
            if call == "Download": await tree.sandbox.download("/work", here + "/back")
            if call == "WatchTree":
                async for _ in tree.watch(): pass
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted")
"""
    (tmp_path / "file").write_text("x")
    with subprocess.Popen(
        [sys.executable, "-c", program, daemon.socket, image.digest, call, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()
        daemon.fake.stalled.add(call)
        print(file=process.stdin, flush=True)
        assert daemon.fake.stalling.wait(20)
        daemon.fake.stalled.clear()
        process.send_signal(2)
        try:
            out, err = process.communicate(timeout=30)
        finally:
            daemon.fake.unstalled.set()
            process.kill()
    assert out == "interrupted\n", err


def test_a_stream_of_a_loop_that_is_gone(daemon: FakeDaemon, image: boxwood.Image) -> None:
    client = boxwood.aio.connect(daemon.socket)
    watches: list[Any] = []

    async def begin() -> None:
        tree = await client.create_tree(image=image, with_sandbox=False)
        watches.append(tree.watch())
        await anext(watches[0])

    async def go_on() -> None:
        with pytest.raises((RuntimeError, boxwood.BoxwoodError, StopAsyncIteration)):
            await asyncio.wait_for(anext(watches[0]), 10)
        assert (await client.info()).version == "fake"
        await client.close()

    asyncio.run(begin())
    asyncio.run(go_on())


def test_without_a_loop_it_says_so(daemon: FakeDaemon) -> None:
    call = boxwood.aio.connect(daemon.socket).info()
    with pytest.raises(RuntimeError, match="no running event loop"):
        call.send(None)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def settled(limit: int) -> int:
    """How many descriptors there are once grpc's threads have put away what is closed."""
    until, tick = time.monotonic() + 20, threading.Event()
    while (count := descriptors()) > limit and time.monotonic() < until:
        tick.wait(0.05)
    return count


def test_nothing_is_left_of_many_clients(daemon: FakeDaemon) -> None:
    async def ask() -> None:
        async with boxwood.aio.connect(daemon.socket) as client:
            await client.info()

    def once() -> None:
        with boxwood.connect(daemon.socket) as client:
            client.info()
        asyncio.run(ask())

    for _ in range(5):
        once()
    before, threads = descriptors(), threading.active_count()
    for _ in range(40):
        once()
    assert settled(before + 5) <= before + 5
    assert threading.active_count() <= threads + 2


def test_nothing_is_left_of_clients_that_nobody_closed(daemon: FakeDaemon) -> None:
    async def ask() -> None:
        await boxwood.aio.connect(daemon.socket).info()

    with pytest.warns(ResourceWarning):
        asyncio.run(ask())
        boxwood.connect(daemon.socket).info()
        gc.collect()
        before = descriptors()
        for _ in range(20):
            asyncio.run(ask())
            boxwood.connect(daemon.socket).info()
        gc.collect()
    assert settled(before + 5) <= before + 5


ENDS = {
    "closed": "with boxwood.connect(S) as c: c.info()",
    "open": "c = boxwood.connect(S); c.info()",
    "watched": "c = boxwood.connect(S); t = c.create_tree(image=I, with_sandbox=False); w = t.watch(); next(w)",
    "in a thread": "c = boxwood.connect(S); t = c.create_tree(image=I)\n"
    "threading.Thread(target=lambda: t.sandbox.run('exec sleep 5'), daemon=True).start(); c.info()",
    "asyncio": "async def m():\n  global c; c = boxwood.aio.connect(S); await c.info()\nasyncio.run(m())",
    "asyncio, watched": "async def m():\n  global c, w\n  c = boxwood.aio.connect(S)\n"
    "  t = await c.create_tree(image=I, with_sandbox=False); w = t.watch(); await anext(w)\nasyncio.run(m())",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_ends(daemon: FakeDaemon, image: boxwood.Image, how: str) -> None:
    """With whatever is open: a few times here, hundreds of times in the nightly run (LONG=1)."""
    program = f"import sys, asyncio, threading, boxwood, boxwood.aio\nS, I = sys.argv[1:]\n{ENDS[how]}\n"
    for _ in range(200 if os.environ.get("LONG") else 3):
        done = subprocess.run(
            [sys.executable, "-c", program, daemon.socket, image.digest], capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
