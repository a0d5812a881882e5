//go:build sabotage_kept

package engine

const comparesKept = false
