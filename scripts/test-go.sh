#!/usr/bin/env bash
# test-go.sh: the Go tests. All of them leave their results in .cache/test/go.json,
# which docs/ACCEPTANCE.md is held against; PKG and RUN narrow a run and don't.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
mkdir -p .cache/test bin
results=.cache/test/go.json
if [ -n "${PKG:-}${RUN:-}" ]; then
  results=.cache/test/go-part.json
fi
go build -o bin/show-tests ./internal/acceptance/show
# What takes longest first, so that the others run beside it and don't wait for it to follow them.
packages=(./engine/service ./...)
[ -z "${PKG:-}" ] || packages=("$PKG")
# Not cached: what these tests find depends on the kernel, not on files alone.
go test -json -count=1 -timeout "${TIMEOUT:-45m}" ${RUN:+-run "$RUN"} "${packages[@]}" </dev/null 2>&1 | bin/show-tests "$results"
