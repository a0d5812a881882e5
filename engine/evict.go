package engine

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// Retention says which saved states are kept. A state that goes leaves its nodes, with
// all that they say, and the way to make it again: "withheld: evicted" names
// the nearest node that can be forked and how many turns lead from there (law 6).
//
// What is pinned or stood on, and everything on the path from the root to such a node, is
// kept whatever the policy says; so are roots, and what other trees were started from.
// Of the rest the oldest go first. Zero values: no bound.
type Retention struct {
	// Depth: states of nodes further below the root go.
	Depth int
	// Count of states that each tree keeps.
	Count int
	// Bytes that the states of all trees may hold, each counted with what it added.
	Bytes int64
	// Age since the node's turn ended.
	Age time.Duration
	// Every is how often the policy is applied; 0: a minute.
	Every time.Duration
}

func (r Retention) none() bool { return r.Depth == 0 && r.Count == 0 && r.Bytes == 0 && r.Age == 0 }

// PruneStates gives up the saved states of a node and of all below it, or only of what
// lies below; the nodes stay, withheld. Refused like Prune, naming by what: a node is
// pinned, a sandbox stands there or was made from there, another tree was started from
// it, or it is a root, from which all else can be made again.
func (e *Engine) PruneStates(ctx context.Context, id ids.Node, keep, release bool, commit func(*tree.Tx, Pruned) error) (Pruned, error) {
	if release {
		if err := e.releaseUnder(ctx, id, keep); err != nil {
			return Pruned{}, err
		}
	}
	var out Pruned
	_, err := e.Store.Update(ctx, func(tx *tree.Tx) error {
		top, err := tx.Node(id)
		if err != nil {
			return err
		}
		if top.Parent == "" && !keep {
			return fault.New(fault.Precondition, "root", "node %s is the root of its tree: all else can be made again from it", id).
				WithHint("keep the node and prune the states below it")
		}
		var list []*tree.Node
		for n := range tx.Subtree(id) {
			if n.Checkpoint == "" || keep && n.ID == id {
				continue
			}
			if err := e.evictable(tx, n); err != nil {
				return err
			}
			list = append(list, n)
		}
		if out, err = e.evict(tx, list, "by request"); err != nil {
			return err
		}
		return commit(tx, out)
	})
	if err != nil {
		return Pruned{}, err
	}
	if err := failpoint.Hit("states evicted"); err != nil {
		return Pruned{}, err
	}
	e.removeCondemned(ctx)
	return out, nil
}

// evictable refuses a node whose state is in use.
func (e *Engine) evictable(tx *tree.Tx, n *tree.Node) error {
	if n.Pinned {
		return fault.New(fault.Precondition, "pinned", "node %s is pinned", n.ID).WithHint("unpin it first")
	}
	for s := range tx.SandboxesAt(n.ID) {
		return fault.New(fault.Precondition, "sandbox_there", "sandbox %s stands at node %s", s.ID, n.ID).
			WithHint("release it first, or ask for that with the prune")
	}
	k, err := tx.Checkpoint(n.Checkpoint)
	if err != nil || k.Node != n.ID {
		return err
	}
	for u := range tx.CheckpointUsers(k.ID) {
		if u.Tree != n.Tree {
			return fault.New(fault.Precondition, "checkpoint_shared", "tree %s was started from node %s", u.Tree, n.ID).WithHint("prune that tree first")
		}
	}
	if s := e.basedOn(k.ID); s != "" {
		return fault.New(fault.Precondition, "sandbox_there", "what sandbox %s changes is compared with node %s", s, n.ID).WithHint("release it first")
	}
	return nil
}

// basedOn is a live sandbox whose last successful capture is this checkpoint; empty: none.
func (e *Engine) basedOn(id ids.Checkpoint) ids.Sandbox {
	for _, s := range e.live() {
		s.mu.Lock()
		based := s.body.checkpoint != nil && s.body.checkpoint.ID == id
		s.mu.Unlock()
		if based {
			return s.id
		}
	}
	return ""
}

// evict withholds nodes, parents first, and says how each can be made again.
func (e *Engine) evict(tx *tree.Tx, list []*tree.Node, why string) (Pruned, error) {
	var out Pruned
	own := map[ids.Checkpoint]*tree.Checkpoint{}
	going := map[ids.Node]bool{}
	for _, n := range list {
		going[n.ID] = true
		if k, err := tx.Checkpoint(n.Checkpoint); err == nil && k.Node == n.ID {
			own[k.ID] = k
		}
	}
	for _, n := range list {
		if err := tx.SetWithheld(n.ID, fmt.Sprintf("evicted %s%s", why, replay(tx, n.ID, going))); err != nil {
			return out, err
		}
		out.Nodes++
	}
	for id, k := range own {
		for range tx.CheckpointUsers(id) {
			k = nil // another node has it still
			break
		}
		if k != nil {
			out.Checkpoints++
			out.FreedBytes += k.Bytes
		}
	}
	return out, nil
}

// replay says from where a node can be made again.
func replay(tx *tree.Tx, id ids.Node, going map[ids.Node]bool) string {
	turns := 0
	for a := range tx.PathToRoot(id) {
		if a.Checkpoint != "" && !going[a.ID] {
			return fmt.Sprintf("; %d turns from node %s make it again", turns, a.ID)
		}
		turns++
	}
	return ""
}

// Retain applies the policy once, and says what that gave back.
func (e *Engine) Retain(ctx context.Context) (Pruned, error) {
	policy := e.cfg.Retention
	if policy.none() {
		return Pruned{}, nil
	}
	var total Pruned
	for _, k := range e.surplus(e.Store.View(), policy, time.Now()) {
		_, err := e.Store.Update(ctx, func(tx *tree.Tx) error {
			var list []*tree.Node
			for n := range tx.CheckpointUsers(k.ID) {
				if err := e.evictable(tx, n); err != nil {
					return err
				}
				list = append(list, n)
			}
			slices.SortFunc(list, func(a, b *tree.Node) int { return cmp.Compare(a.Depth, b.Depth) })
			got, err := e.evict(tx, list, "by policy")
			total.Nodes, total.Checkpoints, total.FreedBytes = total.Nodes+got.Nodes, total.Checkpoints+got.Checkpoints, total.FreedBytes+got.FreedBytes
			return err
		})
		if err != nil && !fault.Is(err, fault.Precondition) { // somebody has come to use it
			return total, err
		}
	}
	e.removeCondemned(ctx)
	return total, nil
}

// surplus are the checkpoints that the policy lets go, oldest first.
func (e *Engine) surplus(v *tree.View, p Retention, now time.Time) []*tree.Checkpoint {
	kept := e.inUse(v)
	var all []*tree.Checkpoint
	have := map[ids.Tree]int{}
	var bytes int64
	for k := range v.Checkpoints() {
		have[k.Tree]++
		bytes += k.Bytes
		if !kept[k.ID] {
			all = append(all, k)
		}
	}
	slices.SortFunc(all, func(a, b *tree.Checkpoint) int { return a.CreatedAt.Compare(b.CreatedAt) })
	var out []*tree.Checkpoint
	for _, k := range all {
		var n *tree.Node // its own, or the first that has it since that was pruned
		for n = range v.CheckpointUsers(k.ID) {
			break
		}
		if n == nil {
			continue
		}
		if p.Count > 0 && have[k.Tree] > p.Count || p.Bytes > 0 && bytes > p.Bytes ||
			p.Depth > 0 && int(n.Depth) > p.Depth || p.Age > 0 && now.Sub(n.EndedAt) > p.Age {
			have[k.Tree]--
			bytes -= k.Bytes
			out = append(out, k)
		}
	}
	return out
}

// inUse are the checkpoints on the path to what is pinned or stood on, those of
// roots, and those that several trees share.
func (e *Engine) inUse(v *tree.View) map[ids.Checkpoint]bool {
	kept, seen := map[ids.Checkpoint]bool{}, map[ids.Node]bool{}
	path := func(id ids.Node) {
		for n := range v.PathToRoot(id) {
			if seen[n.ID] {
				return
			}
			seen[n.ID] = true
			kept[n.Checkpoint] = true
		}
	}
	for s := range v.Sandboxes() {
		path(s.Head)
	}
	owner := map[ids.Checkpoint]ids.Tree{}
	for t := range v.Trees() {
		path(t.Root)
		for n := range v.NodesOf(t.ID) {
			if n.Pinned {
				path(n.ID)
			}
			if n.Checkpoint == "" {
				continue
			}
			if first, ok := owner[n.Checkpoint]; ok && first != t.ID {
				kept[n.Checkpoint] = true
			}
			owner[n.Checkpoint] = t.ID
		}
	}
	return kept
}

// retainAgain applies the policy until ctx ends.
func (e *Engine) retainAgain(ctx context.Context) {
	defer e.wg.Done()
	every := e.cfg.Retention.Every
	if every <= 0 {
		every = time.Minute
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			gone, err := e.Retain(ctx)
			if err != nil && ctx.Err() == nil {
				e.log.Error("applying the retention policy", "error", err)
			} else if gone.Nodes > 0 {
				e.log.Info("states were evicted", "nodes", gone.Nodes, "checkpoints", gone.Checkpoints, "bytes", gone.FreedBytes)
			}
		}
	}
}
