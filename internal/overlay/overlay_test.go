package overlay_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/overlay"
	"github.com/boxwood-rl/boxwood/internal/overlay/overlaytest"
	"github.com/boxwood-rl/boxwood/internal/testenv"
)

const base = 100000

// stack makes two layers, an upper and a work folder; "f" is in both layers.
func stack(t testing.TB) overlay.Options {
	dir := t.TempDir()
	for _, d := range []string{"l0/dir", "l1", "u/upper", "u/work"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range map[string]string{"l0/f": "low", "l1/f": "high", "l0/only": "x", "l0/dir/a": "a"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return overlay.Options{Lower: []string{dir + "/l0", dir + "/l1"}, Upper: dir + "/u/upper", Work: dir + "/u/work"}
}

// Both ways of handing over layers must give the same mount; the one for old
// kernels works on new ones, so it can't rot unseen.
func TestMount(t *testing.T) {
	testenv.Require(t, testenv.Root)
	if got, err := overlay.Probe(); err != nil {
		t.Fatalf("probe: %v", err)
	} else {
		t.Logf("this kernel: %v", got)
	}
	for _, method := range []overlay.Method{overlay.Detached, overlay.Attached} {
		for _, mapped := range []bool{false, true} {
			for _, split := range []bool{false, true} {
				name := method.String()
				if mapped {
					name += ",idmapped"
				}
				if split {
					name += ",layers on two mounts"
				}
				t.Run(name, func(t *testing.T) {
					o := stack(t)
					owner := uint32(0)
					if mapped {
						o.UserNS, o.IDBase, owner = overlaytest.MustUserNS(t, base), base, base
					}
					if split {
						if err := unix.Mount(o.Lower[1], o.Lower[1], "", unix.MS_BIND, ""); err != nil {
							t.Fatal(err)
						}
						t.Cleanup(func() { unix.Unmount(o.Lower[1], unix.MNT_DETACH) })
					}
					before := mounts(t)
					m, err := overlay.MountBy(method, o)
					if err != nil {
						if method == overlay.Detached && isUnsupported() {
							t.Skipf("this kernel takes no detached layers: %v", err)
						}
						t.Fatal(err)
					}
					defer m.Close()
					if after := mounts(t); after != before {
						t.Errorf("mounting left a mount behind:\n%s", after)
					}
					check(t, m, o, owner)
				})
			}
		}
	}
}

func isUnsupported() bool {
	m, _ := overlay.Probe()
	return m != overlay.Detached
}

func check(t *testing.T, m *os.File, o overlay.Options, owner uint32) {
	settings, err := overlay.ReadBack(m)
	if err != nil {
		t.Fatal(err)
	}
	if wrong := settings.Wrong(); wrong != nil {
		t.Errorf("options: %v", wrong)
	}
	root := t.TempDir()
	overlaytest.MustAttach(t, m, root)
	if b, err := os.ReadFile(root + "/f"); err != nil || string(b) != "high" {
		t.Errorf("f = %q, %v; want the upper layer's", b, err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(root+"/only", &st); err != nil || st.Uid != owner || st.Gid != owner {
		t.Errorf("only belongs to %d:%d (%v), want %d", st.Uid, st.Gid, err, owner)
	}
	err = os.WriteFile(root+"/host", nil, 0o644)
	if owner == 0 && err != nil {
		t.Errorf("writing through a mount that isn't mapped: %v", err)
	} else if owner != 0 && err == nil {
		t.Error("host root, which the map doesn't know, made a file through the mount")
	}
	if owner == 0 {
		if err := os.Rename(root+"/dir", root+"/moved"); err != nil {
			t.Errorf("renaming a folder of a layer: %v", err)
		}
	} else {
		asSandbox(t, func() error {
			if err := unix.Rename(root+"/dir", root+"/moved"); err != nil {
				return err
			}
			if err := unix.Unlink(root + "/only"); err != nil {
				return err
			}
			return unix.Mkdir(root+"/new", 0o755)
		})
		if err := syscall.Stat(o.Upper+"/new", &st); err != nil || st.Uid != 0 {
			t.Errorf("new belongs to %d on disk (%v), want 0", st.Uid, err)
		}
		if err := syscall.Lstat(o.Upper+"/only", &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFCHR || st.Rdev != 0 {
			t.Errorf("a deleted file leaves no whiteout: mode %o, %v", st.Mode, err)
		}
	}
}

// asSandbox runs fn with the ids of the sandbox's root, on a thread that ends.
func asSandbox(t *testing.T, fn func() error) {
	t.Helper()
	ch := make(chan error, 1)
	go func() { ch <- overlaytest.AsFSUser(base, fn) }()
	if err := <-ch; err != nil {
		t.Errorf("as the sandbox's root: %v", err)
	}
}

func mounts(t *testing.T) string {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	var ours []string // other tests of the machine mount, too
	for _, line := range strings.Split(string(b), "\n") {
		if strings.Contains(line, "/tmp/bwo") || strings.Contains(line, t.TempDir()) {
			ours = append(ours, line)
		}
	}
	return strings.Join(ours, "\n")
}

// The thread that mounts has the ids of the sandbox for a moment. If they
// stayed, the daemon would lose its rights at random.
func TestMounterIDsAreRestored(t *testing.T) {
	testenv.Require(t, testenv.Root)
	done := make(chan error)
	for range 8 {
		o := stack(t)
		o.UserNS, o.IDBase = overlaytest.MustUserNS(t, base), base
		go func() {
			done <- func() error {
				for range 20 {
					cleanWork(o)
					m, err := overlay.Mount(o)
					if err != nil {
						return err
					}
					m.Close()
				}
				return nil
			}()
		}()
	}
	for range 8 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	// A thread that was given up, as other tests do on purpose, takes a moment to end.
	var strange []string
	for began := time.Now(); time.Since(began) < 10*time.Second; {
		if strange = threadsWithOtherIDs(t); len(strange) == 0 {
			return
		}
	}
	t.Error(strange)
}

// The first thread of a process is left out: if that was given up, it can't end, and runs nothing any more.
func threadsWithOtherIDs(t *testing.T) (strange []string) {
	threads, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, status := range threads {
		if strings.HasPrefix(status, fmt.Sprintf("/proc/self/task/%d/", os.Getpid())) {
			continue
		}
		b, err := os.ReadFile(status)
		if err != nil {
			continue // ended meanwhile
		}
		for _, line := range strings.Split(string(b), "\n") {
			if f := strings.Fields(line); len(f) == 5 && (f[0] == "Uid:" || f[0] == "Gid:") && f[4] != "0" {
				strange = append(strange, status+": "+line)
			}
		}
	}
	return strange
}

// Symbolic links above the folders change nothing. If it fails, a layer is mounted without its ids: nothing in it is root's in the
// sandbox, and its folders can't be written to.
func TestLayersBehindLinks(t *testing.T) {
	testenv.Require(t, testenv.Root)
	for name, relink := range map[string]func(o *overlay.Options, link func(string) string){
		"a layer": func(o *overlay.Options, link func(string) string) { o.Lower[0] = link(o.Lower[0]) },
		"changes": func(o *overlay.Options, link func(string) string) {
			o.Upper, o.Work = link(o.Upper), link(o.Work)
		},
		"all": func(o *overlay.Options, link func(string) string) {
			o.Lower[0], o.Lower[1], o.Upper, o.Work = link(o.Lower[0]), link(o.Lower[1]), link(o.Upper), link(o.Work)
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := stack(t)
			o.UserNS, o.IDBase = overlaytest.MustUserNS(t, base), base
			links := t.TempDir()
			relink(&o, func(path string) string {
				link := filepath.Join(links, filepath.Base(filepath.Dir(path)))
				if err := os.Symlink(filepath.Dir(path), link); err != nil && !errors.Is(err, os.ErrExist) {
					t.Fatal(err)
				}
				return filepath.Join(link, filepath.Base(path))
			})
			m, err := overlay.Mount(o)
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			check(t, m, o, base)
		})
	}
}

func TestMountRefuses(t *testing.T) {
	testenv.Require(t, testenv.Root)
	good := stack(t)
	for name, o := range map[string]overlay.Options{
		"no layer":        {Upper: good.Upper, Work: good.Work},
		"missing layer":   {Lower: []string{good.Lower[0], "/nonexistent"}, Upper: good.Upper, Work: good.Work},
		"work elsewhere":  {Lower: good.Lower, Upper: good.Upper, Work: t.TempDir()},
		"layer is a file": {Lower: []string{good.Lower[0] + "/f"}, Upper: good.Upper, Work: good.Work},
	} {
		t.Run(name, func(t *testing.T) {
			fds := len(must(os.ReadDir("/proc/self/fd")))
			if m, err := overlay.Mount(o); err == nil {
				m.Close()
				t.Error("mounted")
			}
			if now := len(must(os.ReadDir("/proc/self/fd"))); now > fds {
				t.Errorf("%d descriptors before, %d after", fds, now)
			}
		})
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// cleanWork removes the mark of a volatile mount, which forbids a second one.
func cleanWork(o overlay.Options) { os.RemoveAll(o.Work + "/work") }

func BenchmarkMount(b *testing.B) {
	testenv.Require(b, testenv.Root)
	o := stack(b)
	o.Lower = o.Lower[:1]
	o.UserNS, o.IDBase = overlaytest.MustUserNS(b, base), base
	for _, method := range []overlay.Method{overlay.Detached, overlay.Attached} {
		b.Run(method.String(), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				cleanWork(o)
				b.StartTimer()
				m, err := overlay.MountBy(method, o)
				if err != nil {
					b.Fatal(err)
				}
				m.Close()
			}
		})
	}
}
