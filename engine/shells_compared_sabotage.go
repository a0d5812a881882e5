//go:build sabotage_compare

package engine

const comparesShells = false
