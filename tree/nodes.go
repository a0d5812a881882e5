package tree

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"
	"unsafe"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// Nodes are kept in memory as the bytes that the log has of them, and a Node is made
// of these when one is asked for: a quarter of the memory, nothing for the garbage
// collector to follow, and nothing that a reader could change.
type nodeRow struct {
	id nodeKey
	b  string // of layoutNode
}

// nodeKey is an id in binary (ids.Binary). Those of trees and checkpoints look alike.
type nodeKey [16]byte

// The tables of nodes, with the reason of each. All but the first are sets: what
// they find is at the end of the key.
var (
	// A node by its id.
	nodeTable = paged[string]{nodes, 16, 0}
	// NodesOf: all of a tree in creation order. Key: tree, CreateIndex, node.
	nodesByTree = paged[struct{}]{nodes + "/" + byTree, 16 + 8 + 16, 1}
	// Children in order, and the next ordinal without counting. Key: parent, ordinal, node.
	nodesByParent = paged[struct{}]{nodes + "/" + byParent, 16 + 4 + 16, 2}
	// Who shares a checkpoint, and whether anybody still does. Key: checkpoint, node.
	nodesByCheckpoint = paged[struct{}]{nodes + "/" + byCheckpoint, 16 + 16, 3}
	// Whether anybody still has a payload; only nodes with one. Key: sha256, node.
	nodesByPayload = paged[struct{}]{nodes + "/" + byPayload, 32 + 16, 4}
	// PendingCaptures in creation order; nearly always nearly empty. Key: CreateIndex, node.
	nodesPending = paged[struct{}]{nodes + "/" + pending, 8 + 16, 5}
	// PinnedNodes: what a policy for states has to go around. Key: tree, node.
	nodesPinned = paged[struct{}]{nodes + "/" + pinned, 16 + 16, 6}
	// What a watcher that comes back has missed, however large the tree is. Key: tree, ModifyIndex, node.
	nodesByChange = paged[struct{}]{nodes + "/" + byChange, 16 + 8 + 16, 8}
	// NodesWhere: the few of a tree that are at one level, have one status, or a label. Each finds a CreateIndex, which
	// nodesByTree has the node of: half the memory. Keys: tree, depth, CreateIndex; tree, status, CreateIndex;
	// hash of tree and label, CreateIndex, once for each label.
	nodesByDepth   = paged[struct{}]{nodes + "/" + byDepth, 16 + 4 + 8, 9}
	nodesByCapture = paged[struct{}]{nodes + "/" + byCapture, 16 + 1 + 8, 10}
	nodesByLabel   = paged[struct{}]{nodes + "/" + byLabel, 8 + 8, 11}

	nodeIndexes = []paged[struct{}]{nodesByTree, nodesByParent, nodesByCheckpoint, nodesByPayload, nodesPending, nodesPinned, nodesByChange,
		nodesByDepth, nodesByCapture, nodesByLabel}
)

// refs is what the store itself needs of a node, read without making a Node.
type refs struct {
	id, tree, parent, checkpoint nodeKey // zero: none
	depth, ordinal               int32
	capture                      Capture
	create, modify               uint64
	payload                      [32]byte
	hasPayload, pinned           bool
	labels                       []uint64 // labelHash of each, ascending
}

// refsKeys are a node's keys in each of nodeIndexes, back to back; nil: it isn't in it.
type refsKeys [10][]byte

func (f *refs) keys() (ks refsKeys) {
	room := nodesByLabel.size * len(f.labels)
	for _, t := range nodeIndexes {
		room += t.size
	}
	b := make([]byte, 0, room)
	u32, u64 := binary.BigEndian.AppendUint32, binary.BigEndian.AppendUint64
	cut := func() []byte { // what was appended since
		k := slices.Clip(b)
		b = b[len(b):]
		return k
	}
	b = append(u64(append(b, f.tree[:]...), f.create), f.id[:]...)
	ks[0] = cut()
	if f.parent != (nodeKey{}) {
		b = append(u32(append(b, f.parent[:]...), uint32(f.ordinal)), f.id[:]...)
		ks[1] = cut()
	}
	if f.checkpoint != (nodeKey{}) {
		b = append(append(b, f.checkpoint[:]...), f.id[:]...)
		ks[2] = cut()
	}
	if f.hasPayload {
		b = append(append(b, f.payload[:]...), f.id[:]...)
		ks[3] = cut()
	}
	if f.capture == Recorded {
		b = append(u64(b, f.create), f.id[:]...)
		ks[4] = cut()
	}
	if f.pinned {
		b = append(append(b, f.tree[:]...), f.id[:]...)
		ks[5] = cut()
	}
	b = append(u64(append(b, f.tree[:]...), f.modify), f.id[:]...)
	ks[6] = cut()
	b = u64(u32(append(b, f.tree[:]...), uint32(f.depth)), f.create)
	ks[7] = cut()
	b = u64(append(append(b, f.tree[:]...), byte(f.capture)), f.create)
	ks[8] = cut()
	for _, l := range f.labels {
		b = u64(u64(b, l), f.create)
	}
	if len(f.labels) > 0 {
		ks[9] = cut()
	}
	return ks
}

// of are a node's keys in one of nodeIndexes.
func (ks *refsKeys) of(i int) iter.Seq[[]byte] { return slices.Chunk(ks[i], nodeIndexes[i].size) }

func (ks *refsKeys) has(i int, key []byte) bool {
	for k := range ks.of(i) {
		if bytes.Equal(k, key) {
			return true
		}
	}
	return false
}

// labelHash finds a label of a tree's node. Two labels may have the same: who looks for one compares it, too.
func labelHash[T string | []byte](tree nodeKey, k, v T) uint64 {
	const prime = 1099511628211 // FNV-1a
	h := uint64(14695981039346656037)
	for _, b := range tree {
		h = (h ^ uint64(b)) * prime
	}
	for i := range len(k) {
		h = (h ^ uint64(k[i])) * prime
	}
	h *= prime // between the two
	for i := range len(v) {
		h = (h ^ uint64(v[i])) * prime
	}
	return h
}

// layoutRefs reads layoutNode's fields.
func layoutRefs(c *coder, f *refs) {
	c.key(1, &f.id, "nd_")
	c.key(2, &f.tree, "tr_")
	c.key(3, &f.parent, "nd_")
	signed(c, 4, &f.depth)
	signed(c, 5, &f.ordinal)
	unsigned(c, 10, &f.capture)
	c.key(11, &f.checkpoint, "ck_")
	c.labelRefs(16, f)
	if b, ok := c.takeBytes(18); ok {
		f.hasPayload = true
		if len(b) == 2*len(f.payload) {
			if _, err := hex.Decode(f.payload[:], b); err != nil {
				c.fail(err)
			}
		} else if copy(f.payload[:], b) != len(f.payload) || len(b) > len(f.payload) {
			c.fail(fmt.Errorf("a payload's digest has %d bytes", len(b)))
		}
	}
	c.flag(20, &f.pinned)
	unsigned(c, 28, &f.modify)
	unsigned(c, 29, &f.create)
}

// labelRefs reads what layoutNode's labels are found by.
func (c *coder) labelRefs(n protowire.Number, f *refs) {
	type entry struct{ key, value []byte }
	var last []byte
	for c.at(n) {
		b, ok := c.takeBytes(n)
		if !ok {
			return
		}
		var e entry
		if err := decodeInto(&e, b, func(c *coder, e *entry) { e.key, _ = c.takeBytes(1); e.value, _ = c.takeBytes(2) }); err != nil {
			c.fail(fmt.Errorf("in field %d: %w", n, err))
			return
		}
		if len(f.labels) > 0 && bytes.Compare(last, e.key) >= 0 {
			c.fail(errOrder)
			return
		}
		last = e.key
		f.labels = append(f.labels, labelHash(f.tree, e.key, e.value))
	}
	f.sortLabels()
}

func (f *refs) sortLabels() {
	slices.Sort(f.labels)
	f.labels = slices.Compact(f.labels)
}

// key reads an id that must be one.
func (c *coder) key(n protowire.Number, k *nodeKey, prefix string) {
	b, ok := c.takeBytes(n)
	if !ok {
		return
	}
	if len(b) == len(k) {
		copy(k[:], b)
	} else if *k, ok = ids.Binary(string(b), prefix); !ok {
		c.fail(fmt.Errorf("%q is no id that starts with %s", b, prefix))
	}
}

func (r nodeRow) refs() (*refs, error) {
	f, err := decode(bytesOf(r.b), layoutRefs)
	if err == nil {
		f.id = r.id
	}
	return f, err
}

// refsOf is of a node whose ids were checked.
func refsOf(n *Node) *refs {
	f := &refs{depth: n.Depth, ordinal: n.Ordinal, capture: n.Capture, create: n.CreateIndex, modify: n.ModifyIndex, pinned: n.Pinned}
	f.id, _ = keyOf(n.ID, "nd_")
	f.tree, _ = keyOf(n.Tree, "tr_")
	f.parent, _ = keyOf(n.Parent, "nd_")
	f.checkpoint, _ = keyOf(n.Checkpoint, "ck_")
	if n.PayloadDigest != "" {
		f.hasPayload = true
		_, _ = hex.Decode(f.payload[:], []byte(n.PayloadDigest))
	}
	for k, v := range n.Labels {
		f.labels = append(f.labels, labelHash(f.tree, k, v))
	}
	f.sortLabels()
	return f
}

// mustRefs is of a row that was read before.
func (r nodeRow) mustRefs() *refs {
	f, err := r.refs()
	if err != nil {
		panic(err)
	}
	return f
}

func (r nodeRow) node() *Node {
	n, err := decode(bytesOf(r.b), layoutNode)
	if err != nil {
		panic(err) // it was read at Open or written here
	}
	n.ID = ids.Node(ids.Text("nd_", r.id))
	return n
}

// lean is what a reader would get of n, which is the caller's.
func lean(n *Node) *Node {
	c := *n
	c.Action, c.Reasons, c.Effects, c.Recipe = Action{}, nil, nil, Recipe{}
	c.Observation.Stdout, c.Observation.Stderr = nil, nil
	c.Rewards, c.Labels = maps.Clone(n.Rewards), maps.Clone(n.Labels)
	if len(c.Rewards) == 0 {
		c.Rewards = nil
	}
	if len(c.Labels) == 0 {
		c.Labels = nil
	}
	for _, t := range []*time.Time{&c.StartedAt, &c.EndedAt, &c.FrozenAt} {
		if !t.IsZero() {
			*t = time.Unix(0, t.UnixNano()).UTC()
		}
	}
	return &c
}

// encodeNode leaves the id out: it is the row's key.
func encodeNode(n *Node) string {
	c := *n
	c.ID = ""
	b := encode(&c, layoutNode)
	return string(b)
}

// bytesOf is a string's bytes. They are only read.
func bytesOf(s string) []byte { return unsafe.Slice(unsafe.StringData(s), len(s)) }

// keyOf is an id's key; of what is no id, one that nothing has.
func keyOf[T ~string](id T, prefix string) (k nodeKey, ok bool) {
	k, ok = ids.Binary(string(id), prefix)
	return k, ok
}

// ---- reading ---------------------------------------------------------------

func (r reader) row(id nodeKey) (nodeRow, bool) {
	b, ok := nodeTable.get(r, id[:])
	return nodeRow{id, b}, ok
}

func (r reader) refs(id ids.Node) (*refs, bool) {
	k, ok := keyOf(id, "nd_")
	if !ok {
		return nil, false
	}
	row, ok := r.row(k)
	if !ok {
		return nil, false
	}
	return row.mustRefs(), true
}

// rowsIn gives the nodes that an index has under a prefix.
func (r reader) rowsIn(t paged[struct{}], prefix []byte) iter.Seq[nodeRow] {
	return r.rowsFrom(t, prefix, prefix)
}

// rowsFrom is rowsIn from a key, or the start of one, on.
func (r reader) rowsFrom(t paged[struct{}], prefix, from []byte) iter.Seq[nodeRow] {
	return func(yield func(nodeRow) bool) {
		for k := range t.scanFrom(r, prefix, from) {
			row, ok := r.row(nodeKey(k[len(k)-16:]))
			if !ok {
				panic("an index of nodes has one that isn't there")
			}
			if !yield(row) {
				return
			}
		}
	}
}

func (r reader) nodesIn(t paged[struct{}], prefix []byte) iter.Seq[*Node] {
	return func(yield func(*Node) bool) {
		for row := range r.rowsIn(t, prefix) {
			if !yield(row.node()) {
				return
			}
		}
	}
}

// under is the prefix of an id, or one that nothing has.
func under[T ~string](id T, prefix string) []byte {
	if k, ok := keyOf(id, prefix); ok {
		return k[:]
	}
	return bytes.Repeat([]byte{0xff}, 16)
}

// allNodes are by id.
func (r reader) allNodes() iter.Seq[nodeRow] {
	return func(yield func(nodeRow) bool) {
		for k, b := range nodeTable.scan(r, nil) {
			if !yield(nodeRow{nodeKey(k), b}) {
				return
			}
		}
	}
}

// Node is without what its turn did; see FullNode.
func (r reader) Node(id ids.Node) (*Node, error) {
	if k, ok := keyOf(id, "nd_"); ok {
		if row, ok := r.row(k); ok {
			return row.node(), nil
		}
	}
	return nil, noNode(id)
}

func noNode(id ids.Node) error {
	return fault.New(fault.NotFound, "node_not_found", "there is no node %q", id)
}

// Children are by ordinal.
func (r reader) Children(id ids.Node) iter.Seq[*Node] {
	return r.nodesIn(nodesByParent, under(id, "nd_"))
}

// HasChildren is Children without making one.
func (r reader) HasChildren(id ids.Node) bool {
	_, ok := nodesByParent.first(r, under(id, "nd_"))
	return ok
}

// changedAfter are a tree's nodes that were made or changed after an index, in the order of their last changes.
func (r reader) changedAfter(id ids.Tree, index uint64) iter.Seq[nodeRow] {
	of := under(id, "tr_")
	return r.rowsFrom(nodesByChange, of, binary.BigEndian.AppendUint64(of[:16:16], index+1))
}

// NodesOf is a tree's nodes in creation order.
func (r reader) NodesOf(id ids.Tree) iter.Seq[*Node] {
	return r.nodesIn(nodesByTree, under(id, "tr_"))
}

// Subtree is a node and all below it, parents before their children, each
// node's children in order.
func (r reader) Subtree(id ids.Node) iter.Seq[*Node] {
	return func(yield func(*Node) bool) {
		for row := range r.subtree(id) {
			if !yield(row.node()) {
				return
			}
		}
	}
}

func (r reader) subtree(id ids.Node) iter.Seq[nodeRow] {
	return func(yield func(nodeRow) bool) {
		top, ok := keyOf(id, "nd_")
		if !ok {
			return
		}
		for stack := []nodeKey{top}; len(stack) > 0; {
			k := stack[len(stack)-1]
			stack = stack[:len(stack)-1]
			row, ok := r.row(k)
			if !ok || !yield(row) {
				return
			}
			from := len(stack)
			for c := range nodesByParent.scan(r, k[:]) {
				stack = append(stack, nodeKey(c[20:]))
			}
			for i, j := from, len(stack)-1; i < j; i, j = i+1, j-1 {
				stack[i], stack[j] = stack[j], stack[i]
			}
		}
	}
}

// PendingCaptures are the nodes that are only Recorded, oldest first.
func (r reader) PendingCaptures() iter.Seq[*Node] { return r.nodesIn(nodesPending, nil) }

// CheckpointUsers are the nodes, of any tree, that a fork would give this checkpoint.
func (r reader) CheckpointUsers(id ids.Checkpoint) iter.Seq[*Node] {
	return r.nodesIn(nodesByCheckpoint, under(id, "ck_"))
}

// PinnedNodes are those of a tree.
func (r reader) PinnedNodes(id ids.Tree) iter.Seq[*Node] {
	return r.nodesIn(nodesPinned, under(id, "tr_"))
}

func (r reader) checkpointUsed(id ids.Checkpoint) bool {
	_, used := nodesByCheckpoint.first(r, under(id, "ck_"))
	return used
}

func (r reader) payloadUsed(digest string) bool {
	b, err := hex.DecodeString(digest)
	if err != nil || len(b) != 32 {
		return false
	}
	_, used := nodesByPayload.first(r, b)
	return used
}

// ---- writing ---------------------------------------------------------------

// keepNode writes a node to the log and to memory; old is what it was, nil: new.
func (tx *Tx) keepNode(n, old *Node) nodeRow {
	f := refsOf(n)
	row := nodeRow{f.id, encodeNode(n)}
	tx.set(rowKey(nodeRows, string(n.ID)), bytesOf(row.b))
	nodeTable.put(tx, f.id[:], row.b)
	if old == nil {
		tx.reindex(nil, f)
	} else {
		tx.reindex(refsOf(old), f)
	}
	tx.events = append(tx.events, Event{Index: n.ModifyIndex, tree: n.Tree, node: n.ID, row: row})
	return row
}

// dropNodes takes many out at once: each page is written once.
func (tx *Tx) dropNodes(gone []*Node) {
	keys := make([][]byte, len(gone))
	var in [len(refsKeys{})][][]byte
	for i, n := range gone {
		tx.set(rowKey(nodeRows, string(n.ID)), nil)
		f := refsOf(n)
		keys[i] = f.id[:]
		ks := f.keys()
		for j := range ks {
			in[j] = slices.AppendSeq(in[j], ks.of(j))
		}
	}
	slices.SortFunc(keys, bytes.Compare)
	nodeTable.drop(tx, keys...)
	for j, ks := range in {
		slices.SortFunc(ks, bytes.Compare)
		nodeIndexes[j].drop(tx, ks...)
	}
}

// reindex takes a node from where it was and puts it where it is.
func (tx *Tx) reindex(old, now *refs) {
	var was, is refsKeys
	if old != nil {
		was = old.keys()
	}
	if now != nil {
		is = now.keys()
	}
	for i, t := range nodeIndexes {
		if bytes.Equal(was[i], is[i]) {
			continue
		}
		for k := range was.of(i) {
			if !is.has(i, k) {
				t.drop(tx, k)
			}
		}
		for k := range is.of(i) {
			if !was.has(i, k) {
				t.put(tx, k, struct{}{})
			}
		}
	}
}
