package service

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

const (
	captured = boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED
	proven   = boxwoodv1.CaptureStatus_CAPTURE_STATUS_PROVEN
	withheld = boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD
)

// becomes waits until a node has a state that it is given in the shadow.
func (d *daemon) becomes(t testing.TB, node string, want boxwoodv1.CaptureStatus) *boxwoodv1.Node {
	t.Helper()
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for until := time.Now().Add(50 * time.Second); ; {
		n := d.captured1(t, node)
		if n.GetCapture() == want {
			return n
		}
		if time.Now().After(until) {
			t.Fatalf("the node is %v, not %v: %s; %s", n.GetCapture(), want, n.GetWithheldReason(), d.says(t, "trial restores"))
		}
		<-again.C
	}
}

// says is what the daemon tells of one of its capabilities.
func (d *daemon) says(t testing.TB, name string) string {
	t.Helper()
	i, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range i.GetCapabilities() {
		if c.GetName() == name {
			return c.GetDetail()
		}
	}
	t.Fatalf("nothing is said of %q", name)
	return ""
}

// spoil flips a bit in every dump that the daemon has.
func (d *daemon) spoil(t testing.TB) {
	t.Helper()
	flipped := 0
	for _, place := range []string{engine.FindRunDir(d.dir) + "/dumps", d.dir + "/processes"} {
		files, err := filepath.Glob(place + "/ps_*/images/pages-*.img")
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range files {
			b, err := os.ReadFile(path)
			if err != nil || len(b) == 0 {
				continue // dropped meanwhile
			}
			b[len(b)/2] ^= 1
			if err = os.Chmod(path, 0o600); err == nil {
				err = os.WriteFile(path, b, 0o600)
			}
			if err == nil {
				err = os.Chmod(path, 0o444) // as it was: the byte alone must be enough
			}
			if err == nil {
				flipped++
			}
		}
	}
	if flipped == 0 {
		t.Fatal("no dump was found")
	}
}

const sleeper = `sleep 1000 >/dev/null 2>&1 </dev/null & true`

// A node of processes that nobody has forked is proven before the sandbox that stands there ends, by whatever way,
// and when nothing else goes on.
func TestTrialsProve(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	for _, c := range []struct {
		name string
		end  func(t *testing.T, root *boxwoodv1.Node, sb *boxwoodv1.Sandbox) error
	}{
		{"a release", func(t *testing.T, _ *boxwoodv1.Node, sb *boxwoodv1.Sandbox) error {
			_, err := d.client.Release(ctx(t), &boxwoodv1.ReleaseRequest{SandboxIds: []string{sb.GetId()}})
			return err
		}},
		{"its tree is closed", func(t *testing.T, _ *boxwoodv1.Node, sb *boxwoodv1.Sandbox) error {
			_, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: sb.GetTreeId()})
			return err
		}},
		{"its lease", func(t *testing.T, _ *boxwoodv1.Node, sb *boxwoodv1.Sandbox) error {
			_, err := d.client.Renew(ctx(t), &boxwoodv1.RenewRequest{SandboxIds: []string{sb.GetId()}, LeaseNs: 1})
			return err
		}},
		{"a rollback", func(t *testing.T, root *boxwoodv1.Node, sb *boxwoodv1.Sandbox) error {
			_, err := d.client.Rollback(ctx(t), &boxwoodv1.RollbackRequest{SandboxId: sb.GetId(), NodeId: root.GetId()})
			return err
		}},
		{"a quiet moment", func(*testing.T, *boxwoodv1.Node, *boxwoodv1.Sandbox) error { return nil }},
	} {
		t.Run(c.name, func(t *testing.T) {
			root, sb := d.newTree(t)
			node := d.saved(t, d.run(t, sb.GetId(), sleeper).GetNode().GetId())
			if err := c.end(t, root, sb); err != nil {
				t.Fatal(err)
			}
			d.becomes(t, node, proven)
		})
	}
	if said := d.says(t, "trial restores"); strings.HasPrefix(said, "0 proved") {
		t.Error(said)
	}
}

// A dump that can't be restored is found out while its sandbox is there: the node is withheld, and the next turn
// is captured anew, whatever it changed.
func TestTrialsThatFail(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := startDaemon(t, "")
	expected.Store(d.dir, "lost_state") // of those that were spoiled after their trial
	d.importRoot(t)
	_, sb := d.newTree(t)
	// refused dumps anew until a trial meets a dump that is spoiled already.
	refused := func(leave func(), dump func() string) *boxwoodv1.Node {
		t.Helper()
		for range 10 {
			n := d.captured1(t, d.saved(t, dump()))
			d.spoil(t)
			leave()
			until(t, "it is tried", func() bool { n = d.captured1(t, n.GetId()); return n.GetCapture() != captured })
			if n.GetCapture() == withheld {
				return n
			}
		}
		t.Fatal("spoiled dumps are proven")
		return nil
	}
	n := refused(func() {}, func() string { return d.run(t, sb.GetId(), sleeper).GetNode().GetId() })
	if !strings.Contains(n.GetWithheldReason(), "can't be restored") {
		t.Error(n.GetWithheldReason())
	}
	until(t, "the trial is counted as failed", func() bool { return strings.Contains(d.says(t, "trial restores"), " 1 failed") })
	next := d.saved(t, d.run(t, sb.GetId(), "true").GetNode().GetId())
	const sleeping = `cat /proc/[0-9]*/comm | grep -c '^sleep$'`
	if there, c := d.ok(t, sb.GetId(), sleeping), d.fork(t, next, 1)[0]; d.ok(t, c.GetId(), sleeping) != there {
		t.Error("the child isn't what was captured anew")
	}

	// Before its end, too, of which the caller needs to wait for nothing.
	var other *boxwoodv1.Sandbox
	refused(func() { free(t, d, other) }, func() string {
		_, other = d.newTree(t)
		return d.run(t, other.GetId(), sleeper).GetNode().GetId()
	})
}

// The daemon is killed while it tries a restore before the end of a sandbox. The next one finds the
// node as it was, and nothing of either body.
func TestDaemonKilledInATrial(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	dir := stateDir(t)
	d := startDaemon(t, dir)
	d.importRoot(t)
	_, sb := d.newTree(t)
	node := d.saved(t, d.run(t, sb.GetId(), sleeper).GetNode().GetId())
	var once sync.Once
	for until := time.Now().Add(20 * time.Second); time.Now().Before(until) && d.captured1(t, node).GetCapture() == captured; {
		once.Do(func() { free(t, d, sb) })
		if d.criuOf() > 0 {
			break
		}
	}
	d.kill()
	d = startDaemon(t, dir)
	if list := d.sandboxes(t, ""); len(list) != 0 {
		t.Errorf("adopted: %v", list)
	}
	if n := d.captured1(t, node); n.GetCapture() != captured && n.GetCapture() != proven {
		t.Errorf("the node is %v: %s", n.GetCapture(), n.GetWithheldReason())
	}
	d.becomes(t, d.saved(t, d.run(t, d.fork(t, node, 1)[0].GetId(), "true").GetNode().GetId()), proven)
}
