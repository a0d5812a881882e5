//go:build sabotage_unread

package tree

const tellsReads = false
