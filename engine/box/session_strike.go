//go:build !sabotage_strike

package box

// strikesRunning: only what runs is interrupted, not a shell that reads. The build tag sabotage_strike breaks this on
// purpose; TestInterruptsCutNoLine must then fail.
const strikesRunning = true
