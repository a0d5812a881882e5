//go:build sabotage_replay

package engine

const comparesReplays = false
