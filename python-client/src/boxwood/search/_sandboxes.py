"""Real sandboxes as the place where a search's turns run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

from .. import aio
from .._proto import boxwood_pb2 as pb
from ..aio import node as nodes
from ..errors import BoxwoodError, InvalidArgument, NotFound
from ..grading import Evaluation, Grader
from ..records import Annotation, TurnStatus
from ._types import Action, Ran, Seen


class Sandboxes:
    """Runs a search's turns in forks of the nodes of one tree.

    A turn goes on in the sandbox that made its node while that still stands there; else the node is
    forked. Nodes and sandboxes carry the label ``search``, by which a later attempt finds them.

    Args:
        tree: The tree; the caller closes it.
        at: The id of the node to start from; the tree's root if None.
        lease: Seconds that a sandbox lives without a call; the tree's default if None.
        idle: How many sandboxes may wait at their nodes; beyond that the oldest is released.
    """

    def __init__(
        self, tree: aio.Tree, *, at: str | None = None, lease: float | None = None, idle: int = 64
    ) -> None:
        self._tree, self._client, self._at = tree, tree._client, at
        self._lease, self._most_idle = lease, idle
        self._search = ""
        # Which sandboxes stand where, the oldest node first.
        self._idle: dict[str, list[aio.Sandbox]] = {}

    async def resume(self, search: str) -> tuple[str, Sequence[Ran]]:
        """See `Rollout.resume`."""
        self._search = search
        # A release waits until the turn that it stops is a node: what is listed after it is all there is.
        old = [s for s in await self._client.sandboxes(self._tree) if s.labels.get("search") == search]
        if old:
            await self._client.release(old)
        found = [node async for node in self._tree.nodes(labels={"search": search})]
        stopped = [node for node in found if node.turn_status == TurnStatus.CANCELLED]
        await asyncio.gather(*(node.prune() for node in stopped))
        kept = [node for node in found if node not in stopped]
        payloads = await asyncio.gather(*(node.payload() for node in kept))
        at = (await self._tree.root).id if self._at is None else self._at
        return at, [_ran(node, payload) for node, payload in zip(kept, payloads, strict=True)]

    async def prepare(self, node_id: str, count: int) -> None:
        """See `Rollout.prepare`."""
        missing = count - len(self._idle.get(node_id, ()))
        if missing > 0:
            self._idle.setdefault(node_id, []).extend(await self._fork(node_id, missing))

    async def turn(self, node_id: str, action: Action, labels: Mapping[str, str], payload: bytes) -> Ran:
        """See `Rollout.turn`."""
        while True:
            waited = bool(self._idle.get(node_id))
            sandbox = self._idle[node_id].pop() if waited else (await self._fork(node_id, 1))[0]
            try:
                turn = await self._run(sandbox, action, labels, payload)
            except NotFound:
                sandbox.released = True
                if not waited:
                    raise
                continue  # it had waited beyond its lease
            except InvalidArgument:
                self._idle.setdefault(node_id, []).append(sandbox)  # nothing was run
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
        found = await self._client.wait_captured(node_ids, timeout=600.0)
        return {node.id: node.captured for node in found}

    async def annotate(self, notes: Mapping[str, Annotation]) -> None:
        """See `Rollout.annotate`."""
        by_node: dict[aio.Node | str, Annotation] = {node: note for node, note in notes.items()}  # noqa: C416
        await self._client.annotate(by_node)

    async def evaluate(self, node_id: str, grader: Grader) -> Evaluation:
        """See `Rollout.evaluate`."""
        return await self._node(node_id).evaluate(grader)

    async def leave(self, node_id: str) -> None:
        """See `Rollout.leave`."""
        await self._let_go(self._idle.pop(node_id, []))

    async def close(self) -> None:
        """See `Rollout.close`."""
        idle = [sandbox for kept in self._idle.values() for sandbox in kept]
        self._idle.clear()
        await self._let_go(idle)

    def _node(self, node_id: str) -> aio.Node:
        return nodes.from_message(self._client, pb.Node(id=node_id))

    async def _run(
        self, sandbox: aio.Sandbox, action: Action, labels: Mapping[str, str], payload: bytes
    ) -> aio.Turn:
        version = action.policy_version
        if action.command is not None:
            return await sandbox.run(
                action.command,
                timeout=action.timeout,
                labels=labels,
                payload=payload,
                policy_version=version,
            )
        async with sandbox.turn(labels=labels, payload=payload, policy_version=version) as turn:
            pass
        return turn.result

    async def _fork(self, node_id: str, count: int) -> list[aio.Sandbox]:
        """At least one sandbox at the node, of so many asked for."""
        children = await self._node(node_id).fork(
            count, replace_failed=True, labels={"search": self._search}, lease=self._lease
        )
        if not children.ready:
            raise children.failed[0].error
        return children.ready

    async def _trim(self) -> None:
        surplus: list[aio.Sandbox] = []
        waiting = sum(map(len, self._idle.values()))
        for node_id in list(self._idle):
            kept = self._idle[node_id]
            while kept and waiting > self._most_idle:
                surplus.append(kept.pop(0))
                waiting -= 1
            if not kept:
                del self._idle[node_id]
        await self._let_go(surplus)

    async def _let_go(self, sandboxes: Sequence[aio.Sandbox]) -> None:
        if sandboxes:
            with contextlib.suppress(BoxwoodError):  # their lease ends them
                await self._client.release(sandboxes)
            for sandbox in sandboxes:
                sandbox.released = True


def _ran(node: aio.Node, payload: bytes) -> Ran:
    seen = node.observation
    return Ran(
        node_id=node.id,
        parent_id=node.parent_id,
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
