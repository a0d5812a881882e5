"""examples/tree_grpo_shell: its tasks, its arms and its twin, on a real daemon."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import boxwood
from boxwood import search

pytestmark = pytest.mark.integration
np = pytest.importorskip("numpy")
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tree_grpo_shell"


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    """Its modules, whose names are nobody else's while it runs."""
    names = ("plan", "tasks", "policy", "rollouts", "training", "run", "figures")
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in names:
            del sys.modules[name]


def last_line(turn: boxwood.Turn) -> str:
    return turn.stdout.text.rstrip().rpartition("\n")[2]


def test_a_task_is_mended_by_the_right_commands_alone(
    client: boxwood.Client, base_image: str, example: dict[str, ModuleType]
) -> None:
    """What the twin takes for granted: each complaint, the grade, and that no other command matters."""
    tasks = example["tasks"]
    training, held_out = tasks.family()
    kinds: set[str] = set()
    chosen = []
    for task in (held_out[0], *training):
        if not kinds >= {kind for kind, _ in task.stages}:
            kinds |= {kind for kind, _ in task.stages}
            chosen.append(task)
    assert kinds == set(tasks.KINDS)

    def do(sandbox: boxwood.Sandbox, name: str) -> boxwood.Turn:
        return sandbox.run(tasks.command(tasks.ACTIONS.index(name)))

    with client.create_tree(image=base_image, with_sandbox=False) as fresh:
        for task in chosen:
            with client.create_tree(image=base_image, setup=task.setup()) as tree:
                sandbox, graded = tree.sandbox, []
                assert last_line(do(sandbox, task.stages[0][0])) == tasks.complaint(2, *task.stages[1])
                assert last_line(do(sandbox, "start over")) == task.complaint
                for number, (kind, name) in enumerate(task.stages, 1):
                    wrong = [a for a in tasks.ACTIONS if a not in (kind, "start over")]
                    for other in wrong:
                        assert last_line(do(sandbox, other)) == tasks.complaint(number, kind, name), other
                    turn = do(sandbox, kind)
                    if number in (2, len(task.stages)):
                        graded.append(turn.node.evaluate(task.grader(fresh.root)).reward)
                assert last_line(turn) == "released"
                assert graded == [0.3333, 1.0]


def test_arms_take_one_step(socket_path: str, base_image: str, example: dict[str, ModuleType]) -> None:
    """C sees what B sees, the twin what sandboxes show, and turns come to those of A."""
    training, plan = example["training"], example["plan"]

    async def main() -> None:
        async with training.Real.open(base_image, socket_path, ahead=False) as world:
            trained = {}
            for arm in ("B", "C"):
                trained[arm] = training.Trainer(world, arm, 7, 8.0)
                await trained[arm].step()
        twin = training.Trainer(training.Twins(), "B", 7, 8.0)
        await twin.step()
        assert training.differing(trained["B"].run, trained["C"].run) == (plan.TASKS_PER_STEP, 0)
        # The twin has no error output.
        assert training.differing(trained["B"].run, twin.run)[1] > 0
        assert trained["C"].run.replayed > 0
        assert trained["C"].run.differed == trained["B"].run.lost == trained["C"].run.lost == 0
        for one in trained.values():
            assert one.run.turns == twin.run.turns
            assert np.array_equal(one.policy.weights, twin.policy.weights)
            assert np.any(one.policy.weights)
            for where, found in one.places.items():
                shown = {
                    name: (did, seen.stdout.rstrip().rpartition("\n")[2])
                    for name, (did, seen) in found.items()
                }
                assert shown == {
                    name: (did, seen.stdout.rstrip()) for name, (did, seen) in twin.places[where].items()
                }

        # Over several steps the turns are A's, to within one branch.
        for _ in range(4):
            await twin.step()
        a = 5 * plan.TASKS_PER_STEP * plan.ROLLOUTS * plan.STAGES
        assert abs(twin.run.turns - a) <= 0.1 * a

    asyncio.run(main())


def test_shuffled_values_stay_the_same_values(example: dict[str, ModuleType]) -> None:
    training = example["training"]
    root = search.Place(None, "")
    rewards = iter([0.0, 0.25, 0.5, 0.75, 1.0, 0.125])

    def leaf(parent: search.Place) -> search.Place:
        place = parent.child()
        place.status, place.reward = "done", next(rewards)
        return place

    points = []
    for tree in ("0", "1", "2"):
        point = root.child(tree)
        point.status = "open"
        points.append(point)
        leaf(point), leaf(point)
    leaves = root.leaves()
    plain = search.tree_grpo_advantages(leaves)
    moved = training.Shuffled("some seed")(leaves)
    # The turns of one leaf keep what they had, those of branch points swap theirs.
    assert [row[1] for row in moved] == [row[1] for row in plain]
    values = sorted((plain[i][0] + plain[i + 1][0]) / 2 for i in (0, 2, 4))
    assert [moved[i][0] for i in (0, 2, 4)] == [moved[i][0] for i in (1, 3, 5)]
    assert sorted(moved[i][0] for i in (0, 2, 4)) == pytest.approx(values)
    found = {tuple(training.Shuffled(str(seed))(leaves)[i][0] for i in (0, 2, 4)) for seed in range(20)}
    assert len(found) > 1


def test_ratios_and_picture(example: dict[str, ModuleType]) -> None:
    """To the level on a straight line; a run that isn't there counts as if it got there at its end."""
    figures, training = example["figures"], example["training"]
    rows = []
    for seed in range(3):
        for arm, turns in (("A", 200), ("B", 100), ("C", 100), ("D", 150)):
            curve = [(0, 0, 0.0, 0.1), (2, turns, turns / 10, 0.6), (4, 2 * turns, turns / 5, 1.0)]
            run = training.Run(arm, seed, 1.0, curve=curve, reached=True, turns=2 * turns)
            rows.append(run.row())
    censored = training.Run("A", 3, 1.0, curve=[(0, 0, 0.0, 0.1), (40, 5000, 50.0, 0.5)])
    assert censored.to_level("turns") == 5000
    found = figures.runs(rows)
    assert found["A"][0].to_level("turns") == pytest.approx(300)
    # The twin's runs count where there is no other, and for turns only.
    rows.append(
        training.Run("A", 0, 1.0, "twin", curve=[(0, 0, 0.0, 0.1), (2, 9, 9.0, 1.0)], reached=True).row()
    )
    ratio = figures.ratio(rows, "B", "A", "turns")
    assert (ratio.value, ratio.low, ratio.high, ratio.n) == pytest.approx((0.5, 0.5, 0.5, 3))
    rows += [
        {"sweep": arm, "cost": c, "wait": w, "at_once": 2, "seconds": s, "turns": 10}
        for c in (0.003, 1.0)
        for w in (0.0, 1.0)
        for arm, s in (("A", 1.0), ("B", 1.2), ("C", 2.0))
    ]
    picture = figures.picture(rows)
    assert picture.count("<svg") == picture.count("</svg>") == 1
    assert "0.60" in picture  # B over C in a cell
