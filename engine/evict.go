package engine

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
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
		based := e.based()
		for n := range tx.Subtree(id) {
			if n.Checkpoint == "" || keep && n.ID == id {
				continue
			}
			if err := evictable(tx, based, n); err != nil {
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
func evictable(tx *tree.Tx, based map[ids.Checkpoint]ids.Sandbox, n *tree.Node) error {
	if err := tx.Unused(n); err != nil || n.Checkpoint == "" {
		return err
	}
	if s := based[n.Checkpoint]; s != "" {
		return fault.New(fault.Precondition, "sandbox_there", "what sandbox %s changes is compared with node %s", s, n.ID).WithHint("release it first")
	}
	return nil
}

// based are the checkpoints that are the last successful capture of a live sandbox, each with such a one.
func (e *Engine) based() map[ids.Checkpoint]ids.Sandbox {
	of := map[ids.Checkpoint]ids.Sandbox{}
	for _, s := range e.live() {
		s.mu.Lock()
		if k := s.body.checkpoint; k != nil {
			of[k.ID] = s.id
		}
		s.mu.Unlock()
	}
	return of
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
	again := recipes{}
	for _, n := range list {
		if err := tx.SetWithheld(n.ID, fmt.Sprintf("evicted %s%s", why, again.of(tx, n.ID, going))); err != nil {
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

// recipes are from where nodes can be made again: those of one change, so that a path is walked once, however many nodes of
// it go.
type recipes map[ids.Node]recipe

type recipe struct {
	from  ids.Node // empty: from nowhere
	turns int
}

func (r recipes) of(tx *tree.Tx, id ids.Node, going map[ids.Node]bool) string {
	var path []ids.Node
	var found recipe
	for a := range tx.PathToRoot(id) {
		known, ok := r[a.ID]
		if !ok && a.Checkpoint != "" && !going[a.ID] {
			known, ok = recipe{from: a.ID}, true
		}
		if ok {
			found = known
			break
		}
		path = append(path, a.ID)
	}
	for i, n := range slices.Backward(path) {
		r[n] = recipe{found.from, found.turns + len(path) - i}
	}
	if found.from == "" {
		return ""
	}
	return fmt.Sprintf("; %d turns from node %s make it again", r[id].turns, found.from)
}

// Retain applies the policy once, and says what that gave back. A closed tree whose states go comes back into memory for
// that, and leaves it again.
func (e *Engine) Retain(ctx context.Context) (Pruned, error) {
	if e.cfg.Retention.none() {
		return Pruned{}, nil
	}
	going, err := e.surplus(e.Store.View(), time.Now())
	if err != nil {
		return Pruned{}, err
	}
	var total Pruned
	for some := range slices.Chunk(going, evictStep) {
		var got Pruned
		_, err := e.Store.Update(ctx, func(tx *tree.Tx) error {
			var list []*tree.Node
			based := e.based()
			for _, k := range some {
				users, err := tx.UsersOf(k.ID)
				if err != nil {
					return err
				}
				unused := true // since it was looked for
				for _, n := range users {
					err := evictable(tx, based, n)
					if unused = unused && err == nil; err != nil && !fault.Is(err, fault.Precondition) {
						return err
					}
				}
				if unused {
					list = append(list, users...)
				}
			}
			slices.SortFunc(list, func(a, b *tree.Node) int { return cmp.Compare(a.Depth, b.Depth) })
			var err error
			got, err = e.evict(tx, list, "by policy")
			return err
		})
		if err != nil {
			return total, err
		}
		total.Nodes, total.Checkpoints, total.FreedBytes = total.Nodes+got.Nodes, total.Checkpoints+got.Checkpoints, total.FreedBytes+got.FreedBytes
	}
	e.removeCondemned(ctx)
	return total, nil
}

// evictStep is how many states one change gives up: the way to the nearest that stays is walked once for them all, and the
// disk waited for once.
const evictStep = 64

// retained is what a policy knows of checkpoints and of archived trees from when it was applied last, so that what
// doesn't change is read from the disk once. Of one goroutine at a time.
type retained struct {
	mu   sync.Mutex
	made map[ids.Checkpoint]made
	kept map[ids.Tree]keptBy
}

// made is where and when a checkpoint came to be. Neither changes.
type made struct {
	depth int
	ended time.Time
}

// keptBy are the checkpoints on the path to pinned nodes of an archived tree, which is as it is while its index stays.
type keptBy struct {
	index       uint64
	checkpoints []ids.Checkpoint
}

// surplus are the checkpoints that the policy lets go, oldest first.
func (e *Engine) surplus(v *tree.View, now time.Time) ([]*tree.Checkpoint, error) {
	e.retained.mu.Lock()
	defer e.retained.mu.Unlock()
	kept, err := e.inUse(v)
	if err != nil {
		return nil, err
	}
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
	p, known := e.cfg.Retention, map[ids.Checkpoint]made{}
	for _, k := range all {
		goes := p.Count > 0 && have[k.Tree] > p.Count || p.Bytes > 0 && bytes > p.Bytes
		if !goes && (p.Depth > 0 || p.Age > 0) {
			m, err := e.madeAt(v, k)
			if err != nil {
				return nil, err
			}
			known[k.ID] = m
			goes = p.Depth > 0 && m.depth > p.Depth || p.Age > 0 && now.Sub(m.ended) > p.Age
		}
		if goes {
			have[k.Tree]--
			bytes -= k.Bytes
			out = append(out, k)
		}
	}
	e.retained.made = known
	return out, nil
}

// madeAt reads the node that a checkpoint was made for, or the first that has it since that was pruned.
func (e *Engine) madeAt(v *tree.View, k *tree.Checkpoint) (made, error) {
	if m, ok := e.retained.made[k.ID]; ok {
		return m, nil
	}
	n, err := v.Node(k.Node)
	if fault.Is(err, fault.NotFound) {
		for n = range v.CheckpointUsers(k.ID) {
			break
		}
		if err = v.Err(); n == nil && err == nil { // it has gone since the view was taken
			return made{0, k.CreatedAt}, nil
		}
	}
	if err != nil {
		return made{}, err
	}
	return made{int(n.Depth), n.EndedAt}, nil
}

// inUse are the checkpoints on the path to what is pinned or stood on, those of
// roots, and those that several trees share: another tree has a node's checkpoint only if it was started from it, so
// that its root has it, too.
func (e *Engine) inUse(v *tree.View) (map[ids.Checkpoint]bool, error) {
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
	known, root := map[ids.Tree]keptBy{}, map[ids.Tree]ids.Node{}
	for t := range v.Trees() {
		if t.Archive == tree.OnDisk {
			root[t.ID] = t.Root
			of, ok := e.retained.kept[t.ID]
			if !ok || of.index != t.ModifyIndex {
				of = keptBy{index: t.ModifyIndex, checkpoints: pinnedPaths(v, t.ID)}
			}
			known[t.ID] = of
			for _, k := range of.checkpoints {
				kept[k] = true
			}
			continue
		}
		path(t.Root)
		for n := range v.PinnedNodes(t.ID) {
			path(n.ID)
		}
	}
	for id, of := range v.ArchivedUses() {
		if k, err := v.Checkpoint(id); err == nil && (k.Tree != of || k.Node == root[of]) {
			kept[id] = true
		}
	}
	if err := v.Err(); err != nil { // what couldn't be read may be in use
		return nil, err
	}
	e.retained.kept = known
	return kept, nil
}

func pinnedPaths(v *tree.View, id ids.Tree) (out []ids.Checkpoint) {
	seen := map[ids.Node]bool{}
	for p := range v.PinnedNodes(id) {
		for n := range v.PathToRoot(p.ID) {
			if seen[n.ID] {
				break
			}
			seen[n.ID] = true
			if n.Checkpoint != "" {
				out = append(out, n.Checkpoint)
			}
		}
	}
	return out
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
				e.log.ErrorContext(ctx, "applying the retention policy", "error", err)
			} else if gone.Nodes > 0 {
				e.log.InfoContext(ctx, "states were evicted", "nodes", gone.Nodes, "checkpoints", gone.Checkpoints, "bytes", gone.FreedBytes)
			}
		}
	}
}
