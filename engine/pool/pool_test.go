package pool_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/engine/pool/pooltest"
	"github.com/boxwood-rl/boxwood/internal/btrfs"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/overlay"
	"github.com/boxwood-rl/boxwood/internal/testenv"
)

func TestPlain(t *testing.T) {
	pooltest.Run(t, pooltest.Subject{
		Open:  func(dir string) (pool.Pool, error) { return pool.OpenPlain(dir) },
		Mount: func(_ testing.TB, up *pool.Upper) (string, func()) { return up.Dir, func() {} },
		Tamper: func(t testing.TB, dir string, id ids.Snapshot, file string) {
			flip(t, filepath.Join(dir, "snapshots", string(id), "upper", file))
		},
	})
}

const testSize = 1 << 30

func TestBtrfs(t *testing.T) {
	testenv.Require(t, testenv.Btrfs)
	pooltest.Run(t, pooltest.Subject{
		Open: func(dir string) (pool.Pool, error) {
			return pool.OpenBtrfs(pool.Options{Dir: dir, SizeBytes: testSize, LowWater: 64 << 20})
		},
		Mount:  mountUpper,
		Inodes: true,
		Tamper: func(t testing.TB, dir string, id ids.Snapshot, file string) {
			subvol := filepath.Join(dir, "pool", "snapshots", string(id))
			f, err := os.Open(subvol)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if err := btrfs.SetReadOnly(f, false); err != nil {
				t.Fatal(err)
			}
			flip(t, filepath.Join(subvol, "upper", file))
			if err := btrfs.SetReadOnly(f, true); err != nil {
				t.Fatal(err)
			}
		},
	})
}

// flip changes the first byte of a file. It is in the page cache then, and shows
// in nothing that is on disk yet.
func flip(t testing.TB, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, 0); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b, 0); err != nil {
		t.Fatal(err)
	}
}

// mountUpper shows an upper's overlay in a fresh folder.
func mountUpper(t testing.TB, up *pool.Upper) (string, func()) {
	t.Helper()
	// A volatile mount leaves its mark; only captures clean it.
	if err := os.RemoveAll(filepath.Join(up.Work, "work")); err != nil {
		t.Fatal(err)
	}
	m, err := overlay.Mount(overlay.Options{Lower: up.Layers, Upper: up.Dir, Work: up.Work})
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	if err := unix.MoveMount(int(m.Fd()), "", unix.AT_FDCWD, root, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		t.Fatal(err)
	}
	m.Close()
	done := false
	unmount := func() {
		if !done {
			done = true
			if err := unix.Unmount(root, 0); err != nil {
				t.Errorf("unmounting an overlay: %v", err)
				unix.Unmount(root, unix.MNT_DETACH)
			}
		}
	}
	t.Cleanup(unmount)
	return root, unmount
}
