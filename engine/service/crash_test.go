package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// acked is a node the client has heard of and what a fork of it must show.
type acked struct {
	node    *boxwoodv1.Node
	content string
	asked   *boxwoodv1.RunTurnRequest
}

// Kills the daemon at random instants in the middle of turns. Every node that
// was acknowledged must be there afterwards; every one that reported captured
// must fork to its content; every other must be captured again or withheld
// with a reason. Whoever asks with the same key again is told the same, and nothing runs.
func TestKilledDaemonKeepsEveryAcknowledgedNode(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	dir := stateDir(t)
	var mu sync.Mutex
	var all []acked
	wasCaptured := map[string]bool{}
	for round := range 3 {
		d := startDaemon(t, dir)
		d.importRoot(t)
		checkAcked(t, d, all, wasCaptured)
		stop, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		for w := range 4 {
			_, sb := d.newTree(t)
			wg.Add(1)
			go func() {
				defer wg.Done()
				d.work(stop, sb.GetId(), fmt.Sprintf("%d-%d", round, w), func(n *boxwoodv1.Node, content string, asked *boxwoodv1.RunTurnRequest) {
					mu.Lock()
					defer mu.Unlock()
					all = append(all, acked{n, content, asked})
					if n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED {
						wasCaptured[n.GetId()] = true
					}
				})
			}()
		}
		until(t, "each life of the daemon answers some turns", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(all) >= 8*(round+1)
		})
		<-time.After(time.Duration(rnd.IntN(900)) * time.Millisecond) // where it is hit is the case, not a wait
		d.kill()
		cancel()
		wg.Wait()
	}
	d := startDaemon(t, dir)
	checkAcked(t, d, all, wasCaptured)
}

// work runs turns until the daemon is gone; every second one waits for its capture.
func (d *daemon) work(ctx context.Context, sandbox, name string, heard func(*boxwoodv1.Node, string, *boxwoodv1.RunTurnRequest)) {
	content := ""
	for i := 0; ; i++ {
		line := fmt.Sprintf("%s turn %d\n", name, i)
		req := &boxwoodv1.RunTurnRequest{SandboxId: sandbox, IdempotencyKey: fmt.Sprint(sandbox, " ", i), Command: &boxwoodv1.Command{Argv: [][]byte{
			[]byte("sh"), []byte("-c"), []byte("printf '%s' '" + line + "' >> /root/log")}}}
		if i%2 == 1 {
			req.Ack = boxwoodv1.Ack_ACK_CAPTURED
		}
		stream, err := d.client.RunTurn(ctx, req)
		if err != nil {
			return
		}
		for {
			m, err := stream.Recv()
			if err != nil {
				if errors.Is(err, io.EOF) {
					break
				}
				return
			}
			if r := m.GetResult(); r != nil {
				content += line
				heard(r.GetNode(), content, req)
			}
		}
	}
}

func checkAcked(t *testing.T, d *daemon, all []acked, wasCaptured map[string]bool) {
	t.Helper()
	counts := map[boxwoodv1.CaptureStatus]int{}
	for _, a := range all {
		n, err := d.client.GetNode(ctx(t), &boxwoodv1.GetNodeRequest{NodeId: a.node.GetId()})
		if err != nil {
			t.Fatalf("an acknowledged node is gone: %v", err)
		}
		if again, err := d.tryRun(t, a.asked); err != nil || again.GetNode().GetId() != n.GetId() {
			t.Fatalf("the key of node %s is answered with %v, %v", n.GetId(), again, err)
		}
		if n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_RECORDED {
			n = d.captured(t, n.GetId())[0]
		}
		counts[n.GetCapture()]++
		if n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
			if wasCaptured[n.GetId()] {
				t.Fatalf("node %s was captured and is withheld now: %s", n.GetId(), n.GetWithheldReason())
			}
			if n.GetWithheldReason() == "" {
				t.Fatalf("node %s is withheld without a reason", n.GetId())
			}
			continue
		}
		child := d.fork(t, n.GetId(), 1)[0]
		if got := d.ok(t, child.GetId(), "cat /root/log"); got != a.content {
			t.Fatalf("a fork of node %s shows %q, its turn left %q", n.GetId(), got, a.content)
		}
		if _, err := d.client.Release(ctx(t), &boxwoodv1.ReleaseRequest{SandboxIds: []string{child.GetId()}}); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d acknowledged nodes: %v", len(all), counts)
}

// A turn in the middle when the daemon dies was never acknowledged: nothing of
// it may show in any node, and its sandbox isn't adopted.
func TestKilledDaemonDropsTheHalfRunTurn(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	dir := stateDir(t)
	d := startDaemon(t, dir)
	d.importRoot(t)
	_, sb := d.newTree(t)
	_, idle := d.newTree(t)
	good := d.run(t, sb.GetId(), "echo good > /root/state").GetNode()
	kept := d.run(t, idle.GetId(), "echo kept > /root/state").GetNode()
	d.captured(t, good.GetId(), kept.GetId())
	stream, err := d.client.RunTurn(ctx(t), &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{
		Shell: []byte("echo bad > /root/state; echo begun; exec sleep 1000")}})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := stream.Recv(); err != nil || string(m.GetStdout()) != "begun\n" {
		t.Fatal(m, err)
	}
	d.kill()
	d = startDaemon(t, dir)
	list, err := d.client.ListSandboxes(ctx(t), &boxwoodv1.ListSandboxesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if len(list.GetSandboxes()) != 1 || list.GetSandboxes()[0].GetId() != idle.GetId() {
		t.Fatalf("the idle sandbox must be adopted and only it: %v", list.GetSandboxes())
	}
	n := d.run(t, idle.GetId(), "cat /root/state").GetNode()
	if got := string(n.GetObservation().GetStdout()); got != "kept\n" || n.GetParentId() != kept.GetId() {
		t.Fatalf("the adopted sandbox shows %q under %s", got, n.GetParentId())
	}
	if n.GetVerdict() == boxwoodv1.Verdict_VERDICT_NONE {
		t.Fatal("the first turn after a restart can't be none: nobody watched in between")
	}
	if got := d.ok(t, d.fork(t, good.GetId(), 1)[0].GetId(), "cat /root/state"); got != "good\n" {
		t.Fatalf("the half-run turn shows in a fork: %q", got)
	}
}

// A second daemon on the same state is refused and harms nothing.
func TestSecondDaemonIsRefused(t *testing.T) {
	d := running(t)
	second, err := launch(d.dir)
	if err == nil {
		second.stop()
		t.Fatal("two daemons on one state folder")
	}
	if !strings.Contains(err.Error(), "another process uses the state") {
		t.Fatalf("the refusal must say why: %v", err)
	}
	_, sb := d.newTree(t)
	d.ok(t, sb.GetId(), "echo still working")
}

// After the host went down under a pool that is damaged, the daemon refuses to
// start until it is told to rebuild; then every node is there and withheld, and
// the image can be imported again.
func TestRebuiltPoolWithholdsWhatItLost(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	dir := stateDir(t)
	d := startDaemon(t, dir)
	d.importRoot(t)
	_, sb := d.newTree(t)
	n := d.run(t, sb.GetId(), "echo x > /root/x").GetNode()
	d.captured(t, n.GetId())
	d.stop()
	if err := os.WriteFile(filepath.Join(dir, "pool.json"), []byte(`{"boot_id":"another","clean":false}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(dir, "pool.img"), 300<<20); err != nil {
		t.Fatal(err)
	}
	if broken, err := launch(dir); err == nil {
		broken.stop()
		t.Fatal("a damaged pool was trusted")
	} else if !strings.Contains(err.Error(), "pool") {
		t.Fatalf("the refusal must name the pool: %v", err)
	}
	t.Setenv(rebuildPool, "1")
	d = startDaemon(t, dir)
	got, err := d.client.GetNode(ctx(t), &boxwoodv1.GetNodeRequest{NodeId: n.GetId()})
	if err != nil || got.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD || !strings.Contains(got.GetWithheldReason(), "state lost") {
		t.Fatalf("after the rebuild: %v, %v", got, err)
	}
	d.importRoot(t)
	_, sb = d.newTree(t)
	d.ok(t, sb.GetId(), "echo works again")
}
