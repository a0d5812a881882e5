//go:build sabotage_fence

package tree

const fenced = false
