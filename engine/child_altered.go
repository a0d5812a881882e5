//go:build !sabotage_hundredth

package engine

// alterChild: a child that is handed out is as its node was, also behind what the daemon itself compares (law 5). The
// build tag sabotage_hundredth breaks this on purpose, one time in a hundred; TestReplayVerifies must then fail.
func alterChild(string) error { return nil }
