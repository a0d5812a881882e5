//go:build sabotage_frozen

package cgroup

const freezesLeavesFirst = false
