package engine

import (
	"os"
	"path/filepath"
	"testing"
)

// If it fails, the next daemon looks for its run folder elsewhere, and a dump that couldn't be copied to the disk is lost.
func TestARunFolderWithADumpStays(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	dump := filepath.Join(dir, dumpsDir, "ps_1")
	for _, path := range []string{filepath.Join(dir, "births"), filepath.Join(dir, "boxes"), dump} {
		if err := os.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	leaveRunDir(dir)
	for _, path := range []string{filepath.Join(dir, "boxes"), dump} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	if err := os.RemoveAll(filepath.Join(dir, dumpsDir)); err != nil {
		t.Fatal(err)
	}
	leaveRunDir(dir)
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("an empty run folder is left (%v)", err)
	}
}
