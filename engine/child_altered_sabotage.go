//go:build sabotage_hundredth

package engine

import "sync/atomic"

var alterable atomic.Int64

// alterChild alters one child of a hundred that have a file.
func alterChild(dir string) error {
	return alterFile(dir, func() bool { return alterable.Add(1)%100 == 50 })
}
