//go:build !sabotage_policy

package engine

// withholdsLeftOut: what a capture policy leaves out is withheld (law 6). The build tag sabotage_policy breaks this on
// purpose; TestCapturePolicies must then fail.
const withholdsLeftOut = true
