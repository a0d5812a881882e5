//go:build sabotage_used

package tree

const refusesUsed = false
