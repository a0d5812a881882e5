//go:build !sabotage_end

package tree

// watchesEnd: a log that lost its end, or its marker, is told.
const watchesEnd = true
