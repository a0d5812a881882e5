//go:build !sabotage_still

package engine

// looksAgain: a dump counts only if what was seen before it is still so after it. The build tag sabotage_still breaks this on
// purpose; TestADumpInWhichAProcessRanIsMadeAgain must then fail.
const looksAgain = true
