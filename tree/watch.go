package tree

import (
	"cmp"
	"context"
	"iter"
	"slices"
	"sync"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// Event is one change of a tree. Exactly one of Node, Removed, Tree is set.
type Event struct {
	Index   uint64
	Node    *Node
	Removed ids.Node
	Tree    *Tree

	tree ids.Tree
	node ids.Node
	row  nodeRow // what Node is made of, once somebody watches
}

// Watcher gives the changes of one tree. One goroutine calls Next.
type Watcher struct {
	ws   *watchers
	tree ids.Tree
	last uint64 // events up to here were given or are in past

	past []Event // what happened before Watch, still to be given

	mu    sync.Mutex
	live  []Event
	err   error         // why nothing more comes; given after live
	ready chan struct{} // cap 1: live or err has changed
}

// watchers are told of every durable change.
type watchers struct {
	max int

	mu     sync.Mutex
	err    error // after close
	trees  map[ids.Tree]map[*Watcher]struct{}
	nodes  map[ids.Node]map[chan struct{}]struct{} // WaitNodes
	closed chan struct{}
}

func (ws *watchers) init(max int) {
	ws.max = max
	ws.trees = map[ids.Tree]map[*Watcher]struct{}{}
	ws.nodes = map[ids.Node]map[chan struct{}]struct{}{}
	ws.closed = make(chan struct{})
}

func (ws *watchers) publish(events []Event) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for _, e := range events {
		of := ws.trees[e.tree]
		if len(of) > 0 && e.row.b != "" {
			e.Node = e.row.node() // one for all of them
		}
		for w := range of {
			w.offer(e, ws.max)
		}
		for c := range ws.nodes[e.node] {
			nudge(c)
		}
	}
}

func (ws *watchers) close(err error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.err != nil {
		return
	}
	ws.err = err
	close(ws.closed)
	for _, of := range ws.trees {
		for w := range of {
			w.end(err)
		}
	}
}

func nudge(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Watch gives the changes of a tree after an index, then goes on with live
// ones. What happened before the call comes once per thing, in its newest
// state, in the order of the last changes; live, each change comes once, in order.
// Every event has an index of its own: a watcher goes on after the last one it
// saw, over restarts, too. 0 is from the start.
//
// Precondition "resync": what was removed since then is forgotten, or the index
// is not of this store; start again from 0 with nothing in hand.
func (s *Store) Watch(ctx context.Context, id ids.Tree, after uint64) (*Watcher, error) {
	w := &Watcher{ws: &s.watch, tree: id, ready: make(chan struct{}, 1)}
	if err := s.watch.join(w); err != nil {
		return nil, err
	}
	// From here on live events are kept; those that this instant has are dropped.
	v := s.View()
	if err := w.catchUp(v, after); err != nil {
		w.Close()
		return nil, err
	}
	w.last = v.Index()
	return w, nil
}

func (ws *watchers) join(w *Watcher) error {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.err != nil {
		return ws.err
	}
	if ws.trees[w.tree] == nil {
		ws.trees[w.tree] = map[*Watcher]struct{}{}
	}
	ws.trees[w.tree][w] = struct{}{}
	return nil
}

func (w *Watcher) catchUp(v *View, after uint64) error {
	t, err := v.Tree(w.tree)
	if err != nil {
		return err
	}
	if after > v.Index() {
		return resync("index %d hasn't been reached yet: the last one is %d", after, v.Index())
	}
	if after > 0 && after < v.horizon() {
		return resync("what was removed before index %d is forgotten, and %d is older", v.horizon(), after)
	}
	if t.ModifyIndex > after {
		w.past = append(w.past, Event{Index: t.ModifyIndex, tree: t.ID, Tree: t})
	}
	if err := v.Load(w.tree); err != nil {
		return err
	}
	for row := range v.of(w.tree).changedAfter(w.tree, after) {
		w.past = append(w.past, Event{Index: row.mustRefs().modify, tree: w.tree, row: row})
	}
	// Who comes back is told what was removed meanwhile.
	if after > 0 && !sabotage.On("watch") {
		for r := range v.removedAfter(w.tree, after) {
			for i, id := range r.Nodes {
				if at := r.First + uint64(i); at > after {
					w.past = append(w.past, Event{Index: at, tree: w.tree, Removed: ids.Node(id)})
				}
			}
		}
	}
	slices.SortFunc(w.past, func(a, b Event) int { return cmp.Compare(a.Index, b.Index) })
	return nil
}

// removedAfter are a tree's removals that may have a node that went after an index: the last one that began before it, and
// those that began later.
func (r reader) removedAfter(id ids.Tree, index uint64) iter.Seq[*removal] {
	return func(yield func(*removal) bool) {
		at := append(key(id), number(index)...)
		before, err := r.txn.ReverseLowerBound(removals, byTree, at)
		if err != nil {
			panic(err) // an index that isn't in the schema
		}
		if x, ok := before.Next().(*removal); ok && x.Tree == string(id) && !yield(x) {
			return
		}
		later, err := r.txn.LowerBound(removals, byTree, append(key(id), number(index+1)...))
		if err != nil {
			panic(err)
		}
		for x, ok := later.Next().(*removal); ok && x.Tree == string(id); x, ok = later.Next().(*removal) {
			if !yield(x) {
				return
			}
		}
	}
}

func resync(format string, args ...any) error {
	return fault.New(fault.Precondition, "resync", format, args...).
		WithHint("watch from index 0 again, and forget what earlier events said")
}

// offer is called with watchers.mu held.
func (w *Watcher) offer(e Event, max int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil {
		return
	}
	if len(w.live) >= max {
		w.err = fault.New(fault.Exhausted, "watch_behind", "the watcher of tree %s is %d events behind", w.tree, max).
			WithHint("watch again after the last index seen")
		nudge(w.ready)
		return
	}
	w.live = append(w.live, e)
	nudge(w.ready)
}

func (w *Watcher) end(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
		nudge(w.ready)
	}
}

// Next waits for the next event. A watcher that fell behind gets Exhausted
// "watch_behind" after what was kept for it: watch again after its last index.
func (w *Watcher) Next(ctx context.Context) (Event, error) {
	if len(w.past) > 0 {
		e := w.past[0]
		w.past = w.past[1:]
		if e.row.b != "" {
			e.Node = e.row.node()
		}
		return e, nil
	}
	for {
		w.mu.Lock()
		for len(w.live) > 0 {
			e := w.live[0]
			w.live = w.live[1:]
			if e.Index > w.last {
				w.mu.Unlock()
				return e, nil
			}
		}
		w.live = nil
		err := w.err
		w.mu.Unlock()
		if err != nil {
			return Event{}, err
		}
		select {
		case <-w.ready:
		case <-ctx.Done():
			return Event{}, waitFault(ctx.Err())
		}
	}
}

// Close lets go of the watcher; Next then fails. Idempotent.
func (w *Watcher) Close() {
	w.ws.mu.Lock()
	if of := w.ws.trees[w.tree]; of != nil {
		delete(of, w)
		if len(of) == 0 {
			delete(w.ws.trees, w.tree)
		}
	}
	w.ws.mu.Unlock()
	w.end(fault.New(fault.Cancelled, "watch_closed", "the watch is closed"))
}

// WaitNodes waits until done has said true of each node, once; a node that
// isn't there or is removed meanwhile is NotFound. done must be quick.
func (s *Store) WaitNodes(ctx context.Context, nodes []ids.Node, done func(*Node) bool) error {
	changed := make(chan struct{}, 1)
	leave, err := s.watch.await(nodes, changed)
	if err != nil {
		return err
	}
	defer leave()
	left := slices.Clone(nodes)
	for {
		v := s.View()
		var missing error
		left = slices.DeleteFunc(left, func(id ids.Node) bool {
			n, err := v.Node(id)
			if err != nil {
				missing = err
				return false
			}
			return done(n)
		})
		if missing != nil || len(left) == 0 {
			return missing
		}
		select {
		case <-changed:
		case <-s.watch.closed:
			return errClosed()
		case <-ctx.Done():
			return waitFault(ctx.Err())
		}
	}
}

func (ws *watchers) await(nodes []ids.Node, c chan struct{}) (leave func(), err error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.err != nil {
		return nil, ws.err
	}
	for _, id := range nodes {
		if ws.nodes[id] == nil {
			ws.nodes[id] = map[chan struct{}]struct{}{}
		}
		ws.nodes[id][c] = struct{}{}
	}
	return func() {
		ws.mu.Lock()
		defer ws.mu.Unlock()
		for _, id := range nodes {
			delete(ws.nodes[id], c)
			if len(ws.nodes[id]) == 0 {
				delete(ws.nodes, id)
			}
		}
	}, nil
}

func waitFault(err error) error {
	if err == context.DeadlineExceeded {
		return fault.New(fault.Deadline, "deadline", "the deadline passed while waiting: %w", err)
	}
	return fault.New(fault.Cancelled, "cancelled", "cancelled while waiting: %w", err)
}
