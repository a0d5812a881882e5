//go:build sabotage_strike

package box

const strikesRunning = false
