package engine

import (
	"context"
	"fmt"
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
