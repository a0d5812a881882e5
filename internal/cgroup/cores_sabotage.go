//go:build sabotage_cores

package cgroup

const coresHeld = false
