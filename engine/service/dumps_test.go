package service

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// What a turn leaves running is there in every child, as it was, and goes on apart
// from its siblings and its parent.
func TestAServerIsForked(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	_, sb := d.newTree(t)
	n := d.run(t, sb.GetId(), `mkfifo /in /out; (n=0; while :; do read -r line </in; n=$((n+1)); echo "$n $line" >/out; done) >/dev/null 2>&1 & echo started`).GetNode()
	d.saved(t, n.GetId())
	ask := func(sb *boxwoodv1.Sandbox, want string) {
		t.Helper()
		if got := d.ok(t, sb.GetId(), `echo hello >/in; cat /out`); got != want {
			t.Errorf("it says %q, not %q", got, want)
		}
	}
	ask(sb, "1 hello\n")
	ask(sb, "2 hello\n")
	children := d.fork(t, n.GetId(), 8)
	for range 2 {
		for _, c := range children {
			d.ok(t, c.GetId(), "true")
		}
	}
	for _, c := range children {
		ask(c, "1 hello\n")
		ask(c, "2 hello\n")
	}
	ask(sb, "3 hello\n")
	if got := d.captured(t, n.GetId())[0]; got.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_PROVEN {
		t.Errorf("after its forks the node is %v", got.GetCapture())
	}
	free(t, d, children...)
}

// A turn beside a server that sleeps on is judged by what it changed itself, in the
// sandbox that started it and in those that are made from its dump.
func TestAnIdleServerIsNoChange(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	_, sb := d.newTree(t)
	n := d.run(t, sb.GetId(), `mkfifo /in; (while read -r line; do echo "$line" >>/out; done <>/in) >/dev/null 2>&1 & until test -p /in; do :; done`).GetNode()
	d.saved(t, n.GetId())
	for _, s := range append(d.fork(t, n.GetId(), 2), sb) {
		for _, c := range []struct {
			shell string
			want  boxwoodv1.Verdict
		}{
			{"true", boxwoodv1.Verdict_VERDICT_NONE},
			{"t=$(mktemp); rm $t", boxwoodv1.Verdict_VERDICT_NONE},
			{"echo x >/file", boxwoodv1.Verdict_VERDICT_FILES},
			{"true", boxwoodv1.Verdict_VERDICT_NONE},
			{"echo hello >/in; until test -s /out; do :; done", boxwoodv1.Verdict_VERDICT_BOTH},
			{"true", boxwoodv1.Verdict_VERDICT_NONE},
		} {
			n := d.run(t, s.GetId(), c.shell).GetNode()
			// A capture may have met the server on its way back to its read.
			for tries := 0; tries < 10 && c.shell == "true" && n.GetVerdict() == boxwoodv1.Verdict_VERDICT_PROCESS; tries++ {
				d.captured(t, n.GetId())
				n = d.run(t, s.GetId(), c.shell).GetNode()
			}
			if n.GetVerdict() != c.want {
				t.Errorf("%s: %v, not %v: %q", c.shell, n.GetVerdict(), c.want, n.GetReasons())
			}
			if got := d.captured(t, n.GetId())[0]; got.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
				t.Errorf("%s: %s", c.shell, got.GetWithheldReason())
			}
		}
	}
}

// odd is a payload that does something first.
func odd(name, first string) payload {
	return payload{name: name, needs: "/usr/bin/python3", step: askStep, start: `cat >/p/odd.py <<'END'
from lib import serve
` + first + `
n = 0
def step():
    global n
    n += 1
    return n
serve(step)
END
PYTHONDONTWRITEBYTECODE=1 python3 -u /p/odd.py >/tmp/log 2>&1 </dev/null & ` + waitReady}
}

const halfClosed = `import socket, threading, time
listener = socket.socket(socket.AF_UNIX)
listener.bind("/tmp/half")
listener.listen()
client = socket.socket(socket.AF_UNIX)
client.connect("/tmp/half")
accepted, _ = listener.accept()
client.close()
`

// A shell's command ends, and the shell doesn't take its terminal back.
const foregroundGone = `import os, pty, signal, sys, threading, time
pid, terminal = pty.fork()
if pid > 0:
    os.read(terminal, 1)
    open("/tmp/ready", "w").close()
    os.waitpid(pid, 0)
    sys.exit(0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
command = os.fork()
if command == 0:
    signal.pause()
os.setpgid(command, command)
os.tcsetpgrp(0, command)
os.kill(command, signal.SIGKILL)
os.waitpid(command, 0)
os.write(1, b".")
`

// What is on its way to a state that can be saved is waited for.
func TestStatesInPassingAreWaitedFor(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	for _, c := range []struct{ name, first, late string }{
		{"a server closes late", halfClosed, "accepted.close()"},
		{"a shell takes its terminal back late", foregroundGone, "os.tcsetpgrp(0, os.getpid())"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := odd(c.name, c.first+`def late():
    time.sleep(0.2)
    `+c.late+`
threading.Thread(target=late).start()`)
			sb := d.newPayload(t, p)
			n := d.run(t, sb.GetId(), p.start).GetNode()
			children := d.fork(t, d.saved(t, n.GetId()), 1)
			d.stepTo(t, children[0], p, 1)
			d.stepTo(t, sb, p, 1)
			free(t, d, children...)
		})
	}
}

// Zombies are zombies in each child, too.
func TestZombiesAreRestored(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	p := odd("zombies", `import os
dead = []
for i in range(60):
    dead.append(os.fork())
    if dead[-1] == 0:
        os._exit(i % 7)
def zombies():
    return all(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z" for pid in dead)
while not zombies():
    pass
serve_as = serve
def serve(step):
    def checked():
        assert zombies()
        return step()
    serve_as(checked)
`)
	sb := d.newPayload(t, p)
	n := d.run(t, sb.GetId(), p.start).GetNode()
	children := d.fork(t, d.saved(t, n.GetId()), 8)
	for _, c := range children {
		d.stepTo(t, c, p, 1)
	}
	d.stepTo(t, sb, p, 1)
	free(t, d, children...)
}

// What CRIU can't save, or would lose without a word, withholds the node and says why; the
// sandbox goes on unharmed.
func TestWhatCannotBeDumpedIsWithheld(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	for _, c := range []struct{ name, start, reason string }{
		{"POSIX queue", `import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mq_open(b"/q", 0o102, 0o600, None) >= 0, ctypes.get_errno()`, "POSIX message queue"},
		{"half-open connection", `import socket
listener = socket.create_server(("127.0.0.1", 4000), backlog=0)
waiting = []
for _ in range(6):
    s = socket.socket()
    s.setblocking(False)
    s.connect_ex(("127.0.0.1", 4000))
    waiting.append(s)`, "CRIU"},
		{"half-closed connection", halfClosed, "whose other end is closed"},
		{"foreground group that is gone", foregroundGone, "a foreground group that is gone"},
		{"io_uring", `import ctypes
ring = ctypes.CDLL(None, use_errno=True).syscall(425, 4, ctypes.create_string_buffer(120))
assert ring >= 0, ctypes.get_errno()`, "io_uring"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := odd(c.name, c.start)
			p.calls = []string{"io_uring"}
			sb := d.newPayload(t, p)
			n := d.run(t, sb.GetId(), p.start).GetNode()
			if o := n.GetObservation(); o.GetExitCode() != 0 {
				t.Fatalf("%s%s", o.GetStdout(), o.GetStderr())
			}
			n = d.captured(t, n.GetId())[0]
			if n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD || !strings.Contains(n.GetWithheldReason(), c.reason) {
				t.Fatalf("%v: %q", n.GetCapture(), n.GetWithheldReason())
			}
			t.Log(n.GetWithheldReason())
			d.stepTo(t, sb, p, 1)
			d.captured(t, d.stepTo(t, sb, p, 2))
			d.stepTo(t, sb, p, 3)
		})
	}
}

// criuOf finds the CRIU that the daemon runs.
func (d *daemon) criuOf() int {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", d.cmd.Process.Pid))
	for _, file := range tasks {
		text, _ := os.ReadFile(file)
		for _, pid := range strings.Fields(string(text)) {
			if comm, _ := os.ReadFile("/proc/" + pid + "/comm"); strings.HasPrefix(string(comm), "criu") {
				n, _ := strconv.Atoi(pid)
				return n
			}
		}
	}
	return 0
}

// CRIU is killed at any instant of its work. Then either the sandbox goes on as if nothing
// had happened, or it is gone; and the node is withheld unless its dump was complete.
func TestKilledCRIU(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	for _, p := range killed() {
		t.Run(p.name, func(t *testing.T) {
			p.wanted(t)
			unharmed, lost := 0, 0
			for i := range 8 {
				if d.killedCRIU(t, p, time.Duration(i)*12*time.Millisecond) {
					lost++
				} else {
					unharmed++
				}
			}
			t.Logf("%d unharmed, %d lost", unharmed, lost)
		})
	}
}

// killedCRIU kills the CRIU that saves a payload, so long after it is there, and says
// whether the payload was lost.
func (d *daemon) killedCRIU(t *testing.T, p payload, after time.Duration) (lost bool) {
	sb := d.newPayload(t, p)
	d.saved(t, d.run(t, sb.GetId(), p.start).GetNode().GetId())
	node := d.stepTo(t, sb, p, 1)
	until := time.Now().Add(20 * time.Second)
	for criu := 0; ; {
		if criu = d.criuOf(); criu > 0 {
			<-time.After(after) // where it is hit is the case, not a wait
			_ = syscall.Kill(criu, syscall.SIGKILL)
			break
		}
		if n := d.captured1(t, node); n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_RECORDED || time.Now().After(until) {
			break
		}
	}
	n := d.captured(t, node)[0]
	r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Shell: []byte(p.step)}})
	switch {
	case err == nil && strings.TrimSpace(string(r.GetNode().GetObservation().GetStdout())) == "2":
	case err != nil && (reason(err) == "sandbox_gone" || reason(err) == "box_gone"):
		lost = true
	case err == nil && r.GetNode().GetTurnStatus() == boxwoodv1.TurnStatus_TURN_STATUS_LOST:
		lost = true
	default:
		t.Fatalf("killed after %s: neither unharmed nor lost: %v, %v %q", after, err, r.GetNode().GetObservation(), n.GetWithheldReason())
	}
	if n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
		c := d.fork(t, node, 1)[0] // the kill came late
		d.stepTo(t, c, p, 2)
		free(t, d, c)
	}
	return lost
}

func (d *daemon) captured1(t testing.TB, node string) *boxwoodv1.Node {
	t.Helper()
	n, err := d.client.GetNode(ctx(t), &boxwoodv1.GetNodeRequest{NodeId: node})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// The daemon is killed while CRIU works on a sandbox. The sandbox goes on, the next daemon
// finds it, and what was captured before can be forked, though it lay in memory.
func TestDaemonKilledInTheWindow(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	dir, all := stateDir(t), t // which the daemons outlive each payload in
	d := startDaemon(t, dir)
	for _, p := range killed() {
		t.Run(p.name, func(t *testing.T) {
			p.wanted(t)
			sb := d.newPayload(t, p)
			d.saved(t, d.run(t, sb.GetId(), p.start).GetNode().GetId())
			one := d.saved(t, d.stepTo(t, sb, p, 1))
			two := d.stepTo(t, sb, p, 2)
			for until := time.Now().Add(20 * time.Second); d.criuOf() == 0 && time.Now().Before(until); {
				runtime.Gosched()
			}
			d.kill()
			d = startDaemon(all, dir)
			list := d.sandboxes(t, "")
			if len(list) != 1 || list[0].GetId() != sb.GetId() {
				t.Fatalf("adopted: %v", list)
			}
			d.stepTo(t, sb, p, 3)
			c := d.fork(t, one, 1)[0]
			d.stepTo(t, c, p, 2)
			free(t, d, c, sb)
			if n := d.captured(t, two)[0]; n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
				t.Logf("the node of the cut-off capture: %s", n.GetWithheldReason())
			} else {
				c := d.fork(t, two, 1)[0]
				d.stepTo(t, c, p, 3)
				free(t, d, c)
			}
		})
	}
}

// One bit of a dump differs from what was saved: nothing is restored from it, wherever
// it is.
func TestAFlippedByteOfADumpIsRefused(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := startDaemon(t, "")
	expected.Store(d.dir, "lost_state")
	d.importRoot(t)
	_, sb := d.newTree(t)
	n := d.run(t, sb.GetId(), `x=secret; (while :; do read -t 1000 -u 9; done) 9<>/dev/null >/dev/null 2>&1 & sleep 1000 >/dev/null 2>&1 & true`).GetNode()
	d.saved(t, n.GetId())
	d.spoil(t)
	for _, r := range d.tryFork(t, &boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{
		{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: n.GetId()}, Count: 1}}}) {
		if r.GetError().GetReason() != "process_state_lost" {
			t.Errorf("a child was made of a changed dump: %v", r)
		}
	}
}

// Dumps of one path share what they have in common on the disk. After a restart, when none is in memory, each is
// restored as it was.
func TestDumpsOfAPathAfterARestart(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	dir := stateDir(t)
	d := startDaemon(t, dir)
	d.importRoot(t)
	_, sb := d.newTree(t)
	first := d.run(t, sb.GetId(), `mkfifo /in /out; printf -v held '%*s' 3000000 x; (n=0; while :; do read -r line </in; n=$((n+1)); echo "$n $line" >/out; done) >/dev/null 2>&1 & true`).GetNode().GetId()
	d.saved(t, first)
	nodes := []string{first}
	for range 4 {
		n := d.run(t, sb.GetId(), `echo hello >/in; cat /out >/said`).GetNode().GetId()
		d.saved(t, n)
		nodes = append(nodes, n)
	}
	free(t, d, sb)
	d.stop()
	parts, err := filepath.Glob(dir + "/processes/ps_*/pages")
	if err != nil || len(parts) != 4 {
		t.Errorf("%d of the dumps are stored in parts, and 4 came after another: %v", len(parts), err)
	}
	d = startDaemon(t, dir)
	for i, n := range nodes {
		c := d.fork(t, n, 1)[0]
		if got, want := d.ok(t, c.GetId(), `echo hello >/in; cat /out`), fmt.Sprintf("%d hello\n", i+1); got != want {
			t.Errorf("node %d says %q, not %q", i, got, want)
		}
		free(t, d, c)
	}
}

// What a process has in memory and what it has written are of one instant: one that counts, and writes down each number, goes
// on in every child with the number after the last one there.
func TestHalvesAreOfOneInstant(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	_, sb := d.newTree(t)
	n := d.run(t, sb.GetId(), `mkfifo /never; (exec 9<>/never; while :; do n=$((n+1)); echo $n >>/log; read -t 0.002 <&9; done) >/dev/null 2>&1 &
		until [ -e /log ] && [ $(wc -l </log) -gt 10 ]; do :; done`).GetNode()
	d.saved(t, n.GetId())
	again := d.saved(t, d.run(t, sb.GetId(), "true").GetNode().GetId())
	for _, node := range []string{n.GetId(), again} {
		child := d.fork(t, node, 1)[0]
		// It counts on: a number that was written twice, or never, shows.
		if got := d.ok(t, child.GetId(), `n=$(($(wc -l </log)+20)); until [ $(wc -l </log) -ge $n ]; do :; done; [ "$(head -n $n /log)" = "$(seq $n)" ] || echo it counted otherwise`); got != "" {
			t.Errorf("node %s: %s", node, got)
		}
		free(t, d, child)
	}
}

// If it fails, a sandbox that outlived the daemon of another release, whose pid 1 is another program, is saved as if it were of this
// one, and no child can be made of what says that it is captured.
func TestABoxOfAnotherReleaseIsNotDumped(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs, testenv.CRIU)
	for _, c := range []struct{ name, program string }{{"that says so", `"program":"0123456789abcdef"`}, {"of before they did", `"before":0`}} {
		t.Run(c.name, func(t *testing.T) {
			d := startDaemon(t, "")
			d.importRoot(t)
			_, sb := d.newTree(t)
			d.saved(t, d.run(t, sb.GetId(), countStart+"; echo $! >/server").GetNode().GetId())
			d.kill()
			births, err := engine.Births(engine.FindRunDir(d.dir))
			if err != nil || len(births) != 1 {
				t.Fatal(births, err)
			}
			text, err := os.ReadFile(births[0].Path)
			if err != nil {
				t.Fatal(err)
			}
			other := strings.Replace(string(text), fmt.Sprintf(`"program":%q`, box.ProgramDigest()), c.program, 1)
			if other == string(text) {
				t.Fatalf("%s doesn't say which program its pid 1 is", text)
			}
			if err := os.WriteFile(births[0].Path, []byte(other), 0o600); err != nil {
				t.Fatal(err)
			}
			d = startDaemon(t, d.dir)
			r := d.run(t, sb.GetId(), countAsk)
			if got := string(r.GetNode().GetObservation().GetStdout()); got != "1 hello\n" {
				t.Fatalf("its server says %q", got)
			}
			n := d.captured(t, r.GetNode().GetId())[0]
			if n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD || !strings.Contains(n.GetWithheldReason(), "another version of Boxwood") {
				t.Fatalf("a turn of it: %v, %s", n.GetCapture(), n.GetWithheldReason())
			}
			// What it did while nobody watched may have outlived it, in the kernel, where only a dump would find it.
			gone := d.run(t, sb.GetId(), `kill -9 $(cat /server); while kill -0 $(cat /server) 2>/dev/null; do :; done; echo gone`).GetNode()
			if got := string(gone.GetObservation().GetStdout()); got != "gone\n" {
				t.Fatalf("ending the server says %q", got)
			}
			if n := d.captured(t, gone.GetId())[0]; n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD || !strings.Contains(n.GetWithheldReason(), "another version of Boxwood") {
				t.Fatalf("a turn of it without its server: %v, %s", n.GetCapture(), n.GetWithheldReason())
			}
		})
	}
}

// What runs while a dump is made, as it may where a freeze is none, is in neither half of a node: the dump is made again. The
// daemon stops between the dump and its second look, and the sandbox runs meanwhile.
func TestADumpInWhichAProcessRanIsMadeAgain(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	_, sb := d.newTree(t)
	if answer, _ := d.tell("stop 1 dump saved"); answer != "armed <nil>" {
		t.Fatal(answer)
	}
	goOn := func() { _ = d.cmd.Process.Signal(syscall.SIGCONT) }
	defer goOn()
	ran := make(chan string, 1)
	go func() {
		defer close(ran)
		ran <- d.run(t, sb.GetId(), `(while :; do n=$((n+1)); echo $n >>/counted-on; sleep 0.01; done) >/dev/null 2>&1 & until [ -s /counted-on ]; do :; done`).GetNode().GetId()
	}()
	until(t, "the daemon stops", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", d.cmd.Process.Pid))
		return err == nil && strings.Contains(string(stat), ") T ")
	})
	pid1, group := d.groupOf(t, "/counted-on")
	lines := func() int {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/counted-on", pid1))
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(text), "\n")
	}
	was := lines()
	if err := cgroup.Thaw(group); err != nil {
		t.Fatal(err)
	}
	until(t, "it counts", func() bool { return lines() > was+2 })
	if err := cgroup.Freeze(ctx(t), group); err != nil {
		t.Fatal(err)
	}
	goOn()
	node := <-ran
	d.saved(t, node)
	child := d.fork(t, node, 1)[0]
	if got := d.ok(t, child.GetId(), `n=$(($(wc -l </counted-on)+5)); until [ $(wc -l </counted-on) -ge $n ]; do :; done; [ "$(head -n $n /counted-on)" = "$(seq $n)" ] || echo it counted otherwise`); got != "" {
		t.Error(got)
	}
	free(t, d, child, sb)
}

// groupOf finds a sandbox by what is in the command line of one of its processes: its pid 1 as the host counts, and its v2 group.
func (d *daemon) groupOf(t testing.TB, command string) (pid1 int, dir string) {
	t.Helper()
	mounts, err := cgroup.FindMounts("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	root := "/boxwood-test-" + filepath.Base(d.dir) + "/"
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range lines {
		if line, err := os.ReadFile(file); err != nil || !strings.Contains(string(line), command) {
			continue
		}
		text, err := os.ReadFile(filepath.Dir(file) + "/cgroup")
		_, in, ok := strings.Cut(string(text), "0::"+root)
		pid1 := pidOne(filepath.Dir(file))
		if err != nil || !ok || pid1 == 0 {
			continue // it has ended meanwhile
		}
		slot, _, _ := strings.Cut(in, "/")
		return pid1, mounts.V2 + root + slot
	}
	t.Fatalf("no sandbox has a process with %q", command)
	return 0, ""
}
