"""A rollout without a daemon: nodes in memory, commands that are counted, failures that are asked for."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from boxwood import errors
from boxwood.grading import Evaluation, Grader
from boxwood.records import Annotation
from boxwood.search import Action, History, Place, Ran, Seen


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test that is a coroutine, in a loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


def infrastructure(message: str) -> errors.BoxwoodError:
    return errors.from_detail("UNAVAILABLE", message, None)


@dataclasses.dataclass
class Memory:
    """Turns as data. A command's output is the commands on its path, joined.

    `fail` gets the labels of a turn. It may raise before the turn is kept, or say "lost" (its
    sandbox died) or "unheard" (it ran, and the answer didn't arrive).
    """

    fail: Callable[[Mapping[str, str]], str | None] = lambda labels: None
    withheld: frozenset[str] = frozenset()
    ran: dict[str, Ran] = dataclasses.field(default_factory=dict)
    outputs: dict[str, str] = dataclasses.field(default_factory=lambda: {"root": ""})
    prepared: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    log: list[str] = dataclasses.field(default_factory=list)
    most: int = 0
    under: int = 0
    notes: dict[str, Annotation] = dataclasses.field(default_factory=dict)

    async def resume(self, search: str) -> tuple[str, Sequence[Ran]]:
        return "root", [r for r in self.ran.values() if r.labels["search"] == search]

    async def prepare(self, node_id: str, count: int) -> None:
        self.prepared.append((node_id, count))

    async def turn(self, node_id: str, action: Action, labels: Mapping[str, str], payload: bytes) -> Ran:
        self.under += 1
        self.most = max(self.most, self.under)
        try:
            # Later places end earlier, so that nothing can lean on the order of ends.
            for _ in range(20 - min(int(labels["place"].rpartition(".")[2]), 19)):
                await asyncio.sleep(0)
            if node_id in self.withheld:
                raise errors.from_detail(
                    "FAILED_PRECONDITION", "withheld", errors.pb.Error(reason="node_withheld")
                )
            if action.command is not None and "\0" in str(action.command):
                raise errors.invalid("an argument holds a NUL byte")
            what = self.fail(labels)
            lost = what == "lost"
            self.log.append(labels["place"])
            name = f"nd_{labels['place']}_{labels['try']}"
            assert name not in self.ran, f"{name} ran twice"
            self.outputs[name] = f"{self.outputs[node_id]}/{action.command}"
            ran = Ran(name, node_id, Seen(stdout=self.outputs[name]), lost, payload, {}, dict(labels))
            self.ran[name] = ran
            if what == "unheard":
                raise infrastructure("the answer was lost")
            return ran
        finally:
            self.under -= 1

    async def forkable(self, node_ids: Sequence[str]) -> Mapping[str, bool]:
        return {node: node not in self.withheld for node in node_ids}

    async def annotate(self, notes: Mapping[str, Annotation]) -> None:
        for node, note in notes.items():
            self.notes[node] = note
            self.ran[node] = dataclasses.replace(
                self.ran[node], rewards={**self.ran[node].rewards, **note.rewards}
            )

    async def evaluate(self, node_id: str, grader: Grader) -> Evaluation:
        raise NotImplementedError

    async def leave(self, node_id: str) -> None: ...

    async def close(self) -> None: ...


async def policy(history: History) -> Action:
    """Three or so turns; tokens that tell the seed, and context that tells the depth."""
    depth, pick = len(history.steps), history.seed % 3
    return Action(
        f"act{pick}",
        token_ids=[100 * depth + pick, history.seed % 1000],
        logprobs=[-0.1 * (pick + 1), -0.5],
        context_ids=[depth] * (depth + 1),
        policy_version=f"v{depth}",
        stop=depth >= 2 and pick != 0,
    )


async def reward(place: Place) -> float:
    """How often the first action was taken, as a share."""
    words = place.seen.stdout.split("/")[1:]
    return words.count("act0") / len(words)
