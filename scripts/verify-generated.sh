#!/usr/bin/env bash
# verify-generated.sh: generates everything again in a copy of the checkout and
# demands that not a byte differs from what is here.
set -euo pipefail
cd "$(dirname "$0")/.."
top=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/before"
git ls-files -co --exclude-standard -z | while IFS= read -r -d '' file; do
  [ ! -e "$file" ] || printf '%s\0' "$file"
done | xargs -0 cp -a --parents -t "$work/before"
cp -a "$work/before" "$work/after"
mkdir -p .cache
ln -s "$top/.cache" "$top/.venv" "$work/after/" # the pinned tools
"$work/after/scripts/generate.sh"
rm "$work/after/.cache" "$work/after/.venv"
if ! diff -rq "$work/before" "$work/after"; then
  echo "generated code is not what its sources give: run make generate and commit it" >&2
  exit 1
fi
echo "generated code is fresh"
