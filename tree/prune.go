package tree

import (
	"encoding/binary"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// Pruned says what a Prune removed. It is complete only when the function given
// to Update has returned, and for those of Finally: what has no user any more is
// found at its end.
type Pruned struct {
	Nodes       []ids.Node
	Checkpoints []ids.Checkpoint
	Condemned   []ids.Snapshot
}

// Prune removes a node and all below it, or only what lies below.
//
// Phase one, this one, removes the records and condemns the snapshots that
// nobody uses any more, in one change. Phase two is the caller's, after Update
// has returned: remove the file state of what is Condemned, then
// FinishRemoval. A crash between them loses nothing: at start-up the
// condemned are still listed.
//
// Refused with fault.Precondition, naming the first user found:
// "pinned"; "sandbox_there": a sandbox stands there; "checkpoint_shared": another tree
// was started from a checkpoint made there; "root": a tree's root
// goes only when the tree is closed, and the tree goes with it.
func (tx *Tx) Prune(id ids.Node, keepNode bool) (*Pruned, error) {
	tx.removes = true
	top, err := tx.Node(id)
	if err != nil {
		return nil, err
	}
	t, err := tx.Tree(top.Tree)
	if err != nil {
		return nil, err
	}
	if err := tx.resident(t.ID); err != nil {
		return nil, err
	}
	whole := !keepNode && top.Parent == ""
	if whole && !t.Closed {
		return nil, fault.New(fault.Precondition, "root", "node %s is the root of tree %s, which is open", id, t.ID).
			WithHint("close the tree first, or keep the node and prune what lies below it")
	}
	var doomed []*Node
	for n := range tx.Subtree(id) {
		if keepNode && n.ID == id {
			continue
		}
		if err := tx.Unused(n); err != nil {
			return nil, err
		}
		doomed = append(doomed, n)
	}
	if len(doomed) == 0 {
		return &Pruned{}, nil
	}
	p := &Pruned{}
	tx.pruned = append(tx.pruned, p)
	gone := removal{First: tx.index + 1, Tree: string(t.ID)}
	tx.dropNodes(doomed)
	for _, n := range doomed {
		tx.removed(n)
		p.Nodes = append(p.Nodes, n.ID)
		gone.Nodes = append(gone.Nodes, string(n.ID))
	}
	tx.add(nodes, t.ID, -len(doomed))
	for _, n := range doomed {
		for s := range collect(scan[Setup](tx.reader, setups, byNode, key(n.ID))) {
			remove(tx, setups, setupRows, s.Digest, s)
		}
	}
	tx.remember(gone)
	if whole {
		tx.step()
		tx.add(trees, "", -1)
		remove(tx, trees, treeRows, string(t.ID), t)
	}
	return p, nil
}

// Unused refuses a node whose state is in use, as Prune does.
func (tx *Tx) Unused(n *Node) error {
	if sabotage.On("used") {
		return nil
	}
	if n.Pinned {
		return fault.New(fault.Precondition, "pinned", "node %s is pinned", n.ID).WithHint("unpin it first")
	}
	for s := range tx.SandboxesAt(n.ID) {
		return fault.New(fault.Precondition, "sandbox_there", "sandbox %s stands at node %s", s.ID, n.ID).
			WithHint("release it first, or ask for that with the prune")
	}
	if n.Checkpoint == "" {
		return nil
	}
	k, err := tx.Checkpoint(n.Checkpoint)
	if err != nil || k.Node != n.ID {
		return err
	}
	users := tx.archivedUsers(k.ID)
	for u := range tx.CheckpointUsers(k.ID) {
		users = append(users, u.Tree)
	}
	for _, u := range users {
		if u != n.Tree {
			return fault.New(fault.Precondition, "checkpoint_shared", "tree %s was started from node %s", u, n.ID).
				WithHint("prune that tree first")
		}
	}
	return nil
}

func (tx *Tx) removed(n *Node) {
	tx.set(rowKey(detailRows, string(n.ID)), nil)
	tx.events = append(tx.events, Event{Index: tx.step(), tree: n.Tree, node: n.ID, Removed: n.ID})
	if n.Checkpoint != "" {
		tx.loose = append(tx.loose, n.Checkpoint)
	}
	if n.PayloadDigest != "" {
		tx.loosePayloads = append(tx.loosePayloads, n.PayloadDigest)
	}
}

// FinishRemoval strikes snapshots off the condemned: their file state is gone.
// What isn't on the list is no error.
func (tx *Tx) FinishRemoval(gone []ids.Snapshot) error {
	tx.removes = true
	for _, id := range gone {
		if d, ok := find[condemned](tx.reader, doomed, byID, key(id)); ok {
			tx.step()
			remove(tx, doomed, condemnedRows, string(id), d)
		}
	}
	return nil
}

// FinishProcessRemoval strikes condemned process states off: their content is
// gone. What isn't condemned, or isn't there, is no error and stays.
func (tx *Tx) FinishProcessRemoval(gone []ids.Process) error {
	tx.removes = true
	for _, id := range gone {
		if p, ok := find[ProcessState](tx.reader, processes, byID, key(id)); ok && p.Condemned {
			tx.step()
			remove(tx, processes, processRows, string(id), p)
		}
	}
	return nil
}

// remember keeps what was removed for watchers that come back, and forgets the
// oldest beyond MaxRemovals; the horizon is the last index forgotten.
func (tx *Tx) remember(r removal) {
	put(tx, removals, removalRows, string(binary.BigEndian.AppendUint64(nil, r.First)), &r, layoutRemoval)
	tx.add(removals, "", len(r.Nodes))
	for tx.count(removals, "") > tx.s.o.MaxRemovals {
		var oldest *removal
		for o := range scan[removal](tx.reader, removals, byID, nil) {
			oldest = o
			break
		}
		last := oldest.First + uint64(len(oldest.Nodes)) - 1
		remove(tx, removals, removalRows, string(binary.BigEndian.AppendUint64(nil, oldest.First)), oldest)
		tx.add(removals, "", -len(oldest.Nodes))
		tx.set(horizonKey, varint(last))
		tx.insert(marks, &mark{horizon, last})
	}
}

// mark is a number of the store's own, such as the horizon.
type mark struct {
	name string
	n    uint64
}

const horizon = "horizon"

func (r reader) horizon() uint64 {
	if m, ok := find[mark](r, marks, byID, key(horizon)); ok {
		return m.n
	}
	return 0
}
