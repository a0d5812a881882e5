#!/usr/bin/env bash
# sabotage.sh [TAG]: builds with each tag of saboteurs.txt and demands that the
# check beside it turns red. The check must be green without the tag, and must
# fail by its own verdict: a build error or a skip proves nothing.
#
# GREEN=FILE: results of a test run of these sources (`go test -json`), in which a check
# that passed isn't run again without its tag.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
table=scripts/saboteurs.txt

tags_in_sources=$(git grep -hoE '^//go:build sabotage_[a-z0-9_]+' -- '*.go' | awk '{print $2}' | sort -u)
tags_in_table=$(awk '!/^#/ && NF { print $1 }' $table | sort -u)
if [ "$tags_in_sources" != "$tags_in_table" ]; then
  echo "saboteurs in the sources (<) and in $table (>) differ:" >&2
  diff <(echo "$tags_in_sources") <(echo "$tags_in_table") >&2 || true
  exit 1
fi

run() { # TAG PACKAGE TEST -> what the test says of itself
  timeout --kill-after=10 420 go test -count=1 -timeout 150s -tags "$1" -run "^$3\$" -v "$2" </dev/null 2>&1
}
# was_green PACKAGE TEST: it passed in the run that GREEN tells of.
was_green() {
  [ -n "${GREEN:-}" ] && grep -E '^\{[^{}]*"Action":"pass"' "$GREEN" 2>/dev/null | grep -qF "\"Package\":\"$module/${1#./}\",\"Test\":\"$2\","
}
module=$(go list -m)
failures=0 count=0
while read -r tag package test breaks; do
  case $tag in '' | '#'*) continue ;; esac
  [ -z "${1:-}" ] || [ "$1" = "$tag" ] || continue
  count=$((count + 1))
  if ! was_green "$package" "$test" && { ! output=$(run none "$package" "$test") || ! grep -q "^--- PASS: $test" <<<"$output"; }; then
    verdict="its check $test isn't green without it"
  elif output=$(run "$tag" "$package" "$test"); then
    verdict="NOT CAUGHT: $test is green although broken"
  elif grep -q "^ *--- FAIL: $test" <<<"$output"; then
    echo "saboteur $tag: caught by $test ($breaks)"
    continue
  else
    verdict="$test gave no verdict"
  fi
  echo "saboteur $tag: $verdict" >&2
  tail -n 20 <<<"$output" >&2
  failures=$((failures + 1))
done <$table
[ $count -gt 0 ] || {
  echo "no such saboteur: ${1:-}" >&2
  exit 1
}
[ $failures -eq 0 ]
