"""Where arms run their turns beside `search.Sandboxes`: prefixes executed again, and the twin in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from boxwood import aio, search
from boxwood.grading import Evaluation, Grader
from boxwood.records import Annotation, Observation, Observed, TurnStatus

import plan
import policy
import tasks

Command: TypeAlias = str | Sequence[str]


class Replay:
    """Branches without forks of nodes: a fresh sandbox, in which the prefix is executed again.

    A rollout goes on in the sandbox that it has, as with `search.Sandboxes`. Where there is none at a node,
    the start state is forked (that of a container would cost more), and the prefix and the new action run
    as one turn, which is the cheapest that can be had here: one capture, not one for each turn.

    Attributes:
        replayed: Turns that were executed again.
        differed: Those of them that didn't show what they had shown the first time.
    """

    def __init__(self, tree: aio.Tree) -> None:
        self._sandboxes = search.Sandboxes(tree)
        self._tree = tree
        self._search = ""
        self._root = ""
        self._made: dict[str, tuple[str, search.Action, search.Seen]] = {}
        self._standing: dict[str, list[aio.Sandbox]] = {}
        self.replayed = self.differed = 0

    async def resume(self, name: str) -> tuple[str, Sequence[search.Ran]]:
        """See `search.Rollout`; it doesn't go on from an earlier attempt, whose prefixes have no nodes."""
        self._search = name
        self._root, _ = await self._sandboxes.resume(name)
        return self._root, ()

    async def prepare(self, node_id: str, count: int) -> None:
        """See `search.Rollout`."""
        if node_id == self._root:
            self._standing.setdefault(node_id, []).extend(await self._fresh(count))

    async def turn(
        self, node_id: str, action: search.Action, labels: Mapping[str, str], payload: bytes
    ) -> search.Ran:
        """See `search.Rollout`."""
        assert action.command is not None
        standing = self._standing.get(node_id)
        if standing:
            sandbox = standing.pop()
            turn = await sandbox.run(action.command, labels=labels, payload=payload)
            shown = seen(turn)
        else:
            [sandbox] = await self._fresh(1)
            async with sandbox.turn(labels=labels, payload=payload) as opened:
                for before, then in self._prefix(node_id):
                    again = seen(await opened.exec(before))
                    self.replayed += 1
                    self.differed += again != then
                shown = seen(await opened.exec(action.command))
            turn = opened.result
        self._made[turn.node.id] = (node_id, action, shown)
        self._standing.setdefault(turn.node.id, []).append(sandbox)
        return search.Ran(turn.node.id, node_id, shown, turn.sandbox_lost, payload, {}, labels)

    def _prefix(self, node_id: str) -> list[tuple[Command, search.Seen]]:
        """The commands from the root to a node, and what each showed."""
        prefix: list[tuple[Command, search.Seen]] = []
        while node_id != self._root:
            node_id, action, shown = self._made[node_id]
            assert action.command is not None
            prefix.append((action.command, shown))
        return prefix[::-1]

    async def _fresh(self, count: int) -> list[aio.Sandbox]:
        root = await self._tree.root
        children = await root.fork(count, replace_failed=True, labels={"search": self._search})
        if not children.ready:
            raise children.failed[0].error
        return children.ready

    async def forkable(self, node_ids: Sequence[str]) -> Mapping[str, bool]:
        """See `search.Rollout`: what was executed once can be executed again."""
        return dict.fromkeys(node_ids, True)

    async def annotate(self, notes: Mapping[str, Annotation]) -> None:
        """See `search.Rollout`."""
        await self._sandboxes.annotate(notes)

    async def evaluate(self, node_id: str, grader: Grader) -> Evaluation:
        """See `search.Rollout`."""
        return await self._sandboxes.evaluate(node_id, grader)

    async def leave(self, node_id: str) -> None:
        """See `search.Rollout`."""
        for sandbox in self._standing.pop(node_id, ()):
            await sandbox.release()

    async def close(self) -> None:
        """See `search.Rollout`."""
        await asyncio.gather(*(self.leave(node_id) for node_id in list(self._standing)))
        await self._sandboxes.close()


def seen(what: Observed) -> search.Seen:
    """What the policy sees of it."""
    return search.Seen(what.stdout.text, what.stderr.text, what.exit_code)


class Twin:
    """The tasks in memory, for the search of learning rates: what they answer, without a sandbox."""

    def __init__(self, task: tasks.Task) -> None:
        self._task = task
        self._done = {"root": 0}  # by node: stages

    async def resume(self, name: str) -> tuple[str, Sequence[search.Ran]]:
        """See `search.Rollout`."""
        return "root", ()

    async def prepare(self, node_id: str, count: int) -> None:
        """See `search.Rollout`."""

    async def turn(
        self, node_id: str, action: search.Action, labels: Mapping[str, str], payload: bytes
    ) -> search.Ran:
        """See `search.Rollout`."""
        stages, done = self._task.stages, self._done[node_id]
        command = tasks.ACTIONS[action.token_ids[0] - policy.FIRST_COMMAND]
        if command == "start over":
            done = 0
        elif done < len(stages) and command == stages[done][0]:
            done += 1
        line = tasks.complaint(done + 1, *stages[done]) if done < len(stages) else "released"
        made = f"node {len(self._done)}"
        self._done[made] = done
        return search.Ran(made, node_id, search.Seen(line + "\n"), payload=payload, labels=labels)

    async def forkable(self, node_ids: Sequence[str]) -> Mapping[str, bool]:
        """See `search.Rollout`."""
        return dict.fromkeys(node_ids, True)

    async def annotate(self, notes: Mapping[str, Annotation]) -> None:
        """See `search.Rollout`."""

    async def evaluate(self, node_id: str, grader: Grader) -> Evaluation:
        """See `search.Rollout`."""
        reward = self._done[node_id] * 10_000 // plan.STAGES / 10_000
        return Evaluation({"reward": reward}, Observation(), TurnStatus.COMPLETED, "", (), 0.0)

    async def leave(self, node_id: str) -> None:
        """See `search.Rollout`."""

    async def close(self) -> None:
        """See `search.Rollout`."""
