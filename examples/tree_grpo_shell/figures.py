"""From runs to figures: ratios with intervals, and the picture.

figures.py RUNS PICTURE.svg: RUNS are the JSON lines that `run.py` writes.
"""

from __future__ import annotations

import dataclasses
import html
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

import plan
from training import ARMS, Arm, Run

Row = dict[str, Any]
Column = Literal["turns", "seconds"]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio of sums over seeds, with its 95 % interval."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


Runs = dict[Arm, dict[int, Run]]


def runs(rows: Iterable[Row], *, twin: bool = True) -> Runs:
    """By arm and seed; those in sandboxes go before those on the twin, which `twin` may leave out."""
    found: Runs = {arm: {} for arm in ARMS}
    for run in (Run(**row) for row in rows if "arm" in row):
        if run.world == "sandboxes" or (twin and run.seed not in found[run.arm]):
            found[run.arm][run.seed] = run
    return found


def ratio(rows: Iterable[Row], above: Arm, below: Arm, column: Column) -> Ratio:
    """What one arm needs to the level over what another does; seeds are resampled in pairs.

    Seconds are those of runs in sandboxes alone.
    """
    found = runs(rows, twin=column == "turns")
    seeds = sorted(found[above].keys() & found[below].keys())
    pairs = np.array([[found[arm][seed].to_level(column) for arm in (above, below)] for seed in seeds])
    drawn = np.random.default_rng(0).integers(len(seeds), size=(plan.BOOTSTRAP, len(seeds)))
    sums = pairs[drawn].sum(axis=1)
    low, high = np.percentile(sums[:, 0] / sums[:, 1], (2.5, 97.5))
    top, bottom = pairs.sum(axis=0)
    return Ratio(float(top / bottom), float(low), float(high), len(seeds))


def cells(rows: Iterable[Row]) -> dict[tuple[float, float, int], dict[str, float]]:
    """Of the sweep: by cost, wait and how many turns of a task at once, each arm's seconds of a turn."""
    found: dict[tuple[float, float, int], dict[str, float]] = {}
    for row in rows:
        if "sweep" in row:
            where = (row["cost"], row["wait"], row["at_once"])
            found.setdefault(where, {})[row["sweep"]] = row["seconds"] / row["turns"]
    return found


# ---- the picture ------------------------------------------------------------

COLOURS: dict[Arm, str] = {"A": "#57606a", "B": "#0969da", "C": "#bf8700", "D": "#8250df"}
NAMES: dict[Arm, str] = {
    "A": "A independent",
    "B": "B tree, by forks",
    "C": "C tree, executed again",
    "D": "D tree, values shuffled",
}


class Canvas:
    """SVG elements."""

    def __init__(self, width: int, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def text(self, x: float, y: float, words: str, anchor: str = "start", **more: object) -> None:
        """Writes words."""
        extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in more.items())
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{html.escape(words)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, **more: object) -> None:
        """Draws a line through points."""
        extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in more.items())
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{extra}/>')

    def dot(self, x: float, y: float, colour: str) -> None:
        """Draws a dot."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}" fill-opacity="0.55"/>')

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Fills a box."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def ticks(top: float) -> list[float]:
    """About five round numbers from 0."""
    step = 10.0 ** np.floor(np.log10(top / 4))
    step *= next(m for m in (1, 2, 5, 10) if top / (step * m) <= 6)
    return [float(v) for v in np.arange(0, top * 1.0001, step)]


def curves(canvas: Canvas, found: Runs, x0: int, y0: int, wide: int, high: int) -> None:
    """Held-out reward over turns, a line a run. C, whose turns are B's, is left out."""
    shown = [arm for arm in ARMS if arm != "C" and found[arm]]
    top = max(run.curve[-1][1] for arm in shown for run in found[arm].values())

    def at(turns: float, reward: float) -> tuple[float, float]:
        return x0 + wide * turns / top, y0 + high * (1 - reward)

    canvas.text(x0, y0 - 26, "Mean reward on held-out tasks over turns of training", font_weight="bold")
    for reward in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        canvas.line([at(0, reward), at(top, reward)], "#eaeef2")
        canvas.text(x0 - 8, at(0, reward)[1] + 4, f"{reward:.1f}", "end", fill="#57606a")
    for turns in ticks(top):
        canvas.text(at(turns, 0)[0], y0 + high + 18, f"{turns:.0f}", "middle", fill="#57606a")
    canvas.line([at(0, plan.LEVEL), at(top, plan.LEVEL)], "#cf222e", stroke_dasharray="5 4")
    canvas.text(x0 + 4, at(0, plan.LEVEL)[1] - 5, f"level {plan.LEVEL:g}", fill="#cf222e")
    for arm in shown:
        for run in found[arm].values():
            line = [at(turns, reward) for _, turns, _, reward in run.curve]
            canvas.line(line, COLOURS[arm], stroke_opacity=0.5, stroke_width=1.3)
    for i, arm in enumerate(shown):
        x, y = x0 + wide - 170, y0 + high - 14 - 18 * (len(shown) - 1 - i)
        canvas.box(x - 6, y - 12, 176, 17, "white")
        canvas.line([(x, y - 4), (x + 20, y - 4)], COLOURS[arm], stroke_width=2.5)
        canvas.text(x + 26, y, NAMES[arm])


def strips(canvas: Canvas, found: Runs, column: Column, title: str, x0: int, y0: int, wide: int) -> int:
    """A row of dots for each arm: what each seed needed to the level, with the mean. Returns the end."""
    values = {arm: [run.to_level(column) for run in found[arm].values()] for arm in ARMS if found[arm]}
    top = max(max(v) for v in values.values()) * 1.02
    canvas.text(x0, y0 - 12, title, font_weight="bold")
    y = float(y0)
    for arm, mine in values.items():
        y += 24
        canvas.line([(x0 + 160, y), (x0 + wide, y)], "#eaeef2")
        canvas.text(x0, y + 4, NAMES[arm], fill=COLOURS[arm])
        for value in mine:
            canvas.dot(x0 + 160 + (wide - 160) * value / top, y, COLOURS[arm])
        mean = x0 + 160 + (wide - 160) * sum(mine) / len(mine) / top
        canvas.line([(mean, y - 9), (mean, y + 9)], COLOURS[arm], stroke_width=3)
    for value in ticks(top):
        canvas.text(x0 + 160 + (wide - 160) * value / top, y + 26, f"{value:.0f}", "middle", fill="#57606a")
    return round(y + 26)


def ratios(canvas: Canvas, rows: Sequence[Row], x0: int, y0: int, wide: int) -> None:
    """The ratios with their intervals, beside their targets."""
    wanted: list[tuple[str, Arm, Arm, Column, float | None]] = [
        ("turns, B over A (the algorithm)", "B", "A", "turns", plan.TARGET_TURNS),
        ("seconds, B over C (the engine)", "B", "C", "seconds", plan.TARGET_SECONDS),
        ("turns, B over D (the values)", "B", "D", "turns", None),
        ("seconds, B over A", "B", "A", "seconds", None),
    ]
    for_column = {"turns": runs(rows), "seconds": runs(rows, twin=False)}
    # One pair has no interval.
    wanted = [w for w in wanted if len(for_column[w[3]][w[1]].keys() & for_column[w[3]][w[2]].keys()) > 1]
    values = [ratio(rows, above, below, column) for _, above, below, column, _ in wanted]
    top = max(1.15, *(v.high for v in values)) * 1.02
    left = x0 + 220

    def at(value: float) -> float:
        return left + (wide - 220) * value / top

    canvas.text(x0, y0 - 12, "Ratios to the level, with 95 % intervals", font_weight="bold")
    canvas.line([(at(1), y0 + 6), (at(1), y0 + 8 + 30 * len(wanted))], "#57606a", stroke_dasharray="3 3")
    canvas.text(at(1), y0 + 22 + 30 * len(wanted), "1", "middle", fill="#57606a")
    canvas.text(at(0), y0 + 22 + 30 * len(wanted), "0", "middle", fill="#57606a")
    y = y0 - 6
    for (name, *_, target), value in zip(wanted, values, strict=True):
        y += 30
        canvas.line([(at(0), y), (at(top), y)], "#eaeef2")
        canvas.text(x0, y + 4, name)
        canvas.line([(at(value.low), y), (at(value.high), y)], "#0969da", stroke_width=3)
        canvas.dot(at(value.value), y, "#0969da")
        canvas.text(at(value.value), y - 8, f"{value.value:.2f}", "middle", font_size=11)
        if target is not None:
            canvas.line([(at(target), y - 9), (at(target), y + 9)], "#1a7f37", stroke_width=2)
    canvas.text(x0, y0 + 22 + 30 * len(wanted), "green: target", fill="#1a7f37")


def tables(canvas: Canvas, rows: Sequence[Row], turns: float, x0: int, y0: int) -> None:
    """The sweep: for each cost and wait B over C, and B over A to the level."""
    found = cells(rows)
    kinds = (("B over C", "C", 1.0), ("B over A", "A", turns))
    for column, at_once in enumerate(sorted({where[2] for where in found}, reverse=True)):
        for row, (title, other, factor) in enumerate(kinds):
            x, y = x0 + column * 480, y0 + row * 190
            canvas.text(
                x,
                y - 12,
                f"Seconds to the level, {title}; {at_once} turns at once",
                font_weight="bold",
            )
            canvas.text(x, y + 14, "a turn costs", fill="#57606a")
            waits = sorted({where[1] for where in found})
            for i, wait in enumerate(waits):
                canvas.text(
                    x + 140 + 105 * i,
                    y + 14,
                    f"policy waits {wait:g} s",
                    "middle",
                    fill="#57606a",
                    font_size=11,
                )
            for j, cost in enumerate(sorted({where[0] for where in found})):
                canvas.text(x, y + 46 + 32 * j, f"{cost:g} s")
                for i, wait in enumerate(waits):
                    arms = found.get((cost, wait, at_once), {})
                    if "B" not in arms or other not in arms:
                        continue
                    value = factor * arms["B"] / arms[other]
                    colour = "#dafbe1" if value < 0.95 else "#ffebe9" if value > 1.05 else "#f6f8fa"
                    canvas.box(x + 90 + 105 * i, y + 26 + 32 * j, 100, 28, colour)
                    canvas.text(x + 140 + 105 * i, y + 45 + 32 * j, f"{value:.2f}", "middle")


def picture(rows: Sequence[Row]) -> str:
    """All of it as SVG."""
    found = runs(rows)
    swept = any("sweep" in row for row in rows)
    canvas = Canvas(1000, 945 if swept else 540)
    curves(canvas, found, 50, 50, 430, 420)
    end = strips(canvas, found, "turns", "Turns to the level: a dot a seed, and the mean", 520, 36, 450)
    real = runs(rows, twin=False)
    if any(len(by_seed) > 1 for by_seed in real.values()):
        end = strips(canvas, real, "seconds", "Seconds to the level", 520, end + 36, 450)
    ratios(canvas, rows, 520, end + 36, 450)
    if swept:
        tables(canvas, rows, ratio(rows, "B", "A", "turns").value, 50, 575)
    return str(canvas)


if __name__ == "__main__":
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    Path(sys.argv[2]).write_text(picture(lines))
    print("turns, B over A:", ratio(lines, "B", "A", "turns"))
    print("seconds, B over C:", ratio(lines, "B", "C", "seconds"))
