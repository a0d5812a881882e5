"""Search without a daemon: advantages by hand, loss weights, strategies, restarts, failures."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

import boxwood
from boxwood import search
from boxwood.search import Action, History, Place, Search

from searchfake import Memory, asynchronous, infrastructure, policy, reward


def leaf(parent: Place, score: float, tokens: Sequence[int] = (1, 2), tree: str | None = None) -> Place:
    made = turn(parent, tokens, tree)
    made.status, made.reward = "done", score
    return made


def turn(parent: Place, tokens: Sequence[int] = (7,), tree: str | None = None) -> Place:
    made = parent.child(tree)
    made.status, made.node_id = "open", f"nd_{made.name}"
    made.action = Action("x", tokens, [-float(t) for t in tokens], context_ids=[0], policy_version="p")
    return made


def root() -> Place:
    made = Place(None, "")
    made.node_id, made.status = "nd_root", "open"
    return made


def two_trees() -> list[Place]:
    """Tree 0 has rewards 1 (alone), and 0 and 1 below a shared turn; tree 1 has 0 and 0.

    root -+- a (tree 0) -+- 1        root -+- c (tree 1) -+- 0
          |              +- b -+- 0                       +- 0
                               +- 1
    """
    top = root()
    a = turn(top, [11], "0")
    first = leaf(a, 1.0)
    b = turn(a, [12])
    second, third = leaf(b, 0.0), leaf(b, 1.0)
    c = turn(top, [13], "1")
    return [first, second, third, leaf(c, 0.0), leaf(c, 0.0)]


def close(found: list[list[float]], wanted: list[list[float]]) -> None:
    assert [len(row) for row in found] == [len(row) for row in wanted]
    for row, by_hand in zip(found, wanted, strict=True):
        assert row == pytest.approx(by_hand, abs=1e-5)


def test_grpo_by_hand() -> None:
    # Rewards 1 0 1 0 0: mean 0.4, squares 0.36+0.16+0.36+0.16+0.16 = 1.2, over 4 is 0.3, root 0.547723.
    up, down = 0.6 / 0.547723, -0.4 / 0.547723
    close(search.grpo_advantages(two_trees()), [[up] * 2, [down] * 3, [up] * 3, [down] * 2, [down] * 2])


def test_tree_grpo_by_hand() -> None:
    # Tree 0: rewards 1 0 1, mean 2/3, squares 1/9+4/9+1/9 = 2/3, over 2 is 1/3, root 0.577350.
    # Tree 1: rewards 0 0: 0. Inter-tree as above.
    up, down = 0.6 / 0.547723, -0.4 / 0.547723
    inner_up, inner_down = (1 / 3) / 0.577350, (-2 / 3) / 0.577350
    close(
        search.tree_grpo_advantages(two_trees()),
        [[up + inner_up] * 2, [down + inner_down] * 3, [up + inner_up] * 3, [down] * 2, [down] * 2],
    )


def test_spo_by_hand() -> None:
    # V(b) = 1/2, V(a) = (1 + 1/2)/2 = 3/4, V(c) = 0, V(root) = (3/4 + 0)/2 = 3/8.
    close(
        search.spo_advantages(two_trees()),
        [
            [0.75 - 0.375, 1 - 0.75],
            [0.75 - 0.375, 0.5 - 0.75, 0 - 0.5],
            [0.75 - 0.375, 0.5 - 0.75, 1 - 0.5],
            [0 - 0.375, 0],
            [0 - 0.375, 0],
        ],
    )


def test_treerl_by_hand() -> None:
    # By leaves: V(root) = 2/5, V(a) = 2/3 over 3 leaves, V(b) = 1/2 over 2, V(c) = 0 over 2.
    a = ((2 / 3 - 2 / 5) * 2) / math.sqrt(3)
    b = ((1 / 2 - 2 / 5) + (1 / 2 - 2 / 3)) / math.sqrt(2)
    c = ((0 - 2 / 5) * 2) / math.sqrt(2)
    close(
        search.treerl_advantages(two_trees()),
        [
            [a, (1 - 2 / 5) + (1 - 2 / 3)],
            [a, b, (0 - 2 / 5) + (0 - 1 / 2)],
            [a, b, (1 - 2 / 5) + (1 - 1 / 2)],
            [c, (0 - 2 / 5) + 0],
            [c, (0 - 2 / 5) + 0],
        ],
    )


@pytest.mark.parametrize("trees", ["one", "each"])
def test_a_star_is_exactly_grpo(trees: str) -> None:
    rewards = [1.0, 0.0, 0.25, 1.0, 0.5]
    top = root()
    leaves = []
    for i, score in enumerate(rewards):
        last = turn(turn(top, [i], "0" if trees == "one" else str(i)), [i])
        leaves.append(leaf(last, score))
    wanted = [(r - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6) for r in rewards]
    close(search.tree_grpo_advantages(leaves), [[a] * 3 for a in wanted])
    assert search.tree_grpo_advantages(leaves) == search.grpo_advantages(leaves)
    # No token is shared, so every rule weighs each of them 1: the rows are those of plain GRPO.
    for rule in ("split", "path", "once"):
        rows = search.Result(top, "g").trajectories(search.tree_grpo_advantages, weights=rule)
        for row, advantage in zip(rows, wanted, strict=True):
            sampled = [(m, a) for m, a in zip(row.loss_mask, row.advantages, strict=True) if m]
            assert sampled == [(1.0, pytest.approx(advantage))] * 4


def test_groups_without_a_difference() -> None:
    top = root()
    only = [leaf(top, 1.0)]
    assert search.grpo_advantages(only) == search.tree_grpo_advantages(only) == [[0.0]]
    equal = [leaf(root(), 0.5) for _ in range(3)]
    assert search.grpo_advantages(equal) == [[0.0]] * 3


@pytest.mark.parametrize(
    ("rule", "total"), [("split", lambda k: 1), ("once", lambda k: 1), ("path", lambda k: k)]
)
def test_loss_weight_of_shared_tokens(rule: Any, total: Callable[[int], float]) -> None:
    leaves = two_trees()
    rows = search.Result(leaves[0].path[0], "g").trajectories(search.spo_advantages, weights=rule)
    weights: Counter[tuple[str, int]] = Counter()
    sharing: Counter[tuple[str, int]] = Counter()
    for row in rows:
        for span in row.spans:
            for at in range(span.action, span.end):
                weights[span.node_id, at] += row.loss_mask[at]  # type: ignore[assignment]
                sharing[span.node_id, at] += 1
            assert row.loss_mask[span.start : span.action] == (0.0,) * (span.action - span.start)
    assert max(sharing.values()) == 3
    for token, k in sharing.items():
        assert weights[token] == pytest.approx(total(k))


def test_split_and_once_have_the_same_gradient() -> None:
    leaves = two_trees()

    def gradient(rule: Any) -> dict[tuple[str, int], float]:
        sums: dict[tuple[str, int], float] = {}
        for row in search.Result(leaves[0].path[0], "g").trajectories(search.grpo_advantages, weights=rule):
            for span in row.spans:
                for at in range(span.action, span.end):
                    key = (span.node_id, at)
                    sums[key] = sums.get(key, 0.0) + row.loss_mask[at] * row.advantages[at]
        return sums

    assert gradient("split") == pytest.approx(gradient("once"))
    assert gradient("path") != pytest.approx(gradient("once"))


def test_tokens_pass_through() -> None:
    leaves = two_trees()
    row = search.Result(leaves[0].path[0], "g").trajectories()[2]
    assert row.token_ids == (0, 11, 0, 12, 0, 1, 2)
    assert row.logprobs == (0.0, -11.0, 0.0, -12.0, 0.0, -1.0, -2.0)
    assert row.policy_versions == ("", "p", "", "p", "", "p", "p")
    assert row.node_ids == ("nd_root", "nd_0", "nd_0.1", "nd_0.1.1")
    assert [(s.node_id, s.start, s.action, s.end) for s in row.spans] == [
        ("nd_0", 0, 1, 2),
        ("nd_0.1", 2, 3, 4),
        ("nd_0.1.1", 4, 5, 7),
    ]
    assert (row.group_id, row.tree_id, row.status, row.reward, row.prompt_length) == (
        "g",
        "0",
        "done",
        1.0,
        1,
    )


def test_payloads_come_back_bit_for_bit() -> None:
    from boxwood.search._types import pack, unpack

    action = Action(
        ["printf", "ü"],
        [3, 4],
        [-0.1, float("-inf")],
        [5],
        policy_version="7",
        stop=True,
        entropy=1 / 3,
        timeout=2.5,
    )
    again, refused = unpack(pack(action, "why"))
    assert (list(again.command or ()), refused) == (["printf", "ü"], "why")
    assert again.logprobs == action.logprobs
    assert again.entropy == action.entropy
    assert (again.token_ids, again.context_ids, again.stop, again.timeout) == ((3, 4), (5,), True, 2.5)
    with pytest.raises(boxwood.InvalidArgument, match="2 token ids and 1 log"):
        Action("x", [1, 2], [0.0])


# ---- strategies ---------------------------------------------------------------

STRATEGIES: dict[str, Callable[[Search], Awaitable[search.Result]]] = {
    "grpo": lambda s: search.grpo(s, 4),
    "tree_grpo": lambda s: search.tree_grpo(s, trees=2, expand=2, rounds=2),
    "tree_grpo_leaves": lambda s: search.tree_grpo(s, trees=2, expand=3, rounds=1, leaves=2),
    "arpo": lambda s: search.arpo(s, budget=8, initial=3, threshold=0.01),
    "spo_tree": lambda s: search.spo_tree(s, branching=(2, 2), segment=2),
    "beam": lambda s: search.beam(s, width=2, children=3, depth=3),
    "best_first": lambda s: search.best_first(s, expansions=4, children=2, parallel=2),
    "mcts": lambda s: search.mcts(s, iterations=9, children=2, parallel=3),
}


def summary(result: search.Result) -> list[Any]:
    return [
        (
            p.name,
            p.tree,
            p.status,
            p.action and p.action.token_ids,
            p.seen.stdout,
            p.reward,
            p.rewards,
            p.visits,
            p.value,
        )
        for p in result.root.walk()
    ] + result.trajectories(search.tree_grpo_advantages)


async def run(memory: Memory, name: str, **options: Any) -> tuple[Search, search.Result]:
    async with Search(memory, options.pop("policy", policy), options.pop("reward", reward), **options) as s:
        return s, await STRATEGIES[name](s)


@pytest.mark.parametrize("name", STRATEGIES)
@asynchronous
async def test_time_has_no_say(name: str) -> None:
    """The same search with one thing at a time and with many: the same tree, the same rows."""
    one, many = Memory(), Memory()
    _, slow = await run(one, name, concurrency=1, seed=3)
    _, fast = await run(many, name, concurrency=8, seed=3)
    assert summary(slow) == summary(fast)
    assert one.most == 1
    assert 1 <= many.most <= 8
    _, other = await run(Memory(), name, seed=4)
    assert summary(other) != summary(fast)


@asynchronous
async def test_searches_share_a_bound() -> None:
    """A semaphore bounds all searches that were given it, which are what they are alone."""
    slots, under, most = asyncio.Semaphore(3), 0, 0

    async def counting(history: History) -> Action:
        nonlocal under, most
        under += 1
        most = max(most, under)
        for _ in range(5):
            await asyncio.sleep(0)
        under -= 1
        return await policy(history)

    together = await asyncio.gather(
        *(run(Memory(), "tree_grpo", policy=counting, concurrency=slots, seed=n) for n in range(4))
    )
    assert most == 3
    assert not slots.locked()
    for n, (_, result) in enumerate(together):
        assert summary(result) == summary((await run(Memory(), "tree_grpo", seed=n))[1])


class Killed(Exception):
    pass


@pytest.mark.parametrize("name", STRATEGIES)
@asynchronous
async def test_restarts_go_on(name: str) -> None:
    """Killed at every turn in succession: the tree and the rows are those of an undisturbed search."""
    undisturbed = Memory()
    s, wanted = await run(undisturbed, name, seed=5)
    memory = Memory()
    asked: Counter[str] = Counter()

    async def counting(history: History) -> Action:
        if left < 0:
            raise Killed
        asked[f"{history.prefix_id} {history.index}"] += 1
        return await policy(history)

    attempts, left, got = 0, 0, None
    while got is None:
        left = 2

        def fail(_: Mapping[str, str]) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed

        memory.fail = fail
        attempts += 1
        try:
            _, got = await run(memory, name, seed=5, policy=counting, concurrency=2)
        except Killed:
            continue
    assert summary(got) == summary(wanted)
    assert attempts > 2
    # Each turn once, though Memory itself refuses a second time.
    assert sorted(memory.log) == sorted(undisturbed.log)
    assert len(memory.log) == s.turns
    # The policy is asked again only for what was under way when the search was killed.
    assert sum(asked.values()) - len(asked) <= 2 * (attempts - 1)
    again, same = await run(memory, name, seed=5, policy=counting)
    assert (again.turns, again.found) == (0, s.turns)
    assert summary(same) == summary(wanted)


@asynchronous
async def test_tree_grpo_grows_as_told() -> None:
    memory = Memory()
    _, result = await run(memory, "tree_grpo")
    # M trees with L * N + 1 rollouts each.
    assert len(result.leaves) == 2 * (2 * 2 + 1)
    assert Counter(p.tree for p in result.leaves) == {"0": 5, "1": 5}
    assert any(p.parent is not None and len(p.parent.children) > 1 for p in result.leaves for p in p.path[2:])
    _, kept = await run(Memory(), "tree_grpo_leaves")
    assert Counter(p.tree for p in kept.leaves) == {"0": 2, "1": 2}
    assert len(kept.root.leaves()) == 8


@asynchronous
async def test_siblings_share_a_fork() -> None:
    memory = Memory()
    await run(memory, "grpo")
    assert memory.prepared == [("root", 4)]


@asynchronous
async def test_arpo_branches_where_the_policy_is_unsure() -> None:
    async def unsure(history: History) -> Action:
        depth = len(history.steps)
        return Action("x", [depth], [-1.0], entropy=[0.1, 2.0, 0.1][depth], stop=depth == 2)

    async with Search(Memory(), unsure, reward) as s:
        result = await search.arpo(s, budget=6, initial=2, branches=2, threshold=0.5)
    names = [p.name for p in result.leaves]
    # Both rollouts get two more second turns, after their first results and nowhere else; that is the budget.
    assert names == ["0.0.0", "0.1.0", "0.2.0", "1.0.0", "1.1.0", "1.2.0"]


@asynchronous
async def test_mcts_finds_the_rewarded_path() -> None:
    async def any_of(history: History) -> Action:
        return Action(f"act{history.index}", stop=len(history.steps) == 2)

    async def best_is_010(place: Place) -> float:
        wanted = ["act0", "act1", "act0"]
        return sum(a == b for a, b in zip(place.seen.stdout.split("/")[1:], wanted, strict=True)) / 3

    async with Search(Memory(), any_of, best_is_010) as s:
        result = await search.mcts(s, iterations=8, children=2, parallel=2)
        assert result.best is not None
        assert result.best.name == "0.1.0"
        assert result.root.visits == 8
        assert s.turns <= 2 + 4 + 8
        # All 8 ends were reached once each: what is exhausted isn't visited again.
        assert len(result.leaves) == 8
        assert result.root.value == pytest.approx(0.5)


@asynchronous
async def test_best_first_stops_when_it_is_good_enough() -> None:
    async def lists(history: History) -> list[Action]:
        return [Action(f"act{i}") for i in range(history.index, history.index + history.width)]

    async def share(place: Place) -> float:
        words = place.seen.stdout.split("/")[1:]
        return words.count("act0") / 3

    async with Search(Memory(), lists, share) as s:
        result = await search.best_first(s, expansions=9, children=3, enough=1.0)
    assert result.best is not None
    assert (result.best.name, result.best.reward) == ("0.0.0", 1.0)
    assert s.turns == 9


# ---- failures -----------------------------------------------------------------


@asynchronous
async def test_a_lost_turn_is_run_again_with_the_same_action() -> None:
    memory = Memory(fail=lambda labels: "lost" if labels["place"] == "1.0" and labels["try"] == "0" else None)
    seen: list[History] = []

    async def watching(history: History) -> Action:
        seen.append(history)
        return await policy(history)

    _, result = await run(memory, "grpo", policy=watching)
    _, wanted = await run(Memory(), "grpo")
    assert [p.reward for p in result.leaves] == [p.reward for p in wanted.leaves]
    after = [h.invalidated for h in seen if h.steps and h.affinity_key.endswith("/1") and len(h.steps) > 1]
    assert after
    assert set(after) == {("nd_1.0_0",)}
    assert all(not h.invalidated for h in seen if not h.affinity_key.endswith("/1"))


@asynchronous
async def test_a_turn_whose_answer_was_lost_is_superseded() -> None:
    """It is there twice then: what came after stands on the second try, also for who reads it later."""
    memory = Memory(
        fail=lambda labels: "unheard" if labels["place"] == "1.0" and labels["try"] == "0" else None
    )
    _, first = await run(memory, "grpo")
    place = next(p for p in first.root.walk() if p.name == "1.0")
    assert place.node_id == "nd_1.0_1"
    memory.fail = lambda labels: None
    s, again = await run(memory, "grpo")
    assert s.turns == 0
    assert summary(again) == summary(first)
    place = next(p for p in again.root.walk() if p.name == "1.0")
    assert (place.node_id, place.abandoned) == ("nd_1.0_1", ["nd_1.0_0"])


@asynchronous
async def test_what_stays_lost_leaves_the_group() -> None:
    def fail(labels: Mapping[str, str]) -> str | None:
        if labels["place"] == "1.0":
            return "lost"
        if labels["place"].startswith("2"):
            raise infrastructure("no room")
        return None

    memory = Memory(fail=fail)
    _, result = await run(memory, "grpo")
    assert [(p.name, p.status) for p in result.lost] == [("1.0", "lost"), ("2", "lost")]
    assert {p.branch for p in result.leaves} == {"0", "3"}
    rows = result.trajectories(search.grpo_advantages, include_lost=True)
    assert [row.status for row in rows[2:]] == ["lost", "lost"]
    for row in rows[2:]:
        assert row.reward is None
        assert not any(row.loss_mask)
        assert not any(row.advantages)
    # What is left is a group of two: equal and opposite, or both 0.
    assert rows[0].advantages[-1] == pytest.approx(-rows[1].advantages[-1])
    assert all("reward" not in memory.ran[p.node_id].rewards for p in result.lost if p.node_id)
    with pytest.raises(search.GroupLost, match=r"2 rollouts.*3 are needed; lost: 1.0 \(lost\), 2 \(lost\)"):
        async with Search(Memory(fail=fail), policy, reward) as s:
            await search.grpo(s, 4, min_ready=3)


@asynchronous
async def test_a_grader_without_a_host_gives_no_reward() -> None:
    async def broken(place: Place) -> float:
        if place.branch == "2":
            raise infrastructure("the grader's host is gone")
        return 1.0

    memory = Memory()
    _, result = await run(memory, "grpo", reward=broken)
    assert [p.status for p in result.lost] == ["ungraded"]
    assert len(result.leaves) == 3
    # Found again later, it is graded then.
    again, whole = await run(memory, "grpo")
    assert len(whole.leaves) == 4
    assert again.turns == 0


@asynchronous
async def test_nothing_branches_off_a_withheld_node() -> None:
    _, plain = await run(Memory(), "tree_grpo", seed=1)
    inner = [p.node_id for p in plain.root.walk() if p.status == "open" and p.parent is not None]

    async def go(history: History) -> Action:
        return await policy(history)

    memory = Memory()
    memory.withheld = frozenset()
    original = memory.forkable

    async def forkable(node_ids: Sequence[str]) -> Mapping[str, bool]:
        return {**await original(node_ids), **dict.fromkeys((n for n in node_ids if n in inner), False)}

    memory.forkable = forkable  # type: ignore[method-assign]
    _, result = await run(memory, "tree_grpo", seed=1, policy=go)
    assert all(len(p.children) <= 1 for p in result.root.walk() if p.node_id in inner)
    assert len(result.leaves) == 10


@asynchronous
async def test_a_refused_command_is_the_policys_doing() -> None:
    async def nul(history: History) -> Action:
        if history.steps:
            assert history.steps[0].seen.refused == "an argument holds a NUL byte"
            return Action("fine", [2], [0.0], stop=True)
        return Action("bad\0", [1], [0.0])

    async with Search(Memory(), nul, reward) as s:
        result = await search.grpo(s, 2)
    assert [row.token_ids for row in result.trajectories()] == [(1, 2), (1, 2)]


@asynchronous
async def test_policies_that_fail_end_the_search() -> None:
    async def broken(history: History) -> Action:
        if history.index == 2:
            raise ZeroDivisionError
        await asyncio.sleep(3600)
        raise AssertionError

    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(run(Memory(), "grpo", policy=broken, concurrency=4), 30)


@asynchronous
async def test_named_rewards_need_the_one() -> None:
    async def named(place: Place) -> dict[str, float]:
        return {"reward": 0.5, "style": 0.1}

    _, result = await run(Memory(), "grpo", reward=named)
    assert result.leaves[0].rewards == {"reward": 0.5, "style": 0.1}

    async def other(place: Place) -> dict[str, float]:
        return {"score": 0.5}

    with pytest.raises(boxwood.InvalidArgument, match='one that is called "reward"'):
        await run(Memory(), "grpo", reward=other)


@asynchronous
async def test_affinity() -> None:
    histories: list[History] = []

    async def watching(history: History) -> Action:
        histories.append(history)
        return await policy(history)

    await run(Memory(), "spo_tree", policy=watching)
    keys = {h.affinity_key for h in histories}
    assert len(keys) == 2
    for h in histories:
        # The key is that of the first turn, the prefix id that of the last.
        assert h.prefix_id == (h.steps[-1].node_id if h.steps else "root")
        if h.steps:
            assert h.affinity_key.rpartition("/")[2] == h.steps[0].node_id.split("_")[1]
    assert len({h.seed for h in histories}) == len(histories)
