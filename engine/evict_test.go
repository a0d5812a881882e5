package engine

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// Each node whose state goes names the nearest that stays, however many go at once and however deep they lie.
func TestEvictedNodesNameTheirWay(t *testing.T) {
	store, err := tree.Open("state", tree.Options{FS: vfs.NewCrashableMem(), AllowTmpfs: true})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	tr := tree.Tree{ID: ids.NewTree(), Root: ids.NewNode(), CreatedAt: time.Now()}
	update := func(f func(tx *tree.Tx) error) {
		t.Helper()
		if _, err := store.Update(context.Background(), f); err != nil {
			t.Fatal(err)
		}
	}
	// A chain of 400 captured nodes; every third has a child that shares its state, every seventh was withheld before.
	parents := map[ids.Node]ids.Node{}
	going := map[ids.Node]bool{}
	update(func(tx *tree.Tx) error {
		if err := tx.PutTree(tr); err != nil {
			return err
		}
		last := ids.Node("")
		for i := range 400 {
			n := tree.Node{ID: ids.NewNode(), Tree: tr.ID, Parent: last, Capture: tree.Recorded, TurnStatus: tree.Completed}
			if i == 0 {
				n.ID = tr.Root
			}
			if _, err := tx.AddNode(n); err != nil {
				return err
			}
			parents[n.ID], last = n.Parent, n.ID
			if i%7 == 6 {
				if err := tx.SetWithheld(n.ID, "for a test"); err != nil {
					return err
				}
				continue
			}
			k := tree.Checkpoint{ID: ids.NewCheckpoint(), Tree: tr.ID, Node: n.ID, Snapshot: ids.NewSnapshot(), Process: tree.Empty, CreatedAt: time.Now()}
			if err := tx.SetCaptured(k, time.Now(), false, 0); err != nil {
				return err
			}
			going[n.ID] = i > 0 && i%50 != 0
			if i%3 == 0 {
				child := tree.Node{ID: ids.NewNode(), Tree: tr.ID, Parent: n.ID, Capture: tree.Captured, Checkpoint: k.ID, TurnStatus: tree.Completed}
				if _, err := tx.AddNode(child); err != nil {
					return err
				}
				parents[child.ID], going[child.ID] = n.ID, going[n.ID]
			}
		}
		return nil
	})
	stays := map[ids.Node]bool{}
	for id, goes := range going {
		stays[id] = !goes
	}
	update(func(tx *tree.Tx) error {
		var list []*tree.Node
		for n := range tx.Subtree(tr.Root) {
			if going[n.ID] {
				list = append(list, n)
			}
		}
		got, err := (&Engine{}).evict(tx, list, "by request")
		if err == nil && got.Nodes != len(list) {
			err = fmt.Errorf("%d of %d nodes were evicted", got.Nodes, len(list))
		}
		return err
	})
	for n := range store.View().NodesOf(tr.ID) {
		if !going[n.ID] {
			continue
		}
		turns, from := 0, n.ID
		for ; !stays[from]; from = parents[from] {
			turns++
		}
		if want := fmt.Sprintf("evicted by request; %d turns from node %s make it again", turns, from); n.WithheldReason != want || n.Checkpoint != "" {
			t.Fatalf("node %s, %d deep, says %q, and %q is so", n.ID, n.Depth, n.WithheldReason, want)
		}
	}
}

// If it fails, a bound of a policy isn't kept, gives up more than it asks for, or takes what a pinned or live node stands on.
func TestEachBoundOfAPolicy(t *testing.T) {
	store, err := tree.Open("state", tree.Options{FS: vfs.NewCrashableMem(), AllowTmpfs: true})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	now := time.Now()
	update := func(f func(tx *tree.Tx) error) {
		t.Helper()
		if _, err := store.Update(context.Background(), f); err != nil {
			t.Fatal(err)
		}
	}
	// A root and eight levels below it, of 100 bytes each, an hour apart: the last has just ended.
	const levels = 8
	tr := tree.Tree{ID: ids.NewTree(), Root: ids.NewNode(), CreatedAt: now}
	line, level := []ids.Node{}, map[ids.Node]int{}
	update(func(tx *tree.Tx) error {
		if err := tx.PutTree(tr); err != nil {
			return err
		}
		for i := range levels + 1 {
			at := now.Add(-time.Duration(levels-i) * time.Hour)
			n := tree.Node{ID: tr.Root, Tree: tr.ID, Capture: tree.Recorded, TurnStatus: tree.Completed, EndedAt: at}
			if i > 0 {
				n.ID, n.Parent = ids.NewNode(), line[i-1]
			}
			line, level[n.ID] = append(line, n.ID), i
			if _, err := tx.AddNode(n); err != nil {
				return err
			}
			k := tree.Checkpoint{ID: ids.NewCheckpoint(), Tree: tr.ID, Node: n.ID, Snapshot: ids.NewSnapshot(), Bytes: 100, Process: tree.Empty, CreatedAt: at}
			if err := tx.SetCaptured(k, at, false, 0); err != nil {
				return err
			}
		}
		return nil
	})
	sb := tree.Sandbox{ID: ids.NewSandbox(), Tree: tr.ID, Head: line[levels], Generation: ids.NewGeneration()}
	nothing := func(*tree.Tx) error { return nil }
	pin := func(tx *tree.Tx) error { return tx.Pin(line[3]) }
	unpin := func(tx *tree.Tx) error { return tx.Unpin(line[3]) }
	live := func(tx *tree.Tx) error { return tx.PutSandbox(sb) }
	over := func(tx *tree.Tx) error { return tx.DeleteSandbox(sb.ID) }
	for _, c := range []struct {
		name       string
		policy     Retention
		use, leave func(*tree.Tx) error
		goes       []int // oldest first
	}{
		{"none", Retention{}, nothing, nothing, nil},
		{"depth", Retention{Depth: 5}, nothing, nothing, []int{6, 7, 8}},
		{"count, the root with it", Retention{Count: 4}, nothing, nothing, []int{1, 2, 3, 4, 5}},
		{"bytes", Retention{Bytes: 450}, nothing, nothing, []int{1, 2, 3, 4, 5}},
		{"bytes, all that there are", Retention{Bytes: 900}, nothing, nothing, nil},
		{"age", Retention{Age: 150 * time.Minute}, nothing, nothing, []int{1, 2, 3, 4, 5}},
		{"the strictest of two", Retention{Count: 7, Depth: 6}, nothing, nothing, []int{1, 2, 7, 8}},
		{"depth around a pin", Retention{Depth: 1}, pin, unpin, []int{4, 5, 6, 7, 8}},
		{"age around a pin", Retention{Age: time.Minute}, pin, unpin, []int{4, 5, 6, 7}},
		{"count below what a pin needs", Retention{Count: 1}, pin, unpin, []int{4, 5, 6, 7, 8}},
		{"bytes on the way to a sandbox", Retention{Bytes: 1}, live, over, nil},
	} {
		update(c.use)
		e := &Engine{}
		e.cfg.Retention = c.policy
		for again := range 2 { // the second time it knows what it read
			got, err := e.surplus(store.View(), now)
			if err != nil {
				t.Fatal(err)
			}
			var goes []int
			for _, k := range got {
				goes = append(goes, level[k.Node])
			}
			if !slices.Equal(goes, c.goes) {
				t.Errorf("%s, time %d: levels %v go, and should %v", c.name, again+1, goes, c.goes)
			}
		}
		update(c.leave)
	}
}
