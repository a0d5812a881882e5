#!/usr/bin/env bash
# leakcheck.sh before FILE | after FILE: what a run left on the host.
#
# `before` writes down what is there; `after` compares, and fails with what is new:
# mounts, loop devices, Boxwood's cgroups, network namespaces, sandboxes, processes that
# carry BOXWOOD_LEAK_MARK in their environment as the run's do, run folders, what there is
# of System V and POSIX (queues, semaphores, shared memory), and files of Boxwood's in the
# temporary folder. A process may take a moment to end, so `after` looks again for up to
# 10 s until nothing is new.
set -euo pipefail
[ $# = 2 ] || {
  sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
  exit 2
}

inventory() {
  awk '{ print "mount " $5 }' /proc/self/mountinfo
  local file backing
  for file in /sys/block/loop*/loop/backing_file; do
    if [ -e "$file" ] && backing=$(cat "$file" 2>/dev/null); then
      echo "loop device $backing"
    fi
  done
  find /sys/fs/cgroup -type d -path '*boxwood*' -printf 'cgroup %p\n' 2>/dev/null || true
  find /run/netns -mindepth 1 -printf 'network namespace %f\n' 2>/dev/null || true
  # Run folders of daemons, and memory and semaphores of POSIX.
  find /run -mindepth 1 -maxdepth 1 -name 'boxwood-*' -printf 'run folder %p\n'
  find /dev/shm -mindepth 1 -maxdepth 1 -printf 'shared memory %p\n' 2>/dev/null || true
  local kind
  for kind in msg sem shm; do
    awk -v kind=$kind 'NR > 1 { print "System V " kind ", key " $1 ", mode " $3 }' /proc/sysvipc/$kind
  done
  unshare --mount sh -c 'mount -t mqueue none /mnt && find /mnt -mindepth 1 -printf "message queue %f\n"'
  find "${TMPDIR:-/tmp}" -maxdepth 1 \( -name '*boxwood*' -o -name 'bwo*' -o -name '.doctor-*' \) -printf 'file %p\n'
  # By command line and not by pid. Builtins alone, or looking takes seconds.
  local pid argv inside outside
  for pid in /proc/[0-9]*; do
    # Sandboxes by their ids: nobody else's namespaces begin at ours.
    if { read -r inside outside _ <"$pid/uid_map"; } 2>/dev/null && [ "$inside" = 0 ] && [ "$outside" -ge 100000 ]; then
      { mapfile -d '' -t argv <"$pid/cmdline"; } 2>/dev/null || continue
      echo "process in a sandbox: ${argv[*]:0:5}"
    fi
  done
  # What the run itself started carries its mark; whoever looks is part of it.
  [ -z "${BOXWOOD_LEAK_MARK:-}" ] || grep -lz "^BOXWOOD_LEAK_MARK=$BOXWOOD_LEAK_MARK\$" /proc/[0-9]*/environ 2>/dev/null | while IFS=/ read -r _ _ pid _; do
    is_ours "$pid" || echo "process $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-120)"
  done || true
}

# is_ours: the one who looks, or one of its forebears or children.
is_ours() {
  local up=$1
  while [ "${up:-0}" -gt 1 ]; do
    [ "$up" != $$ ] || return 0
    up=$(awk '{ print $4 }' "/proc/$up/stat" 2>/dev/null) || return 0
  done
  up=$$
  while [ "${up:-0}" -gt 1 ]; do
    [ "$up" != "$1" ] || return 0
    up=$(awk '{ print $4 }' "/proc/$up/stat" 2>/dev/null) || return 1
  done
  return 1
}

list() { inventory | sort; }

case $1 in
before) list >"$2" ;;
after)
  now=$(mktemp)
  trap 'rm -f "$now"' EXIT
  for _ in $(seq 20); do
    list >"$now"
    if [ -z "$(comm -13 "$2" "$now")" ]; then
      echo "nothing was left behind ($(wc -l <"$now") things looked at)"
      exit 0
    fi
    sleep 0.5
  done
  echo "left behind:" >&2
  comm -13 "$2" "$now" | head -n 60 >&2
  exit 1
  ;;
*) exit 2 ;;
esac
