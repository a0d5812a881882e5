package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/testenv"
)

func TestFindMounts(t *testing.T) {
	const hybrid = `31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
`
	for _, c := range []struct {
		name, text string
		want       Mounts
		fails      bool
	}{
		{"hybrid", hybrid, Mounts{V2: "/sys/fs/cgroup/unified", V1: map[string]string{
			"cpu": "/sys/fs/cgroup/cpu,cpuacct", "memory": "/sys/fs/cgroup/memory", "pids": "/sys/fs/cgroup/pids"}}, false},
		{"pure v2", "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n", Mounts{V2: "/sys/fs/cgroup", V1: map[string]string{}}, false},
		{"v1 alone", strings.Split(hybrid, "\n")[2] + "\n", Mounts{}, true},
		{"nothing", "", Mounts{}, true},
		{"garbage", "a - b\n - \nx y z\n", Mounts{}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "mountinfo")
			if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := FindMounts(path)
			if c.fails {
				if !fault.Is(err, fault.Unsupported) {
					t.Errorf("got %+v, %v", got, err)
				}
			} else if err != nil || !reflect.DeepEqual(got, c.want) {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
}

// What a pure v2 host would see: the same calls on folders that stand for it.
func TestLimitsGoWhereTheControllerLives(t *testing.T) {
	dir := t.TempDir()
	v2, v1 := filepath.Join(dir, "v2"), filepath.Join(dir, "v1")
	files := map[string][]string{
		v2 + "/7": {"memory.max", "memory.swap.max", "cpu.max"}, v1 + "/7": {"pids.max"},
	}
	for folder, names := range files {
		os.MkdirAll(folder, 0o755)
		for _, name := range names {
			os.WriteFile(filepath.Join(folder, name), nil, 0o600)
		}
	}
	r := &Root{V2: v2, v1: map[string]string{"pids": v1}, v1dirs: []string{v1}, inV2: map[string]bool{"memory": true, "cpu": true}}
	if err := r.group("7").SetLimits(Limits{MemoryBytes: 1 << 20, Pids: 9, CPUMillis: 1500}); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		v2 + "/7/memory.max": "1048576", v2 + "/7/memory.swap.max": "0", v2 + "/7/cpu.max": "150000", v1 + "/7/pids.max": "10",
	} {
		if got, _ := os.ReadFile(path); string(got) != want {
			t.Errorf("%s holds %q, not %q", path, got, want)
		}
	}
	if err := r.group("8").SetLimits(Limits{Pids: 1}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a limit that can't be written: %v", err)
	}
}

// mustRoot makes a root of a test's own, which must be empty at its end.
func mustRoot(t *testing.T, name string) *Root {
	t.Helper()
	r, err := OpenRoot(fmt.Sprintf("boxwood-test-%d-%s", os.Getpid(), name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Remove(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func TestGroup(t *testing.T) {
	testenv.Require(t, testenv.Root)
	r := mustRoot(t, "group")
	g, err := r.Make("5", 123456, Limits{MemoryBytes: 64 << 20, Pids: 10, CPUMillis: 500})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.KillAll(context.Background()); g.Remove() })
	if found, err := r.Find("5"); err != nil || found.RunID != g.RunID || g.RunID == 0 {
		t.Errorf("found %+v, %v", found, err)
	}
	if names, err := r.Names(); err != nil || !reflect.DeepEqual(names, []string{"5"}) {
		t.Errorf("names %v, %v", names, err)
	}
	leaf, kill, err := OpenLeaf(g.Run)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(leaf)
	defer unix.Close(kill)
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: leaf}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	if pids, err := Pids(g.Dir); err == nil && len(pids) != 0 {
		// Pids looks below, too.
		if pids[0] != cmd.Process.Pid {
			t.Errorf("pids %v", pids)
		}
	} else {
		t.Errorf("pids %v, %v", pids, err)
	}
	if !Populated(g.Run) {
		t.Error("a group with a process isn't populated")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := Freeze(ctx, g.Dir); err != nil {
		t.Fatal(err)
	}
	if err := g.Remove(); err == nil {
		t.Error("a group with a process was removed")
	}
	short, stop := context.WithTimeout(ctx, 30*time.Millisecond)
	defer stop()
	if err := Await(short, g.Dir, "frozen", 0); !fault.Is(err, fault.Deadline) {
		t.Errorf("waiting for what doesn't come: %v", err)
	}
	if err := g.KillAll(ctx); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	for range 2 {
		if err := g.Remove(); err != nil {
			t.Error(err)
		}
	}
}

// A freeze that isn't reached in time is undone: what stayed frozen would stall whoever comes next.
func TestAFreezeThatFailsIsUndone(t *testing.T) {
	testenv.Require(t, testenv.Root)
	r := mustRoot(t, "freeze")
	g, err := r.Make("5", 123456, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.KillAll(context.Background()); g.Remove() })
	leaf, kill, err := OpenLeaf(g.Run)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(leaf)
	defer unix.Close(kill)
	// Too many that run for all of them to stop at once.
	cmd := exec.Command("sh", "-c", "for i in 1 2 3 4 5 6 7; do (while :; do :; done) & done; echo; while :; do :; done")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: leaf}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer g.KillAll(context.Background())
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	late, stop := context.WithDeadline(context.Background(), time.Now().Add(-time.Second))
	defer stop()
	if err := Freeze(late, g.Dir); !fault.Is(err, fault.Deadline) {
		t.Fatalf("freezing without any time: %v", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := Await(ctx, g.Dir, "frozen", 0); err != nil {
		t.Error(err)
	}
	if set, err := os.ReadFile(g.Dir + "/cgroup.freeze"); err != nil || strings.TrimSpace(string(set)) != "0" {
		t.Errorf("the group is told to be %q, %v", set, err)
	}
}

func TestBadName(t *testing.T) {
	for _, name := range []string{"", "/a", "a/../b", "a/", ".."} {
		if _, err := OpenRoot(name); !fault.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", name, err)
		}
	}
}
