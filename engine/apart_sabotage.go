//go:build sabotage_grader

package engine

const gradesApart = false
