#!/usr/bin/env bash
# fuzz.sh: every fuzz target for FOR (default 1m), or those whose name has NAME in it, but not SKIP. What they come across is kept in
# .cache/fuzz and built upon by the next run; what breaks one is written below its package's testdata/fuzz, to be
# committed with what mends it: every run of the tests tries that again.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
. scripts/env.sh
failed=() count=0
while IFS=: read -r file target; do
  [[ $target == *"${NAME:-}"* && $target != "${SKIP:-}" ]] || continue
  package=./$(dirname "$file")
  count=$((count + 1))
  echo "fuzz: $target of $package"
  corpus=$PWD/.cache/fuzz/$target
  mkdir -p "$corpus"
  timeout --kill-after=20 "${LIMIT:-7200}" go test -run '^$' -fuzz "^$target\$" -fuzztime "${FOR:-1m}" "$package" -args -test.fuzzcachedir="$corpus" </dev/null || failed+=("$target")
done < <(git grep --untracked -noE '^func Fuzz[A-Za-z0-9_]+' -- '*_test.go' | sed -E 's/^([^:]+):[0-9]+:func /\1:/')
[ $count -gt 0 ] || {
  echo "fuzz: no such target: ${NAME:-}" >&2
  exit 1
}
[ ${#failed[@]} -eq 0 ] || {
  echo "fuzz: failed: ${failed[*]}" >&2
  exit 1
}
