# shellcheck shell=bash disable=SC2034 # the variables are for those who source it
# env.sh is sourced by the other scripts, from the top of the checkout: which
# tools of the checkout's own they use, and the versions that are pinned.

go_minimum=1.26
go_pinned=1.26.8
# The formatter, vet and these must agree between two developers and CI.
staticcheck=honnef.co/go/tools/cmd/staticcheck@v0.8.2
protoc_gen_go=google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
protoc_gen_go_grpc=google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
# For make vulnerabilities.
govulncheck=golang.org/x/vuln/cmd/govulncheck@v1.9.0
pip_audit=pip-audit==2.10.1
# Compilers whose output is committed: another major version writes other bytes.
clang_major=14
gcc_major=12

# find_go prints the first Go that is new enough (or, from 1.21 on, that fetches
# one that is).
find_go() {
  local candidate version
  for candidate in "$PWD/.cache/go/bin/go" go /usr/local/go/bin/go; do
    candidate=$(command -v "$candidate") || continue
    version=$(GOFLAGS='' "$candidate" env GOVERSION 2>/dev/null) || continue
    if [ "$(printf '%s\n' "$go_minimum" "${version#go}" | sort -V | head -n 1)" = "$go_minimum" ]; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

if go_found=$(find_go); then
  PATH=$(dirname "$go_found"):$PATH
fi
export PATH
# CI and the tests use the CRIU that set-up proved.
if [ -z "${BOXWOOD_CRIU:-}" ]; then
  export BOXWOOD_CRIU=${BOXWOOD_CRIU_PREFIX:-$PWD/.cache/criu}/criu
fi
# One way of building for the binary and its tests, so that what one compiled
# serves the other: Arrow alone takes minutes on two cores.
export CGO_ENABLED=0
# Whatever a build or test asks of a terminal, the answer is no.
export PIP_NO_INPUT=1 GIT_TERMINAL_PROMPT=0
