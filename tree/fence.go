//go:build !sabotage_fence

package tree

// fenced: earlier attempts of a run are refused. The build tag sabotage_fence breaks this on
// purpose; TestNewAttemptEndsTheOld must then fail.
const fenced = true
