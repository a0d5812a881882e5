#!/usr/bin/env bash
# setup.sh [--dev]: brings a fresh Debian 12 or 13 to where `make demo` and
# `make test` work. It looks first and does only what is missing, so it may run
# at any time; with nothing missing it takes well under a second.
#
# --dev adds what regenerating committed code and linting need.
#
# Outside the checkout it installs Debian packages and nothing else. Go, CRIU and
# the Python environment go into .cache/ and .venv/; removing those undoes them.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh

dev=false
case ${1:-} in
--dev) dev=true ;;
'') ;;
*)
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
  ;;
esac

say() { echo "setup: $*"; }
die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# --- what is needed: the proof that it is there, and Debian's package for it
# A proof is a program in PATH or a file, which may be a pattern.
needs="
mkfs.btrfs         btrfs-progs      makes the pool
mmdebstrap         mmdebstrap       builds the base image
patchelf           patchelf         binds CRIU to its own libraries
gcc                gcc              compiles the baselines and test programs
/usr/include/stdio.h libc6-dev      compiles the baselines and test programs
ip                 iproute2         network set-up in tests
git                git              revisions, and the demo's image
/etc/ssl/certs/ca-certificates.crt ca-certificates  downloads
"
needs_dev="
clang              clang            compiles the BPF programs
/usr/include/bpf/bpf_helpers.h libbpf-dev  compiles the BPF programs
protoc             protobuf-compiler generates the service's code
shellcheck         shellcheck       lints the scripts
patch              patch            the inspector is tested with it
vi                 vim-tiny         the inspector is tested with it
rsync              rsync            the inspector is tested with it
sqlite3            sqlite3          the inspector is tested with it
npm                npm              the inspector is tested with it
node               nodejs           process states are tested with it
tmux               tmux             process states are tested with it
redis-server       redis-server     process states are tested with it
chromium-headless-shell chromium-headless-shell shows the pages of reports in their test
/usr/share/fonts/truetype/*/*.ttf fonts-dejavu-core letters for that
/usr/lib/postgresql/*/bin/initdb postgresql the inspector is tested with it
"
there() {
  case $1 in
  /*) compgen -G "$1" >/dev/null ;;
  *) command -v "$1" >/dev/null ;;
  esac
}
python_ok() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
find_python() {
  local candidate
  # pyenv and the like put a python3 in front of Debian's, which may lack venv.
  for candidate in ${PYTHON:+"$PYTHON"} python3 /usr/bin/python3; do
    if command -v "$candidate" >/dev/null && python_ok "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

is_debian() {
  [ -r /etc/os-release ] || return 1
  # shellcheck source=/dev/null
  case $(. /etc/os-release && echo "${ID:-} ${VERSION_ID:-}") in
  'debian 12' | 'debian 13') return 0 ;;
  esac
  return 1
}

# --- Debian packages
missing=() lines=()
while read -r proof package why; do
  [ -n "$proof" ] || continue
  there "$proof" && continue
  missing+=("$package")
  lines+=("  $proof (Debian: $package): $why")
done <<<"$needs$($dev && echo "$needs_dev")"
if [ ! -x .venv/bin/python ] && ! find_python >/dev/null; then
  missing+=(python3 python3-venv)
  lines+=("  python3 >= 3.10 with venv (Debian: python3-venv): the Python package and its tests")
fi
go=$(find_go) || {
  lines+=("  go >= $go_minimum in PATH: the engine (Debian's golang-go fetches a newer one)")
  missing+=(golang-go)
}
if [ ${#missing[@]} -gt 0 ]; then
  is_debian || die "this is not Debian 12 or 13, so nothing was installed. Install these, then run it again:" "${lines[@]}"
  [ "$(id -u)" = 0 ] || die "installing packages needs root: ${missing[*]}"
  say "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt_install() { apt-get -qq -y --no-install-recommends -o Dpkg::Use-Pty=0 install "${missing[@]}" >/dev/null; }
  apt_install 2>/dev/null || {
    apt-get -qq update # the lists are missing or old
    apt_install
  }
fi

# --- Go. Debian's is too old, but any Go can fetch a newer one as the module
# golang.org/toolchain, through the module proxy and checked by the sum database.
# (From 1.21 on it would do so by itself, GOTOOLCHAIN=auto; Debian 12 has 1.19.)
if [ -z "$go" ]; then
  module=golang.org/toolchain@v0.0.1-go$go_pinned.linux-$(dpkg --print-architecture)
  say "fetching Go $go_pinned into .cache/go (Debian's is $(GOTOOLCHAIN=local go env GOVERSION))"
  work=$(mktemp -d)
  trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
  (cd "$work" && printf 'module fetch\n\ngo 1.19\n' >go.mod && GOFLAGS=-mod=mod GOMODCACHE="$work/mod" go mod download "$module") ||
    die "the module proxy gave no $module: put Go >= $go_minimum in PATH yourself"
  rm -rf .cache/go
  mkdir -p .cache
  cp -r --no-preserve=mode "$work/mod/$module" .cache/go
  chmod -R u+w,a+rX .cache/go
  chmod a+x .cache/go/bin/* .cache/go/pkg/tool/*/*
  go=$(find_go) || die "the Go fetched into .cache/go doesn't run"
fi
PATH=$(dirname "$go"):$PATH

# --- CRIU, proven by a dump and a restore
[ "$(id -u)" = 0 ] || die "testing CRIU needs root"
scripts/install-criu.sh

# --- Python environment
fingerprint=$(cat scripts/requirements.txt python-client/pyproject.toml | sha256sum | cut -d' ' -f1)\ $PWD
if [ "$(cat .venv/boxwood-setup 2>/dev/null)" != "$fingerprint" ] || [ ! -x .venv/bin/python ]; then
  python=$(find_python) || die "no python3 >= 3.10 with venv: install it, or name one in PYTHON"
  say "bringing .venv up to date (from nothing about 30 s)"
  # An environment holds absolute paths, so one that was moved is made anew.
  case $(cat .venv/boxwood-setup 2>/dev/null) in
  *" $PWD") .venv/bin/python -c '' 2>/dev/null || rm -rf .venv ;;
  *) rm -rf .venv ;;
  esac
  [ -d .venv ] || "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r scripts/requirements.txt
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e ./python-client
  .venv/bin/python -c 'import boxwood' || die "the boxwood package was installed but can't be imported"
  echo "$fingerprint" >.venv/boxwood-setup
fi

# --- the binary
scripts/build.sh
