//go:build !sabotage_deadline

package engine

// keepsDeadlines: a command ends at its deadline (law 12). The build tag sabotage_deadline breaks this on purpose;
// TestDeadlineEndsTheTurn must then fail.
const keepsDeadlines = true
