//go:build sabotage_shadow

package engine

const waitsForCapture = false
