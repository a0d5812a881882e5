"""Real sandboxes as the place where a search's turns run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .. import node as nodes
from .._proto import boxwood_pb2 as pb
from ..errors import BoxwoodError, InvalidArgument, NotFound
from ..node import Node
from ..records import Annotation, TurnStatus
from ..sandbox import Sandbox
from ..tree import Tree
from ..turn import Turn
from ._types import Action, Ran, Seen

T = TypeVar("T")


class Sandboxes:
    """Runs a search's turns in forks of the nodes of one tree.

    A turn goes on in the sandbox that made its node while that still stands there; else the node is forked.
    Nodes and sandboxes carry the label ``search``, by which a later attempt finds them.

    Args:
        tree: The tree; the caller closes it.
        at: The node to start from; the tree's root if None.
        lease: Seconds that a sandbox lives without a call; the tree's default if None.
        idle: How many sandboxes may wait at their nodes; beyond that the oldest is released.
        threads: Calls to the daemon at once.
    """

    def __init__(
        self,
        tree: Tree,
        *,
        at: Node | None = None,
        lease: float | None = None,
        idle: int = 64,
        threads: int = 32,
    ) -> None:
        self._tree, self._client = tree, tree._client
        self._at = tree.root if at is None else at
        self._lease, self._most_idle = lease, idle
        self._search = ""
        # Which sandboxes stand where, the oldest node first.
        self._idle: dict[str, list[Sandbox]] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="boxwood-search")

    async def resume(self, search: str) -> tuple[str, Sequence[Ran]]:
        """See `Rollout.resume`."""
        self._search = search
        # A release waits until the turn that it stops is a node, so what is listed after it is all there is.
        old = [
            s
            for s in await self._call(self._client.sandboxes, self._tree)
            if s.labels.get("search") == search
        ]
        if old:
            await self._call(self._client.release, old)
        found = await self._call(lambda: list(self._tree.nodes(labels={"search": search})))
        stopped = [node for node in found if node.turn_status == TurnStatus.CANCELLED]
        await asyncio.gather(*(self._call(node.prune) for node in stopped))
        kept = [node for node in found if node not in stopped]
        payloads = await asyncio.gather(*(self._call(node.payload) for node in kept))
        return self._at.id, [_ran(node, payload) for node, payload in zip(kept, payloads, strict=True)]

    async def prepare(self, node_id: str, count: int) -> None:
        """See `Rollout.prepare`."""
        missing = count - len(self._idle.get(node_id, ()))
        if missing > 0:
            await self._fork(node_id, missing)

    async def turn(self, node_id: str, action: Action, labels: Mapping[str, str], payload: bytes) -> Ran:
        """See `Rollout.turn`."""
        while True:
            kept = self._idle.get(node_id)
            if not kept:
                await self._fork(node_id, 1)
                kept = self._idle[node_id]
                fresh = True
            else:
                fresh = False
            sandbox = kept.pop()
            try:
                turn = await self._run(sandbox, action, labels, payload)
            except NotFound:
                sandbox.released = True
                if fresh:
                    raise
                continue  # it waited beyond its lease
            except InvalidArgument:
                kept.append(sandbox)  # nothing was run
                raise
            except BaseException:
                await self._let_go([sandbox])
                raise
            if not turn.sandbox_lost:
                self._idle.setdefault(turn.node.id, []).append(sandbox)
                await self._trim()
            return _ran(turn.node, payload)

    async def forkable(self, node_ids: Sequence[str]) -> Mapping[str, bool]:
        """See `Rollout.forkable`."""
        found = await self._call(lambda: self._client.wait_captured(list(node_ids), timeout=600.0))
        return {node.id: node.captured for node in found}

    async def annotate(self, notes: Mapping[str, Annotation]) -> None:
        """See `Rollout.annotate`."""
        await self._call(self._client.annotate, notes)

    async def leave(self, node_id: str) -> None:
        """See `Rollout.leave`."""
        await self._let_go(self._idle.pop(node_id, []))

    async def close(self) -> None:
        """See `Rollout.close`."""
        idle = [sandbox for kept in self._idle.values() for sandbox in kept]
        self._idle.clear()
        await self._let_go(idle)
        self._pool.shutdown(wait=False)

    async def _run(self, sandbox: Sandbox, action: Action, labels: Mapping[str, str], payload: bytes) -> Turn:
        def run() -> Turn:
            if action.command is not None:
                return sandbox.run(
                    action.command,
                    timeout=action.timeout,
                    labels=labels,
                    payload=payload,
                    policy_version=action.policy_version,
                )
            with sandbox.turn(labels=labels, payload=payload, policy_version=action.policy_version) as turn:
                pass
            return turn.result

        try:
            return await self._call(run)
        except asyncio.CancelledError:
            with contextlib.suppress(BoxwoodError):
                await self._call(sandbox.cancel)
            raise

    async def _fork(self, node_id: str, count: int) -> None:
        node = nodes.from_message(self._client, pb.Node(id=node_id))

        def fork() -> list[Sandbox]:
            children = node.fork(
                count, replace_failed=True, labels={"search": self._search}, lease=self._lease
            )
            if not children.ready:
                raise children.failed[0].error
            return children.ready

        ready = await self._call(fork)
        self._idle.setdefault(node_id, []).extend(ready)

    async def _trim(self) -> None:
        surplus: list[Sandbox] = []
        waiting = sum(map(len, self._idle.values()))
        for node_id in list(self._idle):
            kept = self._idle[node_id]
            while kept and waiting > self._most_idle:
                surplus.append(kept.pop(0))
                waiting -= 1
            if not kept:
                del self._idle[node_id]
        await self._let_go(surplus)

    async def _let_go(self, sandboxes: Sequence[Sandbox]) -> None:
        if sandboxes:
            with contextlib.suppress(BoxwoodError):  # their lease ends them
                await self._call(self._client.release, list(sandboxes))
            for sandbox in sandboxes:
                sandbox.released = True

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)


def _ran(node: Node, payload: bytes) -> Ran:
    seen = node.observation
    return Ran(
        node_id=node.id,
        seen=Seen(
            stdout=seen.stdout.text,
            stderr=seen.stderr.text,
            exit_code=seen.exit_code,
            timed_out=node.turn_status == TurnStatus.TIMED_OUT,
        ),
        lost=node.turn_status in (TurnStatus.LOST, TurnStatus.CANCELLED),
        payload=payload,
        rewards=node.rewards,
        labels=node.labels,
    )
