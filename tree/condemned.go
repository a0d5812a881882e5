//go:build !sabotage_condemned

package tree

// condemns: a snapshot that no record needs any more is listed for removal. The build tag sabotage_condemned breaks this on
// purpose; TestPruneInTwoPhases must then fail.
const condemns = true
