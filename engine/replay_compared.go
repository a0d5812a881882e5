//go:build !sabotage_replay

package engine

// comparesReplays: of each turn that is run again it is told whether the same came of it. The build tag sabotage_replay
// breaks this on purpose; TestReplayTellsWhatDiffers must then fail.
const comparesReplays = true
