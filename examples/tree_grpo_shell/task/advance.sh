# shellcheck shell=bash
# advance.sh: takes the release from stage to stage, and stops at the first one that isn't fit. A stage
# is seen only when those before it are done.
cd /work/release || exit
# shellcheck source=examples/tree_grpo_shell/task/fit.sh
. /work/fit.sh
shopt -s nullglob
while :; do
  if [ ! -d stage ]; then
    queue=(queue/*)
    [ ${#queue[@]} -gt 0 ] || { echo "released"; exit 0; }
    mv "${queue[0]}" stage
  fi
  read -r number kind name <stage/.stage
  wrong=$(cd stage && fit "$kind" "$name")
  [ -z "$wrong" ] || { echo "stage $number: $wrong"; exit 1; }
  mv stage "done/$number"
done
