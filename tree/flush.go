//go:build !sabotage_fsync

package tree

// flushWrites: a change is flushed to the disk before it is acknowledged. The
// build tag sabotage_fsync breaks this on purpose; TestAcknowledgedSurvivesPowerLoss
// must then fail.
const flushWrites = true
