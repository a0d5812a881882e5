#!/usr/bin/env bash
# run.sh NAME: measures a claim beside its baseline on a daemon of its own and
# prints JSON lines {"bench","metric","value","unit","n","conditions"} on standard
# output, everything else on standard error. LONG=1 is the thorough form.
# density: ROWS=n256,n16_zero_wait measures these alone, EACH=5 has sandboxes wait for 5 s in each arm (or do 5 turns where none waits).
# Names: fork, turn, client, capture, isolation, density, learning, stats, inspector, tree, sched-sim. Needs root. A plot goes to benchmarks/out/ where
# matplotlib is (learning draws its own).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/.." && pwd)
name=${1:-}
case $name in
fork | turn | client | capture | isolation | density | learning | stats) ;;
inspector) exec "$here/inspector.sh" ;; # it needs no daemon
tree) exec "$here/tree.sh" ;;           # nor does this
sched-sim) exec "$here/sched-sim.sh" ;; # nor this, which simulates
*)
  echo "usage: run.sh fork|turn|client|capture|isolation|density|learning|stats|inspector|tree|sched-sim" >&2
  exit 2
  ;;
esac
boxwood=${BOXWOOD:-$top/bin/boxwood}
python=${BOXWOOD_PYTHON:-$top/.venv/bin/python}
[ "$(id -u)" = 0 ] || { echo "run.sh: needs root" >&2; exit 1; }
[ -x "$boxwood" ] || { echo "run.sh: there is no $boxwood: make build" >&2; exit 1; }

scratch=$(mktemp -d "${TMPDIR:-/tmp}/boxwood-bench.XXXXXX")
daemon=
cleanup() {
  status=$?
  trap - EXIT INT TERM HUP
  if [ -n "$daemon" ]; then
    kill -TERM "$daemon" 2>/dev/null || true
    for _ in $(seq 250); do
      kill -0 "$daemon" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL "$daemon" 2>/dev/null || true
    wait "$daemon" 2>/dev/null || true
  fi
  find /sys/fs/cgroup \( -path "*/boxwood-bench-$$/*" -o -path "*/boxwood-bench-$$-bare/*" \) -name cgroup.procs -exec cat {} + 2>/dev/null | sort -u | xargs -r kill -KILL 2>/dev/null || true
  [ "$status" = 0 ] || tail -n 15 "$scratch/log" >&2 || true
  rm -rf "$scratch" "/dev/shm/boxwood-bench-$$-bare"
  for _ in $(seq 20); do
    find /sys/fs/cgroup -depth -type d -path "*/boxwood-bench-$$*" -exec rmdir {} + 2>/dev/null || true
    [ -n "$(find /sys/fs/cgroup -maxdepth 3 -name "boxwood-bench-$$" -print -quit 2>/dev/null)" ] || break
    sleep 0.1
  done
  exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

gcc -O2 -static -o "$scratch/spawn" "$here/spawn/spawn.c"
gcc -O2 -static -o "$scratch/holder" "$here/holder/holder.c"
go=$(command -v go || echo /usr/local/go/bin/go)
(cd "$top" && CGO_ENABLED=0 "$go" build -o "$scratch/forkbench" ./benchmarks/forkbench)

# A small image of this host's own programs is enough: nothing that is measured
# reads more, and it is there in no time.
mkdir -p "$scratch/root"/{bin,etc,tmp,usr/bin}
echo root:x:0:0::/:/bin/sh >"$scratch/root/etc/passwd"
cp "$scratch/holder" "$scratch/root/bin/"
for program in /bin/true /bin/touch /bin/sh /bin/bash /bin/sync; do
  cp -L "$program" "$scratch/root/bin/"
  ldd "$program" | grep -o '/[^ ]*' | while read -r lib; do
    mkdir -p "$scratch/root$(dirname "$lib")"
    cp -L "$lib" "$scratch/root$lib"
  done
done
# As every real image has one: without it the loader of each program tries some forty
# paths that the baseline, which runs on this host, doesn't.
cp -rL /etc/ld.so.conf /etc/ld.so.conf.d "$scratch/root/etc/" 2>/dev/null || true
"$(command -v ldconfig || echo /sbin/ldconfig)" -r "$scratch/root"

[ "$name" != stats ] || "$scratch/forkbench" -history "$scratch/state/stats"
export BOXWOOD_ADDRESS=$scratch/socket
setsid "$boxwood" serve --state "$scratch/state" --socket "$BOXWOOD_ADDRESS" --pool-size 8G \
  --cgroup "boxwood-bench-$$" --max-sandboxes 4000 --log-level warn >"$scratch/ready" 2>"$scratch/log" &
daemon=$!
for _ in $(seq 600); do
  grep -q '^ready' "$scratch/ready" && break
  kill -0 "$daemon" 2>/dev/null || { daemon=; echo "run.sh: the daemon ended" >&2; exit 1; }
  sleep 0.1
done
if [ "$name" = learning ]; then # its tasks want sed, tar and others
  "$boxwood" image build-base --cache "${BOXWOOD_CACHE:-$top/.cache/images}" >&2
else
  "$boxwood" image import "$scratch/root" --name bench:1 >&2
fi

forkbench=("$scratch/forkbench" -image bench:1 -spawn "$scratch/spawn" -state "$scratch/state" -root "$scratch/root" -group "boxwood-bench-$$-bare" ${LONG:+-long})
case $name in
fork)
  "${forkbench[@]}"
  "$python" "$here/fork_first_true.py" --image bench:1 ${LONG:+--long}
  ;;
capture) "${forkbench[@]}" -captures ;;
stats)
  # As it is read by two: a daemon owns its folder.
  cp -r "$scratch/state/stats" "$scratch/history"
  "${forkbench[@]}" -stats "$scratch/history" -daemon "$daemon"
  ;;
density) "${forkbench[@]}" -density -rows "${ROWS:-}" -each "${EACH:-0}" ;;
isolation)
  "$here/isolation.sh"
  "${forkbench[@]}" -isolation
  ;;
turn) "$python" "$here/turn.py" --image bench:1 --spawn "$scratch/spawn" ${LONG:+--long} ;;
client) "$python" "$here/client.py" --image bench:1 ${LONG:+--long} ;;
learning)
  mkdir -p "$here/out"
  # The long form takes an hour: RUNS names a file that keeps the runs, and one that was broken off goes on.
  "$python" "$here/learning.py" --out "${RUNS:-$scratch/runs.jsonl}" --plot "$here/out/learning.svg" ${LONG:+--long}
  ;;
esac | tee "$scratch/lines"
[ "$name" = learning ] || "$python" "$here/plot.py" "$scratch/lines" "$here/out/$name.png" >&2 || true
