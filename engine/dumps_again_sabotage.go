//go:build sabotage_still

package engine

const looksAgain = false
