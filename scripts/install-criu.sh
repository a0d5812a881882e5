#!/usr/bin/env bash
# install-criu.sh [PREFIX]: a CRIU that really dumps and restores on this kernel.
#
# Debian 12 and 13 ship versions that fail or hang on recent kernels although
# their own `criu check` says "Looks good", so nothing is believed here but a
# dump and restore of live processes with a time limit (internal/doctor).
#
# In order: the one installed in PREFIX, one in PATH, and else Debian sid's
# packages, unpacked into PREFIX with the libraries they were built against. The
# system's own packages, apt lists and libraries are not touched.
#
# PREFIX is $BOXWOOD_CRIU_PREFIX or .cache/criu; the program is PREFIX/criu.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
prefix=${1:-${BOXWOOD_CRIU_PREFIX:-$PWD/.cache/criu}}
mkdir -p "$prefix"
prefix=$(cd "$prefix" && pwd)
criu=$prefix/criu
stamp=$prefix/verified # what was verified: the kernel and the file it was verified with

say() { echo "criu: $*"; }
identity() { printf '%s %s %s\n' "$(uname -r)" "$(realpath "$1")" "$(stat -Lc '%s %Y' "$1")"; }
works() { # the first build may take minutes; the test itself has its own limit of 30 s
  go build -o bin/criutest ./internal/doctor/criutest && timeout --kill-after=5 60 bin/criutest "$1"
}
keep() {
  identity "$criu" >"$stamp"
  say "$(timeout 10 "$criu" --version | sed -n 's/^Version: //p') dumps and restores on this kernel: $criu"
}

if [ -x "$criu" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(identity "$criu")" ]; then
  exit 0
fi
if [ -x "$criu" ] && works "$criu"; then
  keep
  exit 0
fi
if system=$(command -v criu) && works "$system"; then
  ln -sfn "$system" "$criu"
  keep
  exit 0
fi

for tool in apt-get dpkg-deb patchelf; do
  command -v $tool >/dev/null || {
    say "needs $tool to install one; or install CRIU >= 4.2 yourself and put it in PATH" >&2
    exit 1
  }
done

# The mirror and keyring this machine already uses for Debian itself.
mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' |
  awk '$1 == "Debian" && $2 !~ /security/ { print $2; exit }')
if [ -z "$mirror" ]; then
  apt-get update -qq
  mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' |
    awk '$1 == "Debian" && $2 !~ /security/ { print $2; exit }')
fi
[ -n "$mirror" ] || {
  say "no Debian mirror found in apt's sources" >&2
  exit 1
}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

work=$(mktemp -d "$prefix/install.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists/partial,cache/archives/partial,parts,root}
: >"$work/status"
echo "deb [signed-by=$keyring] $mirror sid main" >"$work/sources.list"
# An empty status file makes apt believe that nothing is installed, so that the
# whole closure of libraries comes down, of one release.
apt_sid() {
  apt-get -qq \
    -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts="$work/parts" \
    -o Dir::State::Lists="$work/lists" -o Dir::State::Status="$work/status" -o Dir::Cache="$work/cache" \
    -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=3 \
    -o APT::Keep-Downloaded-Packages=true "$@"
}
say "downloading CRIU and its libraries (about 10 s)"
apt_sid update
apt_sid --download-only --no-install-recommends -y install criu
for package in "$work"/cache/archives/*.deb; do
  dpkg-deb -x "$package" "$work/root"
done

# The interpreter and library path are absolute, so the tree is moved to its
# place first. Starting the binary through the loader by hand hangs instead.
rm -rf "$prefix/root"
mv "$work/root" "$prefix/root"
binary=$prefix/root/usr/sbin/criu
loader=$(find "$prefix/root/usr/lib64" "$prefix/root/usr/lib" -maxdepth 2 -name 'ld-linux-*.so.*' 2>/dev/null | head -n 1)
libraries=$(dirname "$(find "$prefix/root/usr/lib" -name 'libprotobuf-c.so.*' | head -n 1)")
patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" "$binary"
ln -sfn "$binary" "$criu"
# What only interactive or plug-in use needs; keeps the prefix small.
rm -rf "$prefix"/root/usr/share "$prefix"/root/var

if ! works "$criu"; then
  say "the installed $("$criu" --version | sed -n 's/^Version: //p') fails its self-test on kernel $(uname -r)" >&2
  say "see why: bin/criutest $criu" >&2
  exit 1
fi
keep
