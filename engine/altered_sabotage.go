//go:build sabotage_files || sabotage_hundredth

package engine

import (
	"io/fs"
	"os"
	"path/filepath"
)

// alterFile changes a byte of the first file that has any. If there is one, it is asked whether it is to.
func alterFile(dir string, now func() bool) error {
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
		if now() {
			b[0] ^= 1
			if _, err := f.WriteAt(b[:], 0); err != nil {
				return err
			}
		}
		return filepath.SkipAll
	})
}
