"""The strategies: how a search grows. Each decides in rounds, so that time has no say in it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import invalid
from ..grading import Grader
from ._search import Result, Search
from ._types import Place, Reward


async def grpo(search: Search, n: int = 8, *, min_ready: int = 0) -> Result:
    """N rollouts from the root, each its own tree: the group of plain GRPO.

    Args:
        search: The search, started.
        n: N.
        min_ready: Fail below this many graded leaves.
    """
    await search.rollouts([search.root.child(str(i)) for i in range(n)])
    return await search.done(min_ready)


async def tree_grpo(
    search: Search,
    trees: int = 2,
    expand: int = 2,
    rounds: int = 1,
    leaves: int | None = None,
    *,
    min_ready: int = 0,
) -> Result:
    """M rollouts, then L times N new branches in each tree from places drawn at random with replacement.

    Tree-GRPO, arXiv 2509.21240, section "Tree Search". A tree's own root is among the places that are drawn;
    ends are not, nor nodes that can't be forked.

    Args:
        search: The search, started.
        trees: M.
        expand: N, in each round and tree.
        rounds: L.
        leaves: How many leaves of each tree are kept, drawn at random; all if None.
        min_ready: Fail below this many graded leaves.
    """
    root = search.root
    await search.rollouts([root.child(str(m)) for m in range(trees)])
    for level in range(rounds):
        # The trees' places are drawn before any turn of the round runs.
        grown = [[p for b in root.children if b.tree == str(m) for p in b.walk()] for m in range(trees)]
        new: list[Place] = []
        for m, places in enumerate(grown):
            candidates = [root, *await search.settle(places)]
            drawn = search.random("expand", level, m).choices(candidates, k=expand)
            new += [place.child(str(m)) for place in drawn]
        await search.rollouts(new)
    result = await search.done(min_ready)
    if leaves is None:
        return result
    kept: list[Place] = []
    for m in range(trees):
        own = [leaf for leaf in result.leaves if leaf.tree == str(m)]
        kept += search.random("leaves", m).sample(own, min(leaves, len(own)))
    return Result(search.root, search.group, tuple(leaf for leaf in result.leaves if leaf in kept))


async def arpo(
    search: Search,
    budget: int = 16,
    initial: int = 8,
    branches: int = 1,
    alpha: float = 0.0,
    beta: float = 1.0,
    threshold: float = 0.2,
    *,
    min_ready: int = 0,
) -> Result:
    """Rollouts that branch after a turn whose result left the policy uncertain.

    ARPO, arXiv 2507.19849, section "Entropy-based Adaptive Rollout". With H the policy's entropy
    at the begin of an action (`Action.uncertainty`), H0 that of the same rollout's first action, a
    place gets more branches where alpha + beta * (H - H0) > threshold; nodes that can't be forked
    don't. What is left of the budget goes into fresh rollouts.

    Args:
        search: The search, started.
        budget: Rollouts in all.
        initial: Rollouts that start from the root.
        branches: More branches at such a place.
        alpha: Base of the branching score.
        beta: Weight of the change of entropy, in 1/nats.
        threshold: See above.
        min_ready: Fail below this many graded leaves.
    """
    if not 1 <= initial <= budget:
        raise invalid(f"initial must lie between 1 and budget, {initial} doesn't lie between 1 and {budget}")
    started = initial
    going = [search.root.child() for _ in range(initial)]
    while going:
        await search.fill_all(going)
        new: list[Place] = []
        for place in going:
            parent = place.parent
            if parent is None or parent is search.root or place.action is None:
                continue
            first = place.path[1].action
            score = alpha + beta * (place.action.uncertainty - (first.uncertainty if first else 0.0))
            count = (
                min(branches, budget - started) if score > threshold and place is parent.children[0] else 0
            )
            if count and await search.settle([parent]):
                started += count
                new += [parent.child() for _ in range(count)]
        await search.all(search.grade(place) for place in going if place.status != "open")
        going = [place.child() for place in going if place.status == "open"] + new
    await search.rollouts([search.root.child() for _ in range(budget - started)])
    return await search.done(min_ready)


async def spo_tree(
    search: Search, branching: Sequence[int] = (4, 4), segment: int = 1, *, min_ready: int = 0
) -> Result:
    """A tree of segments with fixed branching, whose last segments run to the end.

    SPO, arXiv 2505.23564, the tree-based variant; use it with the `spo` advantages.

    Args:
        search: The search, started.
        branching: Children of each place at the begin of each segment.
        segment: Turns of a segment.
        min_ready: Fail below this many graded leaves.
    """
    if segment < 1 or not branching:
        raise invalid("a segment has at least one turn, and there is at least one level of branching")

    async def advance(place: Place) -> Place:
        for turn in range(segment):
            if turn and place.status == "open":
                place = place.child()
            if place.status == "planned":
                await search.fill(place)
        return place if place.status == "open" else await search.grade(place)

    places = [search.root]
    for level, count in enumerate(branching):
        new = [place.child() for place in await search.settle(places) for _ in range(count)]
        if level == len(branching) - 1:
            await search.rollouts(new)
        else:
            places = await search.all(advance(place) for place in new)
    return await search.done(min_ready)


async def beam(
    search: Search,
    width: int = 4,
    children: int = 4,
    depth: int = 8,
    *,
    value: Reward | Grader | None = None,
    enough: float = math.inf,
) -> Result:
    """Keeps the best places of each depth, and gives each so many children.

    Args:
        search: The search, started.
        width: How many are kept.
        children: Children of each.
        depth: How deep at most.
        value: Scores a place that goes on; the search's reward if None. Ended ones have their reward.
        enough: Stop once a place has this score; it has ended then.
    """
    kept = [search.root]
    for _ in range(depth):
        new = [place.child() for place in kept for _ in range(children)]
        await search.fill_all(new)
        scored, reached = await _scores(search, new, value, enough)
        if reached:
            break
        going = [place for place in new if place in scored and place.status == "open"]
        ranked = sorted(await search.settle(going), key=lambda place: -scored[place])
        kept = ranked[:width]
        if not kept:
            break
    return await search.done()


async def best_first(
    search: Search,
    expansions: int = 16,
    children: int = 4,
    *,
    parallel: int = 1,
    value: Reward | Grader | None = None,
    enough: float = math.inf,
) -> Result:
    """Expands the most promising place, again and again.

    Args:
        search: The search, started.
        expansions: How many places are expanded.
        children: Children of each.
        parallel: How many are expanded together.
        value: Scores a place that goes on; the search's reward if None.
        enough: Stop once a place has this score; it has ended then.
    """
    frontier: list[tuple[float, Place]] = [(0.0, search.root)]
    while frontier and expansions > 0:
        best = [place for _, place in frontier[: min(parallel, expansions)]]
        del frontier[: len(best)]
        expansions -= len(best)
        new = [place.child() for place in await search.settle(best) for _ in range(children)]
        await search.fill_all(new)
        scored, reached = await _scores(search, new, value, enough)
        if reached:
            break
        frontier += [(scored[place], place) for place in new if place in scored and place.status == "open"]
        frontier.sort(key=lambda item: -item[0])  # stable: of equals the older first
    return await search.done()


async def mcts(
    search: Search,
    iterations: int = 32,
    children: int = 4,
    c: float = math.sqrt(2),
    *,
    parallel: int = 1,
    value: Reward | Grader | None = None,
) -> Result:
    """Monte-Carlo tree search with UCT: select, add a child, simulate to the end, back up.

    Kocsis and Szepesvari, "Bandit based Monte-Carlo Planning" (2006). Turns of a simulation are real
    ones, so they stay in the tree. What is exhausted (ended, or all of its children are) isn't
    selected again. The nodes get visits and mean values.

    Args:
        search: The search, started.
        iterations: Simulations in all.
        children: A place is fully expanded with this many.
        c: Weight of exploration, for rewards between 0 and 1.
        parallel: Simulations that run together. Selection sees those under way as visits of value 0.
        value: Scores a new place in the place of a simulation.
    """

    async def simulate(place: Place) -> tuple[Place, float | None]:
        await search.fill(place)
        if value is not None and place.status == "open":
            return place, await search.promise(place, value)
        end = await search.finish(place)
        return end, end.reward if end.ended else None

    while iterations > 0:
        chosen: list[Place] = []
        for _ in range(min(parallel, iterations)):
            place = _select(search.root, children, c)
            if place is None:
                break
            if place.forkable is None and not await search.settle([place]):
                continue
            chosen.append(place.child())
            for above in chosen[-1].path:
                above.underway += 1
        if not chosen and _select(search.root, children, c) is None:
            break
        iterations -= max(len(chosen), 1)
        ends = await search.all(simulate(place) for place in chosen)
        for place in chosen:
            for above in place.path:
                above.underway -= 1
        for end, reward in ends:
            if reward is not None:
                end.back_up(reward)
    return await search.done()


def _select(root: Place, children: int, c: float) -> Place | None:
    """Where the next child goes: down by UCT to a place that isn't fully expanded."""
    if _exhausted(root, children):
        return None
    place = root
    while _full(place, children):
        total = max(place.visits + place.underway, 1)
        place = max(
            (child for child in place.children if not _exhausted(child, children)),
            key=lambda child: _uct(child, total, c),
        )
    return place


def _uct(place: Place, total: int, c: float) -> float:
    n = place.visits + place.underway
    if n == 0:
        return math.inf
    return place.value * place.visits / n + c * math.sqrt(math.log(total) / n)


def _full(place: Place, children: int) -> bool:
    return len(place.children) >= children or place.forkable is False


def _exhausted(place: Place, children: int) -> bool:
    if place.status != "open":
        # One that is under way has no end yet, and nothing can be added below it.
        return True
    return _full(place, children) and all(_exhausted(child, children) for child in place.children)


async def _scores(
    search: Search, places: Sequence[Place], value: Reward | Grader | None, enough: float
) -> tuple[dict[Place, float], bool]:
    """The reward of those that ended, and of the others what they promise; lost ones have none.

    A place that promises enough has ended.
    """

    async def score(place: Place) -> float | None:
        if place.status == "open":
            return await search.promise(place, value)
        return (await search.grade(place)).reward if place.ended else None

    found = await search.all(score(place) for place in places)
    scored = {place: s for place, s in zip(places, found, strict=True) if s is not None}
    reached = [place for place, s in scored.items() if s >= enough]
    for place in reached:
        if place.status == "open":
            place.status = "done"
            await search.grade(place)
    for place, s in scored.items():
        place.back_up(s)
    return scored, bool(reached)
