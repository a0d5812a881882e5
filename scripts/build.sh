#!/usr/bin/env bash
# build.sh: bin/boxwood, static, so that it runs on any Linux of this machine type.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
# The commit goes in whatever GOFLAGS says: `boxwood version` tells it. No other
# flags: they would keep the tests from using what was compiled here.
go build -buildvcs=auto -o bin/boxwood ./cmd/boxwood
