//go:build !sabotage_cores

package cgroup

// coresHeld: a share's cores are held by cpuset, which a sandbox can't widen, and not by an affinity alone, which it can. The
// build tag sabotage_cores breaks this on purpose; TestConfine must then fail.
const coresHeld = true
