//go:build sabotage_dump

package engine

const checksDumps = false
