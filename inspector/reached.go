//go:build !sabotage_survivor

package inspector

// neverReached is a class of calls that the programs don't see: those that reach a
// survivor. A saboteur build sets it; TestWhatReachesASurvivor must then fail.
const neverReached = 0
