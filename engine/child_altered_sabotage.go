//go:build sabotage_hundredth

package engine

import (
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
)

var alterable atomic.Int64

// alterChild changes a byte of the first file that has any, in one child of a hundred that have such a file.
func alterChild(dir string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		var b [1]byte
		if n, _ := f.ReadAt(b[:], 0); n == 0 {
			return nil
		}
		if alterable.Add(1)%100 == 50 {
			b[0] ^= 1
			if _, err := f.WriteAt(b[:], 0); err != nil {
				return err
			}
		}
		return filepath.SkipAll
	})
}
