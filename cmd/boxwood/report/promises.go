//go:build !sabotage_report

package report

// countsAll is for a build that breaks what a report promises (scripts/saboteurs.txt):
// that turns of a replay which are no evidence count for nothing.
const countsAll = false
