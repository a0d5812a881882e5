"""Finds the learning rates, trains the arms, measures the sweep: run.py tune | train | sweep.

    run.py tune                    learning rates, on the twin; writes rates.json
    run.py train OUT [SEED...]     all arms, each seed; adds a line to OUT for each run that isn't there yet
    run.py sweep OUT [COMPRESSION] seconds of a step at each cost of a turn and wait for the policy

It takes the daemon of $BOXWOOD_ADDRESS and the image of $BOXWOOD_IMAGE.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import plan
from training import ARMS, Arm, Pace, Real, Trainer, Twins, differences

RATES = Path(__file__).resolve().parent / "rates.json"
IMAGE = os.environ.get("BOXWOOD_IMAGE", "boxwood/base:latest")

Row = dict[str, Any]
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
    seeds: Iterable[int], say: Say, *, done: Iterable[Row] = (), most: int = plan.MAX_STEPS
) -> None:
    """Trains all arms with each seed, their order rotated; says each run, and whether C saw what B saw."""
    have = {(row["arm"], row["seed"]) for row in done if "arm" in row}
    rate = rates()
    async with Real.open(IMAGE) as world:
        for seed in seeds:
            if all((arm, seed) in have for arm in ARMS):
                continue
            trainers: dict[Arm, Trainer] = {}
            turn = seed % len(ARMS)
            for arm in ARMS[turn:] + ARMS[:turn]:
                trainers[arm] = Trainer(world, arm, seed, rate[arm])
                say((await trainers[arm].train(most)).row())
            places, differing = differences(trainers["B"], trainers["C"])
            say({"pair": "BC", "seed": seed, "places": places, "differing": differing})


async def sweep(
    say: Say,
    compression: float,
    *,
    costs: Sequence[float] = plan.PREFIX_COSTS,
    waits: Sequence[float] = plan.LLM_WAITS,
    steps: int = 1,
) -> None:
    """Seconds of a step of A, B and C in each cell, and per turn."""
    async with Real.open(IMAGE) as world:
        for cost in costs:
            for wait in waits:
                # The smallest cost is the command's own.
                pace = Pace(0.0 if cost == costs[0] else cost / compression, wait / compression)
                for arm in ("A", "B", "C"):
                    trainer = Trainer(world, arm, 0, 0.0, pace)
                    for _ in range(steps):
                        await trainer.step()
                    say(
                        {
                            "sweep": arm,
                            "cost": cost,
                            "wait": wait,
                            "compression": compression,
                            "seconds": trainer.seconds,
                            "turns": trainer.run.turns,
                            "replayed": trainer.run.replayed,
                        }
                    )


def keep(path: str) -> tuple[list[Row], Say]:
    """What a file of JSON lines has, and how one is added."""
    file = Path(path)
    have = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def say(row: Row) -> None:
        with file.open("a") as out:
            print(json.dumps(row), file=out)
        print({k: v for k, v in row.items() if k != "curve"}, file=sys.stderr)

    return have, say


def main(arguments: Sequence[str]) -> None:
    """See above."""
    match arguments:
        case ["tune"]:
            RATES.write_text(json.dumps(asyncio.run(tune()), indent=1) + "\n")
        case ["train", out, *seeds]:
            have, say = keep(out)
            asyncio.run(train(map(int, seeds) if seeds else plan.SEEDS, say, done=have))
        case ["sweep", out, *rest]:
            asyncio.run(sweep(keep(out)[1], float(rest[0]) if rest else 10.0))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
