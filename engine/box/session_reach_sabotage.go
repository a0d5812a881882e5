//go:build sabotage_reach

package box

const reachesAll = false
