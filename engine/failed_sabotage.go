//go:build sabotage_failed

package engine

const failedCaptureTaints = false
