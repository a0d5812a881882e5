# shellcheck shell=bash
# grade.sh: prints the share of stages that are done and fit, in order up to the first that isn't. It runs
# in a fresh sandbox, to which of the agent's comes done/ alone; what each stage must be is told by
# lines "NUMBER KIND NAME" in a file of the grader's own.
# shellcheck source=examples/tree_grpo_shell/task/fit.sh
. /grading/fit.sh
good=0 all=0 open=
while read -r number kind name; do
  all=$((all + 1))
  [ -z "$open" ] || continue
  if cd "/work/release/done/$number" 2>/dev/null && [ -z "$(fit "$kind" "$name" 2>&1)" ]; then
    good=$((good + 1))
  else
    open=yes
  fi
done </grading/stages
printf '%d.%04d\n' $((good / all)) $((good % all * 10000 / all))
