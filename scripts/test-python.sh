#!/usr/bin/env bash
# test-python.sh [PYTEST ARGUMENTS]: the tests of the Python package. All of them
# leave their results in .cache/test/python.xml; with arguments they don't.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
[ -x .venv/bin/python ] || {
  echo "no .venv: run make setup" >&2
  exit 1
}
mkdir -p .cache/test
results=(--junitxml "$PWD/.cache/test/python.xml")
if [ $# -gt 0 ]; then
  results=()
fi
cd python-client
exec timeout --kill-after=10 "${TIMEOUT:-600}" ../.venv/bin/python -m pytest -p no:cacheprovider "${results[@]}" "$@" </dev/null
