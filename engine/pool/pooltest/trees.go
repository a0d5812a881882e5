package pooltest

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/engine/pool"
)

func whiteout(path string) error { return unix.Mknod(path, unix.S_IFCHR, 0) }

// opaque hides what lower layers have in a folder.
func opaque(dir string) error {
	err := unix.Setxattr(dir, "trusted.overlay.opaque", []byte("y"), 0)
	if err == unix.EPERM {
		err = unix.Setxattr(dir, "user.overlay.opaque", []byte("y"), 0)
	}
	return err
}

// A layer's deletions must take effect on the layers below, or files that an
// image's author deleted come back.
func testStack(t *testing.T, e *env) {
	low := e.layer("low", map[string]string{"keep": "low", "gone": "low", "over": "low", "dir/a": "low", "shut/a": "low", "file-to-dir": "low"})
	e.must(e.p.AddLayer(e.ctx, layerID("mid"), func(dir string) error {
		if err := write(dir, map[string]string{"over": "mid", "dir/b": "mid", "shut/b": "mid", "file-to-dir/x": "mid"}); err != nil {
			return err
		}
		if err := whiteout(dir + "/gone"); err != nil {
			return err
		}
		return opaque(dir + "/shut")
	}))
	top := layerID("top")
	old := time.Unix(1e9, 5)
	e.must(e.p.AddLayer(e.ctx, top, func(dir string) error {
		if err := write(dir, map[string]string{"top": "top", "dir/c": "top"}); err != nil {
			return err
		}
		if err := os.Chmod(dir, 0o711); err != nil {
			return err
		}
		return os.Chtimes(dir, old, old)
	}))
	e.in(e.clone(e.base(low, layerID("mid"), top)), func(root string) {
		want := map[string]string{"keep": "low", "over": "mid", "top": "top", "dir/a": "low", "dir/b": "mid", "dir/c": "top", "shut/b": "mid", "file-to-dir/x": "mid"}
		got := 0
		filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			rel, _ := filepath.Rel(root, path)
			b, err := os.ReadFile(path)
			if w, ok := want[rel]; !ok || err != nil || w != string(b) {
				t.Errorf("%s is %q (%v), want %q", rel, b, err, w)
			}
			got++
			return nil
		})
		if got != len(want) {
			t.Errorf("%d files, want %d", got, len(want))
		}
		fi, err := os.Stat(root)
		e.must(err)
		if fi.Mode().Perm() != 0o711 || !fi.ModTime().Equal(old) {
			t.Errorf("the root is %v of %v: it isn't the top layer's", fi.Mode(), fi.ModTime())
		}
	})
}

// turn does what agents do to a tree, each in a way that an overlay keeps
// differently: copy-ups, whiteouts, opaque folders, redirects, hard links.
func turn(root string) error {
	at := func(name string) string { return filepath.Join(root, name) }
	old := time.Unix(1234567890, 987654321)
	for _, step := range []func() error{
		func() error { return write(root, map[string]string{"image/0/f0": "changed", "fresh/deep/x": "new"}) },
		func() error { return os.Remove(at("image/1/f1")) },
		func() error { return os.RemoveAll(at("replaced")) },
		func() error { return write(root, map[string]string{"replaced/only": "new"}) },
		func() error { return os.Rename(at("moved"), at("elsewhere")) },
		func() error { return os.Link(at("fresh/deep/x"), at("fresh/link")) },
		func() error { return os.Link(at("image/0/f2"), at("linked-image")) },
		func() error { return os.Symlink("fresh", at("sym")) },
		func() error { return unix.Mkfifo(at("pipe"), 0o640) },
		func() error { return os.Chmod(at("image/0/f4"), 0o4755|os.ModeSetuid) },
		func() error { return unix.Setxattr(at("image/0/f6"), "user.mark", []byte("1"), 0) },
		func() error { return os.Chtimes(at("fresh/deep/x"), old, old) },
		func() error { return os.Chtimes(at("image/0"), old, old) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func (e *env) world() ref {
	files := many("image", 60)
	for i := range 5 {
		files["replaced/"+string(rune('a'+i))] = "old"
		files["moved/in/"+string(rune('a'+i))] = "old"
	}
	return e.base(e.layer("world", files))
}

// What a fork hands out must be the tree that was captured: a wrong one poisons
// training unseen.
func testCloneOfClone(t *testing.T, e *env) {
	up := e.clone(e.world())
	e.in(up, func(root string) { e.must(turn(root)) })
	want := e.lines(up)
	for depth := range 3 {
		up = e.clone(e.snapshot(up))
		e.same("generation "+string(rune('1'+depth)), e.lines(up), want)
	}
	e.in(up, func(root string) {
		e.must(os.WriteFile(root+"/fresh/link", []byte("both"), 0o644))
		if b, err := os.ReadFile(root + "/fresh/deep/x"); err != nil || string(b) != "both" {
			t.Errorf("the other name of a hard link is %q (%v) after a write in the clone", b, err)
		}
		if _, err := os.Lstat(root + "/replaced/a"); err == nil {
			t.Error("a file of a replaced folder is back")
		}
		if b, err := os.ReadFile(root + "/elsewhere/in/a"); err != nil || string(b) != "old" {
			t.Errorf("the content of a renamed image folder is %q (%v)", b, err)
		}
	})
}

// Two files with one (st_dev, st_ino) make cp, mv, find, tar and du treat them as
// one: files are skipped or not copied.
func testUniqueInodes(t *testing.T, e *env) {
	layers := []func() ref{
		func() ref {
			return e.base(e.layer("l1", many("one", 150)), e.layer("l2", many("two", 150)), e.layer("l3", many("three", 150)))
		},
		// The highest numbers lie in the middle and below: order of making isn't order of stacking.
		func() ref {
			third := e.layer("l6", many("six", 100))
			return e.base(e.layer("l5", many("five", 100)), third, e.layer("l4", many("four", 100)))
		},
	}
	for _, stack := range layers {
		base := stack()
		e.layer("made after the base "+string(base.id), many("later", 50))
		up := e.clone(base)
		e.in(up, func(root string) { e.must(write(root, many("upper", 300))) })
		e.unique("the upper", up, 300)
		second := e.clone(e.snapshot(up))
		e.in(second, func(root string) {
			e.must(os.RemoveAll(root + "/upper/1")) // the highest numbers go away
			e.must(write(root, many("second", 200)))
		})
		e.unique("a clone", second, 400)
		e.reopen()
		third := e.clone(e.snapshot(second))
		e.in(third, func(root string) { e.must(write(root, many("third", 200))) })
		e.unique("a clone of a clone after a restart", third, 600)
	}
}

func (e *env) unique(what string, up *pool.Upper, atLeast int) {
	e.t.Helper()
	type key struct{ dev, ino uint64 }
	seen := map[key]string{}
	clashes := 0
	e.in(up, func(root string) {
		e.must(filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			var st unix.Stat_t
			if err := unix.Lstat(path, &st); err != nil {
				return err
			}
			k := key{st.Dev, st.Ino}
			if other, ok := seen[k]; ok && (st.Nlink == 1 || d.IsDir()) {
				if clashes++; clashes < 5 {
					e.t.Errorf("%s: %s and %s are both inode %d", what, other, path, st.Ino)
				}
			}
			seen[k] = path
			return nil
		}))
	})
	if clashes > 0 || len(seen) < atLeast {
		e.t.Errorf("%s: %d clashes among %d files", what, clashes, len(seen))
	}
}
