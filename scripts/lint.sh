#!/usr/bin/env bash
# lint.sh: everything that can be judged without running it. Every check runs;
# the exit status says whether one failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
. scripts/env.sh
failed=()
check() { # NAME COMMAND...
  local name=$1 output
  shift
  if output=$("$@" 2>&1 </dev/null); then
    echo "lint: $name ok"
  else
    printf '%s\n' "$output"
    echo "lint: $name FAILED"
    failed+=("$name")
  fi
}

ours() { git ls-files -co --exclude-standard -- "$@"; }
formatted() {
  local bad
  bad=$(ours '*.go' | xargs -r gofmt -l)
  [ -z "$bad" ] || { printf 'not formatted:\n%s\n' "$bad" && return 1; }
}
# SA1019: proto-generated and go-memdb code use names that their authors deprecate.
staticchecked() { GOFLAGS='' go run "$staticcheck" -checks 'all,-ST1000,-ST1003,-ST1005,-ST1016,-ST1020,-ST1021,-ST1022,-ST1023,-SA1019' ./...; }
shells() {
  command -v shellcheck >/dev/null || { echo "no shellcheck: make setup-dev" && return 1; }
  { ours '*.sh' ':!*/testdata/*' && ours .ci/run; } | xargs -r shellcheck -x -e SC2016
}
# -fanalyzer is left out for BPF, which gcc doesn't compile here.
c_sources() {
  local file status=0
  # What tests run as payloads may be terse.
  for file in $(ours '*.c' ':!*/testdata/*' | grep -v '\.bpf\.c$'); do
    gcc -std=gnu11 -O1 -Wall -Wextra -Werror -fanalyzer -fsyntax-only -I "$(dirname "$file")" "$file" || status=1
  done
  return $status
}
python() { (cd python-client && "../.venv/bin/$1" "${@:2}"); }

# A ban is an extended regular expression, the files it holds for, and its reason.
banned() { # REASON PATTERN PATHSPEC...
  local reason=$1 pattern=$2 hits
  shift 2
  hits=$(ours "$@" | grep -v '^scripts/lint\.sh$' | xargs -r grep -nIE "$pattern" 2>/dev/null)
  [ -z "$hits" ] || { printf '%s\n%s\n' "banned: $reason" "$hits" && return 1; }
}
words() {
  local status=0
  # One machine's folders are nobody else's.
  banned "the path of this checkout" "$PWD(/|\\b)" . || status=1
  # A sleep makes a test slow on a fast machine and wrong on a slow one: wait on
  # an event with a deadline.
  banned "a sleep in a test" 'time\.Sleep\(' '*_test.go' || status=1
  banned "a sleep in a test" 'time\.sleep\(' 'python-client/tests/*.py' || status=1
  # The code says what is, not who wrote it or when it will be finished.
  banned "a note to ourselves" '\b(TODO|FIXME|XXX|HACK)\b' '*.go' '*.c' '*.h' '*.py' '*.sh' '*.md' || status=1
  banned "the story of how it was written" '(DESIGN|FACTS|PEERS|STYLE|BRIEF)\.md|[Pp]rototype' . ':!docs/BENCHMARKS.md' || status=1
  banned "the story of how it was written" '([Ww]ritten|[Gg]enerated|[Aa]ssisted) (by|with) (an? )?(AI|LLM|Claude|Copilot|ChatGPT|Codex|assistant)|[Cc]o-[Aa]uthored-[Bb]y' . || status=1
  # The pages of a tracker move; say what the matter is.
  banned "a number of a tracker" '\b([Ii]ssue|PR|[Tt]icket) ?#?[0-9]+\b' '*.go' '*.c' '*.h' '*.py' '*.sh' '*.md' '*.proto' || status=1
  # Faults are turned on in one place, which what is released doesn't have.
  banned "a build of saboteurs outside internal/sabotage" 'BOXWOOD_SABOTAGE|^//go:build .*sabotage' '*.go' ':!internal/sabotage' || status=1
  # A line that is logged without its context doesn't say what it is about (internal/about).
  banned "a line of the log without its context" '\blog\.(Debug|Info|Warn|Error)\(' 'engine/*.go' ':!*_test.go' || status=1
  # A package of leftovers has no promise that a package comment could state.
  banned "a package without a subject" '^package (util|utils|common|helpers?|misc|manager)$' '*.go' || status=1
  # Output of the program goes through its logger or the command's writer.
  banned "printing from a library" '\bfmt\.Print(ln|f)?\(' 'engine/*.go' 'tree/*.go' 'sched/*.go' 'inspector/*.go' ':!*_test.go' ':!*/main.go' || status=1
  return $status
}

dependencies() {
  local module status=0
  for module in $(GOFLAGS='' go mod edit -json | awk -F'"' '/"Require"/ { on = 1 } on && /"Path"/ { path = $4 }
      on && /"Version"/ { direct[path] = 1 } on && /"Indirect"/ { delete direct[path] } /^\t\]/ { on = 0 }
      END { for (path in direct) print path }'); do
    grep -qF "\`$module\`" docs/DEPENDENCIES.md || { echo "docs/DEPENDENCIES.md has no row for $module" && status=1; }
  done
  return $status
}

check gofmt formatted
check vet go vet ./...
check staticcheck staticchecked
check shellcheck shells
check "C, analysed" c_sources
check ruff python ruff check --no-cache .
check mypy python mypy --cache-dir ../.cache/mypy
check pyright python basedpyright --pythonpath ../.venv/bin/python
check "the blocking face" .venv/bin/python scripts/gen-sync.py --check
check dependencies dependencies
check words words
[ ${#failed[@]} -eq 0 ] || {
  echo "lint: failed: ${failed[*]}" >&2
  exit 1
}
