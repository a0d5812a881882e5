"""The search itself: places are filled by policy and rollout, or from what an earlier attempt left."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import random
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from ..errors import BoxwoodError, InfrastructureError, InvalidArgument, NodeWithheld, invalid
from ..grading import Grader
from ..records import Annotation
from ._advantages import Estimator, Weights, spo
from ._trajectory import Trajectory, trajectories
from ._types import Action, History, Place, Policy, Ran, Reward, Rollout, Step, number, pack, unpack

T = TypeVar("T")
log = logging.getLogger(__name__)

# The one reward that advantages are made of; others are kept under their names.
REWARD = "reward"
PROMISE = "promise"


class GroupLost(RuntimeError):
    """Fewer rollouts of a group could be run and graded than were asked for at least."""


class Search:
    """One search: a policy, a reward, and a tree of real turns that grows.

    Everything that a strategy decides follows from the seed and from what turns and rewards came
    out as, never from time. So a trainer that was killed starts the same search again under the
    same name, and each place that has a node already is read from the node (its payload holds the
    action with its tokens, its rewards the grade) instead of being asked for and run. What was
    running at that moment is fenced off, removed and run again.

    Args:
        rollout: Where turns run, such as `Sandboxes(tree)`.
        policy: Called with a `History`; gives an `Action` or several. Never called for a place
            that has a node.
        reward: A `boxwood.Grader`, or what is called with an ended `Place` and gives a number, or
            named rewards with one ``"reward"`` among them. Where that fails for a reason that isn't
            the agent's (`InfrastructureError`) the place is ungraded and leaves its group; it
            never counts as 0.
        name: The search's name within its tree: at most one search of a name runs at a time.
        seed: Makes each decision of the search, and each `History.seed`.
        concurrency: How many places may be worked on together, from the call of the policy to the
            end of the turn; gradings count as well. A semaphore that several searches are given
            bounds them together, as a trainer wants it for the groups of a batch.
        max_turns: An episode that reaches this depth is truncated, and graded.
        retries: How often a turn that was lost is run again, from the same node and with the
            same action.
        group: The group's id in trajectories; the name if None.
        no_reward: What a grader counts as that ended without a reward: its command reached its
            deadline, or wrote no rewards. None: the place is ungraded.
    """

    def __init__(
        self,
        rollout: Rollout,
        policy: Policy,
        reward: Reward | Grader,
        *,
        name: str = "search",
        seed: int = 0,
        concurrency: int | asyncio.Semaphore = 16,
        max_turns: int = 32,
        retries: int = 1,
        group: str | None = None,
        no_reward: float | None = 0.0,
    ) -> None:
        if max_turns < 1 or retries < 0 or (isinstance(concurrency, int) and concurrency < 1):
            raise invalid("concurrency and max_turns are at least 1, retries at least 0")
        self.rollout, self.policy, self.reward, self.no_reward = rollout, policy, reward, no_reward
        self.name, self.seed, self.max_turns, self.retries = name, seed, max_turns, retries
        self.group = name if group is None else group
        self.root = Place(None, "")
        self.turns = 0
        self.found = 0
        self._slots = asyncio.Semaphore(concurrency) if isinstance(concurrency, int) else concurrency
        self._kept: dict[str, list[Ran]] = {}
        self._many: bool | None = None  # whether the policy gives lists

    def __repr__(self) -> str:
        return f"<Search {self.name}: {self.turns} turns run, {self.found} found>"

    async def __aenter__(self) -> Search:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.rollout.close()

    async def start(self) -> None:
        """Finds what an earlier attempt left. `async with` does it."""
        root, left = await self.rollout.resume(self.name)
        self.root.node_id, self.root.status, self.root.forkable = root, "open", True
        self._kept = {}
        for ran in left:
            self._kept.setdefault(ran.labels["place"], []).append(ran)
        for runs in self._kept.values():
            runs.sort(key=lambda ran: int(ran.labels["try"]))

    def random(self, *words: object) -> random.Random:
        """A source of random numbers for one decision, named by words."""
        return random.Random(number(self.seed, self.name, *words))

    # ---- one place ----------------------------------------------------------

    async def fill(self, place: Place) -> Place:
        """Runs the turn of a planned place; what it came to is in its status."""
        await self.fill_all([place])
        return place

    async def fill_all(self, places: Sequence[Place]) -> None:
        """Runs the turns of planned places, all at once as far as `concurrency` lets them.

        Places of one parent share a call of the policy where it gives several actions, and one fork.
        """
        families: dict[Place, list[Place]] = {}
        for place in places:
            if place.parent is None or place.status != "planned":
                raise invalid(f"{place!r} has no turn to run")
            families.setdefault(place.parent, []).append(place)
        await self.all(self._fill_family(parent, family) for parent, family in families.items())

    async def finish(self, place: Place) -> Place:
        """Goes on from a place until its episode ends, and grades the end.

        Returns:
            The last place: `ended` and graded unless something was lost.
        """
        if place.status == "planned":
            await self.fill(place)
        while place.status == "open":
            place = await self.fill(place.child())
        return await self.grade(place)

    async def grade(self, place: Place) -> Place:
        """Finds the reward of an ended place, once."""
        await self.rollout.leave(place.node_id)
        if not place.ended or place.reward is not None:
            return place
        rewards = await self._score(place, self.reward)
        if rewards is None:
            place.status = "ungraded"
            return place
        await self.rollout.annotate({place.node_id: Annotation(rewards)})
        place.rewards.update(rewards)
        place.reward = rewards[REWARD]
        return place

    async def _score(self, place: Place, reward: Reward | Grader) -> dict[str, float] | None:
        """Named rewards with the one among them; None if they can't be had for no fault of the agent's."""
        try:
            async with self._slots:
                if isinstance(reward, Grader):
                    graded = await self.rollout.evaluate(place.node_id, reward)
                    given: float | Mapping[str, float] = graded.rewards
                    if graded.problem:
                        log.warning("grading %s of search %s: %s", place.name, self.name, graded.problem)
                        if self.no_reward is None:
                            return None
                        given = {REWARD: self.no_reward}
                else:
                    given = await reward(place)
        except (InfrastructureError, NodeWithheld) as error:
            log.warning("grading %s of search %s: %s", place.name, self.name, error)
            return None
        rewards = dict(given) if isinstance(given, Mapping) else {REWARD: float(given)}
        if REWARD not in rewards:
            raise invalid(f'named rewards need one that is called "{REWARD}", these are {sorted(rewards)}')
        return rewards

    async def rollouts(self, places: Sequence[Place]) -> list[Place]:
        """Runs planned places, siblings by one fork, each on to its graded end."""
        families: dict[Place, int] = {}
        for place in places:
            if place.parent is not None and place.name not in self._kept:
                families[place.parent] = families.get(place.parent, 0) + 1
        await self.all(self._prepare(parent, count) for parent, count in families.items() if count > 1)
        return await self.all(self.finish(place) for place in places)

    async def promise(self, place: Place, value: Reward | Grader | None = None) -> float | None:
        """Scores a place that goes on, once: its score is kept in the node as the reward ``"promise"``.

        Args:
            place: The place.
            value: What scores it; the search's reward if None.

        Returns:
            The score; None if it can't be had for a reason that isn't the agent's.
        """
        if PROMISE not in place.rewards:
            scored = await self._score(place, self.reward if value is None else value)
            if scored is None:
                return None
            place.rewards[PROMISE] = scored[REWARD]
            await self.rollout.annotate({place.node_id: Annotation({PROMISE: scored[REWARD]})})
        return place.rewards[PROMISE]

    async def settle(self, places: Iterable[Place]) -> list[Place]:
        """Those of the places where a branch can start: not ended, and their nodes can be forked."""
        going = [place for place in places if place.status == "open"]
        unknown = [place for place in going if place.forkable is None]
        if unknown:
            known = await self.rollout.forkable([place.node_id for place in unknown])
            for place in unknown:
                place.forkable = known[place.node_id]
        return [place for place in going if place.forkable]

    async def all(self, work: Iterable[Awaitable[T]]) -> list[T]:
        """Does all of it together; if one part raises, the others are cancelled and waited for."""
        tasks = [asyncio.ensure_future(part) for part in work]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def history(self, at: Place, place: Place, width: int) -> History:
        """What the policy is asked with for a planned place after `at`."""
        path = at.path
        steps = tuple(Step(p.node_id, p.action, p.seen) for p in path if p.action is not None)
        abandoned = tuple(node for p in [*path, place] for node in p.abandoned if node)
        return History(
            steps=steps,
            seed=number(self.seed, self.name, "policy", place.name),
            index=place.index,
            width=width,
            affinity_key=f"{self.root.node_id}/{self.name}/{place.branch}",
            prefix_id=at.node_id,
            invalidated=abandoned,
        )

    async def _fill_family(self, parent: Place, family: list[Place]) -> None:
        missing = [place for place in family if not self._take(place)]
        if len(missing) > 1:
            await self._prepare(parent, len(missing))
        asked = [place for place in missing if place.action is None]
        if asked and self._many is not False:
            await self._ask_for_all(parent, asked)
        await self.all(
            self._work(parent, place, len(asked)) for place in missing if place.status == "planned"
        )

    async def _ask_for_all(self, parent: Place, asked: list[Place]) -> None:
        """Asks for the first place and finds out whether the policy gives actions for the others, too."""
        async with self._slots:
            answer = await self.policy(self.history(parent, asked[0], len(asked)))
        if isinstance(answer, Action):
            self._many = False
            asked[0].action = answer
            return
        self._many = True
        for place, action in itertools.zip_longest(asked, list(answer)[: len(asked)]):
            place.action = action
            if action is None:
                place.status = "declined"
                parent.children.remove(place)

    async def _work(self, parent: Place, place: Place, width: int) -> None:
        """Asks for an action and runs it. A slot is held over both: who has been asked runs next."""
        async with self._slots:
            if place.action is None:
                answer = await self.policy(self.history(parent, place, width))
                if not isinstance(answer, Action):
                    raise invalid(
                        "the policy gave one action before and a list now", "it must do one of them"
                    )
                place.action = answer
            await self._run(parent, place, place.action)

    def _take(self, place: Place) -> bool:
        """Takes what an earlier attempt left of a place; whether nothing has to be run."""
        parent = place.parent.node_id if place.parent is not None else ""
        kept = [ran for ran in self._kept.pop(place.name, []) if ran.parent_id == parent]
        self.found += len(kept)
        good = [ran for ran in kept if not ran.lost]
        if kept:
            # A try whose answer was never heard was followed by another: what came after stands on the last.
            last = (good or kept)[-1]
            place.action, refused = unpack(last.payload)
            place.abandoned += [ran.node_id for ran in kept if ran.lost or ran is not last]
            if good:
                self._took(place, place.action, last, refused)
                place.rewards = dict(last.rewards)
                place.reward = last.rewards.get(REWARD)
                return True
        if len(place.abandoned) > self.retries:
            place.status = "lost"
            return True
        return False

    def _took(self, place: Place, action: Action, ran: Ran, refused: str) -> None:
        place.node_id = ran.node_id
        place.seen = dataclasses.replace(ran.seen, refused=refused)
        if action.stop:
            place.status = "done"
        else:
            place.status = "truncated" if place.depth >= self.max_turns else "open"

    async def _run(self, parent: Place, place: Place, action: Action) -> None:
        """Runs a place's action until it is not lost, as often as `retries` has it."""
        refused = ""
        while len(place.abandoned) <= self.retries:
            labels = {"search": self.name, "place": place.name, "try": str(len(place.abandoned))}
            what = dataclasses.replace(action, command=None) if refused else action
            try:
                ran = await self.rollout.turn(parent.node_id, what, labels, pack(action, refused))
            except NodeWithheld:
                parent.forkable, place.status = False, "withheld"
                return
            except InfrastructureError as error:
                log.warning("running %s of search %s: %s", place.name, self.name, error)
                place.abandoned.append("")
                continue
            except InvalidArgument as error:
                if refused:
                    raise
                refused = error.message
                continue
            self.turns += 1
            if not ran.lost:
                self._took(place, action, ran, refused)
                return
            place.abandoned.append(ran.node_id)
        place.status = "lost"

    async def _prepare(self, parent: Place, count: int) -> None:
        try:
            await self.rollout.prepare(parent.node_id, count)
        except BoxwoodError as error:  # the turns will find out for themselves
            log.debug("preparing children for search %s: %s", self.name, error)

    # ---- what came out ------------------------------------------------------

    async def done(self, least: int = 0) -> Result:
        """Ends the search: visits and values go to the nodes.

        Args:
            least: How many graded leaves there must be.

        Raises:
            GroupLost: There are fewer.
        """
        if self._kept:
            log.warning(
                "search %s: %d turns of an earlier attempt fit nowhere; was it started with other arguments?",
                self.name,
                len(self._kept),
            )
        result = Result(self.root, self.group)
        if len(result.leaves) < least:
            raise GroupLost(
                f"search {self.name}: {len(result.leaves)} rollouts were run and graded, {least} are needed;"
                f" lost: {', '.join(f'{p.name} ({p.status})' for p in result.lost) or 'none'}"
            )
        notes = {
            place.node_id: Annotation(value=place.value, visits=place.visits)
            for place in self.root.walk()
            if place.visits and place.node_id and place is not self.root
        }
        if notes:
            await self.rollout.annotate(notes)
        return result


@dataclasses.dataclass(frozen=True)
class Result:
    """What a search found.

    Attributes:
        root: The root of all places.
        group: The group's id.
        chosen: The leaves that count, in order; None: all.
    """

    root: Place
    group: str
    chosen: tuple[Place, ...] | None = None

    @property
    def leaves(self) -> list[Place]:
        """The graded ends that count, in order."""
        return self.root.leaves() if self.chosen is None else list(self.chosen)

    @property
    def lost(self) -> list[Place]:
        """Places where something failed that isn't the agent's; they are in no group."""
        return [p for p in self.root.walk() if p.status in ("lost", "withheld", "ungraded")]

    @property
    def best(self) -> Place | None:
        """The first leaf with the greatest reward."""
        return max(self.leaves, key=lambda leaf: leaf.reward or 0.0, default=None)

    def trajectories(
        self, estimator: Estimator = spo, *, weights: Weights = "split", include_lost: bool = False
    ) -> list[Trajectory]:
        """One trajectory for each leaf; see `Trajectory`.

        Args:
            estimator: Makes the advantages, such as `grpo_advantages`.
            weights: How tokens that several trajectories share are weighed; see `Trajectory`.
            include_lost: Also those that ended for no fault of the agent. They have no reward, and
                a loss mask of 0.
        """
        made = trajectories(self.leaves, self.group, estimator, weights)
        if include_lost:
            made += trajectories(self.lost, self.group, None, weights)
        return made
