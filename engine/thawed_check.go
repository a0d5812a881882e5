//go:build !sabotage_thawed

package engine

// thawsLast: a snapshot is taken while the box whose processes were saved is still frozen (law 4). The build tag sabotage_thawed
// breaks this on purpose; TestHalvesAreOfOneInstant must then fail.
const thawsLast = true
