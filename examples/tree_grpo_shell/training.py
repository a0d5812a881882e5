"""Training: the arms, one step of each, and a run from a policy that knows nothing to the level."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Protocol

from boxwood import aio, search

import plan
import tasks
from policy import Policy
from rollouts import Replay, Twin

Arm = Literal["A", "B", "C", "D"]
ARMS: tuple[Arm, ...] = ("A", "B", "C", "D")

# What each place of a search did and showed, by its name.
Places = dict[str, tuple[str, search.Seen]]


class World(Protocol):
    """Where the tasks are: real sandboxes, or their twin."""

    def place(self, task: tasks.Task, arm: Arm) -> contextlib.AbstractAsyncContextManager[search.Rollout]:
        """A tree at the task's start, for one search."""
        ...

    @property
    def fresh(self) -> str:
        """The node that graders start from."""
        ...

    @property
    def name(self) -> str:
        """See `Run.world`."""
        ...


class Real:
    """Real sandboxes."""

    name = "sandboxes"

    def __init__(self, client: aio.Client, image: str, fresh: aio.Tree, fresh_id: str) -> None:
        self._client, self._image, self._tree, self.fresh = client, image, fresh, fresh_id

    @staticmethod
    @contextlib.asynccontextmanager
    async def open(image: str, address: str | None = None, *, ahead: bool = True) -> AsyncIterator[Real]:
        """Connects, and makes what all runs share.

        Args:
            image: The image, its name or digest.
            address: Where the daemon listens; $BOXWOOD_ADDRESS if None.
            ahead: Make every task's start state, so that no step has to.
        """
        async with (
            aio.connect(address, timeout=300) as client,
            client.create_tree(image=image, with_sandbox=False) as fresh,
        ):
            world = Real(client, image, fresh, (await fresh.root).id)
            for task in (task for kind in tasks.family() for task in kind if ahead):
                async with world.place(task, "B"):
                    pass
            yield world

    @contextlib.asynccontextmanager
    async def place(self, task: tasks.Task, arm: Arm) -> AsyncIterator[search.Rollout]:
        """See `World`."""
        async with self._client.create_tree(
            image=self._image, setup=task.setup(), with_sandbox=False, turn_timeout=120
        ) as tree:
            yield Replay(tree) if arm == "C" else search.Sandboxes(tree)


class Twins:
    """The tasks in memory."""

    name = "twin"
    fresh = ""

    @contextlib.asynccontextmanager
    async def place(self, task: tasks.Task, arm: Arm) -> AsyncIterator[search.Rollout]:
        """See `World`."""
        yield Twin(task)


@dataclasses.dataclass
class Pace:
    """What the sweep varies.

    Attributes:
        turn: Seconds that a turn's command takes longer.
        policy: Seconds that the policy takes longer.
        at_once: How many turns and gradings of a step run at once.
    """

    turn: float = 0.0
    policy: float = 0.0
    at_once: int = 16


@dataclasses.dataclass
class Run:
    """One run of one arm.

    Attributes:
        arm: The arm.
        seed: The seed.
        rate: The learning rate.
        world: ``sandboxes`` or ``twin``; the seconds of the twin are those of nothing real.
        curve: After so many steps: turns, seconds of training, mean reward on the held-out tasks.
        reached: Whether the last reward is at the level.
        turns: Turns, over all steps.
        leaves: Graded ends, over all steps.
        lost: Places that were lost for a reason of the host.
        replayed: Turns that were executed again.
        differed: Those of them that showed something else.
        shown: For each search, a digest of what its places did and showed.
    """

    arm: Arm
    seed: int
    rate: float
    world: str = "sandboxes"
    curve: list[tuple[int, int, float, float]] = dataclasses.field(default_factory=list)
    reached: bool = False
    turns: int = 0
    leaves: int = 0
    lost: int = 0
    replayed: int = 0
    differed: int = 0
    shown: list[str] = dataclasses.field(default_factory=list)

    def to_level(self, column: Literal["turns", "seconds"]) -> float:
        """Turns or seconds until the level: between two measurements on a straight line."""
        i = 1 if column == "turns" else 2
        if not self.reached or len(self.curve) < 2:
            return float(self.curve[-1][i])
        before, after = self.curve[-2:]
        share = (plan.LEVEL - before[3]) / (after[3] - before[3])
        return before[i] + share * (after[i] - before[i])

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return dataclasses.asdict(self)


class Trainer:
    """One arm with one seed.

    Args:
        world: Where its tasks are.
        arm: The arm.
        seed: The seed.
        rate: The learning rate.
        pace: What turns and policy take longer.

    Attributes:
        run: What it came to so far.
        policy: The policy.
        places: Of each step and task, what its places did and showed.
    """

    def __init__(self, world: World, arm: Arm, seed: int, rate: float, pace: Pace | None = None) -> None:
        self.world, self.arm, self.seed, self.pace = world, arm, seed, pace or Pace()
        self.run = Run(arm, seed, rate, world.name)
        self.policy = Policy()
        self._slots = asyncio.Semaphore(self.pace.at_once)
        self.seconds = 0.0
        self.places: dict[tuple[int, str], Places] = {}
        self._training, self._held_out = tasks.family()

    async def train(self, most: int = plan.MAX_STEPS) -> Run:
        """Runs to the level, or so many steps."""
        await self._measure()
        for step in range(most):
            await self.step()
            if (step + 1) % plan.MEASURED_EVERY == 0 or step + 1 == most:
                await self._measure()
                if self.run.reached:
                    break
        return self.run

    async def step(self) -> None:
        """One step of the optimiser, timed from the first turn to the last release."""
        number = self.policy.version
        chosen = random.Random(f"{self.seed}/{number}").sample(self._training, plan.TASKS_PER_STEP)
        shapes = self._branches()
        began = time.perf_counter()
        found = await asyncio.gather(*(self._search(t, b) for t, b in zip(chosen, shapes, strict=True)))
        self.policy.learn([row for rows, _ in found for row in rows], self.run.rate)
        self.seconds += time.perf_counter() - began
        self.run.turns += sum(turns for _, turns in found)
        self.run.shown += [digest(self.places[number, task.name]) for task in chosen]

    def _branches(self) -> list[int]:
        """How many branches each tree of a step's tasks gets, for turns that come to those of arm A."""
        # A branch starts at the root or after each turn but the last, and goes on to the end.
        each = plan.TREES * plan.ROUNDS * (plan.STAGES + 1) / 2
        trunks = plan.TREES * plan.STAGES
        owed: float = self.policy.version * plan.TASKS_PER_STEP * plan.ROLLOUTS * plan.STAGES - self.run.turns
        branches: list[int] = []
        for _ in range(plan.TASKS_PER_STEP):
            owed += plan.ROLLOUTS * plan.STAGES
            branches.append(max(1, round((owed - trunks) / each)))
            owed -= trunks + branches[-1] * each
        return branches

    async def _search(self, task: tasks.Task, branches: int) -> tuple[list[search.Trajectory], int]:
        """One search of one task: its trajectories, and how many turns it took."""
        number = self.policy.version
        async with self._open(task, self.arm, f"step {number}", number) as s:
            if self.arm == "A":
                result = await search.grpo(s, plan.ROLLOUTS)
            else:
                result = await search.tree_grpo(s, plan.TREES, branches, plan.ROUNDS)
            if isinstance(s.rollout, Replay):
                self.run.replayed += s.rollout.replayed
                self.run.differed += s.rollout.differed
        self.places[number, task.name] = {
            p.name: (p.action.text if p.action else "", p.seen) for p in result.root.walk()
        }
        self.run.leaves += len(result.leaves)
        self.run.lost += len(result.lost)
        if self.arm == "A":
            rows = result.trajectories(search.grpo_advantages)
        elif self.arm == "D":
            rows = result.trajectories(Shuffled(f"{self.seed}/{number}/{task.name}"))
        else:
            rows = result.trajectories(search.tree_grpo_advantages)
        return rows, s.turns

    @contextlib.asynccontextmanager
    async def _open(
        self, task: tasks.Task, arm: Arm, name: str, seed: object
    ) -> AsyncIterator[search.Search]:
        async def act(history: search.History) -> search.Action:
            if self.pace.policy:
                await asyncio.sleep(self.pace.policy)
            shown = history.steps[-1].seen.stdout if history.steps else task.complaint
            line = shown.rstrip().rpartition("\n")[2]
            last = len(history.steps) == plan.STAGES - 1
            return self.policy.act(line, history.seed, last=last, cost=self.pace.turn)

        async with (
            self.world.place(task, arm) as rollout,
            search.Search(
                rollout,
                act,
                task.grader(self.world.fresh),
                name=name,
                seed=random.Random(f"{self.seed}/{seed}/{task.name}").getrandbits(62),
                max_turns=plan.STAGES,
                concurrency=self._slots,
            ) as s,
        ):
            yield s

    async def _measure(self) -> None:
        """One sampled episode on each held-out task."""

        async def episode(task: tasks.Task) -> list[float]:
            async with self._open(task, "A", "held out", f"held out {self.policy.version}") as s:
                result = await search.grpo(s, 1)
            return [leaf.reward for leaf in result.leaves if leaf.reward is not None]

        pace, self.pace = self.pace, Pace()
        rewards = [r for found in await asyncio.gather(*map(episode, self._held_out)) for r in found]
        self.pace = pace
        mean = sum(rewards) / len(rewards)
        self.run.curve.append((self.policy.version, self.run.turns, self.seconds, mean))
        self.run.reached = mean >= plan.LEVEL


class Shuffled:
    """Tree-GRPO's advantages with the values of branch points permuted among themselves.

    What a shared turn gets is the mean over the leaves below it: the value of the branch point that it
    leads to. The turns of a single leaf keep their advantage.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def __call__(self, leaves: Sequence[search.Place]) -> list[list[float]]:
        """See `search.Estimator`."""
        rows = search.tree_grpo_advantages(leaves)
        below: dict[str, list[int]] = {}
        for i, leaf in enumerate(leaves):
            for place in leaf.path[1:]:
                below.setdefault(place.name, []).append(i)
        # Turns on one stretch without a branch have the same leaves below, and one value.
        points = sorted({tuple(found) for found in below.values() if len(found) > 1})
        values = [sum(rows[i][0] for i in point) / len(point) for point in points]
        self._random.shuffle(values)
        value = dict(zip(points, values, strict=True))
        return [
            [value.get(tuple(below[place.name]), own) for place, own in zip(leaf.path[1:], row, strict=True)]
            for leaf, row in zip(leaves, rows, strict=True)
        ]


def digest(places: Places) -> str:
    """The same for the same places."""
    return hashlib.sha256(repr(sorted(places.items())).encode()).hexdigest()[:16]


def differing(one: Run, other: Run) -> tuple[int, int]:
    """How many searches both runs made, and in how many of them a place did or showed something else."""
    pairs = list(zip(one.shown, other.shown, strict=False))
    return len(pairs), sum(mine != theirs for mine, theirs in pairs)
