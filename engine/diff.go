package engine

import (
	"context"
	"fmt"

	"github.com/boxwood-rl/boxwood/engine/merged"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// Diff gives the names that two nodes' files show otherwise, by what is saved of them; nothing is run. Captures that are pending are waited
// for, and what it reads stays for as long (law 10).
func (e *Engine) Diff(ctx context.Context, was, is ids.Node) ([]merged.Change, error) {
	var sides [2]merged.Side
	for i, id := range []ids.Node{was, is} {
		if err := ids.Check(string(id), "nd_", "node"); err != nil {
			return nil, err
		}
		v, n, err := e.decidedNode(ctx, id)
		if err != nil {
			return nil, err
		}
		ck, err := restorable(v, n)
		if err != nil {
			return nil, err
		}
		defer e.hold(ctx, string(ck.Snapshot))()
		if _, err := e.Store.View().Checkpoint(ck.ID); err != nil { // it may have gone before the hold
			return nil, err
		}
		if err := e.Pool.Verify(ck.Snapshot, ck.Seal); err != nil {
			return nil, err
		}
		sides[i] = merged.Side{Layers: e.Pool.LayerDirs(ck.Seal), Upper: e.Pool.SnapshotDir(ck.Snapshot)}
	}
	changes, err := merged.Changes(ctx, sides[0], sides[1])
	if err != nil {
		return nil, fmt.Errorf("comparing the files of %s and %s: %w", was, is, err)
	}
	return changes, nil
}
