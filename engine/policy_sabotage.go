//go:build sabotage_policy

package engine

const withholdsLeftOut = false
