//go:build !sabotage_dump

package engine

// checksDumps: nothing is restored from a dump that isn't as it was saved (law 5). The build tag
// sabotage_dump breaks this on purpose; TestAFlippedByteOfADumpIsRefused must then fail.
const checksDumps = true
