//go:build !sabotage_used

package tree

// refusesUsed: what is pinned, stood on or built upon isn't removed. The build tag sabotage_used breaks this on purpose;
// TestPruneRefusesWhatIsUsed must then fail.
const refusesUsed = true
