package engine

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/sched"
)

// A dump that is let go from memory while it is being read, since another needs the room, is read again from the disk:
// it isn't lost.
func TestADumpIsLetGoWhileItIsRead(t *testing.T) {
	v, err := openVault(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	run, err := os.MkdirTemp("/dev/shm", "boxwood-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(run) })
	s, err := openDumpStore(v, run, 1<<20, func(what string, args ...any) { t.Error(what, args) })
	if err != nil {
		t.Fatal(err)
	}
	id := ids.NewProcess()
	dir, err := s.begin(id, 1000)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, imagesDir), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "images/b", "images/c"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	digest, size, err := seal(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.complete(sched.Work{Class: sched.Persist}, id, size, ""); err != nil {
		t.Fatal(err)
	}
	s.copying.Wait()
	var read []string
	if err := s.with(s.find, id, func(dir string) error {
		if read = append(read, dir); len(read) == 1 {
			if _, err := s.begin(ids.NewProcess(), 1<<20); err != nil {
				t.Fatal(err)
			}
		}
		return checkSeal(dir, digest)
	}); err != nil {
		t.Errorf("it is lost: %v", err)
	}
	if len(read) != 2 || read[0] != dir || read[1] != v.folder(id) {
		t.Errorf("it was read at %q", read)
	}
	// What differs in a dump that stays where it is isn't read away.
	if err := os.WriteFile(filepath.Join(v.folder(id), "a"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	read = nil
	if err := s.with(s.find, id, func(dir string) error { read = append(read, dir); return checkSeal(dir, digest) }); err == nil || len(read) != 1 {
		t.Errorf("a changed dump: %v, read at %q", err, read)
	}
}
