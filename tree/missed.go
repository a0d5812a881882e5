//go:build !sabotage_watch

package tree

// tellsRemovals: a watcher that comes back is told what was removed meanwhile. The build tag sabotage_watch breaks this on
// purpose; TestWatchGoesOnWithinAPrune must then fail.
const tellsRemovals = true
