"""Finds the learning rates, trains the arms, measures the sweep.

    run.py tune                      learning rates, on the twin; writes rates.json
    run.py train ARMS OUT [SEED...]  such as train ABCD runs.jsonl 0 1; adds to OUT the runs that it lacks
    run.py twin ARMS OUT [SEED...]   the same on the twin: the turns are those of train, the seconds nobody's
    run.py sweep OUT [COMPRESSION]   seconds of a step at each cost of a turn and wait for the policy

It takes the daemon of $BOXWOOD_ADDRESS and the image of $BOXWOOD_IMAGE.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import plan
from training import ARMS, Arm, Pace, Real, Trainer, Twins, World

RATES = Path(__file__).resolve().parent / "rates.json"
IMAGE = os.environ.get("BOXWOOD_IMAGE", "boxwood/base:latest")

Row = dict[str, Any]
CELL = ("sweep", "cost", "wait", "at_once")
Say = Callable[[Row], None]


def rates() -> dict[Arm, float]:
    """The learning rate of each arm, as the search found it."""
    found: dict[Arm, float] = json.loads(RATES.read_text())["chosen"]
    return {**found, "C": found["B"]}


async def tune(seeds: Sequence[int] = plan.TUNING_SEEDS) -> dict[str, Any]:
    """Mean turns to the level for each arm and rate, and the best rates."""
    table: dict[str, dict[str, float]] = {}
    for arm in ("A", "B", "D"):
        table[arm] = {}
        for rate in plan.LEARNING_RATES:
            runs = [await Trainer(Twins(), arm, seed, rate).train() for seed in seeds]
            table[arm][f"{rate:g}"] = sum(run.to_level("turns") for run in runs) / len(runs)
            print(arm, rate, round(table[arm][f"{rate:g}"]), sum(r.reached for r in runs), file=sys.stderr)
    chosen = {arm: float(min(tried, key=lambda r: (tried[r], float(r)))) for arm, tried in table.items()}
    return {"chosen": chosen, "turns_to_level": table, "seeds": list(seeds)}


async def train(
    world: World,
    arms: Sequence[Arm],
    seeds: Iterable[int],
    say: Say,
    *,
    done: Iterable[Row] = (),
    most: int = plan.MAX_STEPS,
) -> None:
    """Trains arms with each seed, their order rotated; says each run."""
    have = {(row["arm"], row["seed"], row["world"]) for row in done if "arm" in row}
    rate = rates()
    for seed in seeds:
        turn = seed % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            if (arm, seed, world.name) not in have:
                say((await Trainer(world, arm, seed, rate[arm]).train(most)).row())


async def train_real(arms: Sequence[Arm], seeds: Iterable[int], say: Say, **options: Any) -> None:
    """The same in sandboxes."""
    async with Real.open(IMAGE) as world:
        await train(world, arms, seeds, say, **options)


async def sweep(
    say: Say,
    compression: float,
    *,
    costs: Sequence[float] = plan.PREFIX_COSTS,
    waits: Sequence[float] = plan.LLM_WAITS,
    at_once: Sequence[int] = (16, 2),
    done: Iterable[Row] = (),
) -> None:
    """Seconds of one step of A, B and C in each cell.

    With many turns at once a host waits, as for the sleeps here; with few a turn has to wait for others, as
    for cores. A search holds a turn's slot from the call of the policy on, so that the policy's wait counts
    there, too.
    """
    have = {tuple(row[k] for k in CELL) for row in done if "sweep" in row}
    async with Real.open(IMAGE) as world:
        for many, cost, wait, arm in itertools.product(at_once, costs, waits, ARMS[:3]):
            if (arm, cost, wait, many) in have:
                continue
            # The smallest cost is the command's own.
            pace = Pace(
                0.0 if cost == min(plan.PREFIX_COSTS) else cost / compression, wait / compression, many
            )
            trainer = Trainer(world, arm, 0, 0.0, pace)
            await trainer.step()
            row = dict(zip(CELL, (arm, cost, wait, many), strict=True))
            say({**row, "compression": compression, "seconds": trainer.seconds, "turns": trainer.run.turns})


def keep(path: str) -> tuple[list[Row], Say]:
    """What a file of JSON lines has, and how one is added."""
    file = Path(path)
    have = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def say(row: Row) -> None:
        with file.open("a") as out:
            print(json.dumps(row), file=out)
        print({k: v for k, v in row.items() if k not in ("curve", "shown")}, file=sys.stderr)

    return have, say


def main(arguments: Sequence[str]) -> None:
    """See above."""
    match arguments:
        case ["tune"]:
            RATES.write_text(json.dumps(asyncio.run(tune()), indent=1) + "\n")
        case ["train" | "twin" as how, arms, out, *some]:
            have, say = keep(out)
            wanted = [arm for arm in ARMS if arm in arms]
            seeds = [int(seed) for seed in some] or plan.SEEDS
            if how == "twin":
                asyncio.run(train(Twins(), wanted, seeds, say, done=have))
            else:
                asyncio.run(train_real(wanted, seeds, say, done=have))
        case ["sweep", out, *rest]:
            have, say = keep(out)
            asyncio.run(sweep(say, float(rest[0]) if rest else 20.0, done=have))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
