//go:build !sabotage_events

package inspector

// alwaysBlind are events that the programs don't see. A saboteur build sets it;
// TestProbes must then fail.
const alwaysBlind = 0
