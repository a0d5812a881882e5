//go:build sabotage_nesting

package box

const restoredNests = true
