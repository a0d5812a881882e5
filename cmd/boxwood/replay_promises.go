//go:build !sabotage_resume && !sabotage_evidence

package main

// What a replay promises, for builds that break it (scripts/saboteurs.txt):
// that one which goes on runs no turn twice, and that what comes after the first
// difference counts for nothing.
const (
	beginsAnew = false
	countsAll  = false
)
