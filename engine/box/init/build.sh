#!/bin/sh
# Builds pid 1 as OUT (default: boxinit beside this script), with CFLAGS if there are any. The result is
# committed and embedded; the same gcc and libc give the same bytes, so that
# `make verify-generated` can compare. It carries neither paths nor a build id.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here/boxinit}
cd "$here"
# shellcheck disable=SC2086 # a word for each flag
${CC:-gcc} -static -no-pie -O2 -std=gnu11 -Wall -Wextra -Werror -fno-ident -ffile-prefix-map="$here"=. \
	${CFLAGS:-} -Wl,--build-id=none -s -o "$out" main.c guard.c nesting.c zygote.c wire.c serve.c session.c spawn.c files.c
