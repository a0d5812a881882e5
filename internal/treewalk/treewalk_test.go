package treewalk_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
)

func build(t *testing.T) string {
	dir := t.TempDir()
	for _, err := range []error{
		os.Chmod(dir, 0o755),
		os.Mkdir(dir+"/d", 0o755),
		os.WriteFile(dir+"/d/f", []byte("x"), 0o644),
		os.Link(dir+"/d/f", dir+"/also"),
		os.Symlink("/etc/passwd", dir+"/l"),
		unix.Mkfifo(dir+"/p", 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	old := time.Unix(1e9, 7)
	for _, name := range []string{"d/f", "d", "."} {
		if err := os.Chtimes(filepath.Join(dir, name), old, old); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"l", "p"} {
		ts := unix.NsecToTimespec(old.UnixNano())
		if err := unix.UtimesNanoAt(unix.AT_FDCWD, filepath.Join(dir, name), []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func digest(t *testing.T, dir string, o treewalk.Options) ([]string, string) {
	t.Helper()
	lines, sum, err := treewalk.Digest(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	return lines, sum
}

// Each of these changes must show; a digest blind to one of them would let a
// wrong restore pass.
func TestEveryChangeShows(t *testing.T) {
	changes := map[string]func(dir string) error{
		"content, same size and time": func(d string) error {
			if err := os.WriteFile(d+"/d/f", []byte("y"), 0o644); err != nil {
				return err
			}
			return os.Chtimes(d+"/d/f", time.Unix(1e9, 7), time.Unix(1e9, 7))
		},
		"mode":            func(d string) error { return os.Chmod(d+"/d/f", 0o4644|os.ModeSetuid) },
		"nanosecond":      func(d string) error { return os.Chtimes(d+"/d/f", time.Unix(1e9, 8), time.Unix(1e9, 8)) },
		"folder's time":   func(d string) error { return os.Chtimes(d+"/d", time.Unix(1e9, 8), time.Unix(1e9, 8)) },
		"xattr":           func(d string) error { return unix.Setxattr(d+"/d/f", "user.a", []byte("b"), 0) },
		"new empty name":  func(d string) error { return os.WriteFile(d+"/n", nil, 0o644) },
		"link made apart": func(d string) error { os.Remove(d + "/also"); return os.WriteFile(d+"/also", []byte("x"), 0o644) },
		"target of link":  func(d string) error { os.Remove(d + "/l"); return os.Symlink("/etc/group", d+"/l") },
		"removed":         func(d string) error { return os.Remove(d + "/p") },
	}
	_, want := digest(t, build(t), treewalk.Options{})
	if _, again := digest(t, build(t), treewalk.Options{}); again != want {
		t.Fatal("two equal trees have different digests")
	}
	for name, change := range changes {
		t.Run(name, func(t *testing.T) {
			dir := build(t)
			if err := change(dir); err != nil {
				t.Fatal(err)
			}
			if _, got := digest(t, dir, treewalk.Options{}); got == want {
				t.Error("not seen")
			}
		})
	}
}

func TestStaysOnItsMount(t *testing.T) {
	testenv.Require(t, testenv.Root)
	dir := build(t)
	if err := unix.Mount("x", dir+"/d", "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir+"/d", unix.MNT_DETACH) })
	if err := os.WriteFile(dir+"/d/hidden", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	lines, _ := digest(t, dir, treewalk.Options{})
	all := strings.Join(lines, "\n")
	if strings.Contains(all, "hidden") || !strings.Contains(all, `"d" mount`) {
		t.Errorf("walked into a mount:\n%s", all)
	}
}

// A file with a hole of any size ends with whoever asked, not with the file.
func TestAHoleEndsTheWalk(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "hole"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(dir, "hole"), 1<<43); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(10*time.Millisecond, cancel)
	if _, _, err := treewalk.Digest(dir, treewalk.Options{Err: ctx.Err}); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}
