//go:build sabotage_condemned

package tree

const condemns = false
