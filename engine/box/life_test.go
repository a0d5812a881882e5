package box

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	osexec "os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/fault"
)

// traces lists what a slot has on the host.
func traces(h *Host, slot int) []string {
	var left []string
	g := h.root.Leftover(fmt.Sprint(slot))
	for _, path := range append([]string{g.Dir, h.controlDir(slot)}, v1Dirs(h, slot)...) {
		if _, err := os.Lstat(path); err == nil {
			left = append(left, path)
		}
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/uid_map")
	for _, path := range procs {
		if text, err := os.ReadFile(path); err == nil && slices.Contains(strings.Fields(string(text)), fmt.Sprint(idBase(slot))) {
			if cg, err := os.ReadFile(filepath.Dir(path) + "/cgroup"); err == nil && strings.Contains(string(cg), testGroup) {
				left = append(left, path)
			}
		}
	}
	return left
}

func v1Dirs(h *Host, slot int) []string {
	mounts, _ := cgroup.FindMounts("/proc/self/mountinfo")
	var dirs []string
	for _, point := range mounts.V1 {
		dirs = append(dirs, filepath.Join(point, h.cfg.CgroupRoot, fmt.Sprint(slot)))
	}
	return dirs
}

func TestKillLeavesNothing(t *testing.T) {
	var mu sync.Mutex
	var told []string
	h := openHost(t, func(c *Config) {
		c.OnBox = func(id uint64, gone bool) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, fmt.Sprint(id, gone))
		}
	})
	root := newRoot(t)
	id := testIdentity
	nesting(&id)
	kept, err := h.Start(context.Background(), root, id)
	if err != nil {
		t.Fatal(err)
	}
	b := kept.(*box)
	must(t, b, "setsid sleep 1000 & (trap '' TERM; exec setsid sleep 1001) & unshare -Urmpf sleep 1002 & cd /tmp; exec 5>open; setsid sleep 1003 &")
	if err := b.BeginTurn(); err != nil {
		t.Fatal(err)
	}
	must(t, b, "setsid sleep 1004 &")
	if len(traces(h, b.rec.Slot)) == 0 {
		t.Fatal("a live box leaves no traces: this test looks in the wrong place")
	}
	var group sync.WaitGroup
	for range 3 { // idempotent, also at once
		group.Go(func() { mustKill(t, b) })
	}
	group.Wait()
	if left := traces(h, b.rec.Slot); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
	// The overlay is gone with its last mount: its folders can be used anew.
	again, err := h.Start(context.Background(), Root{Lower: root.Lower, Upper: root.Upper, Work: freshWork(t, root)}, testIdentity)
	if err != nil {
		t.Fatal(err)
	}
	mustKill(t, again)
	mu.Lock()
	defer mu.Unlock()
	run := b.RunCgroup()
	if want := []string{fmt.Sprint(run, false), fmt.Sprint(run, true)}; !slices.Equal(told[:2], want) {
		t.Errorf("OnBox was told %v, not %v", told, want)
	}
}

func freshWork(t *testing.T, r Root) string {
	t.Helper()
	os.RemoveAll(r.Work)
	if err := os.Mkdir(r.Work, 0o755); err != nil {
		t.Fatal(err)
	}
	return r.Work
}

// If it fails, each start that is refused holds memory of the host for good, or takes from another daemon's boxes what they need.
func TestAHostThatDoesNotOpenChangesNothing(t *testing.T) {
	h := openHost(t)
	names := func(dir string) (found []string) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			info, err := e.Info()
			if err != nil {
				t.Fatal(err)
			}
			found = append(found, fmt.Sprint(e.Name(), " ", info.ModTime()))
		}
		return found
	}
	programs := func() []string {
		return slices.DeleteFunc(names(h.control), func(n string) bool { return !strings.HasPrefix(n, programName) })
	}
	was := programs()
	if _, err := Open(h.cfg); !fault.Is(err, fault.Precondition) || len(was) != 2 {
		t.Fatalf("a second host beside %q: %v", was, err)
	}
	if now := programs(); !slices.Equal(now, was) {
		t.Errorf("a second host that was refused made %q of %q", now, was)
	}
	cfg := h.cfg
	cfg.RunDir, cfg.CgroupRoot, cfg.Share = t.TempDir(), cfg.CgroupRoot+"-refused", cgroup.Share{Cores: "1000"}
	if _, err := Open(cfg); err == nil || fault.As(err).Reason != "bad_cores" {
		t.Fatal(err)
	}
	if left := names(cfg.RunDir); len(left) > 0 {
		t.Errorf("a host that was refused left %q", left)
	}
	if groups, err := filepath.Glob("/sys/fs/cgroup/*/" + cfg.CgroupRoot); err != nil || len(groups) > 0 {
		t.Errorf("a host that was refused left %q, %v", groups, err)
	}
}

func TestManyAtOnce(t *testing.T) {
	h := openHost(t, func(c *Config) { c.Zygotes = 4 })
	var group sync.WaitGroup
	for i := range 24 {
		root := newRoot(t)
		group.Go(func() {
			id := testIdentity
			id.Hostname = fmt.Sprintf("box-%d", i)
			b, err := h.Start(context.Background(), root, id)
			if err != nil {
				t.Error(err)
				return
			}
			if r := bash(t, b, "hostname; sleep 100 & echo $i >/tmp/mine; ls /tmp"); r.out != id.Hostname+"\nmine\n" {
				t.Errorf("got %+v", r)
			}
			mustKill(t, b)
		})
	}
	group.Wait()
}

func TestPoolRefills(t *testing.T) {
	h := openHost(t, func(c *Config) { c.Zygotes = 3 })
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for range 3 {
		if err := h.WaitReady(ctx, 3); err != nil {
			t.Fatal(err)
		}
		startBox(t, h)
	}
	if err := h.WaitReady(ctx, 3); err != nil {
		t.Fatal(err)
	}
	// A zygote that somebody kills isn't handed out.
	h.mu.Lock()
	unix.PidfdSendSignal(h.ready[0].pidfd, unix.SIGKILL, nil, 0)
	dead := h.ready[0]
	h.mu.Unlock()
	if err := awaitExit(ctx, dead.pidfd); err != nil {
		t.Fatal(err)
	}
	if b := startBox(t, h); b.rec.Slot == dead.slot {
		t.Error("a dead zygote became a box")
	}
	h.Close()
	if _, err := h.Start(ctx, newRoot(t), testIdentity); !fault.Is(err, fault.Unavailable) {
		t.Errorf("start on a closed host: %v", err)
	}
}

// daemon is the test program as a daemon that starts a box, says so and waits to be killed.
func daemonMain() int {
	f := strings.Split(os.Getenv("BOXWOOD_TEST_DAEMON"), "|")
	wire, _ := strconv.Atoi(os.Getenv("BOXWOOD_TEST_WIRE"))
	h, err := Open(Config{RunDir: f[0], CgroupRoot: f[1], Zygotes: 2, wire: wire})
	if err != nil {
		fmt.Println("error", err)
		return 1
	}
	ctx := context.Background()
	b, err := h.Start(ctx, Root{Lower: []string{f[2]}, Upper: f[3], Work: f[4]}, testIdentity)
	if err == nil {
		_, err = b.Exec(ctx, Command{Argv: []string{"/bin/bash", "-c", "/bin/setsid /bin/sleep 1001 &"}})
	}
	if err == nil {
		err = b.BeginTurn()
	}
	if err == nil {
		err = h.WaitReady(ctx, 2)
	}
	if err != nil {
		fmt.Println("error", err)
		return 1
	}
	if os.Getenv("BOXWOOD_TEST_WINDOW") != "" {
		if err := errors.Join(b.Part(ctx, nil), b.Freeze(ctx)); err != nil {
			fmt.Println("error", err)
			return 1
		}
		os.MkdirAll(filepath.Join(f[3], "tmp"), 0o755)
		os.WriteFile(filepath.Join(f[3], "tmp/running"), nil, 0o600)
		fmt.Println(base64.StdEncoding.EncodeToString(b.Record()))
		select {}
	}
	fmt.Println(base64.StdEncoding.EncodeToString(b.Record()))
	b.Exec(ctx, Command{Argv: []string{"/bin/bash", "-c", "/bin/setsid /bin/sleep 1002 & >/tmp/running; while :; do echo noise; done"}})
	return 0
}

// startDaemon runs one on a root until its last command runs; it returns the record.
func startDaemon(t *testing.T, runDir, group string, root Root) (*osexec.Cmd, []byte) {
	t.Helper()
	cmd := osexec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "BOXWOOD_TEST_DAEMON="+strings.Join([]string{runDir, group, root.Lower[0], root.Upper, root.Work}, "|"))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	record, derr := base64.StdEncoding.DecodeString(strings.TrimSpace(line))
	if err := errors.Join(err, derr); err != nil {
		t.Fatalf("the daemon says %q: %v", line, err)
	}
	await(t, "its command runs", func() bool { _, err := os.Stat(filepath.Join(root.Upper, "tmp/running")); return err == nil })
	return cmd, record
}

// A daemon is killed in the middle of a turn: zygotes and what the turn started
// die, the box and survivors of earlier turns are found again.
func TestAdopt(t *testing.T) {
	h := openHost(t) // for its clean-up
	root := newRoot(t)
	cmd, rec := startDaemon(t, h.cfg.RunDir, h.cfg.CgroupRoot+"x", root)
	t.Cleanup(func() { removeGroups(t, h.cfg.RunDir, h.cfg.CgroupRoot+"x") })
	cmd.Process.Kill()
	cmd.Wait()

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	h2, err := Open(Config{RunDir: h.cfg.RunDir, CgroupRoot: h.cfg.CgroupRoot + "x"})
	if err != nil {
		t.Fatal(err)
	}
	defer h2.Close()
	adopted, err := h2.Adopt(ctx, rec)
	if err != nil {
		t.Fatal(err)
	}
	b := adopted.(*box)
	defer mustKill(t, b)
	if n := b.Commands(); n != 2 {
		t.Errorf("pid 1 has started %d commands, not 2", n)
	}
	procs, err := b.Survivors()
	if err != nil || len(procs) != 1 || !strings.Contains(string(procs[0].Cmdline), "1001") {
		t.Errorf("survivors: %+v, %v", procs, err)
	}
	if got := must(t, b, "ls /tmp; hostname"); got != "running\noak" {
		t.Errorf("got %q", got)
	}
	if _, err := h2.Adopt(ctx, rec); !fault.Is(err, fault.Precondition) {
		t.Errorf("adopting twice: %v", err)
	}
	if b.RunCgroup() == 0 {
		t.Error("no cgroup id")
	}
	slots, err := h2.leftovers()
	if err != nil || len(slots) < 2 {
		t.Errorf("the zygotes of the killed daemon left %v, %v", slots, err)
	}
	n, err := h2.Sweep(ctx)
	if err != nil || n != len(slots)-1 {
		t.Errorf("swept %d of %d: %v", n, len(slots), err)
	}
	if slots, _ := h2.leftovers(); len(slots) != 1 || slots[0] != b.rec.Slot {
		t.Errorf("after the sweep: %v", slots)
	}
	if must(t, b, "echo fine") != "fine" {
		t.Error("the sweep hurt an adopted box")
	}
	mustKill(t, b)
	if _, err := h2.Adopt(ctx, rec); !fault.Is(err, fault.NotFound) {
		t.Errorf("adopting a dead box: %v", err)
	}
}

// If it fails, a daemon that was replaced by another release leaves boxes that nobody understands or ends, or the new one
// ends those that it could have kept.
func TestBoxesOfOtherReleases(t *testing.T) {
	for _, c := range []struct {
		name    string
		wire    int
		silent  bool // its record says no version
		adopted bool
	}{
		{"the previous", wireNow - 1, false, true},
		{"one of before there were versions", 1, true, true},
		{"a newer", wireNow + 1, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := openHost(t)
			root, group := newRoot(t), h.cfg.CgroupRoot+"x"
			t.Setenv("BOXWOOD_TEST_WIRE", strconv.Itoa(c.wire))
			cmd, rec := startDaemon(t, h.cfg.RunDir, group, root)
			t.Cleanup(func() { removeGroups(t, h.cfg.RunDir, group) })
			cmd.Process.Kill()
			cmd.Wait()
			if said := fmt.Sprintf(`,"wire":%d`, c.wire); !strings.Contains(string(rec), said) {
				t.Fatalf("the record %s doesn't say %s", rec, said)
			} else if c.silent {
				rec = []byte(strings.Replace(string(rec), said, "", 1))
			}
			h2, err := Open(Config{RunDir: h.cfg.RunDir, CgroupRoot: group})
			if err != nil {
				t.Fatal(err)
			}
			defer h2.Close()
			ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
			defer cancel()
			b, err := h2.Adopt(ctx, rec)
			if c.adopted {
				if err != nil {
					t.Fatal(err)
				}
				if got := must(t, b, "ls /tmp; hostname"); got != "running\noak" {
					t.Errorf("adopted, it says %q", got)
				}
				mustKill(t, b)
			} else if fault.As(err) == nil || fault.As(err).Reason != "other_protocol" {
				t.Fatalf("adopting it gives %v", err)
			}
			if _, err := h2.Sweep(ctx); err != nil {
				t.Fatal(err)
			}
			if slots, err := h2.leftovers(); err != nil || len(slots) != 0 {
				t.Errorf("swept, there are still %v, %v", slots, err)
			}
		})
	}
}

// What nobody adopts is swept away, live boxes and their processes included.
func TestSweep(t *testing.T) {
	h := openHost(t)
	root := newRoot(t)
	group := h.cfg.CgroupRoot + "x"
	cmd, _ := startDaemon(t, h.cfg.RunDir, group, root)
	t.Cleanup(func() { removeGroups(t, h.cfg.RunDir, group) })
	cmd.Process.Kill()
	cmd.Wait()
	h2, err := Open(Config{RunDir: h.cfg.RunDir, CgroupRoot: group, Zygotes: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer h2.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := h2.WaitReady(ctx, 1); err != nil { // in a slot of its own
		t.Fatal(err)
	}
	if n, err := h2.Sweep(ctx); err != nil || n < 3 {
		t.Errorf("swept %d, %v", n, err)
	}
	if slots, err := h2.leftovers(); err != nil || len(slots) != 1 {
		t.Errorf("left: %v, %v", slots, err)
	}
	if h2.Ready() != 1 {
		t.Error("the sweep took a zygote of the new host")
	}
}

// removeGroups sweeps what a test's second daemon and host have left.
func removeGroups(t *testing.T, runDir, name string) {
	t.Helper()
	h, err := Open(Config{RunDir: runDir, CgroupRoot: name})
	if err != nil {
		t.Error(err)
		return
	}
	_, err = h.Sweep(context.Background())
	h.Close()
	if err := errors.Join(err, h.root.Remove()); err != nil {
		t.Error(err)
	}
}

// A turn that kills what survived leaves nothing, although the killed process
// takes a moment to be gone: it runs no more of its program.
func TestKilledSurvivorIsNone(t *testing.T) {
	b := startBox(t, openHost(t))
	for range 4 {
		if err := b.BeginTurn(); err != nil {
			t.Fatal(err)
		}
		// Much memory makes its end slow.
		run(t, b, Command{Argv: []string{"bash", "-c", "x=$(head -c 10000000 /dev/zero | tr '\\0' x); while :; do read -t 1000 </dev/zero; done >/dev/null 2>&1 & echo $! >/tmp/pid"}})
		if err := b.BeginTurn(); err != nil {
			t.Fatal(err)
		}
		run(t, b, Command{Argv: []string{"bash", "-c", "kill -9 $(cat /tmp/pid)"}})
		if left, err := b.Survivors(); err != nil || len(left) != 0 {
			t.Fatalf("after the kill: %d survivors, %v", len(left), err)
		}
	}
}
