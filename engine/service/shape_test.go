package service

import (
	"context"
	"errors"
	"io"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/ids"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

// shapes are trees of a stopped daemon, each with a node to go on from: below a small one's root, below 10,000 levels, and below
// a root with 10,000 children.
func shapes(t *testing.T, d *daemon) map[string]*boxwoodv1.Node {
	t.Helper()
	roots := map[string]*boxwoodv1.Node{}
	for _, shape := range []string{"small", "deep", "wide"} {
		roots[shape], _ = d.newTree(t)
	}
	d.stop()
	store, err := tree.Open(filepath.Join(d.dir, "tree"), tree.Options{})
	if err != nil {
		t.Fatal(err)
	}
	at := map[string]ids.Node{}
	for shape, n := range roots {
		if at[shape] = ids.Node(n.GetId()); shape == "small" {
			continue
		}
		_, err := store.Update(context.Background(), func(tx *tree.Tx) error {
			p, err := tx.Node(ids.Node(n.GetId()))
			for i := 0; err == nil && i < 10_000; i++ {
				now := time.Now()
				var added *tree.Node
				added, err = tx.AddNode(tree.Node{ID: ids.NewNode(), Tree: p.Tree, Parent: p.ID, Capture: p.Capture, Checkpoint: p.Checkpoint,
					Verdict: tree.None, TurnStatus: tree.Completed, Action: tree.Action{Text: []byte("true")}, StartedAt: now, EndedAt: now})
				if shape == "deep" && err == nil {
					p, at[shape] = added, added.ID
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	for shape, id := range at {
		roots[shape] = &boxwoodv1.Node{Id: string(id), TreeId: roots[shape].GetTreeId()}
	}
	return roots
}

// processorTime that a process has used; without that of its children.
func processorTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	const ofProcess = 2 // CPUCLOCK_SCHED
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|ofProcess), &ts); err != nil {
		t.Fatal(err)
	}
	return time.Duration(ts.Nano())
}

// If it fails, a call costs the daemon more for a node below 10,000 levels, or of a node with 10,000 children, than in a
// small tree: whatever looks at a whole tree, or at a path, takes many times as long. What is compared is processor time, rounds in turn.
func TestDeepAndWideTreesCostNoMore(t *testing.T) {
	d := startDaemon(t, "")
	d.importRoot(t)
	at := shapes(t, d)
	d = startDaemon(t, d.dir)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	boxes := map[string]*boxwoodv1.Sandbox{}
	for shape, n := range at {
		boxes[shape] = d.fork(t, n.GetId(), 1)[0]
	}
	value := 1.0
	annotate := func(n *boxwoodv1.Node) uint64 {
		r, err := d.client.Annotate(ctx(t), &boxwoodv1.AnnotateRequest{Annotations: []*boxwoodv1.NodeAnnotation{{NodeId: n.GetId(), Value: &value}}})
		must(err)
		return r.GetIndex()
	}
	for _, op := range []struct {
		name   string
		do     func(n *boxwoodv1.Node, sb *boxwoodv1.Sandbox)
		levels float64 // of a path, which is changed as a whole
	}{
		{"a turn that changes a file, and its capture", func(_ *boxwoodv1.Node, sb *boxwoodv1.Sandbox) {
			d.saved(t, d.run(t, sb.GetId(), "date >/root/now").GetNode().GetId())
		}, 1},
		{"a fork, a turn, a release, a prune", func(n *boxwoodv1.Node, _ *boxwoodv1.Sandbox) {
			child := d.fork(t, n.GetId(), 1)[0]
			made := d.run(t, child.GetId(), "true").GetNode()
			free(t, d, child)
			_, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: made.GetId()})
			must(err)
		}, 1},
		{"reading a node", func(n *boxwoodv1.Node, _ *boxwoodv1.Sandbox) {
			for range 4 {
				_, err := d.client.GetNode(ctx(t), &boxwoodv1.GetNodeRequest{NodeId: n.GetId()})
				must(err)
			}
		}, 1},
		{"a turn's state, exported and given up", func(n *boxwoodv1.Node, _ *boxwoodv1.Sandbox) {
			child := d.fork(t, n.GetId(), 1)[0]
			made := d.run(t, child.GetId(), "date >/root/now").GetNode()
			d.saved(t, made.GetId())
			free(t, d, child)
			archive, err := d.client.ExportTree(ctx(t), &boxwoodv1.ExportTreeRequest{NodeId: made.GetId()})
			for err == nil {
				_, err = archive.Recv()
			}
			if !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
			_, err = d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: made.GetId(), StatesOnly: true})
			must(err)
			_, err = d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: made.GetId()})
			must(err)
		}, 1},
		{"a pin", func(n *boxwoodv1.Node, _ *boxwoodv1.Sandbox) {
			for range 4 {
				_, err := d.client.Pin(ctx(t), &boxwoodv1.PinRequest{NodeIds: []string{n.GetId()}})
				must(err)
				_, err = d.client.Unpin(ctx(t), &boxwoodv1.UnpinRequest{NodeIds: []string{n.GetId()}})
				must(err)
			}
		}, 1},
		{"the nodes with a label, of a level, with a status", func(n *boxwoodv1.Node, _ *boxwoodv1.Sandbox) {
			full, err := d.client.GetNode(ctx(t), &boxwoodv1.GetNodeRequest{NodeId: n.GetId()})
			must(err)
			_, err = d.client.Annotate(ctx(t), &boxwoodv1.AnnotateRequest{Annotations: []*boxwoodv1.NodeAnnotation{{NodeId: n.GetId(), Labels: map[string]string{"only": "here"}}}})
			must(err)
			for want, req := range map[string]*boxwoodv1.ListNodesRequest{
				"label":                 {Labels: map[string]string{"only": "here"}},
				"level":                 {Depth: &full.Depth, Labels: map[string]string{"only": "here"}, Capture: []boxwoodv1.CaptureStatus{full.GetCapture()}},
				"below, one is asked":   {Under: n.GetId(), Limit: 1},
				"":                      {Capture: []boxwoodv1.CaptureStatus{boxwoodv1.CaptureStatus_CAPTURE_STATUS_RECORDED}},
				"of the tree, the root": {Limit: 1, Brief: true},
			} {
				req.TreeId = n.GetTreeId()
				if got := d.nodesWhere(t, req); len(got) != min(len(want), 1) {
					t.Errorf("%v are %d nodes", req, len(got))
				}
			}
		}, 1},
		{"an annotation", func(n *boxwoodv1.Node, _ *boxwoodv1.Sandbox) {
			for range 4 {
				annotate(n)
			}
		}, 1},
		{"a watcher that comes back", func(n *boxwoodv1.Node, _ *boxwoodv1.Sandbox) {
			for range 4 {
				index := annotate(n)
				c, leave := context.WithCancel(ctx(t))
				w, err := d.client.WatchTree(c, &boxwoodv1.WatchTreeRequest{TreeId: n.GetTreeId(), AfterIndex: index - 1})
				must(err)
				ev, err := w.Recv()
				must(err)
				if ev.GetNode().GetId() != n.GetId() {
					t.Errorf("a watcher that was away for one change is told of %v first", ev)
				}
				leave()
			}
		}, 1},
		{"a value carried up, for each node", func(n *boxwoodv1.Node, _ *boxwoodv1.Sandbox) {
			_, err := d.client.Backup(ctx(t), &boxwoodv1.BackupRequest{Items: []*boxwoodv1.BackupRequest_Item{{NodeId: n.GetId(), Value: 1}}, Rule: boxwoodv1.BackupRequest_SUM})
			must(err)
		}, 10_000},
	} {
		took := map[string][]time.Duration{}
		for range 5 {
			for shape, n := range at {
				before := processorTime(t, d.cmd.Process.Pid)
				op.do(n, boxes[shape])
				took[shape] = append(took[shape], processorTime(t, d.cmd.Process.Pid)-before)
			}
		}
		median := func(shape string) float64 {
			slices.Sort(took[shape])
			return float64(took[shape][len(took[shape])/2].Nanoseconds())
		}
		small, deep, wide := median("small"), median("deep")/op.levels, median("wide")
		t.Logf("%s: %.0f us in a small tree; %.2f of that in a deep one, %.2f in a wide one", op.name, small/1000, deep/small, wide/small)
		const noise = 4
		if deep > noise*small || wide > noise*small {
			t.Errorf("%s costs %.1f times as much in a deep tree, %.1f in a wide one", op.name, deep/small, wide/small)
		}
	}
}
