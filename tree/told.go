//go:build !sabotage_unread

package tree

// tellsReads: a scan that ends because the disk failed says so.
const tellsReads = true
