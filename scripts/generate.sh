#!/usr/bin/env bash
# generate.sh: writes all generated code that is committed, with pinned tools, so
# that `go build ./...` needs none of them. make setup-dev installs what is from
# Debian; the rest goes into .cache/.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh

# The bytes of an object file depend on the compiler's version.
demand() { # PROGRAM PINNED FOUND
  [ "$2" = "$3" ] && return
  echo "$1 is version $3, but what is committed was made with $2; generating on Debian 12 gives the same bytes" >&2
  exit 1
}
for tool in protoc clang llvm-strip gcc; do
  command -v $tool >/dev/null || {
    echo "no $tool: run make setup-dev" >&2
    exit 1
  }
done
demand clang "$clang_major" "$(clang -dumpversion | cut -d. -f1)"
demand gcc "$gcc_major" "$(gcc -dumpversion | cut -d. -f1)"
demand protoc 3.21.12 "$(protoc --version | cut -d' ' -f2)"

echo "generate: the service in Go"
mkdir -p .cache/tools
GOBIN=$(realpath .cache/tools) GOFLAGS='' go install "$protoc_gen_go"
GOBIN=$(realpath .cache/tools) GOFLAGS='' go install "$protoc_gen_go_grpc"
PATH=$(realpath .cache/tools):$PATH protoc -I proto \
  --go_out=proto --go_opt=paths=source_relative \
  --go-grpc_out=proto --go-grpc_opt=paths=source_relative \
  boxwood/v1/boxwood.proto

echo "generate: the service in Python"
scripts/gen-python.sh

echo "generate: the Python package's blocking face"
.venv/bin/python scripts/gen-sync.py

echo "generate: the BPF programs"
go generate ./bpf/...

echo "generate: the numbers of system calls"
go generate ./internal/seccomp

echo "generate: pid 1 of a sandbox"
engine/box/init/build.sh
