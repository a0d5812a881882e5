"""Boxwood for asyncio: the same classes and methods as in `boxwood`, awaited.

    import boxwood.aio

    async with boxwood.aio.connect() as client:
        async with client.create_tree(image="debian:demo") as tree:
            turn = await tree.sandbox.run("echo hello > /tmp/greeting")
            async for child in turn.node.fork(8):
                if isinstance(child, boxwood.aio.Sandbox):
                    async with child:
                        print((await child.run("cat /tmp/greeting")).text)

What answers with a stream is an async iterator. `create_tree` and `fork` can be
awaited or entered by ``async with``; a fork can also be iterated, which gives each
child as soon as it is ready. `Tree.root` and `Sandbox.head` are awaited without
parentheses. Callbacks may be coroutine functions. Cancelling a task ends what it
waits for on the daemon's side, too: a cancelled `run` kills the turn.

A client may be used in several loops, and by processes that unpickled it: each makes
a channel of its own. A process that was *forked* while its parent had such a channel
open can't use this face (it says so); start it with "spawn" or "forkserver".

Records, enumerations and exceptions are those of `boxwood`.
"""

from ._face import Pending
from ._forking import Forking
from .client import Client, connect
from .fork import Children, Forks
from .images import Images
from .node import Node
from .run import Run
from .sandbox import Sandbox
from .session import Session
from .tree import Tree, TreeChange
from .turn import OpenTurn, Turn

__all__ = [
    "Children",
    "Client",
    "Forking",
    "Forks",
    "Images",
    "Node",
    "OpenTurn",
    "Pending",
    "Run",
    "Sandbox",
    "Session",
    "Tree",
    "TreeChange",
    "Turn",
    "connect",
]
