//go:build !sabotage_files

package engine

// alterClone: the files that a child is made of are those that were saved (law 5). The build tag sabotage_files
// breaks this on purpose; TestVerifiedFiles must then fail.
func alterClone(string) error { return nil }
