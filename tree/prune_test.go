package tree

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

func prune(s *Store, id ids.Node, keep bool) (p *Pruned, err error) {
	_, err = s.Update(context.Background(), func(tx *Tx) error { p, err = tx.Prune(id, keep); return err })
	return p, err
}

func mustPrune(t testing.TB, s *Store, id ids.Node, keep bool) *Pruned {
	t.Helper()
	p, err := prune(s, id, keep)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func mustCapture(t testing.TB, s *Store, n *Node) Checkpoint {
	t.Helper()
	k := checkpointOf(n.Tree, n.ID)
	mustUpdate(t, s, func(tx *Tx) error { return tx.SetCaptured(k, time.Now(), false, 1) })
	return k
}

// If it fails, something in use is deleted, or the user isn't told by what.
func TestPruneRefusesWhatIsUsed(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	a := mustNode(t, s, tr.Root)
	b := mustNode(t, s, a.ID)
	k := mustCapture(t, s, b)
	sb := ids.NewSandbox()
	other := Tree{ID: ids.NewTree(), Root: ids.NewNode()}
	for _, c := range []struct {
		reason, names string
		use, leave    func(tx *Tx) error
	}{
		{"pinned", string(b.ID), func(tx *Tx) error { return tx.Pin(b.ID) }, func(tx *Tx) error { return tx.Unpin(b.ID) }},
		{"sandbox_there", string(sb),
			func(tx *Tx) error { return tx.PutSandbox(Sandbox{ID: sb, Tree: tr.ID, Head: b.ID}) },
			func(tx *Tx) error { return tx.DeleteSandbox(sb) }},
		{"checkpoint_shared", string(other.ID),
			func(tx *Tx) error {
				if err := tx.PutTree(other); err != nil {
					return err
				}
				_, err := tx.AddNode(Node{ID: other.Root, Tree: other.ID, Capture: Captured, Checkpoint: k.ID})
				return err
			},
			func(tx *Tx) error {
				other.Closed = true
				if err := tx.PutTree(other); err != nil {
					return err
				}
				_, err := tx.Prune(other.Root, false)
				return err
			}},
	} {
		t.Run(c.reason, func(t *testing.T) {
			mustUpdate(t, s, c.use)
			before := frozen(t, s)
			for _, id := range []ids.Node{a.ID, b.ID} {
				_, err := prune(s, id, false)
				wantFault(t, err, fault.Precondition, c.reason)
				if !contains(err.Error(), c.names) {
					t.Errorf("%q doesn't name %s", err, c.names)
				}
			}
			wantEqual(t, "after a refusal", frozen(t, s), before)
			mustPrune(t, s, b.ID, true) // what lies below is free
			mustUpdate(t, s, c.leave)
		})
	}
	if p := mustPrune(t, s, a.ID, false); !slices.Equal(p.Condemned, []ids.Snapshot{k.Snapshot}) {
		t.Fatalf("condemned %v, want %s", p.Condemned, k.Snapshot)
	}
	_, err := prune(s, tr.Root, false)
	wantFault(t, err, fault.Precondition, "root")
	_, err = prune(s, "nd_x", false)
	wantFault(t, err, fault.NotFound, "node_not_found")
}

// If it fails, the disk never comes back, or a crash between the record's and
// the file state's end leaks a snapshot.
func TestPruneInTwoPhases(t *testing.T) {
	o := memory()
	s := mustOpen(t, "state", o)
	tr := mustTree(t, s)
	a := mustNode(t, s, tr.Root)
	ka := mustCapture(t, s, a)
	b := mustNode(t, s, a.ID)    // shares a's
	c := mustNode(t, s, b.ID)    // will have its own
	d := mustNode(t, s, tr.Root) // shares the root's
	kc := mustCapture(t, s, c)
	p := mustPrune(t, s, a.ID, true)
	if !slices.Equal(p.Nodes, []ids.Node{b.ID, c.ID}) || !slices.Equal(p.Checkpoints, []ids.Checkpoint{kc.ID}) || !slices.Equal(p.Condemned, []ids.Snapshot{kc.Snapshot}) {
		t.Fatalf("pruned %+v", p)
	}
	if _, err := s.View().Checkpoint(ka.ID); err != nil {
		t.Fatalf("a's own checkpoint: %v", err)
	}
	if p := mustPrune(t, s, d.ID, false); len(p.Checkpoints) != 0 {
		t.Fatalf("the root's checkpoint went: %+v", p)
	}
	mustClose(t, s)
	s = mustOpen(t, "state", o)
	if got := slices.Collect(s.View().Condemned()); !slices.Equal(got, p.Condemned) {
		t.Fatalf("after a restart %v are condemned, want %v", got, p.Condemned)
	}
	mustUpdate(t, s, func(tx *Tx) error { return tx.FinishRemoval(append(p.Condemned, "sn_x")) })
	if got := slices.Collect(s.View().Condemned()); len(got) != 0 {
		t.Fatalf("still condemned: %v", got)
	}
	// A capture that is made again drops the first one.
	k2 := mustCapture(t, s, a)
	if got := slices.Collect(s.View().Condemned()); !slices.Equal(got, []ids.Snapshot{ka.Snapshot}) {
		t.Fatalf("condemned %v, want the first capture's %s", got, ka.Snapshot)
	}
	if n, _ := s.View().Node(a.ID); n.Checkpoint != k2.ID || n.Capture != Captured || n.FrozenAt.IsZero() {
		t.Fatalf("the node has %+v", n)
	}
	// The whole tree.
	mustUpdate(t, s, func(tx *Tx) error {
		if err := tx.PutSetup(Setup{Digest: "d", Node: a.ID}); err != nil {
			return err
		}
		x := *tr
		x.Closed = true
		return tx.PutTree(x)
	})
	mustPrune(t, s, tr.Root, false)
	v := s.View()
	if v.TreeCount()+v.NodeCount("")+v.CheckpointCount("") != 0 {
		t.Error("something is left of the tree")
	}
	if _, err := v.Setup("d"); !fault.Is(err, fault.NotFound) {
		t.Errorf("a set-up outlived its node: %v", err)
	}
}

func TestImages(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	base := ids.NewSnapshot()
	image := Image{Digest: "sha256:aa", Names: []string{"a:1", "a"}, Base: base}
	mustUpdate(t, s, func(tx *Tx) error {
		x := *tr
		x.Image = image.Digest
		if err := tx.PutTree(x); err != nil {
			return err
		}
		k := checkpointOf(tr.ID, tr.Root)
		k.Snapshot = base // a tree's first checkpoint is its image's base
		if err := tx.PutImage(image); err != nil {
			return err
		}
		return tx.SetCaptured(k, time.Now(), false, 0)
	})
	_, err := s.Update(context.Background(), func(tx *Tx) error { return tx.DeleteImage(image.Digest) })
	wantFault(t, err, fault.Precondition, "image_in_use")
	mustUpdate(t, s, func(tx *Tx) error { return tx.PutImage(Image{Digest: "sha256:bb", Names: []string{"a"}}) })
	for ref, want := range map[string]ids.Image{"a:1": "sha256:aa", "a": "sha256:bb", "sha256:aa": "sha256:aa"} {
		if i, err := s.View().Image(ref); err != nil || i.Digest != want {
			t.Errorf("%s is %v, %v; want %s", ref, i, err, want)
		}
	}
	if p := func() *Pruned {
		mustUpdate(t, s, func(tx *Tx) error { x := *tr; x.Image, x.Closed = image.Digest, true; return tx.PutTree(x) })
		return mustPrune(t, s, tr.Root, false)
	}(); slices.Contains(p.Condemned, base) {
		t.Error("an image's base was condemned with a tree")
	}
	mustUpdate(t, s, func(tx *Tx) error { return tx.DeleteImage(image.Digest) })
	if !slices.Contains(slices.Collect(s.View().Condemned()), base) {
		t.Error("a removed image's base wasn't condemned")
	}
}

// If it fails, a large tree can't be walked or removed: recursion, or cost that
// grows with depth or width.
func TestDeepAndWide(t *testing.T) {
	for _, shape := range []string{"deep", "wide"} {
		t.Run(shape, func(t *testing.T) {
			o := memory()
			s := mustOpen(t, "state", o)
			tr := mustTree(t, s)
			at := shapeTree(t, s, tr, shape)
			n := mustNode(t, s, at)
			if want := map[string]int32{"deep": 10_000, "wide": 0}[shape]; n.Depth != want+1 {
				t.Errorf("depth %d", n.Depth)
			}
			mustUpdate(t, s, func(tx *Tx) error { _, err := tx.Backup([]BackupItem{{n.ID, 1}}, Sum, 0); return err })
			if r, _ := s.View().Node(tr.Root); r.Value != 1 {
				t.Error("the value didn't reach the root")
			}
			mustClose(t, s)
			s = mustOpen(t, "state", o)
			if p := mustPrune(t, s, tr.Root, true); len(p.Nodes) != 10_001 {
				t.Errorf("%d nodes were removed", len(p.Nodes))
			}
		})
	}
}

// If it fails, a crash can keep a prune and lose the answer to it: the call that is repeated
// would hear that there is no such node.
func TestFinallyIsOfTheSameChange(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	n := mustNode(t, s, tr.Root)
	k := mustCapture(t, s, n)
	before := frozen(t, s)
	var gone *Pruned
	change := func(then func(tx *Tx) error) error {
		_, err := s.Update(context.Background(), func(tx *Tx) (err error) {
			gone, err = tx.Prune(n.ID, false)
			tx.Finally(func() error { return then(tx) })
			return err
		})
		return err
	}
	if err := change(func(*Tx) error { return errOops }); err != errOops {
		t.Fatal(err)
	}
	wantEqual(t, "after a change whose end was refused", frozen(t, s), before)
	var index uint64
	if err := change(func(tx *Tx) error {
		if len(gone.Nodes) != 1 || !slices.Equal(gone.Condemned, []ids.Snapshot{k.Snapshot}) {
			t.Errorf("at the end of the change, %+v is gone", gone)
		}
		err := tx.PutReply(Reply{Key: "k", Method: "Prune", Body: []byte("1 node")})
		index = tx.Index()
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if v := s.View(); v.Index() != index {
		t.Fatalf("the change ends at %d and the reply is %d", v.Index(), index)
	} else if r, err := v.Reply("k"); err != nil || string(r.Body) != "1 node" {
		t.Fatal(r, err)
	}
}
