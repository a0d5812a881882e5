package service

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// onHost: the attack works for root of the host, in namespaces of its own, whom nothing confines.
const onHost = "host"

type wall struct {
	attack  string
	errnos  []syscall.Errno
	control string
}

// walls are the attacks of testdata/attacks.c: what each comes to in a sandbox, and where it is seen to work, which is on the host
// or in a sandbox that is allowed what it takes; else why it can't be shown.
var walls = []wall{
	{"core_pattern", []syscall.Errno{unix.EACCES, unix.EROFS}, onHost},
	{"modprobe_path", []syscall.Errno{unix.EROFS, unix.ENOENT}, "not every kernel has it"},
	{"sysrq", []syscall.Errno{unix.EACCES, unix.EROFS, unix.ENOENT}, "not every kernel has it"},
	{"kcore", []syscall.Errno{unix.EACCES, unix.ENOENT}, "not every kernel has it"},
	{"drop_caches", []syscall.Errno{unix.EACCES, unix.EROFS}, onHost},
	{"sysfs", []syscall.Errno{unix.EROFS}, onHost},
	{"proc_remount", []syscall.Errno{unix.EPERM}, "it has no such mount on the host"},
	{"proc_unmask", []syscall.Errno{unix.EPERM}, "it has no such mount on the host"},
	{"more_namespaces", []syscall.Errno{unix.EACCES, unix.EROFS}, "the limit is the sandbox's own"},
	{"mount_tmpfs", []syscall.Errno{unix.EPERM}, onHost},
	{"mount_bind", []syscall.Errno{unix.EPERM}, onHost},
	{"mount_proc", []syscall.Errno{unix.EPERM}, onHost},
	{"mount_binfmt", []syscall.Errno{unix.EPERM}, "not every kernel has it"},
	{"release_agent", []syscall.Errno{unix.EPERM}, onHost},
	{"fs_open", []syscall.Errno{unix.EPERM}, onHost},
	{"open_tree_", []syscall.Errno{unix.EPERM}, onHost},
	{"pivot", []syscall.Errno{unix.EPERM}, "it needs a mount to pivot to"},
	{"disk_node", []syscall.Errno{unix.EPERM}, "a device cgroup may forbid it on the host, too"},
	{"memory_node", []syscall.Errno{unix.EPERM}, "a device cgroup may forbid it on the host, too"},
	{"kmsg", []syscall.Errno{unix.EPERM}, onHost},
	{"ports", []syscall.Errno{unix.EPERM}, "not every kernel has it"},
	{"user_namespace", []syscall.Errno{unix.EPERM}, "namespaces"},
	{"net_namespace", []syscall.Errno{unix.EPERM}, onHost},
	{"clone_user", []syscall.Errno{unix.EPERM}, "namespaces"},
	{"clone3_user", []syscall.Errno{unix.ENOSPC}, "namespaces"},
	{"join_pid1", []syscall.Errno{unix.EACCES}, onHost},
	{"trace_pid1", []syscall.Errno{unix.EPERM}, onHost},
	{"read_pid1", []syscall.Errno{unix.EPERM}, onHost},
	{"memory_of_pid1", []syscall.Errno{unix.EACCES}, onHost},
	{"root_of_pid1", []syscall.Errno{unix.EACCES}, onHost},
	{"files_of_pid1", []syscall.Errno{unix.EACCES}, onHost},
	{"program_of_pid1", []syscall.Errno{unix.EACCES}, onHost},
	{"overwrite_pid1", []syscall.Errno{unix.EROFS, unix.EACCES, unix.ETXTBSY}, "the host has no such file"},
	{"limit_pid1", []syscall.Errno{unix.EPERM}, onHost},
	{"kill_pid1", []syscall.Errno{unix.EPERM}, "the kernel drops it in any namespace"},
	{"stolen_descriptor", []syscall.Errno{unix.EPERM}, "pid 1 of the control has no such descriptor"},
	{"by_handle", []syscall.Errno{unix.EPERM}, onHost},
	{"out_of_chroot", []syscall.Errno{unix.ENOENT}, "it leads to the sandbox's root, as it may"},
	{"left_descriptors", []syscall.Errno{unix.EBADF}, "a matter of who starts the program"},
	{"subvolume", []syscall.Errno{unix.ENOTTY}, "the host's root need not be btrfs"},
	{"snapshot", []syscall.Errno{unix.ENOTTY}, "the host's root need not be btrfs"},
	{"quota_off", []syscall.Errno{unix.ENOTTY}, "the host's root need not be btrfs"},
	{"quota_limit", []syscall.Errno{unix.ENOTTY}, "the host's root need not be btrfs"},
	{"search", []syscall.Errno{unix.ENOTTY}, "the host's root need not be btrfs"},
	{"defrag", []syscall.Errno{unix.ENOTTY}, "the host's root need not be btrfs"},
	{"sends", []syscall.Errno{unix.ENOTTY}, "the host's root need not be btrfs"},
	{"stale_blocks", []syscall.Errno{unix.ENODATA}, "no file system shows them"},
	{"daemon_socket", []syscall.Errno{unix.ENOENT}, "no daemon need be at its usual place"},
	{"control_socket", []syscall.Errno{unix.EACCES}, "the host has no such file"},
	{"false_pid1", []syscall.Errno{unix.EROFS}, "the host has no such folder"},
	{"moved_control", []syscall.Errno{unix.EBUSY, unix.EROFS}, "the host has no such folder"},
	{"io_uring", []syscall.Errno{unix.EPERM}, "io_uring"},
	{"keyring", []syscall.Errno{unix.EPERM}, "keyring"},
	{"userfault", []syscall.Errno{unix.EPERM}, "userfaultfd"},
	{"bpf", []syscall.Errno{unix.EPERM}, onHost},
	{"perf", []syscall.Errno{unix.EPERM}, onHost},
	{"module", []syscall.Errno{unix.EPERM}, onHost},
	{"alg", []syscall.Errno{unix.EAFNOSUPPORT}, "not every kernel has it"},
	{"vsock", []syscall.Errno{unix.EAFNOSUPPORT}, "not every kernel has it"},
	{"packet", []syscall.Errno{unix.EAFNOSUPPORT}, onHost},
	{"set_clock", []syscall.Errno{unix.EPERM}, "it would set the host's clock"},
	{"set_name", []syscall.Errno{unix.EPERM}, onHost},
	{"realtime", []syscall.Errno{unix.EPERM}, onHost},
	{"nice_", []syscall.Errno{unix.EACCES, unix.EPERM}, onHost},
	{"spare_me", []syscall.Errno{unix.EACCES}, "the host's root may be confined, too"},
	{"more_files", []syscall.Errno{unix.EPERM}, "the host's root may be confined, too"},
	{"more_capabilities", []syscall.Errno{unix.EPERM}, onHost},
	{"other_group", []syscall.Errno{unix.ENOENT}, onHost},
	{"setuid_program", []syscall.Errno{unix.EPERM}, "setuid"},
	{"capable_program", []syscall.Errno{unix.EPERM}, "setuid"},
	{"dirty_pipe", []syscall.Errno{unix.EROFS}, "kernels that have the fix don't do it anywhere"},
	{"dirty_cow", []syscall.Errno{unix.EROFS}, "kernels that have the fix don't do it anywhere"},
}

// attackProgram compiles a program, for any user.
func attackProgram(t testing.TB, source string) string {
	t.Helper()
	testenv.Require(t, testenv.Program("gcc"), testenv.Program("unshare"))
	to := filepath.Join(t.TempDir(), "program")
	if out, err := exec.Command("gcc", "-O1", "-w", "-static", "-o", to, source).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return to
}

// outcomesOf reads lines of a name and a number.
func outcomesOf(t testing.TB, text string) map[string]int {
	t.Helper()
	out := map[string]int{}
	for line := range strings.Lines(text) {
		name, number, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.Atoi(number)
		if err != nil {
			t.Fatalf("%q", line)
		}
		out[name] = n
	}
	return out
}

// place puts a program into a sandbox, and gives the node.
func (d *daemon) place(t testing.TB, sb *boxwoodv1.Sandbox, program string) string {
	t.Helper()
	content, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	w, err := d.client.WriteFile(ctx(t), &boxwoodv1.WriteFileRequest{SandboxId: sb.GetId(), Path: "/root/program", Content: content, Mode: 0o755})
	if err != nil {
		t.Fatal(err)
	}
	return w.GetResult().GetNode().GetId()
}

// states are sandboxes that came to be in every way, with the same program in them: started from an image, forked,
// put back, and restored from a dump.
func (d *daemon) states(t testing.TB, program string) map[string]*boxwoodv1.Sandbox {
	t.Helper()
	_, fresh := d.newTree(t)
	forked := d.fork(t, d.place(t, fresh, program), 2)
	busy := d.run(t, forked[1].GetId(), "sleep 100000 >/dev/null 2>&1 &").GetNode()
	if n := d.captured(t, busy.GetId())[0]; n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
		t.Fatal(n.GetWithheldReason())
	}
	restored := d.fork(t, busy.GetId(), 2)
	d.ok(t, restored[1].GetId(), "echo x >/root/x")
	back, err := d.client.Rollback(ctx(t), &boxwoodv1.RollbackRequest{SandboxId: restored[1].GetId(), NodeId: busy.GetId()})
	if err != nil {
		t.Fatal(err)
	}
	return map[string]*boxwoodv1.Sandbox{"fresh": fresh, "forked": forked[0], "restored": restored[0], "rolled back": back.GetSandbox()}
}

// No attack gets anywhere, in no sandbox, however it came to be; each does where nothing keeps it from it.
func TestAttacks(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	program := attackProgram(t, "testdata/attacks.c")
	var hostly []string
	for _, w := range walls {
		if w.control == onHost {
			hostly = append(hostly, w.attack)
		}
	}
	said, err := exec.Command("unshare", append([]string{"-mpnui", "--fork", "--mount-proc", "sh", "-c", `"$0" "$@"; :`, program}, hostly...)...).Output()
	if err != nil {
		t.Fatal(err)
	}
	control := outcomesOf(t, string(said))
	_, allowed := d.newTree(t, "io_uring", "keyring", "namespaces", "setuid", "userfaultfd")
	d.place(t, allowed, program)
	freer := outcomesOf(t, d.ok(t, allowed.GetId(), "/root/program"))
	for _, w := range walls {
		switch {
		case w.control == onHost && control[w.attack] != 0:
			t.Errorf("%s fails on the host as well, with %v: what refuses it in a sandbox isn't known", w.attack, syscall.Errno(control[w.attack]))
		case !strings.Contains(w.control, " ") && w.control != onHost && freer[w.attack] != 0:
			t.Errorf("%s fails with %v in a sandbox that may use %s", w.attack, syscall.Errno(freer[w.attack]), w.control)
		}
	}
	for state, sb := range d.states(t, program) {
		got := outcomesOf(t, d.ok(t, sb.GetId(), "/root/program"))
		for _, w := range walls {
			if errno, ok := got[w.attack]; !ok || !slices.Contains(w.errnos, syscall.Errno(errno)) {
				t.Errorf("%s, %s: %v, not %v", state, w.attack, syscall.Errno(errno), w.errnos)
			}
			delete(got, w.attack)
		}
		if len(got) > 0 {
			t.Errorf("attacks without a row: %v", got)
		}
		d.ok(t, sb.GetId(), "true") // pid 1 has come to no harm
	}
}

// What the pages on security and hazards name is there: tests, and for each published escape the attacks that try its first step.
func TestSecurityNamesItsTests(t *testing.T) {
	var sources strings.Builder
	for _, pattern := range []string{"*/*_test.go", "*/*/*_test.go", "*/*/*/*_test.go", "python-client/tests/*.py", "python-client/tests/*/*.py"} {
		files, err := filepath.Glob("../../" + pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			sources.Write(text)
		}
	}
	tests := regexp.MustCompile(`\b(Test[A-Z]\w+|test_\w+)`)
	exists := func(name string) bool {
		return strings.Contains(sources.String(), "func "+name+"(") || strings.Contains(sources.String(), "def "+name)
	}
	pages := map[string]string{}
	for _, page := range []string{"SECURITY.md", "HAZARDS.md"} {
		text, err := os.ReadFile("../../docs/" + page)
		if err != nil {
			t.Fatal(err)
		}
		pages[page] = string(text)
		for _, name := range tests.FindAllString(string(text), -1) {
			if !exists(name) {
				t.Errorf("%s names %s, which isn't there", page, name)
			}
		}
	}
	_, escapes, _ := strings.Cut(pages["SECURITY.md"], "## Known escapes")
	rows := 0
	for line := range strings.Lines(escapes) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) != 6 || cells[1] == " published " || strings.HasPrefix(cells[1], "-") {
			continue
		}
		rows++
		for name := range strings.SplitSeq(cells[4], ",") {
			name = strings.Trim(name, " `")
			if !exists(name) && !slices.ContainsFunc(walls, func(w wall) bool { return w.attack == name }) {
				t.Errorf("%s: nothing tries %q", cells[1], name)
			}
		}
	}
	if rows < 10 {
		t.Errorf("%d escapes are known", rows)
	}
}

// Processes keep what they were started under: a tree that goes on from them has to ask for the same, and a name that
// isn't known is refused.
func TestPolicyStaysWithItsProcesses(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	_, sb := d.newTree(t, "keyring")
	dump := d.kept(t, d.run(t, sb.GetId(), "sleep 100000 >/dev/null 2>&1 &").GetNode(), boxwoodv1.ProcessKind_PROCESS_KIND_DUMP)
	_, sb = d.newTree(t, "setuid")
	d.open(t, sb.GetId(), "main")
	shell := d.kept(t, d.say(t, sb.GetId(), "main", "x=1").GetNode(), shellsKind)
	for _, c := range []struct {
		n      *boxwoodv1.Node
		calls  []string
		reason string
	}{
		{dump, nil, "other_calls"}, {dump, []string{"keyring", "io_uring"}, "other_calls"}, {dump, []string{"keyring", "setuid"}, "other_calls"},
		{dump, []string{"keyring"}, ""}, {dump, []string{"bpf"}, "bad_calls"},
		// A shell is started anew, under other calls as well, but says whether its programs may gain rights.
		{shell, nil, "other_calls"}, {shell, []string{"setuid", "keyring"}, ""},
	} {
		n := c.n
		made, err := d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{
			Start: &boxwoodv1.CreateTreeRequest_NodeId{NodeId: n.GetId()}, WithSandbox: true, Defaults: &boxwoodv1.Defaults{AllowCalls: c.calls},
		})
		if reason(err) != c.reason {
			t.Errorf("%q: %v", c.calls, err)
		}
		if err == nil {
			d.ok(t, made.GetSandbox().GetId(), "true")
			if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: made.GetTree().GetId()}); err != nil {
				t.Error(err)
			}
		}
	}
}

// seen is what bounds a process of a sandbox, as the process sees it.
const seen = `grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp|SigIgn|SigBlk|Umask|Cpus_allowed_list|Mems_allowed_list)' /proc/self/status
	cat /proc/self/limits /proc/self/oom_score_adj /proc/self/setgroups /proc/sys/user/max_user_namespaces /proc/sys/user/max_inotify_* /proc/sys/net/ipv4/ip_forward
	while read -r a b c; do echo $a $c; done </proc/self/uid_map
	while read -r id parent dev rest; do echo "$rest"; done </proc/self/mountinfo | sort
	ls -lnR /dev | grep -v '^total'; ls /sys/class/net /proc/1/fd 2>&1; cat /sys/class/net/lo/flags; ulimit -a`

// groupsOf are the values of a sandbox's cgroups that bound it.
func (d *daemon) groupsOf(t testing.TB, generation string) (values []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(d.rootOf(t, generation), "..", "cgroup"))
	if err != nil {
		t.Fatal(err)
	}
	group := regexp.MustCompile(`/boxwood-test-[^/]+/\d+`).FindString(string(text))
	for _, mount := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		for _, file := range strings.Fields(`memory.max memory.swap.max pids.max cpu.max cpu.weight cpuset.cpus cgroup.max.descendants
			memory.limit_in_bytes memory.memsw.limit_in_bytes memory.swappiness cpu.cfs_quota_us cpu.cfs_period_us cpu.shares`) {
			found, err := filepath.Glob(mount + group + "/" + file)
			if err != nil {
				t.Fatal(err)
			}
			for _, path := range found {
				value, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				values = append(values, fmt.Sprintf("%s of %s: %s", file, strings.TrimSuffix(path, group+"/"+file), value))
			}
		}
	}
	if group == "" || len(values) < 4 {
		t.Fatalf("the cgroup %q has %q", group, values)
	}
	return values
}

// Sandboxes are bounded alike, however they came to be: field by field.
func TestEverySandboxIsConfinedAlike(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	told := map[string][]string{}
	own := regexp.MustCompile(`(lowerdir\+?|upperdir|workdir)=[^, ]*|/boxes/\d+|gid=\d+|\b\w{3} +\d+ \d\d:\d\d\b`)
	for state, sb := range d.states(t, attackProgram(t, "../box/testdata/calls.c")) {
		text := d.ok(t, sb.GetId(), seen+"\n/root/program 0 200 -34 -56 -57 -58 -60; /root/program 201 500 -231 -435") // what ends, forks or waits
		told[state] = append(strings.Split(own.ReplaceAllString(text, ""), "\n"), d.groupsOf(t, sb.GetGeneration())...)
	}
	if len(told["fresh"]) < 400 {
		t.Fatalf("only %d lines were compared", len(told["fresh"]))
	}
	for state, lines := range told {
		for _, line := range lines {
			if !slices.Contains(told["fresh"], line) {
				t.Errorf("%s, but not fresh: %s", state, line)
			}
		}
		for _, line := range told["fresh"] {
			if !slices.Contains(lines, line) {
				t.Errorf("fresh, but not %s: %s", state, line)
			}
		}
	}
}

// Who takes all he can gets to his limit and no further, in a fresh sandbox as in a restored one; with a larger limit, further.
func TestGreed(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	program := attackProgram(t, "testdata/attacks.c")
	states := d.states(t, program)
	head := map[string]string{}
	for _, state := range []string{"forked", "restored"} {
		head[state] = states[state].GetHeadId()
	}
	small := &boxwoodv1.Limits{Pids: 40, MemoryBytes: 96 << 20, DiskBytes: 24 << 20}
	large := &boxwoodv1.Limits{Pids: 400, MemoryBytes: 512 << 20, DiskBytes: 256 << 20}
	for state, node := range head {
		for _, g := range []struct {
			what              string
			most, small, past int // what it asks for; what it may get to, small; what it gets past, large
		}{
			{"processes", 100, 40, 99}, {"memory", 200, 96, 199}, {"disk", 80, 24, 79}, {"files", 2000, 1024, 0},
		} {
			got := map[*boxwoodv1.Limits]int{}
			for _, l := range []*boxwoodv1.Limits{small, large} {
				r := d.tryFork(t, &boxwoodv1.ForkRequest{Limits: l, Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: node}, Count: 1}}})
				if len(r) != 1 || r[0].GetError() != nil {
					t.Fatal(r)
				}
				id := r[0].GetSandbox().GetId()
				turn := d.run(t, id, fmt.Sprintf("setsid --wait /root/program take %s %d", g.what, g.most))
				n, err := strconv.Atoi(strings.TrimSpace(string(turn.GetNode().GetObservation().GetStdout())))
				if err != nil {
					t.Fatalf("%s: %v", g.what, turn.GetNode().GetObservation())
				}
				got[l] = n
				if oom := turn.GetNode().GetObservation().GetOomKilled(); oom != (g.what == "memory" && l == small) {
					t.Errorf("%s, %s: the turn is told of a lack of memory: %t", state, g.what, oom)
				}
				d.ok(t, id, "echo goes on")
				free(t, d, r[0].GetSandbox())
			}
			if got[small] > g.small || got[small] < g.small/4 || got[large] < g.past {
				t.Errorf("%s, %s: %d with the small limit, %d with the large one", state, g.what, got[small], got[large])
			}
		}
	}
}

// Who makes names without end gets as far as what keeps them has room, in a fresh sandbox as in a restored one: there is no
// bound on inodes, but one on what they take.
func TestNamesWithoutEnd(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	states := d.states(t, attackProgram(t, "testdata/attacks.c"))
	const most = 8000
	for _, state := range []string{"forked", "restored"} {
		for disk, past := range map[int64]bool{2 << 20: false, 128 << 20: true} {
			r := d.tryFork(t, &boxwoodv1.ForkRequest{Limits: &boxwoodv1.Limits{DiskBytes: disk}, Wants: []*boxwoodv1.ForkRequest_Want{
				{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: states[state].GetHeadId()}, Count: 1}}})
			if len(r) != 1 || r[0].GetError() != nil {
				t.Fatal(r)
			}
			id := r[0].GetSandbox().GetId()
			o := d.run(t, id, fmt.Sprintf("/root/program take names %d", most)).GetNode().GetObservation()
			n, err := strconv.Atoi(strings.TrimSpace(string(o.GetStdout())))
			if err != nil {
				t.Fatal(o)
			}
			t.Logf("%s, %d MiB: %d names", state, disk>>20, n)
			if (n == most) != past || n == 0 {
				t.Errorf("%s: %d names of %d in %d bytes", state, n, most, disk)
			}
			d.ok(t, id, "rm -rf /root/names")
			free(t, d, r[0].GetSandbox())
		}
	}
}
