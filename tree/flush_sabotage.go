//go:build sabotage_fsync

package tree

const flushWrites = false
