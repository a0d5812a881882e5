//go:build !sabotage_kept

package engine

// comparesKept: a dump goes into another checkpoint only if it is still true of the processes (law 4). The build tag
// sabotage_kept breaks this on purpose; TestADumpIsKeptWhileFilesMoveOn must then fail.
const comparesKept = true
