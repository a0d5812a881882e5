"""plot.py LINES PICTURE: bars of a benchmark's metrics, where matplotlib is installed."""

import json
import sys
from pathlib import Path

try:
    import matplotlib
except ImportError:
    sys.exit("no plot: matplotlib is not installed")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
units = sorted({line["unit"] for line in lines})
figure, axes = plt.subplots(
    len(units),
    1,
    figsize=(9, 1 + 0.45 * len(lines) + 0.6 * len(units)),
    squeeze=False,
    height_ratios=[1 + sum(line["unit"] == unit for line in lines) for unit in units],
)
for axis, unit in zip(axes[:, 0], units):
    mine = [line for line in lines if line["unit"] == unit]
    bars = axis.barh(
        [line["metric"] for line in mine], [line["value"] for line in mine], color="#0969da", height=0.6
    )
    axis.bar_label(bars, fmt="%.3g", padding=3)
    axis.set_xlabel(unit)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
figure.suptitle(lines[0]["bench"] + ": " + lines[-1]["conditions"].split(";")[-1].strip(), fontsize=8)
figure.tight_layout()
Path(sys.argv[2]).parent.mkdir(parents=True, exist_ok=True)
figure.savefig(sys.argv[2], dpi=120)
print("plot:", sys.argv[2])
