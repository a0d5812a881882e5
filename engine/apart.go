//go:build !sabotage_grader

package engine

// gradesApart: a grader that names an image runs there and not in the agent's sandbox. The build tag sabotage_grader breaks this
// on purpose; TestGraderIsOutOfReach must then fail.
const gradesApart = true
