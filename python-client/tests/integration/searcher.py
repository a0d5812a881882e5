"""A trainer of one search, to be killed: searcher.py SOCKET TREE NAME STRATEGY.

At its end it says the result as JSON. With $SEARCHER_DIES=N it is killed, as by kill -9, when it begins its
n-th turn or grading; with $SEARCHER_HANGS its third turns don't end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import signal
import sys

from boxwood import aio, search

begun = itertools.count(1)


def begins() -> None:
    if next(begun) == int(os.environ.get("SEARCHER_DIES") or 0):
        os.kill(os.getpid(), signal.SIGKILL)


async def policy(history: search.History) -> search.Action:
    depth, pick = len(history.steps), history.seed % 3
    begins()
    if depth == 2 and os.environ.get("SEARCHER_HANGS"):
        return search.Action("echo half >> /work/log; sleep 1000", [0], [0.0])
    return search.Action(
        # What ran twice, or in the wrong state, shows in the output.
        f"echo {pick} >> /work/log; [ {pick} != 1 ] || sleep 0.05; cat /work/log",
        token_ids=[depth, history.seed % 50000],
        logprobs=[-0.1 * pick, -1 / 3],
        context_ids=[99] * depth,
        policy_version="7",
        stop=depth == 2,
    )


async def reward(place: search.Place) -> float:
    begins()
    lines = place.seen.stdout.split()
    return lines.count("0") / len(lines)


async def main(socket: str, tree_id: str, name: str, strategy: str) -> None:
    async with aio.connect(socket, timeout=60) as client:
        rollout = search.Sandboxes(await client.tree(tree_id))
        async with search.Search(rollout, policy, reward, name=name, seed=11, concurrency=3) as s:
            if strategy == "mcts":
                result = await search.mcts(s, iterations=8, children=2, parallel=2)
            else:
                result = await search.tree_grpo(s, trees=2, expand=2, rounds=1)
    names = {place.node_id: place.name for place in result.root.walk()}
    rows = [dataclasses.asdict(row) for row in result.trajectories(search.tree_grpo_advantages)]
    for row in rows:
        row["node_ids"] = [names[node] for node in row["node_ids"]]
        for span in row["spans"]:
            span["node_id"] = names[span["node_id"]]
        del row["group_id"]
    places = [
        [p.name, p.status, p.seen.stdout, p.reward, p.visits, p.value, [len(p.children)]]
        for p in result.root.walk()
    ]
    print(json.dumps({"places": places, "rows": rows, "ran": s.turns, "found": s.found}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
