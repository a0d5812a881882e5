#!/usr/bin/env bash
# isolation.sh: what each measure of the box adds, as JSON lines; run.sh calls it before it measures what neighbours do to each
# other on a daemon. LONG=1: five times the rounds.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
scratch=$(mktemp -d "${TMPDIR:-/tmp}/boxwood-bench.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
rounds=60
[ -z "${LONG:-}" ] || rounds=300
go test ./engine/box -run '^$' -bench '^BenchmarkMeasures$' -benchtime 1x -timeout 1h -args \
  -measures.out "$scratch/figures" -measures.rounds $rounds >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 1; }
# A figure that got lost must not look like one that nobody asked for.
wanted="filter.added_ms.p50 filter.create_added_ms.p50 capabilities.added_ms.p50 capabilities.create_added_ms.p50
  limits.added_ms.p50 limits.create_added_ms.p50 masks.added_ms.p50 masks.create_added_ms.p50
  nesting.added_ms.p50 nesting.create_added_ms.p50 no_new_privs.added_ms.p50 no_new_privs.create_added_ms.p50 cgroup_limits.added_ms.p50 cgroup_limits.create_added_ms.p50
  all.added_ms.p50 all.create_added_ms.p50"
for metric in $wanted; do
  grep -qF "\"metric\":\"$metric\"" "$scratch/figures" || { echo "isolation.sh: there is no $metric" >&2; exit 1; }
done
cat "$scratch/figures"
