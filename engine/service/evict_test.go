package service

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/status"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// line runs turns in one sandbox, each of which adds a line to /root/log, and waits for their captures.
func (d *daemon) line(t testing.TB, sandbox, name string, n int) (out []*boxwoodv1.Node) {
	t.Helper()
	for i := range n {
		node := d.run(t, sandbox, fmt.Sprintf("echo %s%d >> /root/log; head -c 100000 /dev/urandom > /root/%[1]s%[2]d", name, i)).GetNode()
		d.captured(t, node.GetId())
		out = append(out, node)
	}
	return out
}

func (d *daemon) node(t testing.TB, id string) *boxwoodv1.Node {
	t.Helper()
	n, err := d.client.GetNode(ctx(t), &boxwoodv1.GetNodeRequest{NodeId: id})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// States alone can go: the nodes stay with all they say, name the way to make them again,
// and their space comes back. What is in use refuses, by what.
func TestPruneOnlyStates(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	d := startDaemon(t, "")
	d.importRoot(t)
	root, sb := d.newTree(t)
	line := d.line(t, sb.GetId(), "a", 4)
	prune := func(id string, keep, release bool) (*boxwoodv1.PruneResponse, error) {
		return d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: id, KeepNode: keep, ReleaseSandboxes: release, StatesOnly: true})
	}
	refused := func(what, why, id string, keep, release bool) {
		t.Helper()
		if r, err := prune(id, keep, release); reason(err) != why {
			t.Fatalf("%s: %v, %v", what, r, err)
		}
	}
	refused("a sandbox at the end", "sandbox_there", line[1].GetId(), false, false)
	refused("the root", "root", root.GetId(), false, true)
	if _, err := d.client.Pin(ctx(t), &boxwoodv1.PinRequest{NodeIds: []string{line[2].GetId()}}); err != nil {
		t.Fatal(err)
	}
	refused("a pinned node", "pinned", line[1].GetId(), false, true)
	if _, err := d.client.Unpin(ctx(t), &boxwoodv1.UnpinRequest{NodeIds: []string{line[2].GetId()}}); err != nil {
		t.Fatal(err)
	}
	other, err := d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{Start: &boxwoodv1.CreateTreeRequest_NodeId{NodeId: line[3].GetId()}})
	if err != nil {
		t.Fatal(err)
	}
	refused("another tree", "checkpoint_shared", line[1].GetId(), false, true)
	if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: other.GetTree().GetId()}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: other.GetRoot().GetId()}); err != nil {
		t.Fatal(err)
	}

	r, err := prune(line[1].GetId(), false, true)
	if err != nil || r.GetNodes() != 3 || r.GetCheckpoints() != 3 || r.GetFreedBytes() < 300_000 {
		t.Fatalf("pruning states: %v, %v", r, err)
	}
	n := d.node(t, line[3].GetId())
	if n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD || string(n.GetAction().GetText()) != string(line[3].GetAction().GetText()) ||
		!strings.Contains(n.GetWithheldReason(), "evicted by request; 3 turns from node "+line[0].GetId()) {
		t.Fatalf("a node whose state was pruned: %v", n)
	}
	_, err = d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{Start: &boxwoodv1.CreateTreeRequest_NodeId{NodeId: n.GetId()}})
	if reason(err) != "node_withheld" || !strings.Contains(status.Convert(err).Message(), "evicted") {
		t.Fatalf("a tree from it: %v", err)
	}
	// The way that it names leads there.
	again := d.fork(t, line[0].GetId(), 1)[0]
	for _, turn := range line[1:] {
		d.ok(t, again.GetId(), string(turn.GetAction().GetText()))
	}
	if got := d.ok(t, again.GetId(), "cat /root/log"); got != "a0\na1\na2\na3\n" {
		t.Fatalf("made again it shows %q", got)
	}
}

// If it fails, the states of closed trees stay whatever the policy says, or one goes that leads to what is pinned.
func TestRetentionOfClosedTrees(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	d := startDaemon(t, "")
	d.importRoot(t)
	root, sb := d.newTree(t)
	line := d.line(t, sb.GetId(), "a", 5)
	if _, err := d.client.Pin(ctx(t), &boxwoodv1.PinRequest{NodeIds: []string{line[1].GetId()}}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: root.GetTreeId()}); err != nil {
		t.Fatal(err)
	}
	until(t, "the closed tree is archived", func() bool { return d.archived(t, root.GetTreeId()) })
	d.stop()
	t.Setenv(keepStates, "3") // as many as the pinned node needs
	d = startDaemon(t, d.dir)
	until(t, "the policy to be kept", func() bool {
		return d.node(t, line[4].GetId()).GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD
	})
	for i, n := range line {
		n = d.node(t, n.GetId())
		if gone := strings.Contains(n.GetWithheldReason(), "evicted by policy"); gone != (i > 1) {
			t.Errorf("state %d of 5, of which the second is pinned: %v %s", i+1, n.GetCapture(), n.GetWithheldReason())
		}
	}
}

// The policy lets the oldest states go, and keeps those on the way to what is
// pinned or lives.
func TestRetention(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	t.Setenv(keepStates, "6")
	d := startDaemon(t, "")
	d.importRoot(t)
	_, sb := d.newTree(t)
	stem := d.line(t, sb.GetId(), "stem", 1)[0]
	kept := map[string]bool{stem.GetId(): true}
	branch := func(name string) []*boxwoodv1.Node {
		child := d.fork(t, stem.GetId(), 1)[0]
		defer free(t, d, child)
		return d.line(t, child.GetId(), name, 2)
	}
	pinned := branch("pinned")
	if _, err := d.client.Pin(ctx(t), &boxwoodv1.PinRequest{NodeIds: []string{pinned[1].GetId()}}); err != nil {
		t.Fatal(err)
	}
	for _, n := range append(pinned, d.line(t, sb.GetId(), "live", 1)...) {
		kept[n.GetId()] = true
	}
	var others []*boxwoodv1.Node
	for i := range 3 {
		others = append(others, branch(fmt.Sprint("other", i))...)
	}
	states := func() (n int) {
		for _, x := range d.nodesOf(t, stem.GetTreeId()) {
			if x.GetCheckpointNodeId() == x.GetId() {
				n++
			}
		}
		return n
	}
	until(t, "the policy to be kept", func() bool { return states() <= 6 })
	for id := range kept {
		if n := d.node(t, id); n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
			t.Fatalf("%s is on the way to what is in use: %s", n.GetAction().GetText(), n.GetWithheldReason())
		}
	}
	gone := d.node(t, others[0].GetId())
	if !strings.Contains(gone.GetWithheldReason(), "evicted by policy; 1 turns from node "+stem.GetId()) {
		t.Fatalf("the oldest of the rest: %v", gone)
	}
	until(t, "the space to come back", func() bool {
		i, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
		return err == nil && i.GetPendingRemovals() == 0
	})
}
