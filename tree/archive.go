package tree

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/hashicorp/go-memdb"

	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// A closed tree can leave memory: its nodes become archive rows, which lie together on the
// disk and aren't loaded at a start. What stays in memory is the record of the tree, its
// checkpoints, and which of these its nodes have. A View reads an archived tree from the
// disk, one read a node or one scan for all; a change to one of its nodes brings the tree
// back first (Update does), and ArchiveIdle takes it out again.
//
// Nodes move some at a time, each change whole; between two of them part of the tree is here and part
// there, and readers put the two together. So no writer waits for a large tree, and
// a crash leaves nothing to repair.

// archivedUses: which archived trees have nodes with a checkpoint. Key: checkpoint, tree.
var archivedUses = paged[struct{}]{"archived/" + byCheckpoint, 16 + 16, 7}

// archived is what changes to nodes of an archived tree fail with, inside Update.
type archived struct{ tree nodeKey }

func (a archived) Error() string {
	return fmt.Sprintf("tree %s is archived", ids.Text("tr_", a.tree))
}

// moved is what a change archives, kept while the disk doesn't have it yet.
type moved struct {
	nodes map[nodeKey]nodeKey // to its tree
	holds map[string]bool     // payload digests, in binary
}

func (m *moved) add(other moved) {
	if len(other.nodes) == 0 {
		return
	}
	if m.nodes == nil {
		*m = moved{map[nodeKey]nodeKey{}, map[string]bool{}}
	}
	maps.Copy(m.nodes, other.nodes)
	maps.Copy(m.holds, other.holds)
}

func archiveKey(tree, node nodeKey) []byte {
	return append(append(rowKey(archiveRows, ""), tree[:]...), node[:]...)
}

func whereKey(node nodeKey) []byte { return append(rowKey(whereRows, ""), node[:]...) }

func holdKey(r rows, what []byte, tree nodeKey) []byte {
	return append(append(rowKey(r, ""), what...), tree[:]...)
}

// ---- moving ----------------------------------------------------------------

// Archive takes a closed tree out of memory. Refused with Precondition "tree_open", and
// with "tree_in_use" while a sandbox is in it or a capture of a node isn't decided.
func (s *Store) Archive(ctx context.Context, id ids.Tree) error {
	s.archiving.Lock()
	defer s.archiving.Unlock()
	k, ok := keyOf(id, "tr_")
	if !ok {
		return fault.New(fault.NotFound, "tree_not_found", "there is no tree %q", id)
	}
	for {
		if err := failpoint.Hit("tree archiving"); err != nil {
			return err
		}
		moved := 0
		_, err := s.Update(ctx, func(tx *Tx) error {
			t, err := tx.Tree(id)
			if err != nil {
				return err
			}
			if t.Archive == InMemory {
				if err := tx.idle(t); err != nil {
					return err
				}
			}
			moved, err = tx.archive(t, k)
			return err
		})
		if err == nil {
			err = failpoint.Hit("tree archived")
		}
		if err != nil || moved < s.o.archiveStep {
			return err
		}
	}
}

// idle refuses a tree that work is still going on in.
func (tx *Tx) idle(t *Tree) error {
	if !t.Closed {
		return fault.New(fault.Precondition, "tree_open", "tree %s is open", t.ID).WithHint("close it first")
	}
	for s := range tx.SandboxesOf(t.ID) {
		return fault.New(fault.Precondition, "tree_in_use", "sandbox %s is in tree %s", s.ID, t.ID)
	}
	for row := range tx.rowsIn(nodesPending, nil) {
		if f := row.mustRefs(); bytes.Equal(f.tree[:], under(t.ID, "tr_")) {
			return fault.New(fault.Precondition, "tree_in_use", "the capture of node %s isn't decided", ids.Text("nd_", row.id))
		}
	}
	return nil
}

// archive moves some nodes of a tree to the disk.
func (tx *Tx) archive(t *Tree, tree nodeKey) (n int, err error) {
	tx.moved = moved{map[nodeKey]nodeKey{}, map[string]bool{}}
	var rows []nodeRow // first all that is read, then what is written
	for row := range tx.rowsIn(nodesByTree, tree[:]) {
		if rows = append(rows, row); len(rows) == tx.s.o.archiveStep {
			break
		}
	}
	gone := make([]*Node, len(rows))
	for i, row := range rows {
		f := row.mustRefs()
		tx.set(archiveKey(tree, row.id), bytesOf(row.b))
		tx.set(whereKey(row.id), tree[:])
		tx.moved.nodes[row.id] = tree
		if f.checkpoint != (nodeKey{}) {
			key := append(f.checkpoint[:16:16], tree[:]...)
			if _, there := archivedUses.get(tx.reader, key); !there {
				archivedUses.put(tx, key, struct{}{})
				tx.set(holdKey(checkpointHoldRows, f.checkpoint[:], tree), []byte{})
			}
		}
		if f.hasPayload {
			tx.moved.holds[string(f.payload[:])] = true
			tx.set(holdKey(payloadHoldRows, f.payload[:], tree), []byte{})
		}
		gone[i] = row.node()
	}
	tx.dropNodes(gone)
	c := *t
	c.ArchivedNodes += int64(len(gone))
	if c.Archive = Moving; len(gone) < tx.s.o.archiveStep {
		c.Archive = OnDisk
	}
	if t.Archive == InMemory {
		return len(gone), tx.putTree(c)
	}
	put(tx, trees, treeRows, string(c.ID), &c, layoutTree) // nothing that a watcher could see
	return len(gone), nil
}

// Recall brings an archived tree back into memory. It stays closed.
func (s *Store) Recall(ctx context.Context, id ids.Tree) error {
	s.archiving.Lock()
	defer s.archiving.Unlock()
	k, ok := keyOf(id, "tr_")
	if !ok {
		return fault.New(fault.NotFound, "tree_not_found", "there is no tree %q", id)
	}
	var last nodeKey // of those moved: what is before it would be passed over anew each time
	for {
		t, err := s.View().Tree(id)
		if err != nil || t.Archive == InMemory {
			return err
		}
		// Rows of an archived tree don't change, so they are read before the change that moves them.
		rows, err := s.archiveRows(k, last, s.o.archiveStep)
		if err != nil {
			return err
		}
		if len(rows) > 0 {
			last = rows[len(rows)-1].id
		} else if t.ArchivedNodes > 0 {
			return rowsGone(id)
		}
		if _, err := s.Update(ctx, func(tx *Tx) error { return tx.recall(id, k, rows) }); err != nil {
			return err
		}
		s.mu.Lock()
		if s.recalled == nil {
			s.recalled = map[ids.Tree]time.Time{}
		}
		s.recalled[id] = s.o.Clock()
		s.mu.Unlock()
		if err := failpoint.Hit("tree recalled"); err != nil {
			return err
		}
	}
}

func (tx *Tx) recall(id ids.Tree, tree nodeKey, rows []nodeRow) error {
	t, err := tx.Tree(id)
	if err != nil {
		return err
	}
	for _, row := range rows {
		f := row.mustRefs()
		tx.set(archiveKey(tree, row.id), nil)
		tx.set(whereKey(row.id), nil)
		tx.set(rowKey(nodeRows, ids.Text("nd_", row.id)), bytesOf(row.b))
		nodeTable.put(tx, row.id[:], row.b)
		tx.reindex(nil, f)
	}
	c := *t
	c.ArchivedNodes -= int64(len(rows))
	if c.Archive = Moving; c.ArchivedNodes > 0 {
		put(tx, trees, treeRows, string(c.ID), &c, layoutTree)
		return nil
	}
	// All are here: nothing is held for the archive any more.
	for _, row := range slices.Collect(tx.rowsIn(nodesByTree, tree[:])) {
		f := row.mustRefs()
		if key := append(f.checkpoint[:16:16], tree[:]...); f.checkpoint != (nodeKey{}) {
			if _, there := archivedUses.get(tx.reader, key); there {
				archivedUses.drop(tx, key)
				tx.set(holdKey(checkpointHoldRows, f.checkpoint[:], tree), nil)
			}
		}
		if f.hasPayload {
			tx.set(holdKey(payloadHoldRows, f.payload[:], tree), nil)
		}
	}
	c.Archive = InMemory
	return tx.putTree(c)
}

// ArchiveIdle archives the closed trees that nothing goes on in, except those that were recalled
// less than keep ago; it says how many.
func (s *Store) ArchiveIdle(ctx context.Context, keep time.Duration) (archived int, err error) {
	now := s.o.Clock()
	s.mu.Lock() // of some the tree is gone
	maps.DeleteFunc(s.recalled, func(_ ids.Tree, at time.Time) bool { return now.Sub(at) >= keep })
	s.mu.Unlock()
	for t := range scan[Tree](s.View().reader, trees, byResident, nil) {
		s.mu.Lock()
		at, was := s.recalled[t.ID]
		s.mu.Unlock()
		if was && now.Sub(at) < keep {
			continue
		}
		switch e := s.Archive(ctx, t.ID); {
		case e == nil:
			archived++
			s.mu.Lock()
			delete(s.recalled, t.ID)
			s.mu.Unlock()
		case fault.Is(e, fault.Precondition) || fault.Is(e, fault.NotFound):
			// still in use, opened again or pruned: another time
		default:
			err = errors.Join(err, e)
		}
	}
	return archived, err
}

// ---- in a change -----------------------------------------------------------

// Node is without what its turn did; see FullNode. One of an archived tree ends the
// change, and Update runs it again with the tree in memory.
func (tx *Tx) Node(id ids.Node) (*Node, error) {
	n, err := tx.reader.Node(id)
	if err != nil {
		return nil, tx.missing(id)
	}
	return n, nil
}

// Free refuses an id that a node has, of an archived tree, too: AddNode alone doesn't see those, since looking on the disk
// for an id that was just made would cost each append a read. For ids that come from elsewhere.
func (tx *Tx) Free(id ids.Node) error {
	_, err := tx.Node(id)
	if fault.Is(err, fault.NotFound) {
		return nil
	}
	if err == nil || errors.As(err, new(archived)) {
		return fault.New(fault.Exists, "node_exists", "there is a node %s already", id)
	}
	return err
}

// UsersOf are the nodes, of any tree, that have a checkpoint; those of an archived tree end the change, as in Node.
func (tx *Tx) UsersOf(id ids.Checkpoint) ([]*Node, error) {
	for _, t := range tx.archivedUsers(id) {
		if err := tx.resident(t); err != nil {
			return nil, err
		}
	}
	return slices.Collect(tx.CheckpointUsers(id)), nil
}

// missing says why a node isn't in memory.
func (tx *Tx) missing(id ids.Node) error {
	k, ok := keyOf(id, "nd_")
	if !ok {
		return noNode(id)
	}
	for _, g := range []*group{tx.s.open, tx.s.sealed} {
		if g != nil {
			if tree, ok := g.moved.nodes[k]; ok {
				return archived{tree}
			}
		}
	}
	tree, err := tx.s.where(k)
	if err != nil {
		return err
	}
	if tree == nil {
		return noNode(id)
	}
	return archived{*tree}
}

// resident refuses a change to a tree that is archived, also in part.
func (tx *Tx) resident(id ids.Tree) error {
	if t, ok := find[Tree](tx.reader, trees, byID, key(id)); ok && t.Archive != InMemory {
		k, _ := keyOf(id, "tr_")
		return archived{k}
	}
	return nil
}

// payloadHeld: an archived node has it.
func (tx *Tx) payloadHeld(digest string) bool {
	b, err := hex.DecodeString(digest)
	if err != nil {
		return false
	}
	for _, g := range []*group{tx.s.open, tx.s.sealed} {
		if g != nil && g.moved.holds[string(b)] {
			return true
		}
	}
	held := false
	err = tx.s.log.within(append(rowKey(payloadHoldRows, ""), b...), func(_, _ []byte) error { held = true; return errEnough })
	return held || err != nil && err != errEnough // what can't be read is kept
}

var errEnough = errors.New("enough")

// ---- reading from the disk --------------------------------------------------

// where is the archived tree that a node is of; nil: none.
func (s *Store) where(node nodeKey) (*nodeKey, error) {
	b, err := s.log.get(whereKey(node))
	switch {
	case errors.Is(err, pebble.ErrNotFound):
		return nil, nil
	case err != nil:
		return nil, err
	case len(b) != 16:
		return nil, damagedRow(whereRows, ids.Text("nd_", node), errors.New("it names no tree"))
	}
	k := nodeKey(b)
	return &k, nil
}

// archiveRows are up to max rows of a tree, by node id, from one on; 0: all.
func (s *Store) archiveRows(tree, from nodeKey, max int) (rows []nodeRow, err error) {
	prefix := append(rowKey(archiveRows, ""), tree[:]...)
	err = s.log.withinFrom(prefix, append(bytes.Clone(prefix), from[:]...), func(k, value []byte) error {
		if len(k) != 33 {
			return damagedRow(archiveRows, fmt.Sprintf("%x", k), errors.New("it has no id"))
		}
		row := nodeRow{nodeKey(k[17:]), string(value)}
		if _, err := row.refs(); err != nil {
			return damagedRow(archiveRows, ids.Text("nd_", row.id), err)
		}
		if rows = append(rows, row); len(rows) == max {
			return errEnough
		}
		return nil
	})
	if err == errEnough {
		err = nil
	}
	return rows, err
}

// elsewhere reads a node that this View doesn't have in memory: its tree is archived, or was then.
func (v *View) elsewhere(id ids.Node) (*Node, error) {
	n, err := v.s.archivedNode(id)
	if err == nil && n.CreateIndex > v.index {
		return nil, noNode(id)
	}
	return n, err
}

func (s *Store) archivedNode(id ids.Node) (*Node, error) {
	k, ok := keyOf(id, "nd_")
	if !ok {
		return nil, noNode(id)
	}
	for {
		tree, err := s.where(k)
		if err != nil {
			return nil, err
		}
		if tree == nil { // it was recalled since, or there is none
			now := s.View()
			if n, err := now.reader.Node(id); err == nil {
				return n, nil
			}
			// Or it is on its way: what the disk has is seen by Views a little later.
			s.archiving.Lock()
			tree, err = s.where(k)
			now = s.View()
			s.archiving.Unlock()
			if err != nil {
				return nil, err
			}
			if tree == nil {
				return now.reader.Node(id)
			}
		}
		b, err := s.log.get(archiveKey(*tree, k))
		if errors.Is(err, pebble.ErrNotFound) { // it was recalled since
			continue
		}
		if err != nil {
			return nil, err
		}
		row := nodeRow{k, string(b)}
		if _, err := row.refs(); err != nil {
			return nil, damagedRow(archiveRows, string(id), err)
		}
		return row.node(), nil
	}
}

// shelf is the archived tree that a View read last, and the first read that failed.
type shelf struct {
	mu   sync.Mutex
	tree ids.Tree
	r    reader
	err  error
}

// Load reads a tree from the disk if it is archived, which else the first call does that wants
// its nodes. Those can't say that it failed: they give what is in memory, and Err says so.
func (v *View) Load(id ids.Tree) error {
	_, err := v.load(id)
	return err
}

// Err is why an iterator of this View gave less than there is: the first read of an archived tree that failed.
// Whoever draws a conclusion from what wasn't there asks for it afterwards.
func (v *View) Err() error {
	v.shelf.mu.Lock()
	defer v.shelf.mu.Unlock()
	return v.shelf.err
}

// less notes why an iterator gives less than there is.
func (v *View) less(err error) {
	v.shelf.mu.Lock()
	defer v.shelf.mu.Unlock()
	if v.shelf.err == nil && !fault.Is(err, fault.NotFound) {
		v.shelf.err = err
	}
}

// of is the reader that has a tree's nodes.
func (v *View) of(id ids.Tree) reader {
	r, err := v.load(id)
	if err != nil {
		v.less(err)
		return v.reader
	}
	return r
}

// load gives, for an archived tree, tables that are made for this View from what is in memory and
// what is on the disk.
func (v *View) load(id ids.Tree) (reader, error) {
	t, err := v.Tree(id)
	if err != nil || t.Archive == InMemory {
		return v.reader, nil
	}
	v.shelf.mu.Lock()
	defer v.shelf.mu.Unlock()
	if v.shelf.tree == id && v.shelf.r.txn != nil {
		return v.shelf.r, nil
	}
	k, _ := keyOf(id, "tr_")
	rows, ok, err := v.s.gather(id, k)
	if err == nil && !ok { // it moved meanwhile
		v.s.archiving.Lock()
		rows, ok, err = v.s.gather(id, k)
		v.s.archiving.Unlock()
		if err == nil && !ok {
			err = rowsGone(id)
		}
	}
	if err != nil {
		return reader{}, err
	}
	db, err := memdb.NewMemDB(schema())
	if err != nil {
		return reader{}, err
	}
	txn := db.Txn(true)
	var all nodeColumns
	for _, id := range slices.SortedFunc(maps.Keys(rows), func(a, b nodeKey) int { return bytes.Compare(a[:], b[:]) }) {
		row := nodeRow{id, rows[id]}
		all.add(row, row.mustRefs())
	}
	if err := all.fill(txn); err != nil {
		txn.Abort()
		return reader{}, err
	}
	txn.Commit()
	v.shelf.tree, v.shelf.r = id, reader{db.Txn(false), v.index, v.totals, nil}
	return v.shelf.r, nil
}

func rowsGone(id ids.Tree) error {
	return fault.New(fault.DataLoss, "log_damaged", "rows of nodes of the archived tree %s are gone", id)
}

// gather has the nodes of a tree that may be archived, as they are at one instant; not ok: it
// moved while they were read. Nodes change only while all are in memory, and the tree's ModifyIndex tells
// whether that has been.
func (s *Store) gather(id ids.Tree, k nodeKey) (rows map[nodeKey]string, ok bool, err error) {
	rows = map[nodeKey]string{}
	collect := func(v *View) {
		for row := range v.rowsIn(nodesByTree, k[:]) {
			rows[row.id] = row.b
		}
	}
	before := s.View()
	was, err := before.Tree(id)
	if err != nil { // pruned meanwhile
		return rows, true, nil
	}
	collect(before)
	if was.Archive == InMemory {
		return rows, true, nil
	}
	onDisk, err := s.archiveRows(k, nodeKey{}, 0)
	if err != nil {
		return nil, false, err
	}
	for _, row := range onDisk {
		rows[row.id] = row.b
	}
	after := s.View()
	collect(after)
	now, err := after.Tree(id)
	return rows, err == nil && now.ModifyIndex == was.ModifyIndex && len(rows) == after.NodeCount(id), nil
}

// home is the reader that has a node and those around it.
func (v *View) home(id ids.Node) reader {
	k, ok := keyOf(id, "nd_")
	if !ok {
		return v.reader
	}
	if row, ok := v.row(k); ok {
		return v.of(ids.Tree(ids.Text("tr_", row.mustRefs().tree)))
	}
	n, err := v.elsewhere(id)
	if err != nil {
		v.less(err)
		return v.reader
	}
	return v.of(n.Tree)
}

// ArchivedUses are the checkpoints that nodes of archived trees have, each with such a tree. They are known without a
// look at the disk.
func (r reader) ArchivedUses() iter.Seq2[ids.Checkpoint, ids.Tree] {
	return func(yield func(ids.Checkpoint, ids.Tree) bool) {
		for k := range archivedUses.scan(r, nil) {
			if !yield(ids.Checkpoint(ids.Text("ck_", nodeKey(k))), ids.Tree(ids.Text("tr_", nodeKey(k[16:])))) {
				return
			}
		}
	}
}

// archivedUsers are the archived trees that have nodes with a checkpoint.
func (r reader) archivedUsers(id ids.Checkpoint) (of []ids.Tree) {
	for k := range archivedUses.scan(r, under(id, "ck_")) {
		of = append(of, ids.Tree(ids.Text("tr_", nodeKey(k[16:]))))
	}
	return slices.Clip(of)
}
