#!/usr/bin/env bash
# sched-sim.sh: the scheduler's decisions on simulated hosts, as JSON lines; run.sh calls it. It needs no daemon and no
# root. LONG=1 simulates five minutes of 20 seeds instead of one of 5.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
scratch=$(mktemp -d "${TMPDIR:-/tmp}/boxwood-bench.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
CGO_ENABLED=0 go build -o "$scratch/schedsim" ./benchmarks/schedsim
"$scratch/schedsim" ${LONG:+-long} >"$scratch/figures"
cat "$scratch/figures"
python=${BOXWOOD_PYTHON:-.venv/bin/python}
grep '"%"' "$scratch/figures" >"$scratch/shares" # the rest spans five orders of magnitude
"$python" benchmarks/plot.py "$scratch/shares" benchmarks/out/sched-sim.png >&2 || true
