//go:build sabotage_end

package tree

const watchesEnd = false
