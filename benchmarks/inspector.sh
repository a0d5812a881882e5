#!/usr/bin/env bash
# inspector.sh: what watching costs and how often it is wrong, as JSON lines; run.sh
# calls it. LONG=1 also compares wall times, and runs the corpus for 20,000 turns and until
# each of its rows changed something 200 times (many hours). CORPUS=N sets the turns, and ends there.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
scratch=$(mktemp -d "${TMPDIR:-/tmp}/boxwood-bench.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
turns=${CORPUS:-400} row=0
[ -z "${LONG:-}" ] || [ -n "${CORPUS:-}" ] || { turns=20000 row=200; }

go test ./inspector -run '^$' -bench '^BenchmarkFigures$' -benchtime 1x -timeout 3h -args \
  -figures.out "$scratch/figures" ${LONG:+-figures.long} >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 1; }
go test ./engine/corpus -run '^TestCorpus$' -timeout 48h -v -parallel $((3 * $(nproc))) -args -corpus.n "$turns" -corpus.row $row -corpus.out "$scratch/corpus" \
  >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 1; }
seed=$(grep -o 'seed [0-9]*' "$scratch/log" | head -n 1)
python3 - "$scratch/corpus" "$seed" <<'PY' >>"$scratch/figures"
import json, os, platform, sys

c = json.load(open(sys.argv[1]))
how = f"random programs as turns of a whole engine, {sys.argv[2]}; {os.cpu_count()} cores, Linux {platform.release()}"
changed, unchanged = c["Turns"] - c["Unchanged"], c["Unchanged"]
for metric, value, unit, n in (
    ("corpus.false_negatives", c["Missed"], "turns", changed),
    ("corpus.false_positive_pct", 100 * c["FalsePositives"] / unchanged, "%", unchanged),
    ("corpus.n", c["Turns"], "turns", c["Turns"]),
):
    print(json.dumps({"bench": "inspector", "metric": metric, "value": value, "unit": unit, "n": n, "conditions": how}))
PY

# A figure that got lost must not look like one that nobody asked for.
wanted="syscall_ns.watched syscall_ns.unwatched syscall_ns.watched_write compile.bpf_share_pct tests.bpf_share_pct git.bpf_share_pct
  barrier_ms.p50 barrier_ms.p95 events_per_s.max corpus.false_negatives corpus.false_positive_pct corpus.n"
wanted+=" compile.bpf_share_net_pct tests.bpf_share_net_pct git.bpf_share_net_pct"
[ -z "${LONG:-}" ] || wanted+=" compile.overhead_pct.ci_low compile.overhead_pct.ci_high
  tests.overhead_pct.ci_low tests.overhead_pct.ci_high git.overhead_pct.ci_low git.overhead_pct.ci_high"
for metric in $wanted; do
  grep -qF "\"metric\":\"$metric\"" <(tr -d ' ' <"$scratch/figures") || { echo "inspector.sh: there is no $metric" >&2; exit 1; }
done
cat "$scratch/figures"
