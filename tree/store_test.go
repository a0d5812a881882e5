package tree

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/testenv"
)

// If it fails, a change that was refused can leave half of itself behind.
func TestFailedUpdateLeavesNothing(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	before := frozen(t, s)
	_, err := s.Update(context.Background(), func(tx *Tx) error {
		p, _ := tx.Node(tr.Root)
		for range 10 {
			if _, err := tx.AddNode(typicalNode(p)); err != nil {
				return err
			}
		}
		if err := tx.PutSandbox(Sandbox{ID: ids.NewSandbox(), Tree: tr.ID, Head: tr.Root}); err != nil {
			return err
		}
		return errOops
	})
	if err != errOops {
		t.Fatalf("got %v, want the function's own error", err)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Fatal("a panic of the function was swallowed")
			}
		}()
		_, _ = s.Update(context.Background(), func(tx *Tx) error {
			_ = tx.DeleteSandbox("sb")
			_ = tx.Pin(tr.Root)
			panic("oops")
		})
	}()
	wantEqual(t, "after failed updates", frozen(t, s), before)
	mustNode(t, s, tr.Root) // and it still works
}

func TestUpdateOfNothingCostsNothing(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	at := s.View().Index()
	if got := mustUpdate(t, s, func(tx *Tx) error { return tx.Unpin(tr.Root) }); got != at {
		t.Fatalf("index went from %d to %d without a write", at, got)
	}
}

// If it fails, a caller that keeps or changes its record changes the store's.
func TestRecordsAreCopied(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	p, _ := s.View().Node(tr.Root)
	n := typicalNode(p)
	mustUpdate(t, s, func(tx *Tx) error { _, err := tx.AddNode(n); return err })
	n.Labels["step"] = "changed"
	n.Effects[0].Subject[0] = 'X'
	got, err := s.FullNode(n.ID)
	if err != nil {
		t.Fatal(err)
	}
	if got.Labels["step"] != "12" || got.Effects[0].Subject[0] != '/' {
		t.Fatalf("the store has the caller's record: %v", got)
	}
}

// If it fails, Check can't tell that somebody wrote to a record given out.
func TestCheckFindsMutation(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	tr.Closed = true
	wrong, err := s.Check(context.Background())
	if err != nil || len(wrong) != 1 {
		t.Fatalf("got %q, %v; want one line about tree %s", wrong, err, tr.ID)
	}
	tr.Closed = false
	// A node is made for who asks: it may be written to.
	n, _ := s.View().Node(tr.Root)
	n.Value = 7
	mustCheck(t, s)
	if n, _ = s.View().Node(tr.Root); n.Value != 0 {
		t.Fatal("the store has a reader's node")
	}
}

func TestViewIsOneInstant(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	v := s.View()
	a := mustNode(t, s, tr.Root)
	if v.NodeCount(tr.ID) != 1 || len(idsOf(v.Subtree(tr.Root))) != 1 {
		t.Fatal("a view has changed")
	}
	if _, err := v.Node(a.ID); !fault.Is(err, fault.NotFound) {
		t.Fatalf("a later node is in an earlier view: %v", err)
	}
}

// If it fails, a node has lost what its turn did when it was annotated, or
// the parts that PutNode must leave alone were changed.
func TestPutNodeKeepsWhatTheTurnDid(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	a := mustNode(t, s, tr.Root)
	before, _ := s.FullNode(a.ID)
	brief, _ := s.View().Node(a.ID)
	if brief.Action.Text != nil || brief.Observation.Stdout != nil || brief.Effects != nil || brief.Reasons != nil {
		t.Fatalf("the node in memory has what belongs on disk: %+v", brief)
	}
	if brief.Observation.ExitCode != 1 || brief.EffectCount != 5 {
		t.Fatalf("the node in memory lacks its outcome: %+v", brief)
	}
	mustUpdate(t, s, func(tx *Tx) error {
		n := *brief
		n.Value, n.Parent, n.Depth, n.Ordinal = 3, "elsewhere", 99, 99
		return tx.PutNode(n)
	})
	after, _ := s.FullNode(a.ID)
	if after.Value != 3 || after.ModifyIndex <= before.ModifyIndex {
		t.Fatalf("nothing changed: %+v", after)
	}
	c := *after
	c.Value, c.ModifyIndex = before.Value, before.ModifyIndex
	if string(encode(&c, layoutNode))+string(encode(&c, layoutDetail)) !=
		string(encode(before, layoutNode))+string(encode(before, layoutDetail)) {
		t.Fatalf("more changed than asked:\n%+v\n%+v", c, before)
	}
}

func TestOrder(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	var want []ids.Node
	for range 300 { // ordinals beyond one byte
		want = append(want, mustNode(t, s, tr.Root).ID)
	}
	v := s.View()
	if got := idsOf(v.Children(tr.Root)); !slices.Equal(got, want) {
		t.Fatalf("children are out of order")
	}
	i := int32(0)
	for c := range v.Children(tr.Root) {
		if c.Ordinal != i || c.Depth != 1 {
			t.Fatalf("child %d has ordinal %d and depth %d", i, c.Ordinal, c.Depth)
		}
		i++
	}
	if got := idsOf(v.NodesOf(tr.ID)); !slices.Equal(got, append([]ids.Node{tr.Root}, want...)) {
		t.Fatal("nodes aren't in creation order")
	}
	deep := mustNode(t, s, want[0])
	v = s.View()
	if got := idsOf(v.PathToRoot(deep.ID)); !slices.Equal(got, []ids.Node{deep.ID, want[0], tr.Root}) {
		t.Fatalf("the path is %v", got)
	}
	if got := idsOf(v.Subtree(tr.Root)); got[0] != tr.Root || got[1] != want[0] || got[2] != deep.ID || got[3] != want[1] || len(got) != 302 {
		t.Fatalf("the subtree isn't parents first, children in order: %v...", got[:4])
	}
}

func TestRefusedRecords(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr, other := mustTree(t, s), mustTree(t, s)
	p, _ := s.View().Node(tr.Root)
	child := func(f func(*Node)) func(tx *Tx) error {
		return func(tx *Tx) error { n := typicalNode(p); f(&n); _, err := tx.AddNode(n); return err }
	}
	for name, c := range map[string]struct {
		f      func(tx *Tx) error
		kind   fault.Kind
		reason string
	}{
		"second root":        {child(func(n *Node) { n.Parent = "" }), fault.Invalid, "bad_record"},
		"no such parent":     {child(func(n *Node) { n.Parent = ids.NewNode() }), fault.NotFound, "node_not_found"},
		"no such tree":       {child(func(n *Node) { n.Tree = ids.NewTree() }), fault.NotFound, "tree_not_found"},
		"parent elsewhere":   {child(func(n *Node) { n.Parent = other.Root }), fault.Invalid, "bad_record"},
		"no such checkpoint": {child(func(n *Node) { n.Checkpoint = ids.NewCheckpoint() }), fault.NotFound, "checkpoint_not_found"},
		"no id":              {child(func(n *Node) { n.Parent = "nd_x" }), fault.Invalid, "bad_record"},
		"no such payload":    {child(func(n *Node) { n.PayloadDigest = "ab" }), fault.Invalid, "bad_record"},
		"id taken":           {child(func(n *Node) { n.ID = tr.Root }), fault.Exists, "node_exists"},
		"long action":        {child(func(n *Node) { n.Action.Text = make([]byte, MaxAction+1) }), fault.Invalid, "bad_record"},
		"many effects":       {child(func(n *Node) { n.Effects = make([]Effect, MaxEffects+1) }), fault.Invalid, "bad_record"},
		"sandbox nowhere":    {func(tx *Tx) error { return tx.PutSandbox(Sandbox{ID: "sb_x", Head: "nd_x"}) }, fault.NotFound, "node_not_found"},
		"other root":         {func(tx *Tx) error { c := *tr; c.Root = "nd_x"; return tx.PutTree(c) }, fault.Invalid, "bad_record"},
		"long payload":       {func(tx *Tx) error { _, err := tx.PutPayload(make([]byte, MaxPayload+1)); return err }, fault.Invalid, "bad_record"},
		"no reason":          {func(tx *Tx) error { return tx.SetWithheld(tr.Root, "") }, fault.Invalid, "bad_record"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := s.Update(context.Background(), c.f)
			wantFault(t, err, c.kind, c.reason)
		})
	}
}

// If it fails, changes that came together were lost, torn or reordered.
func TestManyWritersShareFlushes(t *testing.T) {
	fs := &countingFS{FS: vfs.NewCrashableMem()}
	s := mustOpen(t, "state", Options{FS: fs})
	tr := mustTree(t, s)
	before := fs.syncs.Load()
	const writers, each = 64, 20
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for range each {
				mustNode(t, s, tr.Root)
				// One that is refused in the same group leaves nothing.
				if _, err := s.Update(context.Background(), func(tx *Tx) error {
					p, _ := tx.Node(tr.Root)
					n, _ := tx.AddNode(typicalNode(p))
					_ = tx.SetWithheld(tr.Root, "never")
					_, _ = tx.Prune(n.ID, false)
					_, _ = tx.AddNode(typicalNode(p))
					return errOops
				}); err != errOops {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if r, _ := s.View().Node(tr.Root); r.Capture != Captured {
		t.Errorf("a refused change is there: %+v", r)
	}
	if n := s.View().NodeCount(tr.ID); n != writers*each+1 {
		t.Fatalf("%d nodes, want %d", n, writers*each+1)
	}
	seen := int32(0)
	for c := range s.View().Children(tr.Root) {
		if c.Ordinal != seen {
			t.Fatalf("ordinal %d where %d belongs", c.Ordinal, seen)
		}
		seen++
	}
	if syncs := fs.syncs.Load() - before; syncs >= writers*each {
		t.Errorf("%d changes by %d writers took %d flushes: none was shared", writers*each, writers, syncs)
	}
}

func TestOneProcessAtATime(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir, Options{})
	_, err := Open(dir, Options{AllowTmpfs: true})
	wantFault(t, err, fault.Precondition, "state_in_use")
	// Another process, too.
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), childEnv+"=open", childDir+"="+dir)
	out, err := cmd.CombinedOutput()
	if err == nil || string(out) != "state_in_use\n" {
		t.Fatalf("a second process got %q, %v; want state_in_use", out, err)
	}
	mustClose(t, s)
	mustOpen(t, dir, Options{})
}

func TestTmpfsIsRefused(t *testing.T) {
	testenv.Require(t, testenv.Root)
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, ""); err != nil {
		t.Fatalf("mounting a tmpfs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmounting %s: %v", dir, err)
		}
	})
	_, err := Open(dir, Options{})
	wantFault(t, err, fault.Precondition, "state_on_tmpfs")
	mustOpen(t, dir, Options{AllowTmpfs: true})
}

func TestNewerFormatIsRefused(t *testing.T) {
	o := memory()
	s := mustOpen(t, "state", o)
	b := s.log.db.NewBatch()
	_ = b.Set(formatKey, varint(formatVersion+1), nil)
	if err := s.log.commit(b); err != nil {
		t.Fatal(err)
	}
	mustClose(t, s)
	_, err := Open("state", o)
	wantFault(t, err, fault.Unsupported, "newer_format")
	_, err = Open("state", o) // and it has let go of the lock
	wantFault(t, err, fault.Unsupported, "newer_format")
}

// If it fails, an older program opens a log in which it doesn't see everything.
func TestOlderFormatIsSigned(t *testing.T) {
	o := memory()
	s := mustOpen(t, "state", o)
	tr := mustTree(t, s)
	b := s.log.db.NewBatch()
	_ = b.Set(formatKey, varint(1), nil)
	if err := s.log.commit(b); err != nil {
		t.Fatal(err)
	}
	mustClose(t, s)
	s = mustOpen(t, "state", o)
	if _, err := s.View().Tree(tr.ID); err != nil {
		t.Error(err)
	}
	if v, err := s.log.number(formatKey); err != nil || v != formatVersion {
		t.Errorf("the log has format %d, %v; want %d", v, err, formatVersion)
	}
}

func TestDamagedRowIsNamed(t *testing.T) {
	o := memory()
	s := mustOpen(t, "state", o)
	tr := mustTree(t, s)
	b := s.log.db.NewBatch()
	_ = b.Set(rowKey(nodeRows, string(tr.Root)), []byte{0xff}, nil)
	if err := s.log.commit(b); err != nil {
		t.Fatal(err)
	}
	mustClose(t, s)
	_, err := Open("state", o)
	wantFault(t, err, fault.DataLoss, "log_damaged")
	if want := string(tr.Root); !contains(err.Error(), want) {
		t.Fatalf("%q doesn't name %s", err, want)
	}
}

func TestClosedStore(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	v := s.View()
	w, err := s.Watch(context.Background(), tr.ID, v.Index())
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 2)
	go func() { _, err := w.Next(context.Background()); ended <- err }()
	go func() {
		ended <- s.WaitNodes(context.Background(), []ids.Node{tr.Root}, func(*Node) bool { return false })
	}()
	mustClose(t, s)
	mustClose(t, s)
	for range 2 {
		wantFault(t, <-ended, fault.Unavailable, "store_closed")
	}
	_, err = s.Update(context.Background(), func(tx *Tx) error { return tx.Pin(tr.Root) })
	wantFault(t, err, fault.Unavailable, "store_closed")
	if _, err := v.Node(tr.Root); err != nil {
		t.Fatalf("a view dies with the store: %v", err)
	}
	if _, err := v.FullNode(tr.Root); err == nil {
		t.Fatal("a closed store read from disk")
	}
}

func TestCancelledUpdate(t *testing.T) {
	s := mustOpen(t, "state", memory())
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := s.Update(ctx, func(tx *Tx) error { t.Error("it ran"); return nil })
	wantFault(t, err, fault.Cancelled, "cancelled")
}

func TestRestartFindsAll(t *testing.T) {
	o := memory()
	s := mustOpen(t, "state", o)
	grow(t, s)
	want := frozen(t, s)
	mustClose(t, s)
	s = mustOpen(t, "state", o)
	wantEqual(t, "after a restart", frozen(t, s), want)
}

// grow puts some of everything into a store.
func grow(t testing.TB, s *Store) *Tree {
	t.Helper()
	base := ids.NewSnapshot()
	mustUpdate(t, s, func(tx *Tx) error {
		return tx.PutImage(Image{Digest: "sha256:aa", Names: []string{"debian:12", "debian"}, Layers: []ids.Layer{"sha256:l1", "sha256:l2"},
			Base: base, BaseSeal: Seal{UUID: "u", Generation: 9, Layers: []ids.Layer{"sha256:l1"}}, Env: map[string]string{"PATH": "/bin"}, Bytes: 12})
	})
	tr := mustTree(t, s)
	last := tr.Root
	for i := range 20 {
		n := mustNode(t, s, last)
		mustUpdate(t, s, func(tx *Tx) error {
			b := fmt.Appendf(nil, "payload %d", i%3)
			v := float64(i)
			return tx.Annotate([]Annotation{{Node: n.ID, Value: &v, Payload: &b, Rewards: map[string]float64{"r": 0.5}}})
		})
		if i%2 == 0 {
			last = n.ID
		}
		if i%5 == 0 {
			mustUpdate(t, s, func(tx *Tx) error {
				if err := tx.PutSandbox(Sandbox{ID: ids.NewSandbox(), Tree: tr.ID, Head: n.ID, Commands: 3}); err != nil {
					return err
				}
				if err := tx.PutSetup(Setup{Digest: fmt.Sprint("d", i), Node: n.ID}); err != nil {
					return err
				}
				if err := tx.PutReply(Reply{Key: fmt.Sprint("k", i), Method: "RunTurn", Request: "x", Body: []byte("body")}); err != nil {
					return err
				}
				return tx.SetCaptured(checkpointOf(tr.ID, n.ID), n.EndedAt, true, 5)
			})
		}
	}
	dead := mustNode(t, s, tr.Root)
	mustNode(t, s, dead.ID)
	mustUpdate(t, s, func(tx *Tx) error { _, err := tx.Prune(dead.ID, false); return err })
	return tr
}

// If it fails, what AddNode gives differs from what the next reader gets.
func TestAddedNodeIsAsRead(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	for _, change := range []func(*Node){func(*Node) {}, func(n *Node) {
		n.Labels, n.Rewards, n.StartedAt = map[string]string{}, map[string]float64{}, time.Time{}
	}} {
		var added *Node
		mustUpdate(t, s, func(tx *Tx) error {
			p, err := tx.Node(tr.Root)
			if err != nil {
				return err
			}
			n := typicalNode(p)
			n.Rewards = map[string]float64{"pass": 1}
			change(&n)
			added, err = tx.AddNode(n)
			return err
		})
		if got, err := s.View().Node(added.ID); err != nil || !reflect.DeepEqual(got, added) {
			t.Fatalf("read\n%+v, %v, and added\n%+v", got, err, added)
		}
	}
}
