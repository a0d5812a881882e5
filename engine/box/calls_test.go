package box

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/seccomp"
	"github.com/boxwood-rl/boxwood/internal/testenv"
)

// nesting lets a box make namespaces.
func nesting(id *Identity) { id.Limits.Calls = seccomp.Namespaces }

// compile makes a static program of testdata.
func compile(t testing.TB, source string) string {
	t.Helper()
	testenv.Require(t, testenv.Program("gcc"))
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} { // for any user
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	to := filepath.Join(dir, "program")
	if out, err := exec.Command("gcc", "-O1", "-static", "-o", to, "testdata/"+source).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return to
}

// install puts a program into a box.
func install(t testing.TB, b Box, program, at string) {
	t.Helper()
	content, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.WriteFile(context.Background(), at, content, 0o755, false); err != nil {
		t.Fatal(err)
	}
}

// callArgs are those of calls.c for an interface. It leaves out what ends, forks or waits for ever.
func callArgs(compat bool) (args []string) {
	last := 0
	skip := []string{"exit", "exit_group", "fork", "vfork", "clone", "clone3", "pause", "sigsuspend"}
	for _, c := range seccomp.Calls(0, compat) {
		last = max(last, c.Number)
		if slices.Contains(skip, c.Name) {
			args = append(args, strconv.Itoa(-c.Number))
		}
	}
	args = append([]string{"0", strconv.Itoa(last + 3)}, args...)
	if compat {
		args = append([]string{"i386"}, args...)
	}
	return args
}

// outcomes reads what calls.c says.
func outcomes(t testing.TB, text string) map[int]string {
	t.Helper()
	out := map[int]string{}
	for line := range strings.Lines(text) {
		nr, what, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.Atoi(nr)
		if err != nil {
			t.Fatalf("%q", line)
		}
		out[n] = what
	}
	if len(out) < 300 {
		t.Fatalf("%d calls were made: %s", len(out), text)
	}
	return out
}

func errnoOf(e syscall.Errno) string { return strconv.Itoa(int(e)) }

// Every call of both interfaces is made in a sandbox. What isn't allowed is refused; what is allowed ends as it does
// for a user of the host who has no filter.
func TestEverySystemCall(t *testing.T) {
	program := compile(t, "calls.c")
	h := openHost(t)
	b := startBox(t, h)
	install(t, b, program, "/tmp/calls")
	open := startBox(t, h, func(id *Identity) { id.Limits.Calls = seccomp.All })
	install(t, open, program, "/tmp/calls")
	for _, compat := range []bool{false, true} {
		args := callArgs(compat)
		control := exec.Command(program, args...)
		// The objects that it makes end with it, as those of a sandbox do.
		control.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Cloneflags: syscall.CLONE_NEWIPC, Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		said, err := control.Output()
		if err != nil {
			t.Fatal(err)
		}
		free := outcomes(t, string(said))
		boxed := outcomes(t, run(t, b, Command{Argv: append([]string{"/tmp/calls"}, args...), Env: []string{}}).out)
		opened := outcomes(t, run(t, open, Command{Argv: append([]string{"/tmp/calls"}, args...), Env: []string{}}).out)
		of, number := map[int]string{}, map[string]int{}
		for _, c := range seccomp.Calls(0, compat) {
			of[c.Number], number[c.Name] = c.Name, c.Number
			got, tried := boxed[c.Number]
			if !tried {
				continue
			}
			var want []string
			switch c.Fate {
			case seccomp.Refused:
				want = []string{errnoOf(unix.EPERM)}
				if c.Name == "uprobe" || c.Name == "uretprobe" { // which newer kernels let pass any filter
					want = append(want, free[c.Number])
				}
			case seccomp.Absent:
				want = []string{errnoOf(unix.ENOSYS)}
			case seccomp.Ignored:
				want = []string{"0"}
			case seccomp.Allowed:
				want = []string{free[c.Number]}
				if got != errnoOf(unix.EPERM) && got != errnoOf(unix.ENOSYS) {
					continue // root of the box may get further than nobody of the host
				}
			case seccomp.ByArgument:
				want = []string{errnoOf(unix.EAFNOSUPPORT)}
				if c.Name == "personality" { // which is asked for
					want = []string{"0"}
				}
			}
			if !slices.Contains(want, got) {
				t.Errorf("32 bits %t: %s (%d) ends with %s, not with %s; on the host it ends with %s", compat, c.Name, c.Number, got, want, free[c.Number])
			}
		}
		for n, got := range boxed {
			if of[n] == "" && got != errnoOf(unix.ENOSYS) && got != errnoOf(unix.EPERM) {
				t.Errorf("32 bits %t: call %d, which isn't known, ends with %s", compat, n, got)
			}
		}
		// The filter is what refuses these: allowed, they end otherwise, unless the kernel itself refuses them.
		for _, name := range []string{"io_uring_setup", "io_uring_enter", "add_key", "keyctl", "userfaultfd", "setns", "unshare"} {
			n := number[name]
			if opened[n] == errnoOf(unix.EPERM) && free[n] != opened[n] {
				t.Errorf("32 bits %t: %s is refused although it is allowed", compat, name)
			}
		}
	}
}

// confinement is what bounds a box, line by line, as a process of it and the host see it.
func confinement(t testing.TB, b *box) string {
	t.Helper()
	inside := must(t, b, `
		grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp|SigIgn|SigBlk|Umask|Cpus_allowed_list|Mems_allowed_list)' /proc/self/status
		cat /proc/self/uid_map /proc/self/gid_map /proc/self/limits /proc/self/oom_score_adj /proc/self/personality 2>&1
		cat /proc/self/setgroups /proc/sys/user/max_user_namespaces /proc/sys/user/max_inotify_* /proc/sys/net/ipv4/ip_forward
		while read -r id parent dev rest; do echo "$rest"; done </proc/self/mountinfo | sort
		ls -lnR /dev | grep -v '^total'; ls /sys/class/net; cat /sys/class/net/lo/flags; ulimit -a`)
	inside = regexp.MustCompile(`(?m)(0 +)\d+( +65536)$`).ReplaceAllString(inside, "$1 BASE $2") // each has a range of its own
	inside = regexp.MustCompile(`(lowerdir\+?|upperdir|workdir)=[^, ]*|/boxes/\d+|gid=\d+`).ReplaceAllString(inside, "")
	inside = regexp.MustCompile(`(?m)\b\w{3} +\d+ \d\d:\d\d\b`).ReplaceAllString(inside, "TIME")
	var host strings.Builder
	for _, dir := range b.group.Dirs() {
		for _, file := range strings.Fields(`memory.max memory.swap.max pids.max cpu.max cpu.weight io.max memory.limit_in_bytes memory.swappiness cpu.cfs_quota_us cpu.cfs_period_us
			cpu.shares cpuset.cpus cgroup.max.descendants cgroup.type`) {
			if text, err := os.ReadFile(filepath.Join(dir, file)); err == nil {
				fmt.Fprintf(&host, "%s: %s", file, text)
			}
		}
	}
	return inside + "\n" + host.String()
}

// differ fails with the lines that only one of two boxes has.
func differ(t *testing.T, started, restored string) {
	t.Helper()
	for name, pair := range map[string][2]string{"only what was started": {started, restored}, "only what was restored": {restored, started}} {
		has := strings.Split(pair[1], "\n")
		for line := range strings.Lines(pair[0]) {
			if !slices.Contains(has, strings.TrimSuffix(line, "\n")) {
				t.Errorf("%s has: %s", name, line)
			}
		}
	}
}

// What was dumped and restored is bounded as what was started: its next commands, and what runs there already.
func TestARestoredBoxIsConfinedAsAFreshOne(t *testing.T) {
	by, h := openCRIU(t), openHost(t)
	program := compile(t, "calls.c")
	for name, calls := range map[string]seccomp.Groups{"usual": 0, "more": seccomp.Keyring | seccomp.Namespaces | seccomp.Setuid} {
		t.Run(name, func(t *testing.T) {
			id := testIdentity
			id.Limits.Calls = calls
			root := newRoot(t)
			started, err := h.Start(context.Background(), root, id)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { mustKill(t, started) })
			install(t, started, program, "/tmp/calls")
			must(t, started, `mkfifo /root/in /root/out; (while :; do read -r x </root/in; /tmp/calls clone3 0x10000000 >/root/out; done) &`)
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if err := errors.Join(started.Part(ctx, by), started.Freeze(ctx)); err != nil {
				t.Fatal(err)
			}
			saved, err := started.Save(ctx, t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			child := copyRoot(t, root)
			if err := errors.Join(started.Thaw(), started.Rejoin(ctx)); err != nil {
				t.Fatal(err)
			}
			other := id
			other.Limits.Calls ^= seccomp.IOUring
			if _, err := h.Restore(ctx, child, other, saved, by); !fault.Is(err, fault.Precondition) {
				t.Errorf("restored with other calls: %v", err)
			}
			restored, err := h.Restore(ctx, child, id, saved, by)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { mustKill(t, restored) })
			if err := restored.Resume(); err != nil {
				t.Fatal(err)
			}
			boxes := []*box{started.(*box), restored.(*box)}
			differ(t, confinement(t, boxes[0]), confinement(t, boxes[1]))
			want := errnoOf(unix.ENOSPC)
			if calls&seccomp.Namespaces != 0 {
				want = "0"
			}
			var said []map[int]string
			for _, b := range boxes {
				for what, got := range map[string]string{
					"a new command":     must(t, b, "/tmp/calls clone3 0x10000000"),
					"what runs already": must(t, b, "echo >/root/in; cat /root/out"),
				} {
					if got != want {
						t.Errorf("a user namespace, %s: %s, not %s", what, got, want)
					}
				}
				said = append(said, outcomes(t, run(t, b, Command{Argv: append([]string{"/tmp/calls"}, callArgs(false)...), Env: []string{}}).out))
			}
			if !maps.Equal(said[0], said[1]) {
				t.Errorf("started:  %v\nrestored: %v", said[0], said[1])
			}
		})
	}
}
