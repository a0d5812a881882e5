//go:build !sabotage_compare

package engine

// comparesShells: descriptions of sessions are compared, after turns and after restores (laws 2 and 5). The build tag sabotage_compare
// breaks this on purpose; TestShellPayloads must then fail.
const comparesShells = true
