#!/usr/bin/env bash
# test-python-matrix.sh [PYTEST ARGUMENTS]: the Python package's tests, without those
# that need a daemon, with every supported interpreter that this host has, and once
# with the oldest dependencies that the package declares (nightly).
#
# An interpreter is python3.N of PATH or of pyenv. Without one of 3.10 to 3.13 that
# one is left out and named; BOXWOOD_REQUIRE=all makes it a failure. Environments
# lie in .cache/matrix.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
failed=() left_out=()

find_python() { # 3.N
  local candidate
  for candidate in "$(command -v "python$1")" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    if [ -x "$candidate" ] && [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ]; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

run() { # NAME PYTHON REQUIREMENTS... -- PYTEST ARGUMENTS
  local name=$1 python=$2 env=.cache/matrix/$1 wanted=() start=$SECONDS
  shift 2
  while [ "$1" != -- ]; do
    wanted+=("$1")
    shift
  done
  shift
  [ -x "$env/bin/python" ] || "$python" -m venv "$env" || return
  "$env/bin/python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}" pytest || return
  echo "== $name: $("$env/bin/python" -VV), $("$env/bin/python" -m pip list --format freeze 2>/dev/null | grep -E '^(grpcio|protobuf|pyarrow|pandas|polars)==' | tr '\n' ' ')"
  (cd python-client && PYTHONPATH=src timeout --kill-after=10 600 "../$env/bin/python" -m pytest -q -p no:cacheprovider \
    -m 'not slow and not integration' "$@" </dev/null) || return
  echo "== $name: ok ($((SECONDS - start)) s)"
}

for version in 3.10 3.11 3.12 3.13; do
  if python=$(find_python $version); then
    run "$version" "$python" grpcio protobuf pyarrow polars pandas -- "$@" || failed+=("$version")
  else
    left_out+=("$version")
  fi
done
# The floors of python-client/pyproject.toml, with the oldest interpreter.
floors=$(sed -n 's/^dependencies = \[\(.*\)\]$/\1/p' python-client/pyproject.toml | tr -d '",' | sed 's/>=/==/g')
[ -n "$floors" ] || failed+=("no floors found in pyproject.toml")
if python=$(find_python 3.10); then
  # shellcheck disable=SC2086 # one word a requirement
  run floors "$python" $floors 'pyarrow==14.*' 'numpy<2' -- "$@" || failed+=(floors)
else
  left_out+=(floors)
fi

[ ${#left_out[@]} -eq 0 ] || echo "matrix: not on this host, so not run: ${left_out[*]}"
if [ ${#failed[@]} -gt 0 ] || { [ ${#left_out[@]} -gt 0 ] && [ "${BOXWOOD_REQUIRE:-}" = all ]; }; then
  echo "matrix: failed: ${failed[*]} ${left_out[*]}" >&2
  exit 1
fi
