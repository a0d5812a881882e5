package tree

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// deadline bounds every wait of these tests; it is no measurement.
const deadline = 60 * time.Second

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	t.Cleanup(cancel)
	return ctx
}

// memory is options for a store in memory that crashes can be tried on.
func memory() Options { return Options{FS: vfs.NewCrashableMem()} }

// mustOpen opens a store that is checked and closed at the test's end.
func mustOpen(t testing.TB, dir string, o Options) *Store {
	t.Helper()
	o.AllowTmpfs = true
	s, err := Open(dir, o)
	if err != nil {
		t.Fatalf("opening the store: %v", err)
	}
	t.Cleanup(func() {
		if s.closed {
			return
		}
		mustCheck(t, s)
		if err := s.Close(); err != nil {
			t.Errorf("closing the store: %v", err)
		}
	})
	return s
}

func mustCheck(t testing.TB, s *Store) {
	t.Helper()
	wrong, err := s.Check(context.Background())
	if err != nil {
		t.Errorf("checking the store: %v", err)
	}
	for _, w := range wrong {
		t.Errorf("check: %s", w)
	}
}

func mustClose(t testing.TB, s *Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatalf("closing the store: %v", err)
	}
}

func mustUpdate(t testing.TB, s *Store, f func(tx *Tx) error) uint64 {
	t.Helper()
	index, err := s.Update(context.Background(), f)
	if err != nil {
		t.Fatalf("update: %v", err)
	}
	return index
}

// mustTree makes a tree with a captured root.
func mustTree(t testing.TB, s *Store) *Tree {
	t.Helper()
	tr := Tree{ID: ids.NewTree(), Root: ids.NewNode(), Labels: map[string]string{"run": "a"}, CreatedAt: time.Now()}
	mustUpdate(t, s, func(tx *Tx) error {
		if err := tx.PutTree(tr); err != nil {
			return err
		}
		if _, err := tx.AddNode(Node{ID: tr.Root, Tree: tr.ID, Capture: Recorded, TurnStatus: Completed}); err != nil {
			return err
		}
		return tx.SetCaptured(checkpointOf(tr.ID, tr.Root), time.Now(), false, time.Millisecond)
	})
	got, err := s.View().Tree(tr.ID)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func checkpointOf(tr ids.Tree, n ids.Node) Checkpoint {
	return Checkpoint{ID: ids.NewCheckpoint(), Tree: tr, Node: n, Snapshot: ids.NewSnapshot(), Process: Empty, CreatedAt: time.Now()}
}

// mustNode adds a node that shares its parent's checkpoint.
func mustNode(t testing.TB, s *Store, parent ids.Node) *Node {
	t.Helper()
	var n *Node
	mustUpdate(t, s, func(tx *Tx) error {
		p, err := tx.Node(parent)
		if err != nil {
			return err
		}
		n, err = tx.AddNode(typicalNode(p))
		return err
	})
	return n
}

// typicalNode has 200 B of action, 5 effects and 3 labels.
func typicalNode(parent *Node) Node {
	n := Node{
		ID: ids.NewNode(), Tree: parent.Tree, Parent: parent.ID, TurnStatus: Completed,
		Verdict: None, Capture: parent.Capture, Checkpoint: parent.Checkpoint,
		Action:      Action{Text: make([]byte, 200), Steps: 1},
		Observation: Observation{Stdout: []byte("ok\n"), ExitCode: 1},
		Reasons:     []string{"nothing changed"},
		Labels:      map[string]string{"step": "12", "group": "g-7", "role": "policy"},
		StartedAt:   time.Now(), EndedAt: time.Now(), EffectCount: 5,
		Timings: Timings{Command: 3 * time.Millisecond, Total: 5 * time.Millisecond},
	}
	for i := range n.Action.Text {
		n.Action.Text[i] = byte('a' + i%26)
	}
	for i := range 5 {
		n.Effects = append(n.Effects, Effect{Kind: FileChanged, Subject: fmt.Appendf(nil, "/srv/app/file%d\xff", i), Detail: "d"})
	}
	return n
}

func wantFault(t testing.TB, err error, kind fault.Kind, reason string) {
	t.Helper()
	f := fault.As(err)
	if f == nil || f.Kind != kind || f.Reason != reason {
		t.Fatalf("got error %v, want kind %v with reason %q", err, kind, reason)
	}
}

func idsOf(ns iter.Seq[*Node]) (out []ids.Node) {
	for n := range ns {
		out = append(out, n.ID)
	}
	return out
}

var errOops = errors.New("oops")

// frozen is everything that View can give, in bytes: equal stores have equal ones.
func frozen(t testing.TB, s *Store) map[string]string {
	t.Helper()
	v := s.View()
	m := map[string]string{"index": fmt.Sprint(v.Index()), "horizon": fmt.Sprint(v.horizon())}
	for x := range v.Trees() {
		m["t"+string(x.ID)] = string(encode(x, layoutTree))
		m["counts"+string(x.ID)] = fmt.Sprint(v.NodeCount(x.ID), v.CheckpointCount(x.ID), v.SandboxCount(x.ID))
		for n := range v.NodesOf(x.ID) {
			full, err := v.FullNode(n.ID)
			if err != nil {
				t.Fatal(err)
			}
			m["n"+string(n.ID)] = string(encode(full, layoutNode)) + string(encode(full, layoutDetail))
			m["children"+string(n.ID)] = fmt.Sprint(idsOf(v.Children(n.ID)))
			if n.PayloadDigest != "" {
				b, err := s.Payload(n.PayloadDigest)
				if err != nil {
					t.Fatal(err)
				}
				m["p"+n.PayloadDigest] = string(b)
			}
		}
		m["order"+string(x.ID)] = fmt.Sprint(idsOf(v.NodesOf(x.ID)))
	}
	for x := range v.Runs() {
		m["R"+x.Name] = string(encode(x, layoutRun))
	}
	for x := range v.Checkpoints() {
		m["c"+string(x.ID)] = string(encode(x, layoutCheckpoint)) + fmt.Sprint(idsOf(v.CheckpointUsers(x.ID)))
	}
	for x := range v.Processes() {
		m["o"+string(x.ID)] = string(encode(x, layoutProcess))
	}
	for x := range v.Sandboxes() {
		m["s"+string(x.ID)] = string(encode(x, layoutSandbox))
	}
	for x := range v.Images() {
		m["i"+string(x.Digest)] = string(encode(x, layoutImage))
	}
	for x := range scan[Setup](v.reader, setups, byID, nil) {
		m["u"+x.Digest] = string(encode(x, layoutSetup))
	}
	for x := range scan[Reply](v.reader, replies, byID, nil) {
		if r, err := v.Reply(x.Key); err == nil {
			m["r"+x.Key] = string(encode(r, layoutFullReply))
		}
	}
	for x := range scan[removal](v.reader, removals, byID, nil) {
		m[fmt.Sprint("w", x.First)] = string(encode(x, layoutRemoval))
	}
	m["pending"] = fmt.Sprint(idsOf(v.PendingCaptures()))
	for x := range v.Condemned() {
		m["x"+string(x)] = ""
	}
	return m
}

func wantEqual(t testing.TB, what string, got, want map[string]string) {
	t.Helper()
	for k, v := range want {
		if g, ok := got[k]; !ok {
			t.Errorf("%s: %s is missing", what, k)
		} else if g != v {
			t.Errorf("%s: %s is\n%q and was\n%q", what, k, g, v)
		}
	}
	for k := range got {
		if _, ok := want[k]; !ok {
			t.Errorf("%s: %s is too much", what, k)
		}
	}
}
