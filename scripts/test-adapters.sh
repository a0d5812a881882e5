#!/usr/bin/env bash
# test-adapters.sh [light|harbor|ray|trainers...]: the tests of boxwood.integrations and boxwood.ray, each against the real project at a pinned
# version, in an environment of its own below .cache/adapters. Without arguments all of them.
#
#   light   mini-swe-agent and SWE-ReX (80 MB; in CI)
#   harbor  Harbor (500 MB; nightly; Python >= 3.12)
#   ray     Ray: a cluster of three nodes on this machine, with two daemons (300 MB; nightly)
#   trainers  TRL, verl and SkyRL, which share torch (5 GB; nightly; Python 3.12)
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
export BOXWOOD_ADAPTERS=1 MSWEA_SILENT_STARTUP=1

python_from() { # MINIMUM: a python3 that is at least that and below $BELOW, with venv
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 /usr/bin/python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
    if command -v "$candidate" >/dev/null &&
      "$candidate" -c "import sys, venv, ensurepip; sys.exit(not ($1) <= sys.version_info < (${BELOW:-4,0}))" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# The pip of .venv serves all, so that none has to be put into each environment.
pip() { .venv/bin/python -m pip --python "$1/bin/python" --disable-pip-version-check "${@:2}"; }

environment() { # NAME MINIMUM [PIP OPTION...]: makes .cache/adapters/NAME from scripts/adapters/NAME.txt, or keeps it
  local folder=.cache/adapters/$1 list=scripts/adapters/$1.txt python fingerprint
  fingerprint="$(sha256sum <"$list") $PWD"
  [ "$(cat "$folder/made-from" 2>/dev/null)" != "$fingerprint" ] || return 0
  python=$(python_from "$2") || return 1
  echo "test-adapters: making $folder"
  rm -rf "$folder"
  # Behind an "if !", set -e is off in here.
  "$python" -m venv --without-pip "$folder" || return 1
  pip "$folder" install --quiet "${@:3}" -r "$list" || return 1
  pip "$folder" install --quiet --no-deps -e ./python-client || return 1
  echo "$fingerprint" >"$folder/made-from"
}

run() { # NAME TEST...
  local python=$PWD/.cache/adapters/$1/bin/python
  echo "test-adapters: $1, with $(pip ".cache/adapters/$1" list --format=freeze |
    grep -E '^(mini-swe-agent|swe-rex|harbor|ray|trl|verl|skyrl|torch)==' | paste -sd ' ')"
  # Warnings of other projects are theirs.
  (cd python-client/tests && timeout --kill-after=10 "${TIMEOUT:-200}" "$python" -m pytest -p no:cacheprovider \
    -c ../pyproject.toml -o filterwarnings=default -q "${@:2}" </dev/null)
}

[ $# -gt 0 ] || set -- light harbor ray trainers
for name; do
  case $name in
  light)
    environment light 3,10 --no-deps
    run light adapters/test_mini_swe_agent.py adapters/test_swe_rex.py
    ;;
  harbor)
    if ! environment harbor 3,12; then
      echo "test-adapters: harbor left out: no python3 >= 3.12 with venv (name one in PYTHON)" >&2
      [ "${BOXWOOD_REQUIRE:-}" != all ] || exit 1
      continue
    fi
    run harbor adapters/test_harbor.py
    ;;
  ray)
    environment ray 3,10
    run ray adapters/test_ray.py
    ;;
  trainers)
    if ! BELOW=3,13 environment trainers 3,12 --no-deps; then
      echo "test-adapters: trainers left out: no python3.12 with venv (name one in PYTHON)" >&2
      [ "${BOXWOOD_REQUIRE:-}" != all ] || exit 1
      continue
    fi
    run trainers adapters/test_trl.py
    run trainers adapters/test_verl.py
    run trainers adapters/test_skyrl.py
    ;;
  *)
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
  esac
done
