#!/usr/bin/env bash
# tree.sh: what the tree store does, beside the disk's bare fdatasync, as JSON lines; run.sh
# calls it. LONG=1 has a million nodes instead of 100,000. It writes below $TMPDIR,
# or /var/tmp: that must be a disk, as the store refuses a tmpfs.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
scratch=$(mktemp -d "${TMPDIR:-/var/tmp}/boxwood-bench.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
CGO_ENABLED=0 go build -o "$scratch/treebench" ./benchmarks/treebench
"$scratch/treebench" -dir "$scratch" ${LONG:+-long} >"$scratch/figures"

# A figure that got lost must not look like one that nobody asked for.
for metric in fdatasync_per_s append_per_s.w1 append_per_s.w64 append_ms.p99 reads_per_s watch_ms.p99 \
  node_bytes.memory node_bytes.disk restart_1m_s prune_100k_s append_ratio.deep append_ratio.wide; do
  grep -qF "\"metric\":\"$metric\"" "$scratch/figures" || { echo "tree.sh: there is no $metric" >&2; exit 1; }
done
cat "$scratch/figures"
