"""What trees by forks gain for a small policy that learns: examples/tree_grpo_shell, whose plan.py says how.

Without --long two seeds of four steps, which don't reach the level, and four cells of the sweep: enough to
see that all of it runs, and for seconds of B over C, whose steps are the same. Ratios of turns say
nothing then.
Metrics:
    turns_to_level.ratio_b_over_a, turns_to_level.ratio_b_over_d, seconds_to_level.ratio_b_over_a,
    seconds_to_level.ratio_b_over_c ...: each with .ci_low and .ci_high
    turns_to_level.a, seconds_to_level.a, reached.a, turns_per_step.a ...: of each arm
    c.replayed, c.replays_differing, c.searches, c.searches_differing: whether C saw what B saw
    lost: places that were lost for a reason of the host
    sweep.many.t0.1_w1.b_over_c, .b_over_a ...: seconds to the level in a cell, many or few turns at once
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import boxwood
from report import conditions, emit

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "tree_grpo_shell"
sys.path.insert(0, str(EXAMPLE))

import figures  # noqa: E402
import plan  # noqa: E402
import run  # noqa: E402
import training  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument(
    "--out", required=True, help="keeps the runs as JSON lines; those that are there aren't run again"
)
parser.add_argument("--plot", required=True)
parser.add_argument("--long", action="store_true")
options = parser.parse_args()
seeds = plan.SEEDS if options.long else plan.SEEDS[:2]
steps = plan.MAX_STEPS if options.long else 4
compression = 20.0 if options.long else 100.0
corners = {} if options.long else {"costs": (0.003, 10.0), "waits": (0.0, 5.0), "at_once": (2,)}

rows, keep = run.keep(options.out)


def say(row: run.Row) -> None:
    """Adds a line, and keeps it."""
    rows.append(row)
    keep(row)


with boxwood.connect(os.environ["BOXWOOD_ADDRESS"]) as client:
    where = conditions(client)
asyncio.run(run.train_real(run.ARMS, seeds, say, done=list(rows), most=steps))
asyncio.run(run.sweep(say, compression, done=list(rows), **corners))

found = figures.runs(rows, twin=False)
rates = ", ".join(f"{arm} {rate:g}" for arm, rate in run.rates().items())
how = f"linear policy, level {plan.LEVEL:g}, at most {steps} steps, learning rates {rates}; {where}"
for column in ("turns", "seconds"):
    for above, below in (("B", "A"), ("B", "C"), ("B", "D")):
        ratio = figures.ratio(rows, above, below, column)
        name = f"{column}_to_level.ratio_{above}_over_{below}".lower()
        emit("learning", name, ratio.value, "ratio", ratio.n, how)
        emit("learning", f"{name}.ci_low", ratio.low, "ratio", ratio.n, how)
        emit("learning", f"{name}.ci_high", ratio.high, "ratio", ratio.n, how)
for arm, by_seed in found.items():
    mine, n = list(by_seed.values()), len(by_seed)
    for column, unit in (("turns", "1"), ("seconds", "s")):
        mean = sum(r.to_level(column) for r in mine) / n
        emit("learning", f"{column}_to_level.{arm.lower()}", mean, unit, n, how)
    steps = sum(r.curve[-1][0] for r in mine)
    emit("learning", f"turns_per_step.{arm.lower()}", sum(r.turns for r in mine) / steps, "1", steps, how)
    emit("learning", f"reached.{arm.lower()}", sum(r.reached for r in mine), "1", n, how)
everything = [r for by_seed in found.values() for r in by_seed.values()]
emit("learning", "lost", sum(r.lost for r in everything), "1", len(everything), how)
emit("learning", "c.replayed", sum(r.replayed for r in everything), "1", len(seeds), how)
emit("learning", "c.replays_differing", sum(r.differed for r in everything), "1", len(seeds), how)
pairs = [training.differing(found["B"][seed], found["C"][seed]) for seed in seeds]
emit("learning", "c.searches", sum(n for n, _ in pairs), "1", len(pairs), how)
emit("learning", "c.searches_differing", sum(n for _, n in pairs), "1", len(pairs), how)
turns = figures.ratio(rows, "B", "A", "turns").value
for (cost, wait, at_once), arms in figures.cells(rows).items():
    name = f"sweep.{'few' if at_once == 2 else 'many'}.t{cost:g}_w{wait:g}"
    cell = f"sleeps divided by {compression:g}, {at_once} turns at once, one step; {where}"
    emit("learning", f"{name}.b_over_c", arms["B"] / arms["C"], "ratio", 1, cell)
    emit("learning", f"{name}.b_over_a", turns * arms["B"] / arms["A"], "ratio", 1, cell)
Path(options.plot).write_text(figures.picture(rows))
print("plot:", options.plot, file=sys.stderr)
