//go:build !sabotage_frozen

package cgroup

// freezesLeavesFirst: a group is called frozen when all in it and below it is. The build tag sabotage_frozen breaks this on
// purpose; TestWhatIsFrozenStandsStill must then fail.
const freezesLeavesFirst = true
