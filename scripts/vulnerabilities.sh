#!/usr/bin/env bash
# vulnerabilities.sh: known holes in what is built and installed, by the databases of Go and of PyPI. Both are on the
# network: where they can't be asked, that is said, and the exit status is 3, which is neither yes nor no.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
. scripts/env.sh
status=0
unasked() { # WHAT OUTPUT
  echo "$1: its database can't be asked here: $(grep -m 1 -E "$unreachable" <<<"$2")" >&2
  [ $status -ne 0 ] || status=3
}
# What isn't found in an index counts as unasked, too: pip-audit calls that a success.
unreachable='could not be audited|dial tcp|no such host|connection refused|[Tt]imed? ?out|TLS handshake|ConnectionError|NameResolution|Max retries|ProxyError|403 Forbidden|404 Not Found|unexpected status|proxyconnect|Network is unreachable'
ask() { # WHAT COMMAND...
  local what=$1 output failed=0
  shift
  output=$(timeout --kill-after=10 300 "$@" 2>&1 </dev/null) || failed=$?
  if grep -qE '^Found [0-9]+ known|^Vulnerability #' <<<"$output"; then
    printf '%s\n' "$output"
    status=1
  elif grep -qE "$unreachable" <<<"$output"; then
    unasked "$what" "$output"
  elif [ $failed -eq 0 ]; then
    echo "$what: nothing known"
  else
    printf '%s\n' "$output"
    echo "$what: ended with status $failed" >&2
    status=1
  fi
}
ask govulncheck env GOFLAGS='' go run "$govulncheck" ./...
if [ ! -x .cache/audit/bin/pip-audit ] || [ "$(cat .cache/audit/pin 2>/dev/null)" != "$pip_audit" ]; then
  rm -rf .cache/audit
  if python3 -m venv .cache/audit && .cache/audit/bin/pip --quiet --disable-pip-version-check install "$pip_audit"; then
    printf '%s' "$pip_audit" >.cache/audit/pin
  fi
fi
ask pip-audit .cache/audit/bin/pip-audit --progress-spinner off --no-deps --disable-pip -r scripts/requirements.txt
exit $status
