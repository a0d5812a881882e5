package tree

import (
	"errors"
	"iter"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"github.com/hashicorp/go-memdb"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// View is a consistent, read-only instant of the store. It needs no closing. An archived tree is as it is when
// its nodes are first asked for, if it was changed in between.
type View struct {
	reader
	s     *Store
	shelf shelf
}

// View is the newest durable instant.
func (s *Store) View() *View {
	now := s.state.Load()
	return &View{reader: reader{now.db.Txn(false), now.index, now.totals, nil}, s: s}
}

// FullNode reads a node of the newest instant with all that its turn did.
func (s *Store) FullNode(id ids.Node) (*Node, error) { return s.View().FullNode(id) }

// reader has what View and Tx can both read. A look-up of what isn't there is
// NotFound. Iterators may be left early; those of a Tx must not be held over its writes.
type reader struct {
	txn    *memdb.Txn
	index  uint64
	totals totals
	recent *recent // of a Tx only
}

func find[T any](r reader, table, index string, key []byte) (*T, bool) {
	row, err := r.txn.First(table, index, key)
	if err != nil {
		panic(err) // a table or index that isn't in the schema
	}
	v, ok := row.(*T)
	return v, ok
}

func get[T any](r reader, table, what, id string) (*T, error) {
	if v, ok := find[T](r, table, byID, key(id)); ok {
		return v, nil
	}
	return nil, fault.New(fault.NotFound, what+"_not_found", "there is no %s %q", what, id)
}

// scan gives the rows whose key in index starts with prefix; nil: all.
func scan[T any](r reader, table, index string, prefix []byte) iter.Seq[*T] {
	return func(yield func(*T) bool) {
		var args []any
		if prefix != nil {
			args = append(args, prefix)
		}
		rows, err := r.txn.Get(table, index, args...)
		if err != nil {
			panic(err)
		}
		for row := rows.Next(); row != nil; row = rows.Next() {
			if !yield(row.(*T)) {
				return
			}
		}
	}
}

// Index is that of the last write in this instant.
func (r reader) Index() uint64 { return r.index }

func (r reader) Tree(id ids.Tree) (*Tree, error) { return get[Tree](r, trees, "tree", string(id)) }

// Trees are in creation order.
func (r reader) Trees() iter.Seq[*Tree] { return scan[Tree](r, trees, byCreation, nil) }

func (r reader) TreesOf(image ids.Image) iter.Seq[*Tree] {
	return scan[Tree](r, trees, byImage, key(image))
}

// PathToRoot starts with the node itself.
func (r reader) PathToRoot(id ids.Node) iter.Seq[*Node] {
	return func(yield func(*Node) bool) {
		for id != "" {
			n, err := r.Node(id)
			if err != nil || !yield(n) {
				return
			}
			id = n.Parent
		}
	}
}

func (r reader) Checkpoint(id ids.Checkpoint) (*Checkpoint, error) {
	return get[Checkpoint](r, checkpoints, "checkpoint", string(id))
}

func (r reader) Checkpoints() iter.Seq[*Checkpoint] {
	return scan[Checkpoint](r, checkpoints, byID, nil)
}

func (r reader) CheckpointsOf(id ids.Tree) iter.Seq[*Checkpoint] {
	return scan[Checkpoint](r, checkpoints, byTree, key(id))
}

// StateUsers are the nodes whose checkpoint has a process state.
func (r reader) StateUsers(id ids.Process) iter.Seq[*Node] {
	return func(yield func(*Node) bool) {
		for k := range scan[Checkpoint](r, checkpoints, byState, key(id)) {
			for n := range r.CheckpointUsers(k.ID) {
				if !yield(n) {
					return
				}
			}
		}
	}
}

// Process is a saved process state; a condemned one, too.
func (r reader) Process(id ids.Process) (*ProcessState, error) {
	return get[ProcessState](r, processes, "process state", string(id))
}

func (r reader) Processes() iter.Seq[*ProcessState] {
	return scan[ProcessState](r, processes, byID, nil)
}

// CondemnedProcesses are those that no checkpoint has any more and whose content
// the caller has yet to remove; FinishProcessRemoval strikes them off.
func (r reader) CondemnedProcesses() iter.Seq[*ProcessState] {
	return scan[ProcessState](r, processes, byCondemned, nil)
}

func (r reader) Sandbox(id ids.Sandbox) (*Sandbox, error) {
	return get[Sandbox](r, sandboxes, "sandbox", string(id))
}

func (r reader) Sandboxes() iter.Seq[*Sandbox] { return scan[Sandbox](r, sandboxes, byID, nil) }

func (r reader) SandboxesOf(id ids.Tree) iter.Seq[*Sandbox] {
	return scan[Sandbox](r, sandboxes, byTree, key(id))
}

func (r reader) SandboxesAt(id ids.Node) iter.Seq[*Sandbox] {
	return scan[Sandbox](r, sandboxes, byNode, key(id))
}

// Image finds an image by digest or by name.
func (r reader) Image(ref string) (*Image, error) {
	if i, ok := find[Image](r, images, byName, key(ref)); ok {
		return i, nil
	}
	return get[Image](r, images, "image", ref)
}

func (r reader) Images() iter.Seq[*Image] { return scan[Image](r, images, byID, nil) }

func (r reader) Setup(digest string) (*Setup, error) {
	return get[Setup](r, setups, "setup", digest)
}

// Condemned are the snapshots that no record needs any more and whose file
// state the caller has yet to remove; FinishRemoval strikes them off.
func (r reader) Condemned() iter.Seq[ids.Snapshot] {
	return func(yield func(ids.Snapshot) bool) {
		for d := range scan[condemned](r, doomed, byID, nil) {
			if !yield(ids.Snapshot(d.Snapshot)) {
				return
			}
		}
	}
}

// NodeCount, CheckpointCount and SandboxCount are of one tree, or of all for "".
func (r reader) NodeCount(id ids.Tree) int       { return r.count(nodes, string(id)) }
func (r reader) CheckpointCount(id ids.Tree) int { return r.count(checkpoints, string(id)) }
func (r reader) SandboxCount(id ids.Tree) int    { return r.count(sandboxes, string(id)) }
func (r reader) TreeCount() int                  { return r.count(trees, "") }
func (r reader) ImageCount() int                 { return r.count(images, "") }

func (r reader) count(table, tree string) int {
	if tree == "" {
		return r.totals[slices.Index(counted[:], table)]
	}
	if c, ok := find[count](r, counts, byID, key(counter(table, tree))); ok {
		return c.n
	}
	return 0
}

func counter(table, tree string) string { return table + "/" + tree }

// totals are how many rows the tables have that are counted, in the order of counted.
type totals [7]int

var counted = [len(totals{})]string{trees, nodes, checkpoints, sandboxes, images, replies, removals}

// Node is without what its turn did; see FullNode. One of an archived tree is read from the disk.
func (v *View) Node(id ids.Node) (*Node, error) {
	n, err := v.reader.Node(id)
	if err != nil {
		return v.elsewhere(id)
	}
	return n, nil
}

// NodesOf is a tree's nodes in creation order.
func (v *View) NodesOf(id ids.Tree) iter.Seq[*Node] { return v.of(id).NodesOf(id) }

// Children are by ordinal.
func (v *View) Children(id ids.Node) iter.Seq[*Node] { return v.home(id).Children(id) }

// PinnedNodes are those of a tree.
func (v *View) PinnedNodes(id ids.Tree) iter.Seq[*Node] { return v.of(id).PinnedNodes(id) }

// HasChildren is Children without making one.
func (v *View) HasChildren(id ids.Node) bool { return v.home(id).HasChildren(id) }

// Subtree is a node and all below it, parents before their children, each
// node's children in order.
func (v *View) Subtree(id ids.Node) iter.Seq[*Node] { return v.home(id).Subtree(id) }

// PathToRoot starts with the node itself.
func (v *View) PathToRoot(id ids.Node) iter.Seq[*Node] { return v.home(id).PathToRoot(id) }

// CheckpointUsers are the nodes, of any tree, that a fork would give this checkpoint.
func (v *View) CheckpointUsers(id ids.Checkpoint) iter.Seq[*Node] {
	return func(yield func(*Node) bool) {
		seen := map[ids.Tree]bool{}
		for _, t := range v.archivedUsers(id) {
			seen[t] = true
			for n := range v.of(t).CheckpointUsers(id) {
				if !yield(n) {
					return
				}
			}
		}
		for n := range v.reader.CheckpointUsers(id) {
			if !seen[n.Tree] && !yield(n) {
				return
			}
		}
	}
}

// StateUsers are the nodes, of any tree, whose checkpoint has a process state.
func (v *View) StateUsers(id ids.Process) iter.Seq[*Node] {
	return func(yield func(*Node) bool) {
		for k := range scan[Checkpoint](v.reader, checkpoints, byState, key(id)) {
			for n := range v.CheckpointUsers(k.ID) {
				if !yield(n) {
					return
				}
			}
		}
	}
}

// FullNode is Node with action, output, effects and reasons, read from disk.
func (v *View) FullNode(id ids.Node) (*Node, error) {
	n, err := v.Node(id)
	if err != nil {
		return nil, err
	}
	full := *n
	b, err := v.s.log.get(rowKey(detailRows, string(id)))
	if errors.Is(err, pebble.ErrNotFound) {
		// It was pruned after this instant.
		return nil, fault.New(fault.NotFound, "node_not_found", "there is no node %q any more", id)
	}
	if err == nil {
		err = decodeInto(&full, b, layoutDetail)
	}
	if err != nil {
		return nil, reading(err, "what the turn of node %s did", id)
	}
	return &full, nil
}

// Reply finds the recorded answer to a key; NotFound when there is none or it
// is older than the store keeps them.
func (v *View) Reply(k string) (*Reply, error) {
	r, err := get[Reply](v.reader, replies, "reply", k)
	if err != nil {
		return nil, err
	}
	if v.s.expired(r) {
		return nil, fault.New(fault.NotFound, "reply_not_found", "the reply to %q has expired", k)
	}
	b, err := v.s.log.get(rowKey(replyRows, k))
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, fault.New(fault.NotFound, "reply_not_found", "the reply to %q has expired", k)
	}
	if err == nil {
		r, err = decode(b, layoutFullReply)
	}
	if err != nil {
		return nil, reading(err, "the reply to %q", k)
	}
	return r, nil
}
