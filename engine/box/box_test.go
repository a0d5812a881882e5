package box

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/leakcheck"
	"github.com/boxwood-rl/boxwood/internal/miniroot"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/tree"
)

var testGroup = fmt.Sprintf("boxwood-test-%d", os.Getpid())

func TestMain(m *testing.M) {
	if os.Getenv("BOXWOOD_TEST_DAEMON") != "" {
		os.Exit(daemonMain())
	}
	if os.Getenv("BOXWOOD_TEST_HOSTILE") != "" {
		os.Exit(hostile())
	}
	code := leakcheck.Main(m, testGroup)
	if root, err := cgroup.OpenRoot(testGroup); err == nil {
		root.Remove()
	}
	os.Exit(code)
}

// hostGroups numbers the hosts of this process: each has its own cgroup.
var hostGroups int

// openHost makes a host whose boxes and groups are gone at the end of the test.
func openHost(t testing.TB, change ...func(*Config)) *Host {
	t.Helper()
	testenv.Require(t, testenv.Root)
	hostGroups++
	cfg := Config{RunDir: tempDir(t), Zygotes: 1, CgroupRoot: fmt.Sprintf("%s/%d", testGroup, hostGroups),
		Limits: tree.Limits{MemoryBytes: 512 << 20, Pids: 256}}
	for _, f := range change {
		f(&cfg)
	}
	h, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.Close()
		again, err := Open(Config{RunDir: cfg.RunDir, CgroupRoot: cfg.CgroupRoot})
		if err != nil {
			t.Error(err)
			return
		}
		if n, err := again.Sweep(context.Background()); err != nil {
			t.Errorf("sweeping %d boxes: %v", n, err)
		}
		again.Close()
		if err := again.root.Remove(); err != nil {
			t.Error(err)
		}
		root, err := cgroup.OpenRoot(testGroup)
		if err == nil {
			root.Remove()
		}
	})
	return h
}

// tempDir is on a tmpfs for benchmarks, as /run is on most hosts: the cost of
// making a file on a disk's file system is not ours to measure.
func tempDir(t testing.TB) string {
	t.Helper()
	if _, bench := t.(*testing.B); !bench {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp("/dev/shm", "boxwood-bench-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// newRoot makes an empty upper above the small root.
func newRoot(t testing.TB) Root {
	t.Helper()
	dir := tempDir(t)
	r := Root{Lower: []string{miniroot.Make(t)}, Upper: filepath.Join(dir, "upper"), Work: filepath.Join(dir, "work")}
	for _, d := range []string{r.Upper, r.Work} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

var testIdentity = Identity{Hostname: "oak", MachineID: "0123456789abcdef0123456789abcdef"}

func startBox(t testing.TB, h *Host, change ...func(*Identity)) *box {
	t.Helper()
	id := testIdentity
	for _, f := range change {
		f(&id)
	}
	b, err := h.Start(context.Background(), newRoot(t), id)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mustKill(t, b) })
	return b.(*box)
}

func mustKill(t testing.TB, b Box) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := b.Kill(ctx); err != nil {
		t.Error(err)
	}
}

// result is an Exit with the output.
type result struct {
	Exit
	out, err string
}

func run(t testing.TB, b Box, c Command) result {
	t.Helper()
	return execCtx(t, context.Background(), b, c)
}

func execCtx(t testing.TB, ctx context.Context, b Box, c Command) result {
	t.Helper()
	var out, errs bytes.Buffer
	c.Stdout = func(p []byte) { out.Write(p) }
	c.Stderr = func(p []byte) { errs.Write(p) }
	if c.Env == nil {
		c.Env = []string{"PATH=/bin", "HOME=/root"}
	}
	if c.Deadline.IsZero() {
		c.Deadline = time.Now().Add(time.Minute)
	}
	e, err := b.Exec(ctx, c)
	if err != nil {
		t.Fatalf("exec %q: %v", c.Argv, err)
	}
	return result{e, out.String(), errs.String()}
}

func bash(t testing.TB, b Box, script string) result {
	t.Helper()
	return run(t, b, Command{Argv: []string{"bash", "-c", script}})
}

// must runs a script that succeeds, and gives its output without the last newline.
func must(t testing.TB, b Box, script string) string {
	t.Helper()
	r := bash(t, b, script)
	if r.Code != 0 {
		t.Fatalf("%s: exit %+v\n%s%s", script, r.Exit, r.out, r.err)
	}
	return strings.TrimSuffix(r.out, "\n")
}

func TestExitStatus(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	for _, c := range []struct {
		name   string
		argv   []string
		code   int
		signal int
		out    string
		err    string // a part of it
	}{
		{"success", []string{"true"}, 0, 0, "", ""},
		{"failure", []string{"false"}, 1, 0, "", ""},
		{"code", []string{"bash", "-c", "exit 77"}, 77, 0, "", ""},
		{"signal", []string{"bash", "-c", "kill -TERM $$"}, -1, 15, "", ""},
		{"abort", []string{"bash", "-c", "kill -ABRT $$"}, -1, 6, "", ""},
		{"apart", []string{"bash", "-c", "echo out; echo err >&2"}, 0, 0, "out\n", "err\n"},
		{"not found", []string{"no-such-program"}, 127, 0, "", "no-such-program: command not found"},
		{"no such path", []string{"/no/such"}, 127, 0, "", "/no/such: No such file"},
		{"empty name", []string{""}, 127, 0, "", "command not found"},
		{"not executable", []string{"/etc/passwd"}, 126, 0, "", "/etc/passwd: Permission denied"},
		{"a folder", []string{"/etc"}, 126, 0, "", "Permission denied"},
		{"binary output", []string{"bash", "-c", `printf '\xff\xfe\0\x80'`}, 0, 0, "\xff\xfe\x00\x80", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := run(t, b, Command{Argv: c.argv})
			if r.Code != c.code || r.Signal != c.signal || r.out != c.out || !strings.Contains(r.err, c.err) {
				t.Errorf("got %+v", r)
			}
			if r.Lost || r.TimedOut || r.Cancelled || r.OOMKilled {
				t.Errorf("marked: %+v", r.Exit)
			}
		})
	}
}
