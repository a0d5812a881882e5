package tree

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

func mustWatch(t testing.TB, s *Store, tr ids.Tree, after uint64) *Watcher {
	t.Helper()
	w, err := s.Watch(context.Background(), tr, after)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}

// upTo reads events until the one with this index.
func upTo(t testing.TB, w *Watcher, index uint64) (got []Event) {
	t.Helper()
	ctx := testContext(t)
	for {
		e, err := w.Next(ctx)
		if err != nil {
			t.Fatalf("after %d events: %v", len(got), err)
		}
		if len(got) > 0 && e.Index <= got[len(got)-1].Index {
			t.Fatalf("event %d after event %d", e.Index, got[len(got)-1].Index)
		}
		got = append(got, e)
		if e.Index >= index {
			return got
		}
	}
}

// fold is the tree as a watcher knows it.
type fold map[ids.Node]uint64

func (f fold) apply(events []Event) {
	for _, e := range events {
		if e.Removed != "" {
			delete(f, e.Removed)
		} else if e.Node != nil {
			f[e.Node.ID] = e.Node.ModifyIndex
		}
	}
}

func (f fold) wantTree(t testing.TB, s *Store, tr ids.Tree) {
	t.Helper()
	n := 0
	for x := range s.View().NodesOf(tr) {
		n++
		if f[x.ID] != x.ModifyIndex {
			t.Errorf("the watcher has node %s at %d, the store at %d", x.ID, f[x.ID], x.ModifyIndex)
		}
	}
	if n != len(f) {
		t.Errorf("the watcher knows %d nodes, the store %d", len(f), n)
	}
}

// If it fails, a watcher misses a change, sees it twice or out of order, while
// others write or when it comes back after a restart.
func TestWatchGivesEachChangeOnce(t *testing.T) {
	o := memory()
	s := mustOpen(t, "state", o)
	tr, other := mustTree(t, s), mustTree(t, s)
	early := mustWatch(t, s, tr.ID, 0)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 25 {
				n := mustNode(t, s, tr.Root)
				mustUpdate(t, s, func(tx *Tx) error { return tx.Pin(n.ID) })
				mustNode(t, s, other.Root)
			}
		})
	}
	late := mustWatch(t, s, tr.ID, 0) // in the middle of it
	wg.Wait()
	end := mustUpdate(t, s, func(tx *Tx) error { return tx.PutTree(*tr) })
	seen := upTo(t, early, end)
	nodes := 0
	for _, e := range seen {
		if e.Node != nil {
			nodes++
			if e.Node.Tree != tr.ID {
				t.Fatalf("a node of another tree: %s", e.Node.ID)
			}
		}
	}
	if nodes != 1+4*25*2 || seen[len(seen)-1].Tree == nil {
		t.Errorf("%d node events, want %d, and the tree last", nodes, 1+4*25*2)
	}
	f := fold{}
	f.apply(seen)
	f.wantTree(t, s, tr.ID)
	g := fold{}
	g.apply(upTo(t, late, end))
	g.wantTree(t, s, tr.ID)

	// While it is away nodes are changed and removed, and the store starts again.
	kids := idsOf(s.View().Children(tr.Root))
	mustUpdate(t, s, func(tx *Tx) error {
		if err := tx.Unpin(kids[0]); err != nil {
			return err
		}
		_, err := tx.Prune(kids[0], false)
		return err
	})
	mustClose(t, s)
	s = mustOpen(t, "state", o)
	last := mustUpdate(t, s, func(tx *Tx) error { return tx.Unpin(kids[1]) })
	back := upTo(t, mustWatch(t, s, tr.ID, end), last)
	if len(back) != 2 || back[0].Removed != kids[0] || back[1].Node.ID != kids[1] {
		t.Errorf("coming back gave %+v, want the removal of %s and the change of %s", back, kids[0], kids[1])
	}
	f.apply(back)
	f.wantTree(t, s, tr.ID)
}

// If it fails, a slow watcher holds memory, or isn't told how to go on.
func TestSlowWatcherIsCut(t *testing.T) {
	o := memory()
	o.MaxWatchBuffer = 5
	s := mustOpen(t, "state", o)
	tr := mustTree(t, s)
	w := mustWatch(t, s, tr.ID, s.View().Index())
	for range 20 {
		mustNode(t, s, tr.Root)
	}
	f := fold{}
	var last uint64
	for range 5 {
		e, err := w.Next(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		f.apply([]Event{e})
		last = e.Index
	}
	_, err := w.Next(testContext(t))
	wantFault(t, err, fault.Exhausted, "watch_behind")
	f.apply(upTo(t, mustWatch(t, s, tr.ID, last), s.View().Index()))
	root, _ := s.View().Node(tr.Root)
	f[tr.Root] = root.ModifyIndex // older than the first watch
	f.wantTree(t, s, tr.ID)
}

// If it fails, a watcher that was away too long silently keeps nodes that are gone.
func TestForgottenRemovalsAskForResync(t *testing.T) {
	o := memory()
	o.MaxRemovals = 3
	s := mustOpen(t, "state", o)
	tr := mustTree(t, s)
	start := s.View().Index()
	for range 5 {
		n := mustNode(t, s, tr.Root)
		mustUpdate(t, s, func(tx *Tx) error { _, err := tx.Prune(n.ID, false); return err })
	}
	for range 2 { // also after a restart
		_, err := s.Watch(context.Background(), tr.ID, start)
		wantFault(t, err, fault.Precondition, "resync")
		_, err = s.Watch(context.Background(), tr.ID, s.View().Index()+1)
		wantFault(t, err, fault.Precondition, "resync")
		mustWatch(t, s, tr.ID, s.View().Index())
		mustWatch(t, s, tr.ID, 0)
		mustClose(t, s)
		s = mustOpen(t, "state", o)
	}
	_, err := s.Watch(context.Background(), "tr_x", 0)
	wantFault(t, err, fault.NotFound, "tree_not_found")
}

func TestClosedWatcherIsForgotten(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	w := mustWatch(t, s, tr.ID, s.View().Index())
	ended := make(chan error, 1)
	go func() { _, err := w.Next(context.Background()); ended <- err }()
	w.Close()
	wantFault(t, <-ended, fault.Cancelled, "watch_closed")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := mustWatch(t, s, tr.ID, s.View().Index()).Next(ctx)
	wantFault(t, err, fault.Cancelled, "cancelled")
	w.Close()
	if n := len(s.watch.trees[tr.ID]); n != 1 {
		t.Errorf("%d watchers are known, want the open one", n)
	}
}

// If it fails, who waits for a capture waits for ever, or for nothing.
func TestWaitNodes(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	var wait []ids.Node
	for range 3 {
		n := mustNode(t, s, tr.Root)
		mustUpdate(t, s, func(tx *Tx) error {
			c, _ := tx.Node(n.ID)
			x := *c
			x.Capture, x.Checkpoint = Recorded, ""
			return tx.PutNode(x)
		})
		wait = append(wait, n.ID)
	}
	settled := func(n *Node) bool { return n.Capture != Recorded }
	ended := make(chan error, 1)
	go func() { ended <- s.WaitNodes(testContext(t), wait, settled) }()
	mustUpdate(t, s, func(tx *Tx) error {
		return tx.SetCaptured(checkpointOf(tr.ID, wait[0]), time.Now(), false, 1)
	})
	mustUpdate(t, s, func(tx *Tx) error { return tx.SetWithheld(wait[1], "a job survives") })
	select {
	case err := <-ended:
		t.Fatalf("it didn't wait for the third: %v", err)
	default:
	}
	mustUpdate(t, s, func(tx *Tx) error {
		return tx.SetCaptured(checkpointOf(tr.ID, wait[2]), time.Now(), false, 1)
	})
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	// A node that is removed, one that isn't there, a deadline, none at all.
	gone := mustNode(t, s, tr.Root)
	go func() {
		ended <- s.WaitNodes(testContext(t), []ids.Node{gone.ID}, func(*Node) bool { return false })
	}()
	mustUpdate(t, s, func(tx *Tx) error { _, err := tx.Prune(gone.ID, false); return err })
	wantFault(t, <-ended, fault.NotFound, "node_not_found")
	wantFault(t, s.WaitNodes(testContext(t), []ids.Node{"nd_x"}, settled), fault.NotFound, "node_not_found")
	ctx, cancel := context.WithTimeout(context.Background(), 1)
	defer cancel()
	wantFault(t, s.WaitNodes(ctx, wait, func(*Node) bool { return false }), fault.Deadline, "deadline")
	if err := s.WaitNodes(testContext(t), nil, nil); err != nil {
		t.Fatal(err)
	}
	if len(s.watch.nodes) != 0 {
		t.Errorf("%d nodes are still waited for", len(s.watch.nodes))
	}
}

// If it fails, a thousand watchers of a tree don't each get each change once and in order, or those that don't read
// hold up the others, or can't go on where they were cut, also after a restart.
func TestAThousandWatchers(t *testing.T) {
	ctx := testContext(t)
	const watchers, idle, changes = 1000, 100, 60
	o := memory()
	o.MaxWatchBuffer = changes / 2
	s := mustOpen(t, "state", o)
	tr := mustTree(t, s)
	from := s.View().Index()
	var slow []*Watcher
	for range idle {
		slow = append(slow, mustWatch(t, s, tr.ID, from))
	}
	var live [watchers - idle]*Watcher
	for i := range live {
		live[i] = mustWatch(t, s, tr.ID, from)
	}
	var indexes []uint64
	for range changes {
		indexes = append(indexes, mustUpdate(t, s, func(tx *Tx) error {
			p, err := tx.Node(tr.Root)
			if err != nil {
				return err
			}
			_, err = tx.AddNode(typicalNode(p))
			return err
		}))
		for _, w := range live { // reads as it comes, so it never is behind
			e, err := w.Next(ctx)
			if err != nil || e.Index != indexes[len(indexes)-1] {
				t.Fatalf("event %d, %v; want that of change %d", e.Index, err, indexes[len(indexes)-1])
			}
		}
	}
	rest := func(w *Watcher, kept int) (got []uint64) {
		for range kept {
			e, err := w.Next(ctx)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, e.Index)
		}
		return got
	}
	var last uint64
	for _, w := range slow {
		if len(w.live) != o.MaxWatchBuffer {
			t.Fatalf("%d events are kept for a watcher that doesn't read, want %d", len(w.live), o.MaxWatchBuffer)
		}
		got := rest(w, o.MaxWatchBuffer)
		if !slices.Equal(got, indexes[:len(got)]) {
			t.Fatalf("a slow watcher got %v, want %v", got, indexes[:len(got)])
		}
		_, err := w.Next(ctx)
		wantFault(t, err, fault.Exhausted, "watch_behind")
		if !fault.As(err).Retryable() {
			t.Fatal("a watcher that was cut isn't told that it may go on")
		}
		last = got[len(got)-1]
	}
	for range 2 { // at once, and after a restart
		for range 3 {
			if got := rest(mustWatch(t, s, tr.ID, last), changes-o.MaxWatchBuffer); !slices.Equal(got, indexes[o.MaxWatchBuffer:]) {
				t.Fatalf("going on gave %v, want %v", got, indexes[o.MaxWatchBuffer:])
			}
		}
		mustClose(t, s)
		s = mustOpen(t, "state", o)
	}
}
