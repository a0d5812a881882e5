//go:build sabotage_report

package report

const countsAll = true
