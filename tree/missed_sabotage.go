//go:build sabotage_watch

package tree

const tellsRemovals = false
