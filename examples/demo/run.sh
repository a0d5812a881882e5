#!/usr/bin/env bash
# The main job on real parts: replay a recorded rollout, fork a node from its
# middle into 8 live sandboxes, search for the edits that mend a broken project,
# and write the tables and pictures of it all. Fails if something isn't as claimed.
#
# usage: run.sh [OUT]    OUT: where tables and pictures go (default examples/demo/out)
# DEMO_SHORT=1 (or SHORT=1) makes it shorter; BOXWOOD, BOXWOOD_PYTHON name the
# program and the Python to use. Needs root.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
out=${1:-$here/out}
boxwood=${BOXWOOD:-$top/bin/boxwood}
python=${BOXWOOD_PYTHON:-$top/.venv/bin/python}
image=boxwood/base:latest

[ "$(id -u)" = 0 ] || { echo "demo: needs root" >&2; exit 1; }
[ -x "$boxwood" ] || { echo "demo: there is no $boxwood: make build" >&2; exit 1; }

scratch=$(mktemp -d "${TMPDIR:-/tmp}/boxwood-demo.XXXXXX")
daemon=
# Runs at every end, also by a signal: the daemon is told to stop, awaited, and
# killed only if it doesn't; then nothing of its state is left.
cleanup() {
  status=$?
  trap - EXIT INT TERM HUP
  if [ -n "$daemon" ]; then
    "$boxwood" sandbox list -q 2>/dev/null | xargs -r "$boxwood" release >/dev/null 2>&1 || true
    kill -TERM "$daemon" 2>/dev/null || true
    for _ in $(seq 250); do
      kill -0 "$daemon" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL "$daemon" 2>/dev/null || true
    wait "$daemon" 2>/dev/null || true
  fi
  # What a killed daemon left: its sandboxes outlive it on purpose.
  find /sys/fs/cgroup -path "*/boxwood-demo-$$/*" -name cgroup.procs -exec cat {} + 2>/dev/null | sort -u | xargs -r kill -KILL 2>/dev/null || true
  if [ "$status" != 0 ] && [ -s "$scratch/log" ]; then
    echo "demo: failed; the daemon's last lines:" >&2
    tail -n 15 "$scratch/log" >&2
  fi
  rm -rf "$scratch"
  for _ in $(seq 20); do # the last process of a group may be on its way out
    find /sys/fs/cgroup -depth -type d -path "*/boxwood-demo-$$*" -exec rmdir {} + 2>/dev/null || true
    [ -n "$(find /sys/fs/cgroup -maxdepth 3 -name "boxwood-demo-$$" -print -quit 2>/dev/null)" ] || break
    sleep 0.1
  done
  exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

say() { printf '\n== %s\n' "$*"; }

say "starting a daemon"
export BOXWOOD_ADDRESS=$scratch/socket
# In a session of its own: ^C is for this script, which then stops the daemon.
setsid "$boxwood" serve --state "$scratch/state" --socket "$BOXWOOD_ADDRESS" --pool-size 8G \
  --cgroup "boxwood-demo-$$" >"$scratch/ready" 2>"$scratch/log" &
daemon=$!
for _ in $(seq 600); do
  grep -q '^ready' "$scratch/ready" && break
  kill -0 "$daemon" 2>/dev/null || { daemon=; echo "demo: the daemon ended: boxwood doctor says what is missing" >&2; exit 1; }
  sleep 0.1
done
"$boxwood" version

say "the base image (built once, then cached)"
"$boxwood" image build-base --cache "${BOXWOOD_CACHE:-$top/.cache/images}" 2>&1

"$python" "$here/demo.py" --boxwood "$boxwood" --image "$image" --out "$out" ${DEMO_SHORT:+--short} ${SHORT:+--short}
