package box

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/tree"
)

// waitFor waits until a file is there in the box: a command has come that far.
func waitFor(t *testing.T, b *box, path string) {
	t.Helper()
	root, err := b.Root()
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	await(t, path+" appears", func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/self/fd/%d/%s", root.Fd(), path))
		return err == nil
	})
}

func TestEnvironment(t *testing.T) {
	// As under nohup: what the daemon ignores isn't ignored in a box.
	signal.Ignore(syscall.SIGHUP)
	defer signal.Reset(syscall.SIGHUP)
	h := openHost(t)
	b := startBox(t, h, func(id *Identity) { id.Seed = "42"; id.Generation = "gn_1" })
	for _, c := range []struct {
		name string
		cmd  Command
		code int
		out  string
		err  string
	}{
		{"the whole environment", Command{Argv: []string{"/bin/env"}, Env: []string{"A=1", "B=x y"}}, 0, "A=1\nB=x y\nBOXWOOD_GENERATION=gn_1\nBOXWOOD_SEED=42\n", ""},
		{"own seed", Command{Argv: []string{"/bin/env"}, Env: []string{"BOXWOOD_SEED=7", "BOXWOOD_GENERATION=g"}}, 0, "BOXWOOD_SEED=7\nBOXWOOD_GENERATION=g\n", ""},
		{"default PATH", Command{Argv: []string{"echo", "hi"}, Env: []string{}}, 0, "hi\n", ""},
		{"PATH of the command", Command{Argv: []string{"echo"}, Env: []string{"PATH=/nowhere"}}, 127, "", "echo: command not found"},
		{"cwd", Command{Argv: []string{"pwd"}, Cwd: "/usr"}, 0, "/usr\n", ""},
		{"default cwd", Command{Argv: []string{"pwd"}}, 0, "/\n", ""},
		{"no such cwd", Command{Argv: []string{"pwd"}, Cwd: "/nope"}, 127, "", "/nope: No such file"},
		{"root", Command{Argv: []string{"id"}}, 0, "uid=0(root) gid=0(root) groups=0(root)\n", ""},
		{"user by name", Command{Argv: []string{"id"}, User: "agent"}, 0, "uid=1000(agent) gid=1000(agent) groups=1000(agent),50(staff),77(extra)\n", ""},
		{"user by number", Command{Argv: []string{"id"}, User: "1000"}, 0, "uid=1000(agent) gid=1000(agent) groups=1000(agent),50(staff),77(extra)\n", ""},
		{"uid:gid", Command{Argv: []string{"id"}, User: "1234:50"}, 0, "uid=1234 gid=50(staff) groups=50(staff)\n", ""},
		{"name:group", Command{Argv: []string{"id", "-g"}, User: "agent:staff"}, 0, "50\n", ""},
		{"unknown uid", Command{Argv: []string{"id"}, User: "4242"}, 0, "uid=4242 gid=0(root) groups=0(root)\n", ""},
		{"no such user", Command{Argv: []string{"id"}, User: "nemo"}, 127, "", "nemo: no such user"},
		{"no such group", Command{Argv: []string{"id"}, User: "agent:nemo"}, 127, "", "no such group"},
		{"uid out of range", Command{Argv: []string{"id"}, User: "70000"}, 126, "", "outside the box's"},
		{"umask", Command{Argv: []string{"bash", "-c", "umask"}}, 0, "0022\n", ""},
		{"no open files but three", Command{Argv: []string{"bash", "-c", "echo /proc/$$/fd/*"}}, 0, "", ""},
		{"stdin is empty", Command{Argv: []string{"wc", "-c"}}, 0, "0\n", ""},
		{"stdin", Command{Argv: []string{"cat"}, Stdin: []byte("a\x00b")}, 0, "a\x00b", ""},
		{"signals as usual", Command{Argv: []string{"bash", "-c", "grep -E 'Sig(Blk|Ign)' /proc/self/status"}}, 0, "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n", ""},
		{"own session", Command{Argv: []string{"bash", "-c", "read -r _ _ _ _ pgrp sid _ </proc/self/stat; [ $pgrp = $$ ] && [ $sid = $$ ]"}}, 0, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := run(t, b, c.cmd)
			out := r.out
			if c.name == "no open files but three" {
				if n := len(strings.Fields(out)); n > 4 { // bash has one of its own for the folder
					t.Errorf("%d files are open: %s", n, out)
				}
				out = ""
			}
			if r.Code != c.code || out != c.out || !strings.Contains(r.err, c.err) {
				t.Errorf("got %+v", r)
			}
		})
	}
}

func TestCommandsAreRefusedBeforeTheyStart(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	for name, c := range map[string]Command{
		"no argv":  {},
		"NUL byte": {Argv: []string{"a\x00b"}},
		"too long": {Argv: []string{"true", strings.Repeat("x", 5<<20)}},
	} {
		if _, err := b.Exec(context.Background(), c); !fault.Is(err, fault.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := b.Commands(); n != 0 {
		t.Errorf("%d commands were started", n)
	}
	// Many strings that Linux does take come in several packets.
	argv := []string{"bash", "-c", "echo $#"}
	for range 10_000 {
		argv = append(argv, strings.Repeat("y", 100))
	}
	if r := run(t, b, Command{Argv: argv}); r.out != "9999\n" {
		t.Errorf("got %+v", r.Exit)
	}
	// One string that Linux doesn't take is the command's failure.
	if r := run(t, b, Command{Argv: []string{"true", strings.Repeat("x", 200<<10)}}); r.Code != 126 || !strings.Contains(r.err, "too long") {
		t.Errorf("got %+v", r)
	}
	if n := b.Commands(); n != 2 {
		t.Errorf("%d commands were started, not 2", n)
	}
}

func TestStdinLargerThanPipes(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<17)
	r := run(t, b, Command{Argv: []string{"cat"}, Stdin: data})
	if r.out != string(data) {
		t.Errorf("%d of %d bytes came back, exit %+v", len(r.out), len(data), r.Exit)
	}
	if r := run(t, b, Command{Argv: []string{"true"}, Stdin: data}); r.Code != 0 {
		t.Errorf("a command that doesn't read: %+v", r.Exit)
	}
	if r := run(t, b, Command{Argv: []string{"bash", "-c", "exec <&-; echo closed"}, Stdin: data}); r.out != "closed\n" {
		t.Errorf("a command that closes its stdin: %+v", r)
	}
}

func TestHundredMegabytes(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	const size = 100 << 20
	sum, n := sha256.New(), 0
	e, err := b.Exec(context.Background(), Command{
		Argv:   []string{"bash", "-c", "yes 'a line of output' | head -c 104857600"},
		Env:    []string{"PATH=/bin"},
		Stdout: func(p []byte) { sum.Write(p); n += len(p) },
	})
	if err != nil || e.Code != 0 || n != size {
		t.Fatalf("%+v, %v, %d bytes", e, err, n)
	}
	want := sha256.New()
	io.CopyN(want, repeat("a line of output\n"), size)
	if !bytes.Equal(sum.Sum(nil), want.Sum(nil)) {
		t.Error("the output changed on its way")
	}
}

type repeat string

func (r repeat) Read(p []byte) (int, error) {
	n := 0
	for len(p)-n >= len(r) {
		n += copy(p[n:], r)
	}
	if n == 0 {
		n = copy(p, r[:min(len(r), len(p))])
	}
	return n, nil
}

func TestClosedOutputDoesNotEndACommand(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	r := bash(t, b, "exec >&- 2>&-; cat /etc/passwd >/tmp/copy; exit 3")
	if r.Code != 3 || must(t, b, "wc -l </tmp/copy") != "3" {
		t.Errorf("got %+v", r)
	}
}

// A command is over when its main process is, although a survivor holds its
// stdout; the survivor may go on writing.
func TestSurvivor(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	r := bash(t, b, `(while :; do echo noise; [ -e /tmp/stop ] && break; sleep 0.01; done; touch /tmp/stopped) & echo done`)
	if r.Code != 0 || !strings.HasPrefix(strings.ReplaceAll(r.out, "noise\n", ""), "done\n") {
		t.Fatalf("got %+v", r)
	}
	procs, err := b.Survivors()
	noisy := slices.IndexFunc(procs, func(p Proc) bool { return bytes.Contains(p.Cmdline, []byte("noise")) }) // maybe with a sleep of its own
	if err != nil || noisy < 0 || procs[noisy].PID <= 1 || procs[noisy].HostPID == procs[noisy].PID {
		t.Fatalf("survivors %+v, %v", procs, err)
	}
	if err := b.BeginTurn(); err != nil {
		t.Fatal(err)
	}
	if r := bash(t, b, "touch /tmp/stop; echo quiet"); r.out != "quiet\n" {
		t.Errorf("a survivor's output came with a later command's: %q", r.out)
	}
	waitFor(t, b, "tmp/stopped")
}

func TestKillTurnSparesEarlierSurvivors(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	ctx := context.Background()
	names := func() string {
		procs, err := b.Survivors()
		if err != nil {
			t.Fatal(err)
		}
		var all []string
		for _, p := range procs {
			argv := strings.Split(string(p.Cmdline)+"\x00?", "\x00") // on its way to exec
			all = append(all, argv[1])
		}
		return strings.Join(all, " ")
	}
	for turn, c := range []struct {
		script, before, after string
		kill                  bool
	}{
		{"setsid sleep 1001 & ", "1001", "1001", false},
		{"setsid sleep 1002 & (setsid sleep 1003 &) ", "1001 1002 1003", "1001", true},
		{"setsid sleep 1004 & ", "1001 1004", "1001 1004", false},
		{"setsid sleep 1005 & ", "1001 1004 1005", "1001 1004", true},
		{"kill $(pgrep sleep || grep -l sleep /proc/[0-9]*/comm | cut -d/ -f3) ", "", "", false},
		{"setsid sleep 1006 & ", "1006", "", true},
	} {
		if err := b.BeginTurn(); err != nil {
			t.Fatal(err)
		}
		if r := bash(t, b, c.script); r.Lost || r.Signal != 0 {
			t.Fatalf("turn %d: %+v", turn, r)
		}
		await(t, fmt.Sprintf("turn %d: survivors are %q", turn, c.before), func() bool { return sorted(names()) == c.before })
		if !c.kill {
			continue
		}
		if err := b.KillTurn(ctx); err != nil {
			t.Fatal(err)
		}
		if got := sorted(names()); got != c.after {
			t.Errorf("turn %d: %q survive its end, not %q", turn, got, c.after)
		}
	}
	if err := b.BeginTurn(); err != nil {
		t.Fatal(err)
	}
	entries, _ := os.ReadDir(b.group.Run)
	for _, e := range entries {
		if dir, _ := b.turnLeaf(); e.IsDir() && b.group.Run+"/"+e.Name() != dir {
			t.Errorf("the leaf %s is left though nothing survives", e.Name())
		}
	}
}

func sorted(words string) string {
	f := strings.Fields(words)
	for i := range f {
		for j := i; j > 0 && f[j] < f[j-1]; j-- {
			f[j], f[j-1] = f[j-1], f[j]
		}
	}
	return strings.Join(f, " ")
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond) // what is waited for needs the processor
	defer tick.Stop()
	for late := time.After(time.Minute); !ok(); {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("never: %s", what)
		}
	}
}

func TestDeadlineAndCancel(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	const script = "trap '' TERM INT; (setsid sleep 1000 &) ; echo started; while :; do sleep 1; done"
	testenv.Reach(t, 200*time.Millisecond, func(within time.Duration) bool {
		r := run(t, b, Command{Argv: []string{"bash", "-c", script}, Deadline: time.Now().Add(within)})
		if !r.TimedOut || r.Cancelled || r.Signal != 9 && r.out != "" || r.Code != -1 {
			t.Fatalf("deadline: %+v", r)
		}
		return r.out == "started\n"
	})
	if procs, _ := b.Survivors(); len(procs) > 0 {
		t.Errorf("survivors of a deadline: %+v", procs)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		waitFor(t, b, "tmp/go")
		cancel()
	}()
	r := execCtx(t, ctx, b, Command{Argv: []string{"bash", "-c", "touch /tmp/go; " + script}})
	if !r.Cancelled || r.TimedOut || r.Signal != 9 {
		t.Errorf("cancel: %+v", r)
	}
	if procs, _ := b.Survivors(); len(procs) > 0 {
		t.Errorf("survivors of a cancel: %+v", procs)
	}
	if r := execCtx(t, ctx, b, Command{Argv: []string{"true"}}); !r.Cancelled {
		t.Errorf("cancelled before: %+v", r.Exit)
	}
	r = run(t, b, Command{Argv: []string{"true"}, Deadline: time.Now().Add(-time.Second)})
	if !r.TimedOut {
		t.Errorf("deadline passed before: %+v", r.Exit)
	}
	if must(t, b, "echo fine") != "fine" {
		t.Error("the box is of no use after a deadline")
	}
}

// A cancel or a deadline that comes at any moment of a command ends it once.
func TestCancelAtAnyMoment(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	for i := range 150 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*20*time.Microsecond)
		r := execCtx(t, ctx, b, Command{Argv: []string{"sleep", "100"}})
		cancel()
		if !r.Cancelled || r.Lost {
			t.Fatalf("after %d: %+v", i, r)
		}
	}
	if procs, _ := b.Survivors(); len(procs) > 0 {
		t.Errorf("survivors: %+v", procs)
	}
}

func TestOneCommandAtATime(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	first := make(chan result, 1)
	go func() {
		first <- bash(t, b, "touch /tmp/go; cat /tmp/fifo 2>/dev/null; while [ ! -e /tmp/stop ]; do sleep 0.01; done")
	}()
	waitFor(t, b, "tmp/go")
	if _, err := b.Exec(context.Background(), Command{Argv: []string{"true"}}); !fault.Is(err, fault.Busy) {
		t.Errorf("a second command: %v", err)
	}
	if err := b.WriteFile(context.Background(), "/tmp/stop", nil, 0, false); !fault.Is(err, fault.Busy) {
		t.Errorf("a transfer beside a command: %v", err)
	}
	if err := b.KillTurn(context.Background()); err != nil {
		t.Error(err)
	}
	if r := <-first; r.Signal != 9 {
		t.Errorf("the first: %+v", r)
	}
}

func TestForkBombMeetsItsLimit(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h, func(id *Identity) { id.Limits.Pids = 40 })
	r := run(t, b, Command{Argv: []string{"bash", "-c", "f() { f | f & }; f; sleep 100"}, Env: []string{"PATH=/bin"}, Deadline: time.Now().Add(2 * time.Second)})
	if r.Lost {
		t.Fatalf("got %+v", r.Exit)
	}
	if err := b.KillTurn(context.Background()); err != nil {
		t.Fatal(err)
	}
	if must(t, b, "echo fine") != "fine" {
		t.Error("the box is of no use after a fork bomb")
	}
	if err := b.BeginTurn(); err != nil {
		t.Fatal(err)
	}
	// No process is left to start one more: the command fails like in a shell.
	bash(t, b, "sleep 1000 &")
	if err := b.group.SetLimits(cgroup.Limits{Pids: 1}); err != nil {
		t.Fatal(err)
	}
	if r := bash(t, b, "true"); r.Code != 126 || !strings.Contains(r.err, "can't start a process") {
		t.Errorf("one too many: %+v", r)
	}
}

func TestMemoryBomb(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h, func(id *Identity) { id.Limits = tree.Limits{MemoryBytes: 48 << 20} })
	r := bash(t, b, `exec tail -c 300M < <(exec yes)`)
	if !r.OOMKilled || r.Signal != 9 || r.Lost {
		t.Errorf("got %+v", r.Exit)
	}
	if r := bash(t, b, "echo fine"); r.OOMKilled || r.out != "fine\n" {
		t.Errorf("afterwards: %+v", r)
	}
}

func TestPID1IsOutOfReach(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h, nesting) // which gives most to whoever attacks
	for _, script := range []string{
		"kill -9 1", "kill -STOP 1", "kill -TERM 1", "kill -SEGV 1", "kill -CHLD 1; kill -PIPE 1",
		"kill -9 -1", // everything that can be killed, itself spared
		"exec 3</proc/1/mem", "ls /proc/1/fd/", "cat /proc/1/environ", "readlink /proc/1/exe", "cd /proc/1/root && ls",
		"prlimit --pid 1 --nofile=1:1", "prlimit --pid 1 --cpu=1:1",
		"unshare -Urm bash -c 'kill -9 1; cat /proc/1/mem'",
	} {
		bash(t, b, script+" 2>/dev/null")
	}
	for _, script := range []string{"exec 3</proc/1/mem", "ls /proc/1/fd/", "readlink /proc/1/exe", "prlimit --pid 1 --nofile=1:1", "unshare -Ur cat /proc/1/environ"} {
		if r := bash(t, b, script); r.Code == 0 {
			t.Errorf("%s succeeded: %q", script, r.out)
		}
	}
	if got := must(t, b, "echo fine"); got != "fine" {
		t.Errorf("pid 1 answers %q", got)
	}
	select {
	case <-b.Done():
		t.Error("pid 1 is gone")
	default:
	}
}

func TestExecOfAKilledBoxIsLost(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	got := make(chan result, 1)
	go func() { got <- bash(t, b, "touch /tmp/go; sleep 1000") }()
	waitFor(t, b, "tmp/go")
	mustKill(t, b)
	if r := <-got; !r.Lost || r.Code != -1 {
		t.Errorf("got %+v", r.Exit)
	}
	if _, err := b.Exec(context.Background(), Command{Argv: []string{"true"}}); !fault.Is(err, fault.NotFound) {
		t.Errorf("a command for a dead box: %v", err)
	}
	if _, err := b.Root(); err == nil {
		t.Error("a dead box has a root")
	}
}

func TestFreeze(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	bash(t, b, "(while :; do echo x >>/tmp/ticks; sleep 0.001; done) & ")
	waitFor(t, b, "tmp/ticks")
	ctx := context.Background()
	for range 2 {
		if err := b.Freeze(ctx); err != nil {
			t.Fatal(err)
		}
	}
	root, err := b.Root()
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	size := func() int64 {
		st, err := os.Stat(fmt.Sprintf("/proc/self/fd/%d/tmp/ticks", root.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		return st.Size()
	}
	frozen := size()
	for start := time.Now(); time.Since(start) < 20*time.Millisecond; {
		if size() != frozen {
			t.Fatal("a frozen box writes")
		}
	}
	if err := b.Thaw(); err != nil {
		t.Fatal(err)
	}
	await(t, "it writes again", func() bool { return size() > frozen })
	// A frozen box can be killed.
	if err := b.Freeze(ctx); err != nil {
		t.Fatal(err)
	}
	mustKill(t, b)
	gone, cancel := context.WithCancel(ctx)
	cancel()
	if err := cgroup.Await(gone, h.root.V2, "frozen", 1); !fault.Is(err, fault.Cancelled) || !errors.Is(err, context.Canceled) {
		t.Errorf("waiting without time: %v", err)
	}
}
