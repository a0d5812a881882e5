//go:build sabotage_thawed

package engine

const thawsLast = false
