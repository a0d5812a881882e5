//go:build sabotage_deadline

package engine

const keepsDeadlines = false
