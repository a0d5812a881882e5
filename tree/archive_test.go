package tree

import (
	"context"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

func mustSetClosed(t testing.TB, s *Store, id ids.Tree, closed bool) {
	t.Helper()
	mustUpdate(t, s, func(tx *Tx) error {
		tr, err := tx.Tree(id)
		if err != nil {
			return err
		}
		c := *tr
		c.Closed = closed
		return tx.PutTree(c)
	})
}

// inMemory counts the nodes of a tree that are.
func inMemory(s *Store, id ids.Tree) (n int) {
	for range s.View().reader.NodesOf(id) {
		n++
	}
	return n
}

// If it fails, a closed tree stays in memory, or is another one when it is read from the disk,
// after a restart, or once it is open again.
func TestArchivedTreeReadsTheSame(t *testing.T) {
	fs := vfs.NewCrashableMem()
	o := Options{FS: fs, archiveStep: 7}
	s := mustOpen(t, "state", o)
	tr, other := mustTree(t, s), mustTree(t, s)
	payload := []byte("shared")
	var last *Node
	for range 4 {
		last = mustNode(t, s, tr.Root)
		for range 5 {
			last = mustNode(t, s, last.ID)
		}
	}
	mustCapture(t, s, last)
	elsewhere := mustNode(t, s, other.Root)
	mustUpdate(t, s, func(tx *Tx) error {
		return tx.Annotate([]Annotation{{Node: last.ID, Payload: &payload}, {Node: elsewhere.ID, Payload: &payload}})
	})
	wantFault(t, s.Archive(context.Background(), tr.ID), fault.Precondition, "tree_open")
	mustSetClosed(t, s, tr.ID, true)
	same := func(what string, s *Store, want map[string]string) {
		t.Helper()
		got := frozen(t, s)
		for _, m := range []map[string]string{got, want} { // the records of trees say where they are
			delete(m, "t"+string(tr.ID))
			delete(m, "index")
		}
		wantEqual(t, what, got, want)
		mustCheck(t, s)
	}
	want := frozen(t, s)
	if err := s.Archive(context.Background(), tr.ID); err != nil {
		t.Fatal(err)
	}
	if n := inMemory(s, tr.ID); n != 0 {
		t.Fatalf("%d nodes of an archived tree are in memory", n)
	}
	same("archived", s, want)
	w, err := s.Watch(context.Background(), tr.ID, 0)
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for range s.View().NodeCount(tr.ID) + 1 {
		if e, err := w.Next(testContext(t)); err != nil {
			t.Fatal(err)
		} else if e.Node != nil {
			seen++
		}
	}
	w.Close()
	if seen != 25 {
		t.Fatalf("a watcher saw %d nodes of 25", seen)
	}
	// What it shares with a tree that goes stays.
	mustPrune(t, s, elsewhere.ID, false)
	if b, err := s.Payload(last.PayloadDigest); last.PayloadDigest != "" && (err != nil || string(b) != "shared") {
		t.Fatal(b, err)
	}
	want = frozen(t, s)
	after := mustOpen(t, "state", Options{FS: fs.CrashClone(vfs.CrashCloneCfg{}), archiveStep: 7})
	if n := inMemory(after, tr.ID); n != 0 {
		t.Fatalf("a start loads %d nodes of an archived tree", n)
	}
	same("after a power loss", after, want)
	mustSetClosed(t, after, tr.ID, false)
	if n := inMemory(after, tr.ID); n != 25 {
		t.Fatalf("a tree that was opened again has %d nodes of 25 in memory", n)
	}
	same("opened again", after, want)
	mustNode(t, after, last.ID)
}

// If it fails, a change to a closed tree is refused or lost because its nodes are on the disk.
func TestChangeBringsAnArchivedTreeBack(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	n := mustNode(t, s, tr.Root)
	mustSetClosed(t, s, tr.ID, true)
	archive := func(want int) {
		t.Helper()
		if got, err := s.ArchiveIdle(context.Background(), 0); got != want || err != nil {
			t.Fatalf("archived %d, %v; want %d", got, err, want)
		}
	}
	archive(1)
	if got, err := s.ArchiveIdle(context.Background(), 0); got != 0 || err != nil {
		t.Fatalf("archived again: %d, %v", got, err)
	}
	value := 3.0
	mustUpdate(t, s, func(tx *Tx) error { return tx.Annotate([]Annotation{{Node: n.ID, Value: &value}}) })
	if got, err := s.View().Node(n.ID); err != nil || got.Value != 3 || inMemory(s, tr.ID) != 2 {
		t.Fatal(got, err)
	}
	if got, err := s.ArchiveIdle(context.Background(), deadline); got != 0 || err != nil {
		t.Fatalf("what was just wanted is archived: %d, %v", got, err)
	}
	archive(1)
	// Another tree stands on its checkpoint: that one keeps it.
	k := slices.Collect(s.View().Checkpoints())[0]
	grown := Tree{ID: ids.NewTree(), Root: ids.NewNode()}
	mustUpdate(t, s, func(tx *Tx) error {
		if err := tx.PutTree(grown); err != nil {
			return err
		}
		_, err := tx.AddNode(Node{ID: grown.Root, Tree: grown.ID, Capture: Captured, Checkpoint: k.ID})
		return err
	})
	if got := idsOf(s.View().CheckpointUsers(k.ID)); len(got) != 3 {
		t.Fatalf("users of the checkpoint are %v, want three", got)
	}
	_, err := prune(s, tr.Root, false)
	wantFault(t, err, fault.Precondition, "checkpoint_shared")
	mustSetClosed(t, s, grown.ID, true)
	archive(2)
	_, err = prune(s, tr.Root, false)
	wantFault(t, err, fault.Precondition, "checkpoint_shared")
	mustPrune(t, s, grown.Root, false)
	p := mustPrune(t, s, tr.Root, false)
	if !slices.Equal(p.Condemned, []ids.Snapshot{k.Snapshot}) || s.View().NodeCount("") != 0 {
		t.Fatalf("pruned: %+v, %d nodes are left", p, s.View().NodeCount(""))
	}
}

// If it fails, a change that meets archived trees, however many, is refused, or is made as often as its
// function had to run.
func TestChangeOfManyArchivedTreesIsOne(t *testing.T) {
	s := mustOpen(t, "state", memory())
	const many = 12
	here := mustTree(t, s)
	items := []BackupItem{{here.Root, 1}}
	for range many {
		tr := mustTree(t, s)
		mustSetClosed(t, s, tr.ID, true)
		items = append(items, BackupItem{tr.Root, 1})
	}
	if got, err := s.ArchiveIdle(context.Background(), 0); got != many || err != nil {
		t.Fatalf("archived %d, %v", got, err)
	}
	runs, changed, finally := 0, 0, 0
	index := mustUpdate(t, s, func(tx *Tx) (err error) {
		runs++
		tx.Finally(func() error { finally++; return nil })
		changed, err = tx.Backup(items, Sum, 0)
		return err
	})
	if runs <= many || changed != many+1 || (!rehearse && finally != 1) {
		t.Fatalf("the function ran %d times, changed %d nodes, and ended %d times", runs, changed, finally)
	}
	for _, it := range items {
		if n, err := s.View().Node(it.Node); err != nil || n.Visits != 1 || n.Value != 1 || n.ModifyIndex > index {
			t.Fatalf("node %s: %+v, %v", it.Node, n, err)
		}
	}
}

// If it fails, a reader whose View is older than the return of a tree to memory finds nothing of it.
func TestOldViewOfATreeThatCameBack(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	n := mustNode(t, s, tr.Root)
	mustSetClosed(t, s, tr.ID, true)
	if err := s.Archive(context.Background(), tr.ID); err != nil {
		t.Fatal(err)
	}
	byNode, byChild, byTree := s.View(), s.View(), s.View()
	if err := s.Recall(context.Background(), tr.ID); err != nil {
		t.Fatal(err)
	}
	later := mustNode(t, s, n.ID)
	if _, err := byNode.Node(n.ID); err != nil {
		t.Error(err)
	}
	_, err := byNode.Node(later.ID)
	wantFault(t, err, fault.NotFound, "node_not_found")
	if got := idsOf(byChild.Children(tr.Root)); !slices.Equal(got, []ids.Node{n.ID}) {
		t.Errorf("children of the root are %v, want %s", got, n.ID)
	}
	if got := idsOf(byTree.NodesOf(tr.ID)); len(got) < 2 || got[0] != tr.Root || got[1] != n.ID {
		t.Errorf("nodes are %v", got)
	}
}

// If it fails, a lost process state is not found at the nodes of an archived tree, which then
// look restorable.
func TestStateUsersOfAnArchivedTree(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	p := ProcessState{ID: ids.NewProcess(), Kind: Shells, Digest: "d"}
	k := checkpointOf(tr.ID, tr.Root)
	k.Process, k.State = Shells, p.ID
	mustUpdate(t, s, func(tx *Tx) error {
		if err := tx.PutProcess(p); err != nil {
			return err
		}
		return tx.SetCaptured(k, k.CreatedAt, false, 1)
	})
	mustSetClosed(t, s, tr.ID, true)
	if err := s.Archive(context.Background(), tr.ID); err != nil {
		t.Fatal(err)
	}
	if got := idsOf(s.View().StateUsers(p.ID)); !slices.Equal(got, []ids.Node{tr.Root}) {
		t.Fatalf("users of the state are %v, want %s", got, tr.Root)
	}
}

// If it fails, an archived tree whose rows are damaged looks like an empty one.
func TestDamagedArchiveIsTyped(t *testing.T) {
	s, err := Open("state", memory())
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	tr := mustTree(t, s)
	mustSetClosed(t, s, tr.ID, true)
	if err := s.Archive(context.Background(), tr.ID); err != nil {
		t.Fatal(err)
	}
	tk, _ := keyOf(tr.ID, "tr_")
	nk, _ := keyOf(tr.Root, "nd_")
	b := s.log.db.NewBatch()
	_ = b.Set(archiveKey(tk, nk), []byte{0xff}, nil)
	if err := s.log.commit(b); err != nil {
		t.Fatal(err)
	}
	wantFault(t, s.View().Load(tr.ID), fault.DataLoss, "log_damaged")
	_, err = s.View().Node(tr.Root)
	wantFault(t, err, fault.DataLoss, "log_damaged")
	_, err = s.Watch(context.Background(), tr.ID, 0)
	wantFault(t, err, fault.DataLoss, "log_damaged")
	if wrong, err := s.Check(context.Background()); err != nil || len(wrong) == 0 {
		t.Fatalf("check finds %q, %v", wrong, err)
	}
}

// If it fails, a checkpoint is proven and a node that has it, in an archived tree, is said not to be.
func TestProvenIsSaidInArchivedTrees(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	root, err := s.View().Node(tr.Root)
	if err != nil {
		t.Fatal(err)
	}
	grown := Tree{ID: ids.NewTree(), Root: ids.NewNode()}
	mustUpdate(t, s, func(tx *Tx) error {
		if err := tx.PutTree(grown); err != nil {
			return err
		}
		_, err := tx.AddNode(Node{ID: grown.Root, Tree: grown.ID, Capture: Captured, Checkpoint: root.Checkpoint})
		return err
	})
	mustSetClosed(t, s, grown.ID, true)
	if err := s.Archive(context.Background(), grown.ID); err != nil {
		t.Fatal(err)
	}
	mustUpdate(t, s, func(tx *Tx) error { return tx.SetProven(root.Checkpoint) })
	for _, id := range []ids.Node{tr.Root, grown.Root} {
		if n, err := s.View().Node(id); err != nil || n.Capture != Proven {
			t.Errorf("node %s: %+v, %v", id, n, err)
		}
	}
}

// If it fails, what comes from elsewhere takes the id of a node on the disk, and writes over what that did.
func TestFreeSeesArchivedNodes(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	here := mustNode(t, s, mustTree(t, s).Root)
	gone := mustNode(t, s, tr.Root)
	mustSetClosed(t, s, tr.ID, true)
	if err := s.Archive(context.Background(), tr.ID); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		id    ids.Node
		taken bool
	}{{here.ID, true}, {gone.ID, true}, {ids.NewNode(), false}} {
		_, err := s.Update(context.Background(), func(tx *Tx) error { return tx.Free(c.id) })
		if c.taken {
			wantFault(t, err, fault.Exists, "node_exists")
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if n := inMemory(s, tr.ID); n != 0 {
		t.Fatalf("a look has brought %d nodes into memory", n)
	}
}

// If it fails, a tree whose rows are gone is asked for without end.
func TestArchiveWithoutRowsIsDamaged(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	mustNode(t, s, tr.Root)
	mustSetClosed(t, s, tr.ID, true)
	if err := s.Archive(context.Background(), tr.ID); err != nil {
		t.Fatal(err)
	}
	k, _ := keyOf(tr.ID, "tr_")
	if err := s.log.db.DeleteRange(archiveKey(k, nodeKey{}), archiveKey(k, nodeKey(slices.Repeat([]byte{0xff}, 16))), nil); err != nil {
		t.Fatal(err)
	}
	wantFault(t, s.Recall(testContext(t), tr.ID), fault.DataLoss, "log_damaged")
	s.closed = true // nothing is left to be checked
	if err := s.log.close(); err != nil {
		t.Fatal(err)
	}
}
