package service

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// A request that is refused costs the client nothing: its sandbox stands where
// it stood and goes on.
func TestRefusedTurnsLeaveTheSandboxAlone(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	many := map[string]string{}
	for i := range 65 {
		many[fmt.Sprint(i)] = "x"
	}
	ran := &boxwoodv1.Command{Shell: []byte("echo ran > /root/ran")}
	for name, req := range map[string]*boxwoodv1.RunTurnRequest{
		"long payload":        {Command: ran, Node: &boxwoodv1.NodeInput{Payload: make([]byte, 2<<20)}},
		"many labels":         {Command: ran, Node: &boxwoodv1.NodeInput{Labels: many}},
		"long label":          {Command: ran, Node: &boxwoodv1.NodeInput{Labels: map[string]string{"k": strings.Repeat("x", 5<<10)}}},
		"long policy version": {Command: ran, Node: &boxwoodv1.NodeInput{PolicyVersion: strings.Repeat("x", 5<<10)}},
		"NUL in cwd":          {Command: &boxwoodv1.Command{Shell: []byte("true"), Cwd: "/a\x00b"}},
		"NUL in user":         {Command: &boxwoodv1.Command{Shell: []byte("true"), User: "a\x00b"}},
		"long arguments":      {Command: &boxwoodv1.Command{Argv: [][]byte{[]byte("true"), []byte(strings.Repeat("x", 5<<20))}}},
		"many arguments":      {Command: &boxwoodv1.Command{Argv: append([][]byte{[]byte("true")}, make([][]byte, 1<<19)...)}},
	} {
		t.Run(name, func(t *testing.T) {
			req.SandboxId = sb.GetId()
			if r, err := d.tryRun(t, req); err == nil {
				t.Errorf("accepted: %v", r.GetNode().GetObservation())
			}
			n := d.run(t, sb.GetId(), "test ! -e /root/ran").GetNode()
			if n.GetObservation().GetExitCode() != 0 || n.GetVerdict() != boxwoodv1.Verdict_VERDICT_NONE {
				t.Errorf("the refused command ran: %v", n.GetVerdict())
			}
		})
	}
	turn, err := d.client.BeginTurn(ctx(t), &boxwoodv1.BeginTurnRequest{SandboxId: sb.GetId()})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.EndTurn(ctx(t), &boxwoodv1.EndTurnRequest{TurnId: turn.GetTurnId(), Node: &boxwoodv1.NodeInput{Labels: many}}); err == nil {
		t.Error("65 labels were taken")
	}
	if _, err := d.client.EndTurn(ctx(t), &boxwoodv1.EndTurnRequest{TurnId: turn.GetTurnId()}); err != nil {
		t.Errorf("the turn isn't open any more: %v", err)
	}
}

// forksAlike demands that a fork of the node at which a sandbox stands shows the
// same tree as that sandbox.
func (d *daemon) forksAlike(t testing.TB, sb *boxwoodv1.Sandbox, node string) {
	t.Helper()
	d.forksAlikeBut(t, sb, node, treewalk.Options{})
}

func (d *daemon) forksAlikeBut(t testing.TB, sb *boxwoodv1.Sandbox, node string, o treewalk.Options) {
	t.Helper()
	child := d.fork(t, node, 1)[0]
	defer free(t, d, child)
	var lines [2][]string
	var sums [2]string
	for i, gen := range []string{sb.GetGeneration(), child.GetGeneration()} {
		root := d.rootOf(t, gen)
		st, err := os.Stat(root)
		if err == nil {
			o.IDBase = st.Sys().(*syscall.Stat_t).Gid
			lines[i], sums[i], err = treewalk.Digest(root, o)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if sums[0] != sums[1] {
		t.Errorf("the child differs:\n%s", strings.Join(treewalk.Diff(lines[0], lines[1], 20), "\n"))
	}
}

// A turn may move the folders away that a box's mounts lie in. Such a root can't
// be made again, and its node says so (law 6); any other forks.
func TestMovedMountPointsWithholdTheNode(t *testing.T) {
	d := running(t)
	for _, attack := range []struct {
		shell    string
		withheld bool
	}{
		{"mv /run /gone", true},
		{"mv /run /gone && mkdir -p /run/box", true}, // or the child's /gone/box would differ
		{"mv /run /gone && mkdir /run && touch /run/box", true},
		{"mv /run /gone && mkdir /run && ln -s /proc /run/box", true},
		{"mv /etc /gone", true},
		{"mv /etc /gone && mkdir -p /etc/machine-id", true},
		{"mv /etc /gone && cp -a /gone /etc", true},
		{"mv /etc /gone && mkdir /etc && ln -s machine-id /etc/machine-id", true},
		{"mv /etc /gone && mkdir /etc && ln -s /dev/null /etc/machine-id", true},
		{"mv /etc /gone && mkdir /etc && ln -s /run/box/machine-id /etc/machine-id", true},
		{"mv /etc /gone && ln -s gone /etc", false},
		{"mv /etc /gone && mv /gone /etc", false},
		{"rm -rf /dev /proc /sys /etc /run 2>/dev/null; mv /dev /gone 2>/dev/null; rm -rf /bin /usr", false},
		{"chmod 0 / /etc /run", false},
	} {
		t.Run(attack.shell, func(t *testing.T) {
			_, sb := d.newTree(t)
			n := d.captured(t, d.run(t, sb.GetId(), attack.shell).GetNode().GetId())[0]
			if withheld := n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD; withheld != attack.withheld {
				t.Fatalf("%v: %s", n.GetCapture(), n.GetWithheldReason())
			} else if !withheld {
				d.forksAlike(t, sb, n.GetId())
			} else if !strings.Contains(n.GetWithheldReason(), "mount point") {
				t.Errorf("the reason is %q", n.GetWithheldReason())
			}
		})
	}
}

// until asks again and again until something holds.
func until(t testing.TB, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	late := time.NewTimer(time.Minute)
	defer late.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-late.C:
			t.Fatal("never: ", what)
		}
	}
}

func (d *daemon) sandboxes(t testing.TB, tree string) []*boxwoodv1.Sandbox {
	t.Helper()
	l, err := d.client.ListSandboxes(ctx(t), &boxwoodv1.ListSandboxesRequest{TreeId: tree})
	if err != nil {
		t.Fatal(err)
	}
	return l.GetSandboxes()
}

// A client that stops in the middle of a transfer holds up nobody who wants the
// sandbox: neither a cancel nor a turn's deadline nor a release.
func TestStalledTransfersYield(t *testing.T) {
	d := running(t)
	begin := func(t *testing.T, sb *boxwoodv1.Sandbox, turn string) {
		t.Helper()
		up, err := d.client.Upload(ctx(t))
		if err == nil {
			err = up.Send(&boxwoodv1.UploadRequest{Part: &boxwoodv1.UploadRequest_Start{Start: &boxwoodv1.UploadStart{SandboxId: sb.GetId(), TurnId: turn, Path: "/up"}}})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	busy := func(t *testing.T, sb *boxwoodv1.Sandbox) bool { return d.sandboxes(t, sb.GetTreeId())[0].GetBusy() }
	upload := func(t *testing.T, sb *boxwoodv1.Sandbox) {
		t.Helper()
		begin(t, sb, "")
		until(t, "the upload begins", func() bool { return busy(t, sb) })
	}
	release := func(t *testing.T, sb *boxwoodv1.Sandbox) {
		t.Helper()
		soon, cancel := context.WithTimeout(ctx(t), 20*time.Second)
		defer cancel()
		if r, err := d.client.Release(soon, &boxwoodv1.ReleaseRequest{SandboxIds: []string{sb.GetId()}}); err != nil || r.GetReleased() != 1 {
			t.Errorf("releasing: %v, %v", r, err)
		}
	}
	t.Run("cancelled upload", func(t *testing.T) {
		_, sb := d.newTree(t)
		upload(t, sb)
		if r, err := d.client.CancelTurn(ctx(t), &boxwoodv1.CancelTurnRequest{SandboxId: sb.GetId()}); err != nil || !r.GetWasRunning() {
			t.Fatal(r, err)
		}
		if _, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), BusyWaitNs: int64(20 * time.Second), Command: &boxwoodv1.Command{Shell: []byte("true")}}); err != nil {
			t.Error(err)
		}
	})
	t.Run("upload past the turn's deadline", func(t *testing.T) {
		_, sb := d.newTree(t)
		testenv.Reach(t, 300*time.Millisecond, func(within time.Duration) bool {
			turn, err := d.client.BeginTurn(ctx(t), &boxwoodv1.BeginTurnRequest{SandboxId: sb.GetId(), DeadlineNs: int64(within)})
			if err != nil {
				t.Fatal(err)
			}
			begin(t, sb, turn.GetTurnId())
			begun := busy(t, sb)
			until(t, "the turn ends", func() bool { return !busy(t, sb) })
			return begun
		})
	})
	t.Run("upload while released", func(t *testing.T) {
		_, sb := d.newTree(t)
		upload(t, sb)
		release(t, sb)
	})
	t.Run("download while released", func(t *testing.T) {
		_, sb := d.newTree(t)
		d.ok(t, sb.GetId(), "head -c 30000000 /dev/zero > /root/big")
		down, err := d.client.Download(ctx(t), &boxwoodv1.DownloadRequest{SandboxId: sb.GetId(), Path: "/root/big"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := down.Recv(); err != nil {
			t.Fatal(err)
		}
		release(t, sb)
	})
	t.Run("deadline that has passed at once", func(t *testing.T) {
		_, sb := d.newTree(t)
		if _, err := d.client.BeginTurn(ctx(t), &boxwoodv1.BeginTurnRequest{SandboxId: sb.GetId(), DeadlineNs: 1}); err != nil {
			t.Fatal(err)
		}
		until(t, "the turn ends", func() bool { return !busy(t, sb) })
		d.ok(t, sb.GetId(), "true")
	})
}

// A read is no turn: when its client goes away, what earlier turns left running goes on.
func TestCancelledReadsSpareSurvivors(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	d.ok(t, sb.GetId(), "head -c 30000000 /dev/zero > /root/big; sleep 1000 >/dev/null 2>&1 &")
	going, cancel := context.WithCancel(ctx(t))
	down, err := d.client.Download(going, &boxwoodv1.DownloadRequest{SandboxId: sb.GetId(), Path: "/root/big"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := down.Recv(); err != nil {
		t.Fatal(err)
	}
	cancel()
	r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), BusyWaitNs: int64(20 * time.Second), Command: &boxwoodv1.Command{Shell: []byte(sleepers)}})
	if err != nil || len(r.GetNode().GetObservation().GetStdout()) == 0 {
		t.Fatalf("the survivor is gone: %v, %v", r.GetNode().GetObservation(), err)
	}
}

// A tree whose first sandbox can't be made is an answer with a reason.
func TestTreeWithoutItsSandboxSaysWhy(t *testing.T) {
	d := running(t)
	r, err := d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{
		Start: &boxwoodv1.CreateTreeRequest_Image{Image: "mini"}, WithSandbox: true,
		Defaults: &boxwoodv1.Defaults{Limits: &boxwoodv1.Limits{MemoryBytes: 1}},
	})
	if err == nil || reason(err) == "panic" {
		t.Fatalf("a sandbox in one byte of memory: %v, %v", r, err)
	}
}

// No child is left behind in a tree that was closed while it was being forked.
func TestClosedTreeKeepsNoChild(t *testing.T) {
	d := running(t)
	for range 4 {
		root, sb := d.newTree(t)
		stream, err := d.client.Fork(ctx(t), &boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{
			{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: root.GetId()}, Count: 32}}})
		if err == nil {
			_, err = stream.Recv()
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: sb.GetTreeId()}); err != nil {
			t.Fatal(err)
		}
		for err == nil {
			_, err = stream.Recv()
		}
		if err != io.EOF {
			t.Fatal(err)
		}
		if left := d.sandboxes(t, sb.GetTreeId()); len(left) > 0 {
			t.Fatalf("%d sandboxes live on in a closed tree", len(left))
		}
	}
}

// A repeated key gives the answer that was asked for: captured means captured.
func TestReplayedAnswerWaitsForItsCapture(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	req := &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), IdempotencyKey: "k-" + sb.GetId(), Ack: boxwoodv1.Ack_ACK_CAPTURED,
		Command: &boxwoodv1.Command{Shell: []byte("echo x > /root/x")}}
	for range 2 {
		r, err := d.tryRun(t, req)
		if err != nil {
			t.Fatal(err)
		}
		if n := r.GetNode(); n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED || n.GetCheckpointId() == "" || n.GetCheckpointNodeId() != n.GetId() {
			t.Fatalf("acknowledged as %v, checkpoint %q of node %q", n.GetCapture(), n.GetCheckpointId(), n.GetCheckpointNodeId())
		}
	}
}

// Reading from a sandbox doesn't cost it its adoption: it has run nothing that
// its node doesn't know of.
func TestReadSandboxIsAdopted(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	dir := stateDir(t)
	d := startDaemon(t, dir)
	d.importRoot(t)
	_, sb := d.newTree(t)
	_, written := d.newTree(t)
	n := d.run(t, sb.GetId(), "echo x > /root/x").GetNode()
	d.captured(t, n.GetId())
	if _, err := d.client.ReadFile(ctx(t), &boxwoodv1.ReadFileRequest{SandboxId: sb.GetId(), Path: "/root/x"}); err != nil {
		t.Fatal(err)
	}
	// An open turn that wrote, but whose node was never made.
	turn, err := d.client.BeginTurn(ctx(t), &boxwoodv1.BeginTurnRequest{SandboxId: written.GetId()})
	if err == nil {
		_, err = d.client.WriteFile(ctx(t), &boxwoodv1.WriteFileRequest{SandboxId: written.GetId(), TurnId: turn.GetTurnId(), Path: "/root/x"})
	}
	if err != nil {
		t.Fatal(err)
	}
	d.kill()
	d = startDaemon(t, dir)
	if list := d.sandboxes(t, ""); len(list) != 1 || list[0].GetId() != sb.GetId() {
		t.Fatalf("adopted: %v", list)
	}
}

// A process that forks and exits again and again is never there when it is looked at.
// It is a survivor all the same (law 2).
func TestForkingChainSurvives(t *testing.T) {
	d := running(t)
	root, _ := d.newTree(t)
	for _, c := range d.fork(t, root.GetId(), 4) {
		n := d.run(t, c.GetId(), "f() { f & exit; }; f >/dev/null 2>&1 &").GetNode()
		if v := n.GetVerdict(); v != boxwoodv1.Verdict_VERDICT_PROCESS && v != boxwoodv1.Verdict_VERDICT_BOTH {
			t.Errorf("%v, %v: %q", v, n.GetCapture(), n.GetReasons())
		}
		free(t, d, c)
	}
}

// What turns do to their files and processes to be restored wrongly. Whatever isn't
// withheld forks to the same tree, and a turn judged none has left its parent's.
func TestHostileTurns(t *testing.T) {
	d := running(t)
	root, _ := d.newTree(t, "namespaces")
	fork := func(t *testing.T) *boxwoodv1.Sandbox {
		r := d.tryFork(t, &boxwoodv1.ForkRequest{Limits: &boxwoodv1.Limits{DiskBytes: 32 << 20, Pids: 64}, Wants: []*boxwoodv1.ForkRequest_Want{
			{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: root.GetId()}, Count: 1}}})
		if len(r) != 1 || r[0].GetError() != nil {
			t.Fatal(r)
		}
		return r[0].GetSandbox()
	}
	for name, shell := range map[string]string{
		"fork bomb":               "f() { f | f & }; f",
		"nothing":                 "true",
		"long names":              `n=$(printf 'x%.0s' {1..255}); mkdir /$n && echo y > /$n/$n; mv /$n/$n /$n/${n%x}y`,
		"deep folders":            "d=$(printf 'a/%.0s' {1..1000}); mkdir -p $d && echo x > $d/f",
		"odd names":               `cd /root; echo a > $'new\nline'; echo b > $'\xff\xfe\x80'; mkdir $'\xc3\x28'; mv $'\xff\xfe\x80' $'\xc3\x28/\x01'; ln -s $'\xff' ' '; : > '*'`,
		"odd names of the image":  `mv /etc $'/\xff\xfe' ; mv $'/\xff\xfe' /etc; mv /usr $'/\xffusr'`,
		"links across layers":     "ln /etc/passwd /root/p; ln /etc/group /root/g; echo more >> /root/g; rm /etc/passwd",
		"renamed image folders":   "mv /usr /usr2; mkdir /usr; mv /usr2/bin /usr/bin; mv /var /usr/var; mkdir -p /var/tmp; rmdir /home/agent && mv /home /tmp/home",
		"replaced kinds":          "rm -rf /home; echo f > /home; rm /etc/group; mkdir /etc/group; rm -rf /var; ln -s tmp /var",
		"holes":                   "truncate -s 50M /root/hole; echo x | dd of=/root/hole bs=1 seek=30000000 conv=notrunc 2>/dev/null; dd if=/dev/zero of=/root/z bs=1M count=3 conv=sparse 2>/dev/null",
		"modes and owners":        "cd /root; for m in 0 777 4755 2777 1777; do : > f$m; chmod $m f$m; done; chown 1000:50 f777; chown 65535:65535 f0; mkdir -m 2775 g; chown :77 g; : > g/h; touch -d 1970-01-01 f777; touch -h -d 2038-01-20 f1777",
		"attributes":              "cd /root; : > f; setfattr -n user.a -v 1 f; setfattr -n user.overlay.opaque -v y .; setfattr -n trusted.overlay.opaque -v y . ; setfattr -n user.big -v $(head -c 3000 /dev/zero | tr '\\0' x) f; setfattr -n user.b -v 2 /etc/passwd",
		"capabilities of files":   "cp /bin/true /root/t && setfattr -n security.capability -v 0x0100000200040000000000000000000000000000 /root/t",
		"fifos and devices":       "mkfifo /root/p; mknod /root/null c 1 3; mknod /root/sda b 8 0; mknod /root/whiteout c 0 0; mknod /etc/whiteout c 0 0",
		"whiteout by hand":        "cd /etc; mknod passwd2 c 0 0; rm passwd; mknod passwd c 0 0; ls -la passwd",
		"exchanged":               "mkdir /a /b; echo 1 > /a/f; echo 2 > /b/f; mv /a /c; mv /b /a; mv /c /b; mv /a/f /a/g; ln /b/f /a/f; rm /b/f",
		"undone":                  "echo x > /root/x; rm /root/x; mkdir /d; rmdir /d; mv /etc/group /g; mv /g /etc/group",
		"same content":            "cp -p /etc/passwd /tmp/p; cat /tmp/p > /etc/passwd; touch -r /tmp/p /etc/passwd; rm /tmp/p",
		"opened and deleted":      "exec 5<>/root/x; rm /root/x; echo more >&5; exec 6</etc/passwd; rm /etc/passwd",
		"shared memory":           "echo x > /dev/shm/x; mkdir -p /run/lock /tmp/t; echo y > /run/lock/l",
		"late writer":             "(sleep 0.02; echo late > /root/late) >/dev/null 2>&1 & exit 0",
		"writer in a new session": "setsid bash -c 'while :; do echo x >> /root/late; done' >/dev/null 2>&1 &",
		"parents killed":          "(setsid bash -c 'kill -9 $PPID; sleep 0.01; echo x > /root/x' >/dev/null 2>&1 &); kill -9 $$",
		"kills all":               "echo x > /root/x; kill -9 -1; kill -STOP 1; kill -9 1",
		"closed descriptors":      "exec 0<&- 1>&- 2>&-; echo x > /root/x; exec 9>/root/y; echo z >&9",
		"user namespace":          "unshare -Ur true; unshare -Urm sh -c 'mount -t tmpfs t /tmp && echo x > /tmp/x; mount --bind /root /etc; echo y > /root/y; umount /etc; mv /run /r2'; unshare -Urm sh -c 'umount -l /etc/machine-id; umount -l /run/box; rm -f /etc/machine-id; mv /run/box /run/b'",
		"overlay inside":          "mkdir -p /o/u /o/w /o/m; unshare -Urm sh -c 'mount -t overlay o -o lowerdir=/etc,upperdir=/o/u,workdir=/o/w,userxattr /o/m && rm /o/m/passwd && echo x > /o/m/group'",
		"cgroups":                 "unshare -UrmC sh -c 'mount -t cgroup2 c /tmp && mkdir /tmp/x && echo $$ > /tmp/x/cgroup.procs; mount -t cgroup -o memory c /tmp; ls /tmp'; echo 0 > /sys/fs/cgroup/cgroup.procs; true",
		"writes to proc":          "echo 0 > /proc/self/oom_score_adj; echo -1000 > /proc/1/oom_score_adj; echo x > /proc/sys/kernel/hostname; echo 1 > /proc/sys/vm/drop_caches; true",
		"control folder":          "echo x > /run/box/x; rm /run/box/*; mv /run/box /run/b; mount -o remount,rw /run/box; chmod 777 /run/box; true",
		"no way in":               "chmod 0 / /root /bin /usr/bin; chown 1000 /",
		"quota":                   "head -c 60M /dev/zero > /root/big; echo $?; echo small > /root/small; rm /root/big; echo small > /root/small; head -c 60M /dev/zero > /root/big",
	} {
		t.Run(name, func(t *testing.T) {
			sb := fork(t)
			defer free(t, d, sb)
			r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Shell: []byte(shell), DeadlineNs: int64(5 * time.Second)}})
			if err != nil {
				t.Fatal(err)
			}
			n := d.captured(t, r.GetNode().GetId())[0]
			t.Logf("%v %v: %q %s", n.GetVerdict(), n.GetCapture(), r.GetNode().GetReasons(), n.GetWithheldReason())
			switch {
			case r.GetNode().GetVerdict() == boxwoodv1.Verdict_VERDICT_NONE:
				d.forksAlikeBut(t, sb, n.GetId(), treewalk.Options{IgnoreDirTimes: true}) // see docs/INSPECTOR.md
			case n.GetCapture() == withheld && n.GetWithheldReason() == "":
				t.Error("withheld without a reason")
			case n.GetCapture() == withheld:
			case n.GetSurvivorsRan():
				// The files go on changing; the daemon has compared the processes.
				free(t, d, d.fork(t, n.GetId(), 1)...)
			default:
				d.forksAlike(t, sb, n.GetId())
			}
		})
	}
}

// After many forks, turns and releases the daemon holds what it held before.
func TestForksLeakNothing(t *testing.T) {
	d := running(t)
	root, sb := d.newTree(t)
	past := d.run(t, sb.GetId(), "echo x > /root/x").GetNode()
	count := func(pattern string) int {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		return len(found)
	}
	held := func() map[string]int {
		until(t, "everything is removed", func() bool {
			i, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
			return err == nil && i.GetPendingRemovals() == 0
		})
		return map[string]int{
			"descriptors": count(fmt.Sprintf("/proc/%d/fd/*", d.cmd.Process.Pid)),
			"groups":      count(filepath.Join(v2Mount(t), "boxwood-test-"+filepath.Base(d.dir), "*")),
			"records":     len(d.sandboxes(t, "")),
		}
	}
	round := func() {
		children := append(d.fork(t, past.GetId(), 16), d.fork(t, root.GetId(), 4)...)
		for _, c := range children[12:] {
			d.ok(t, c.GetId(), "echo y > /root/y")
		}
		free(t, d, children...)
	}
	round()
	before := held()
	for range 5 {
		round()
	}
	// Zygotes and spares are made in the background: a few more or less.
	for what, n := range held() {
		if n > before[what]+30 {
			t.Errorf("%s: %d before, %d after 100 forks", what, before[what], n)
		}
	}
	t.Logf("%v, then %v", before, held())
}

// Turns that follow on each other's heels: each waits for the capture of the one
// before, and none is seen in an earlier node (law 9).
func TestNextTurnIsInNoEarlierNode(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	var nodes []string
	for i := range 6 {
		// Much to flush, so that the capture is still at it when the next turn begins.
		shell := fmt.Sprintf("echo %d > /root/f; head -c 20000000 /dev/urandom > /root/much", i)
		r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Argv: [][]byte{[]byte("sh"), []byte("-c"), []byte(shell)}}})
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, r.GetNode().GetId())
	}
	for i, n := range d.captured(t, nodes...) {
		child := d.fork(t, n.GetId(), 1)[0]
		if got := d.ok(t, child.GetId(), "cat /root/f"); got != fmt.Sprintf("%d\n", i) {
			t.Errorf("turn %d left %q", i, got)
		}
		free(t, d, child)
	}
}

// After a capture that failed no verdict is below files until one succeeds (law 2).
func TestFailedCaptureIsRemembered(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	for _, shell := range []string{"echo x > /root/x; mv /run /gone", "true"} {
		n := d.run(t, sb.GetId(), shell).GetNode()
		if got := d.captured(t, n.GetId())[0]; n.GetVerdict() != boxwoodv1.Verdict_VERDICT_FILES || got.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
			t.Errorf("%q: %v, %v", shell, n.GetVerdict(), got.GetCapture())
		}
	}
	n := d.captured(t, d.run(t, sb.GetId(), "mv /gone /run").GetNode().GetId())[0]
	if n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED {
		t.Fatalf("put back: %v: %s", n.GetCapture(), n.GetWithheldReason())
	}
	d.forksAlike(t, sb, n.GetId())
	if n := d.run(t, sb.GetId(), "true").GetNode(); n.GetVerdict() != boxwoodv1.Verdict_VERDICT_NONE {
		t.Errorf("after the capture that worked: %v: %q", n.GetVerdict(), n.GetReasons())
	}
}

func TestDeadlineEndsTheTurn(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Shell: []byte("sleep 5"), DeadlineNs: int64(100 * time.Millisecond)}})
	if err != nil || r.GetNode().GetTurnStatus() != boxwoodv1.TurnStatus_TURN_STATUS_TIMED_OUT {
		t.Fatalf("past its deadline: %v, %v", r.GetNode().GetTurnStatus(), err)
	}
}

// A sandbox that fills the pool: no node is wrong, what it stops says so, and once it
// is gone all goes on.
func TestFullPool(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	t.Setenv(smallPool, "1")
	d := startDaemon(t, "")
	d.importRoot(t)
	_, neighbour := d.newTree(t)
	d.ok(t, neighbour.GetId(), "head -c 10M /dev/urandom > /root/kept")
	// By default nobody gets that far.
	start, bounded := d.newTree(t)
	if o := d.run(t, bounded.GetId(), "head -c 300M /dev/urandom > /root/much").GetNode().GetObservation(); !strings.Contains(string(o.GetStderr()), "quota exceeded") {
		t.Fatalf("one sandbox fills the pool: %s%s", o.GetStdout(), o.GetStderr())
	}
	if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: bounded.GetTreeId()}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: start.GetId()}); err != nil {
		t.Fatal(err)
	}
	until(t, "its bytes are back", func() bool {
		i, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return i.GetPoolBytesUsed() < 80<<20
	})
	made, err := d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{
		Start: &boxwoodv1.CreateTreeRequest_Image{Image: "mini"}, WithSandbox: true,
		Defaults: &boxwoodv1.Defaults{Limits: &boxwoodv1.Limits{DiskBytes: 4 << 30}}})
	if err != nil {
		t.Fatal(err)
	}
	hog := made.GetSandbox()
	full := d.run(t, hog.GetId(), "for ((i = 0; i < 100; i++)); do head -c 10M /dev/urandom > /root/$i || break; done; ls /root | wc -l").GetNode()
	if o := full.GetObservation(); !strings.Contains(string(o.GetStderr()), "No space left") {
		t.Fatalf("the pool isn't full: %s%s", o.GetStdout(), o.GetStderr())
	}
	for _, sb := range []*boxwoodv1.Sandbox{hog, neighbour} {
		n := d.captured(t, d.run(t, sb.GetId(), "echo more > /root/more").GetNode().GetId())[0]
		if n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD && n.GetWithheldReason() == "" {
			t.Error("withheld without a reason")
		}
	}
	grow := func() error {
		_, err := d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{Start: &boxwoodv1.CreateTreeRequest_Image{Image: "mini"}, WithSandbox: true})
		return err
	}
	var refused error
	for range 16 { // a few may be made of what was made ahead
		if refused = grow(); refused != nil {
			break
		}
	}
	if reason(refused) != "pool_full" {
		t.Errorf("a tree in a full pool: %v", refused)
	}
	if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: hog.GetTreeId()}); err != nil {
		t.Fatal(err)
	}
	if r, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: full.GetId()}); err != nil {
		t.Fatal(r, err)
	}
	// The kernel takes its time: it frees blocks by transactions, which need some.
	pause := time.NewTicker(50 * time.Millisecond) // the daemon's log keeps what matters
	defer pause.Stop()
	for began := time.Now(); ; <-pause.C {
		refused = grow()
		if refused == nil {
			break
		}
		if time.Since(began) > 60*time.Second {
			i, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
			t.Fatalf("a minute after the prune: %v; %d bytes used, %d removals pending, %v", refused, i.GetPoolBytesUsed(), i.GetPendingRemovals(), err)
		}
	}
	// A write that failed for lack of space has moved a time in the kernel's memory alone.
	n := d.captured(t, d.run(t, neighbour.GetId(), "rm -f /root/more; echo again > /root/again").GetNode().GetId())[0]
	if n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED {
		t.Fatalf("with room again: %v: %s", n.GetCapture(), n.GetWithheldReason())
	}
	d.forksAlike(t, neighbour, n.GetId())
}

// A step of a turn that panics costs its sandbox, and nobody else: a command, or a transfer.
func TestAPanicEndsItsSandboxAlone(t *testing.T) {
	d := startDaemon(t, "")
	d.importRoot(t)
	_, other := d.newTree(t)
	for what, step := range map[string]func(sandbox string) error{
		"command": func(sandbox string) error {
			_, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sandbox, Command: &boxwoodv1.Command{Shell: []byte("true")}})
			return err
		},
		"transfer": func(sandbox string) error {
			_, err := d.client.WriteFile(ctx(t), &boxwoodv1.WriteFileRequest{SandboxId: sandbox, Path: "/root/x", Content: []byte("x")})
			return err
		},
	} {
		_, sb := d.newTree(t)
		if out, ok := d.tell("panic 1 turn ran"); !ok || out != "armed <nil>" {
			t.Fatal(out)
		}
		if err := step(sb.GetId()); reason(err) != "panic" {
			t.Errorf("%s: %v", what, err)
		}
		if err := step(sb.GetId()); reason(err) != "sandbox_gone" {
			t.Errorf("%s: after the panic its sandbox answers %v", what, err)
		}
	}
	d.run(t, other.GetId(), "true")
}

// What can't be removed at once (a full disk, a process that the kernel takes its time with) is
// removed a moment later, without a restart and without a word from anybody.
func TestRemovalsAreTriedAgain(t *testing.T) {
	d := startDaemon(t, "")
	d.importRoot(t)
	_, sb := d.newTree(t)
	turn := d.run(t, sb.GetId(), "echo much > /root/much").GetNode()
	d.captured(t, turn.GetId())
	for _, way := range []struct {
		step   string
		remove func() error
	}{
		{"box killed", func() error {
			_, err := d.client.Release(ctx(t), &boxwoodv1.ReleaseRequest{SandboxIds: []string{sb.GetId()}})
			return err
		}},
		{"condemned removed", func() error {
			_, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: turn.GetId()})
			return err
		}},
	} {
		if out, ok := d.tell("error 1 " + way.step); !ok || out != "armed <nil>" {
			t.Fatal(out)
		}
		if err := way.remove(); err != nil {
			t.Fatal(way.step, err)
		}
		until(t, "the step fails", func() bool { out, _ := d.tell("?"); return out == "true" })
		until(t, "all is removed", func() bool {
			i, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
			if err != nil {
				t.Fatal(err)
			}
			return i.GetPendingRemovals() == 0
		})
	}
	run := engine.FindRunDir(d.dir)
	if _, err := os.Stat(run); err != nil {
		t.Fatal(err)
	}
	d.stop()
	for _, f := range inspected(d.dir) {
		t.Error(f)
	}
	// If it stays, each daemon that was ever here holds memory of the host.
	if _, err := os.Stat(run); !os.IsNotExist(err) {
		t.Errorf("the run folder %s of a daemon without sandboxes is there after its end: %v", run, err)
	}
}

// An open turn whose client has gone, in the middle of a command or between two, holds up no release, and
// its node says that it was stopped.
func TestAReleaseEndsAnOpenTurn(t *testing.T) {
	d := running(t)
	for _, busy := range []bool{false, true} {
		root, sb := d.newTree(t)
		turn, err := d.client.BeginTurn(ctx(t), &boxwoodv1.BeginTurnRequest{SandboxId: sb.GetId(), DeadlineNs: int64(time.Hour)})
		if err != nil {
			t.Fatal(err)
		}
		if busy {
			stream, err := d.client.Exec(ctx(t), &boxwoodv1.ExecRequest{TurnId: turn.GetTurnId(), Command: &boxwoodv1.Command{Shell: []byte("echo runs; sleep 1h")}})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := stream.Recv(); err != nil {
				t.Fatal(err)
			}
		}
		soon, cancel := context.WithTimeout(ctx(t), 50*time.Second) // a release waits a minute for what it can't end
		_, err = d.client.Release(soon, &boxwoodv1.ReleaseRequest{SandboxIds: []string{sb.GetId()}})
		cancel()
		if err != nil {
			t.Fatal("releasing: ", err)
		}
		if _, err := d.client.EndTurn(ctx(t), &boxwoodv1.EndTurnRequest{TurnId: turn.GetTurnId()}); reason(err) != "turn_over" {
			t.Errorf("ending what was ended: %v", err)
		}
		if list := d.nodesOf(t, root.GetTreeId()); len(list) != 2 || list[1].GetTurnStatus() != boxwoodv1.TurnStatus_TURN_STATUS_CANCELLED {
			t.Errorf("its nodes: %v", list)
		}
	}
}
