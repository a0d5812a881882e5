//go:build sabotage_answers

package tree

const answersWait = false
