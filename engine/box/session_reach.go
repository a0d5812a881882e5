//go:build !sabotage_reach

package box

// reachesAll: an interrupt reaches what is stopped, and without a terminal jobs in groups of their own. The build tag
// sabotage_reach breaks this on purpose; TestInterruptsReachTheForeground must then fail.
const reachesAll = true
