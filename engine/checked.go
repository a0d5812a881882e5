//go:build !sabotage_root

package engine

// checksRoots: a root that can't be made again is withheld (law 6). The build tag sabotage_root breaks this on purpose;
// TestMovedMountPointsWithholdTheNode must then fail.
const checksRoots = true
