"""Search on a real daemon: real turns, and trainers that are killed in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import boxwood
from boxwood import aio, search

pytestmark = pytest.mark.integration
SEARCHER = str(Path(__file__).with_name("searcher.py"))


def trainer(socket: str, tree: boxwood.Tree, strategy: str, kill_at: int | None) -> dict[str, Any] | None:
    """Runs a trainer, which is killed with -9 when it begins its n-th turn or grading. None: it was killed."""
    done = subprocess.run(
        [sys.executable, SEARCHER, socket, tree.id, "s", strategy],
        env={**os.environ, "SEARCHER_DIES": str(kill_at or 0)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=180,
    )
    assert done.returncode in ([0] if kill_at is None else [0, -signal.SIGKILL])
    return json.loads(done.stdout) if done.returncode == 0 else None


@pytest.mark.parametrize("strategy", ["tree_grpo", "mcts"])
def test_a_killed_trainer_goes_on(
    socket_path: str, client: boxwood.Client, image: str, strategy: str
) -> None:
    start: dict[str, Any] = {"image": image, "setup": ["mkdir -p /work"], "with_sandbox": False}
    with client.create_tree(**start) as undisturbed, client.create_tree(**start) as tree:
        wanted = trainer(socket_path, undisturbed, strategy, None)
        assert wanted is not None
        killed, got = 0, None
        for kill_at in (2, 4, 7, 5, None):
            got = trainer(socket_path, tree, strategy, kill_at)
            if got is not None:
                break
            killed += 1
        assert got is not None
        assert killed >= 3
        assert got["places"] == wanted["places"]
        assert got["rows"] == wanted["rows"]
        assert got["ran"] + got["found"] == wanted["ran"]
        # The trees are equal: each place has one node, and nothing else is there.
        assert Counter(n.labels["place"] for n in tree.nodes(labels={"search": "s"})) == Counter(
            name for name, *_ in wanted["places"] if name
        )
        assert len(list(tree.nodes())) == len(list(undisturbed.nodes()))
        # Rewards are the nodes' own.
        by_place = {n.labels.get("place"): n for n in tree.nodes()}
        for name, _, _, reward, visits, value, _ in got["places"]:
            if reward is not None:
                assert by_place[name].rewards["reward"] == reward
            if visits and name:
                assert (by_place[name].visits, by_place[name].value) == (visits, pytest.approx(value))
        assert not client.sandboxes(tree)


@pytest.mark.parametrize("settled", [False, True])
def test_a_trainer_killed_in_a_turn(
    socket_path: str, client: boxwood.Client, image: str, settled: bool
) -> None:
    """Turns that its death cancelled leave nothing; a restart at once, and one after the daemon is done with them."""
    start: dict[str, Any] = {"image": image, "setup": ["mkdir -p /work"], "with_sandbox": False}
    with client.create_tree(**start) as undisturbed, client.create_tree(**start) as tree:
        wanted = trainer(socket_path, undisturbed, "tree_grpo", None)
        assert wanted is not None
        program = subprocess.Popen(
            [sys.executable, SEARCHER, socket_path, tree.id, "s", "tree_grpo"],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "SEARCHER_HANGS": "1"},
        )
        with program:
            wait_until(
                lambda: len(list(tree.nodes(brief=True))) == 5 and all(map(busy, client.sandboxes(tree)))
            )
            program.kill()
        if settled:
            wait_until(lambda: any(n.turn_status == "cancelled" for n in tree.nodes()))
        got = trainer(socket_path, tree, "tree_grpo", None)
        assert got is not None
        assert (got["places"], got["rows"]) == (wanted["places"], wanted["rows"])
        assert got["found"] == 4
        assert len(list(tree.nodes())) == len(list(undisturbed.nodes()))
        assert {n.turn_status for n in tree.nodes() if n.parent_id} == {"completed"}


def busy(sandbox: boxwood.Sandbox) -> bool:
    try:
        sandbox.read_file("/work/log")
    except boxwood.Busy:
        return True
    return False


def wait_until(true: Callable[[], bool]) -> None:
    """Asks until it is true; 60 s without are a failure."""
    tick = threading.Event()
    for _ in range(1200):
        if true():
            return
        tick.wait(0.05)
    pytest.fail("it did not become true")


Run = Callable[[search.Search], Awaitable[search.Result]]


def searched(
    client: boxwood.Client, tree: boxwood.Tree, policy: search.Policy, reward: Any, run: Run, **options: Any
) -> search.Result:
    """One search of a tree over the asyncio face."""

    async def main() -> search.Result:
        async with aio.connect(client.address, timeout=60) as connected:
            rollout = search.Sandboxes(await connected.tree(tree.id), idle=3)
            async with search.Search(rollout, policy, reward, **options) as s:
                return await run(s)

    return asyncio.run(main())


def test_branches_see_their_own_past(client: boxwood.Client, image: str) -> None:
    async def policy(history: search.History) -> search.Action:
        # The past as the policy knows it is what the sandbox has.
        words = [step.action.text for step in history.steps]
        if history.steps:
            assert history.steps[-1].seen.stdout.split() == words
        word = f"w{history.seed % 1000}"
        return search.Action(f"echo {word} >> /tmp/log; cat /tmp/log", text=word, stop=len(words) == 2)

    async def reward(place: search.Place) -> float:
        return float(place.seen.stdout.split() == [p.action.text for p in place.path[1:] if p.action])

    with client.create_tree(image=image, with_sandbox=False) as tree:
        result = searched(client, tree, policy, reward, lambda s: search.spo_tree(s, branching=(2, 2, 2)))
        assert [leaf.reward for leaf in result.leaves] == [1.0] * 8
        assert not client.sandboxes(tree)
        nodes = {n.id: n for n in tree.nodes()}
        for leaf in result.leaves:
            path = [p.node_id for p in leaf.path]
            assert [nodes[n].parent_id for n in path[1:]] == path[:-1]


def test_a_sandbox_that_waited_too_long(client: boxwood.Client, image: str) -> None:
    """Sandboxes that end while the policy thinks are made again from their nodes."""
    ended: list[str] = []

    async def policy(history: search.History) -> search.Action:
        if history.steps:
            waiting = client.sandboxes(tree)
            client.release(waiting)
            ended.extend(sandbox.id for sandbox in waiting)
        return search.Action("echo x >> /tmp/log; cat /tmp/log", stop=len(history.steps) == 2)

    async def reward(place: search.Place) -> float:
        return float(len(place.seen.stdout.split()))

    with client.create_tree(image=image, with_sandbox=False) as tree:
        result = searched(client, tree, policy, reward, lambda s: search.grpo(s, 1))
        assert [leaf.reward for leaf in result.leaves] == [3.0]
        assert len(ended) == 2


def test_survivors_withhold_a_branch_not_a_rollout(client: boxwood.Client, image: str) -> None:
    """A turn that leaves a process can be gone on from, live; where it can't be forked nothing branches."""

    async def policy(history: search.History) -> search.Action:
        if not history.steps:
            return search.Action("sleep 600 & echo $!")
        return search.Action(f"kill -0 {history.steps[0].seen.stdout}", stop=True)

    async def reward(place: search.Place) -> float:
        return float(place.seen.exit_code == 0)

    with client.create_tree(image=image, with_sandbox=False) as tree:
        result = searched(client, tree, policy, reward, lambda s: search.tree_grpo(s, trees=2, expand=3))
        withheld = {n.id for n in tree.nodes() if n.capture == "withheld"}
        assert len(result.leaves) == 8
        for place in result.root.walk():
            if place.node_id in withheld:
                assert len(place.children) <= 1
        # Each rollout's own process is there, or (restored) still is.
        assert [leaf.reward for leaf in result.leaves] == [1.0] * 8


def test_silent_actions_and_refused_ones(client: boxwood.Client, image: str) -> None:
    async def policy(history: search.History) -> search.Action:
        if not history.steps:
            return search.Action("printf 'a\0b'", [1], [-1.0])
        return search.Action(None, [2], [-2.0], stop=True)

    async def reward(place: search.Place) -> float:
        return 1.0

    with client.create_tree(image=image, with_sandbox=False) as tree:
        result = searched(client, tree, policy, reward, lambda s: search.grpo(s, 2))
        assert [row.token_ids for row in result.trajectories()] == [(1, 2)] * 2
        assert [p.seen.refused != "" for p in result.leaves[0].path[1:]] == [True, False]
        assert [n.verdict for n in tree.nodes() if n.parent_id] == ["none"] * 4


def test_a_grader_as_the_reward(client: boxwood.Client, image: str) -> None:
    async def policy(history: search.History) -> search.Action:
        command = ["echo 42 > /work/answer", "echo 41 > /work/answer", "exec sleep 0"][history.index]
        return search.Action(command, stop=True)

    grader = boxwood.Grader(
        "read answer < /work/answer && echo $((answer == 42)) > /rewards",
        image=image,
        paths=["/work"],
        rewards_file="/rewards",
    )
    with client.create_tree(image=image, with_sandbox=False) as tree:
        result = searched(client, tree, policy, grader, lambda s: search.grpo(s, 3))
        # The third gave no answer, so the grader no reward: that counts as said.
        assert [leaf.reward for leaf in result.leaves] == [1.0, 0.0, 0.0]
        again = searched(client, tree, policy, grader, lambda s: search.grpo(s, 3))
        assert [leaf.reward for leaf in again.leaves] == [1.0, 0.0, 0.0]
    with client.create_tree(image=image, with_sandbox=False) as tree:
        strict = searched(client, tree, policy, grader, lambda s: search.grpo(s, 3), no_reward=None)
        assert [p.status for p in strict.lost] == ["ungraded"]
        assert len(strict.leaves) == 2
    broken = boxwood.Grader("no-such-program", image=image)
    with client.create_tree(image=image, with_sandbox=False) as tree:
        nothing = searched(client, tree, policy, broken, lambda s: search.grpo(s, 3))
        assert [p.status for p in nothing.lost] == ["ungraded"] * 3
        assert not nothing.leaves


def test_the_example(socket_path: str, base_image: str) -> None:
    program = Path(boxwood.__file__).parents[3] / "examples" / "tree_search.py"
    done = subprocess.run(
        [sys.executable, str(program), base_image],
        env={**os.environ, "BOXWOOD_ADDRESS": socket_path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 14
    assert all(line.startswith("tree ") for line in lines)
    assert {line.split("reward ")[1][:4] for line in lines} <= {"0.00", "0.30", "0.60", "0.90"}
