#!/usr/bin/env bash
# sabotage.sh [NAME]: lets each saboteur of saboteurs.txt break what it is for, and demands that the check
# beside it turns red. The check must be green without it, and must fail by its own verdict: a build error or a
# skip proves nothing. All saboteurs lie in one build of each package's tests (see internal/sabotage).
#
# GREEN=FILE: results of a test run of these sources (`go test -json`), in which a check that passed isn't run
# again without its saboteur; but one check of each package is, since that was another build.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
table=scripts/saboteurs.txt

# A name that is no literal stays whole here, and is in no table.
names_in_sources=$(git grep --untracked -hoE 'sabotage\.(On|Hundredth)\([^)]*' -- '*.go' | sed -E 's/.*\("([a-z0-9_]+)"$/\1/' | sort -u)
names_in_table=$(awk '!/^#/ && NF { print $1 }' $table | sort -u)
if [ "$names_in_sources" != "$names_in_table" ]; then
  echo "saboteurs in the sources (<) and in $table (>) differ:" >&2
  diff <(echo "$names_in_sources") <(echo "$names_in_table") >&2 || true
  exit 1
fi

# The longest list first.
mapfile -t packages < <(awk -v name="${1:-}" '!/^#/ && NF && (name == "" || name == $1) { n[$2]++ } END { for (p in n) print n[p], p }' $table | sort -rn | cut -d' ' -f2)
[ ${#packages[@]} -gt 0 ] || {
  echo "no such saboteur: $1" >&2
  exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
timeout --kill-after=10 900 go test -c -ldflags '-s -w' -tags sabotage -o "$work/" "${packages[@]}"

# What is released has neither a saboteur in it nor a way to one.
scripts/build.sh
traces='internal/sabotage|BOXWOOD_SABOTAGE'
if grep -qE "$traces" bin/boxwood || ! grep -qE "$traces" "$work/${packages[0]##*/}.test"; then
  echo "bin/boxwood must have nothing of $traces in it, the builds with saboteurs must" >&2
  exit 1
fi

module=$(go list -m)
was_green() { # PACKAGE TEST: in the run that GREEN tells of
  [ -n "${GREEN:-}" ] && grep -E '^\{[^{}]*"Action":"pass"' "$GREEN" 2>/dev/null | grep -qF "\"Package\":\"$module/${1#./}\",\"Test\":\"$2\","
}
run() { # NAME PACKAGE TEST -> what the test says of itself
  cd "$2" && BOXWOOD_SABOTAGE=$1 timeout --kill-after=10 180 "$work/${2##*/}.test" \
    -test.paniconexit0 -test.timeout 150s -test.run "^$3\$" -test.v </dev/null 2>&1
}
saboteurs() { # PACKAGE [NAME]: those of its tests, one after the other
  local name package test breaks output verdict ran=false
  while read -r name package test breaks; do
    [ "$package $name" = "$1 ${2:-$name}" ] || continue
    if { ! $ran || ! was_green "$package" "$test"; } &&
      { ! output=$(run '' "$package" "$test") || ! grep -q "^--- PASS: $test" <<<"$output"; }; then
      verdict="its check $test isn't green without it"
    elif output=$(run "$name" "$package" "$test"); then
      verdict="NOT CAUGHT: $test is green although broken"
    elif ! grep -q "^ *--- FAIL: $test" <<<"$output"; then
      verdict="$test gave no verdict"
    else
      verdict=
      echo "saboteur $name: caught by $test ($breaks)" | tee -a "$work/caught"
    fi
    ran=true
    [ -z "$verdict" ] || printf 'saboteur %s: %s\n%s\n' "$name" "$verdict" "$(tail -n 20 <<<"$output")" >&2
  done < <(grep -v '^#' $table)
}

# As go test does it: packages beside each other, what is in one in turn.
: >"$work/caught"
for package in "${packages[@]}"; do
  [ "$(jobs -rp | wc -l)" -lt "$(nproc)" ] || wait -n || true
  saboteurs "$package" "${1:-}" &
done
wait
[ "$(wc -l <"$work/caught")" = "$(awk -v name="${1:-}" '!/^#/ && NF && (name == "" || name == $1)' $table | wc -l)" ]
