//go:build !sabotage_shadow

package engine

// waitsForCapture: the next turn waits for the capture of the last (law 9). The build tag sabotage_shadow breaks this on purpose;
// TestNextTurnIsInNoEarlierNode must then fail.
const waitsForCapture = true
