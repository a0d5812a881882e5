#!/usr/bin/env bash
# build.sh: bin/boxwood, static, so that it runs on any Linux of this machine type.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
revision=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
CGO_ENABLED=0 go build -trimpath -ldflags "-X main.revision=$revision" -o bin/boxwood ./cmd/boxwood
