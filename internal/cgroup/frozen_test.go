package cgroup

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/testenv"
)

const writerEnv = "BOXWOOD_TEST_WRITER"

// A child with writerEnv is always in the middle of a system call that no freeze ends: it writes 32 MiB into descriptor 9, again and
// again. The first byte of each page is the number of the write.
func init() {
	if os.Getenv(writerEnv) == "" {
		return
	}
	fd, err := unix.MemfdCreate("written", 0)
	if err == nil {
		err = unix.Dup3(fd, 9, 0)
	}
	bytes := make([]byte, writerBytes)
	for i := byte(0); err == nil; i++ {
		for at := 0; at < len(bytes); at += 4096 {
			bytes[at] = i
		}
		_, err = unix.Pwrite(9, bytes, 0)
		if i == 1 {
			fmt.Println("ready")
		}
	}
	panic(err)
}

const writerBytes = 32 << 20

// writes reports whether a writer's system call is in its middle.
func writes(t *testing.T, pid int) bool {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/fd/9", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var first, last [1]byte
	if _, err := f.ReadAt(first[:], 0); err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadAt(last[:], writerBytes-4096); err != nil {
		t.Fatal(err)
	}
	return first != last
}

// What Freeze calls frozen doesn't run, wherever in a tree of groups it is. If it fails, halves of a checkpoint are of two instants.
func TestWhatIsFrozenStandsStill(t *testing.T) {
	testenv.Require(t, testenv.Root)
	for _, c := range []struct {
		name                 string
		writes, sleeps, none string // groups of these below the one that is frozen
	}{
		{"in a group with an empty one below", "run", "", "run/2"},
		{"in the group itself, with an empty one below", "", "run", "run/2"},
		{"below a group that sleeps", "run/2", "", "run/3"},
		{"below two that sleep", "run/2", "run", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := mustRoot(t, "frozen")
			g, err := r.Make("5", 123456, Limits{})
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{c.writes, c.sleeps, c.none} {
				if dir := filepath.Join(g.Dir, name); !exists(dir) {
					if err := MakeLeaf(dir, 123456); err != nil {
						t.Fatal(err)
					}
				}
			}
			t.Cleanup(func() {
				if err := g.Remove(); err != nil {
					t.Error(err)
				}
			})
			start := func(in string, cmd *exec.Cmd) {
				dir, err := unix.Open(filepath.Join(g.Dir, in), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
				if err != nil {
					t.Fatal(err)
				}
				defer unix.Close(dir)
				cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: dir}
				out, err := cmd.StdoutPipe()
				if err == nil {
					err = cmd.Start()
				}
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					g.KillAll(context.Background())
					cmd.Wait()
				})
				if _, err := out.Read(make([]byte, 1)); err != nil {
					t.Fatal(err)
				}
			}
			start(c.sleeps, exec.Command("sh", "-c", "echo; exec sleep 1000"))
			writer := exec.Command("/proc/self/exe")
			writer.Env = append(os.Environ(), writerEnv+"=1")
			start(c.writes, writer)
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			for range 8 {
				for ctx.Err() == nil && !writes(t, writer.Process.Pid) {
					runtime.Gosched()
				}
				if err := Freeze(ctx, g.Dir); err != nil {
					t.Fatal(err)
				}
				if writes(t, writer.Process.Pid) {
					t.Fatal("it is called frozen, and writes")
				}
				for _, dir := range g.Dirs()[:2] {
					if set, err := os.ReadFile(dir + "/cgroup.freeze"); err != nil || (string(set) == "1\n") != (dir == g.Dir) {
						t.Fatalf("%s is told %q, %v: one word to the top is to thaw all", dir, set, err)
					}
				}
				if err := Thaw(g.Dir); err != nil {
					t.Fatal(err)
				}
				for _, dir := range g.Dirs()[:2] {
					if err := Await(ctx, dir, "frozen", 0); err != nil {
						t.Fatal(err)
					}
				}
			}
		})
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
