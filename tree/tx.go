package tree

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"iter"
	"slices"
	"time"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// Tx is one change being made. It reads what it has written. It is used by one
// goroutine, inside the function that got it.
type Tx struct {
	reader // index is that of the last write
	s      *Store
	group  uint64 // the number of the one that it is of
	now    time.Time
	ops    []op
	events []Event
	rows   []rowChange
	// removes: it deletes a sandbox, an image, nodes or condemned snapshots, or withholds a node.
	removes bool

	// What may have lost its last user, looked at by settle.
	loose         []ids.Checkpoint
	looseSnaps    []ids.Snapshot
	looseStates   []ids.Process
	loosePayloads []string

	pruned []*Pruned      // told by settle what went with their nodes
	last   []func() error // see Finally
	moved  moved
}

// op is one write to the log; value nil: delete.
type op struct{ key, value []byte }

// Now is the store's clock, read once for the whole change.
func (tx *Tx) Now() time.Time { return tx.now }

// Finally has f run at the end of this change, when what has no user any more is dropped
// and a Pruned is complete. f may put what takes no part in that, such as a reply; its error
// undoes the change.
func (tx *Tx) Finally(f func() error) { tx.last = append(tx.last, f) }

func (tx *Tx) step() uint64 {
	tx.index++
	return tx.index
}

func (tx *Tx) set(key, value []byte) { tx.ops = append(tx.ops, op{key, value}) }

// put writes a record to the log and to memory. What goes to memory is decoded
// from what goes to the log: it is what a restart would find, and shares
// nothing with the caller's.
func put[T any](tx *Tx, table string, r rows, id string, v *T, layout func(*coder, *T)) *T {
	b := encode(v, layout)
	kept, err := decode(b, layout)
	if err != nil {
		panic(err) // encode and decode disagree
	}
	tx.set(rowKey(r, id), b)
	tx.insert(table, kept)
	return kept
}

func remove[T any](tx *Tx, table string, r rows, id string, v *T) {
	tx.set(rowKey(r, id), nil)
	tx.erase(table, v)
}

// rowChange is what undo takes back; nil: there was, or is, no such row. Without a table
// it is a write to what the group made, after.
type rowChange struct {
	table         string
	before, after any
	at            int    // in a page
	gone          []byte // the key that was taken out of it; its value was before
}

func (tx *Tx) insert(table string, v any) {
	// The id index takes its key from the row itself.
	before, err := tx.txn.First(table, byID, rowID(v))
	if err != nil {
		panic(err) // a table or index that isn't in the schema
	}
	tx.replace(table, before, v)
}

func (tx *Tx) erase(table string, v any) { tx.replace(table, v, nil) }

// replace has after in the place of before, which has the same id; nil: nothing.
func (tx *Tx) replace(table string, before, after any) {
	var err error
	if after != nil {
		err = tx.txn.Insert(table, after)
	} else {
		err = tx.txn.Delete(table, before)
	}
	if err != nil {
		panic(err) // the caller has just read it
	}
	tx.rows = append(tx.rows, rowChange{table: table, before: before, after: after})
}

// run makes the change that f describes.
func (tx *Tx) run(f func(tx *Tx) error) error {
	if err := f(tx); err != nil {
		return err
	}
	tx.settle()
	for _, f := range tx.last {
		if err := f(); err != nil {
			return err
		}
	}
	return nil
}

// undo takes the rows back, last first.
func (tx *Tx) undo() {
	*tx.recent = recent{}
	for _, c := range slices.Backward(tx.rows) {
		if c.table == "" {
			c.after.(interface{ takeBack(rowChange) }).takeBack(c)
			continue
		}
		var err error
		if c.before != nil {
			err = tx.txn.Insert(c.table, c.before)
		} else {
			err = tx.txn.Delete(c.table, c.after)
		}
		if err != nil {
			panic(err) // it was done just before
		}
	}
}

// add counts rows of a table, in all and of a tree.
func (tx *Tx) add(table string, tree ids.Tree, n int) {
	tx.totals[slices.Index(counted[:], table)] += n
	if tree == "" {
		return
	}
	of := counter(table, string(tree))
	old, _ := find[count](tx.reader, counts, byID, key(of))
	if old != nil {
		n += old.n
	}
	switch {
	case n == 0 && old != nil:
		tx.erase(counts, old)
	case old != nil && old.made == tx.group:
		tx.rows = append(tx.rows, rowChange{before: old.n, after: old})
		old.n = n
	default:
		tx.replace(counts, row(old), &count{of, n, tx.group})
	}
}

// row is nil for a nil pointer.
func row[T any](p *T) any {
	if p == nil {
		return nil
	}
	return p
}

// newest are the events of this change without those that a later write of it
// made old.
func (tx *Tx) newest() []Event {
	if len(tx.events) < 2 {
		return tx.events
	}
	seen := make(map[string]bool, len(tx.events))
	kept := tx.events
	at := len(kept)
	for _, e := range slices.Backward(tx.events) {
		id := string(e.node)
		if e.Tree != nil {
			id = string(e.tree)
		}
		if !seen[id] {
			seen[id] = true
			at--
			kept[at] = e
		}
	}
	return kept[at:]
}

// PutTree makes or changes a tree.
func (tx *Tx) PutTree(t Tree) error {
	if t.ID == "" || t.Root == "" {
		return invalid("a tree needs an id and a root")
	}
	if _, ok := keyOf(t.ID, "tr_"); !ok {
		return invalid("%q is no id of a tree", t.ID)
	}
	if old, ok := find[Tree](tx.reader, trees, byID, key(t.ID)); ok {
		if !t.Closed && old.Archive != InMemory {
			return tx.resident(t.ID)
		}
		t.Archive, t.ArchivedNodes = old.Archive, old.ArchivedNodes
	} else {
		t.Archive, t.ArchivedNodes = InMemory, 0
	}
	return tx.putTree(t)
}

func (tx *Tx) putTree(t Tree) error {
	t.CreateIndex, t.ModifyIndex = 0, tx.step()
	if old, ok := find[Tree](tx.reader, trees, byID, key(t.ID)); ok {
		if t.Root != old.Root {
			return invalid("the root of tree %s can't change", t.ID)
		}
		t.CreateIndex = old.CreateIndex
	} else {
		t.CreateIndex = t.ModifyIndex
		tx.add(trees, "", 1)
	}
	kept := put(tx, trees, treeRows, string(t.ID), &t, layoutTree)
	tx.events = append(tx.events, Event{Index: kept.ModifyIndex, tree: kept.ID, Tree: kept})
	return nil
}

// AddNode records a new node of an existing tree, with what its turn did. The
// store sets Depth, Ordinal and the indexes; the parent must be there, unless
// the node is the tree's Root. Exists if the id is taken; one that wasn't just made may be that of an archived
// tree's node, see Free.
func (tx *Tx) AddNode(n Node) (*Node, error) {
	if err := named(&n); err != nil {
		return nil, err
	}
	if err := bounded(&n); err != nil {
		return nil, err
	}
	t, err := tx.Tree(n.Tree)
	if err != nil {
		return nil, err
	}
	if t.Archive != InMemory {
		return nil, tx.resident(t.ID)
	}
	if _, ok := tx.refs(n.ID); ok {
		return nil, fault.New(fault.Exists, "node_exists", "there is a node %s already", n.ID)
	}
	n.Depth, n.Ordinal = 0, 0
	if n.Parent == "" {
		if n.ID != t.Root {
			return nil, invalid("node %s has no parent and isn't the root of tree %s", n.ID, t.ID)
		}
	} else {
		p, ok := tx.refs(n.Parent)
		if !ok {
			return nil, tx.missing(n.Parent)
		}
		if !bytes.Equal(p.tree[:], under(t.ID, "tr_")) {
			return nil, invalid("node %s is of tree %s and its parent %s is of another", n.ID, t.ID, n.Parent)
		}
		n.Depth, n.Ordinal = p.depth+1, tx.nextOrdinal(n.Parent)
	}
	if err := tx.refers(&n); err != nil {
		return nil, err
	}
	n.ModifyIndex = tx.step()
	n.CreateIndex = n.ModifyIndex
	if n.PayloadDigest != "" {
		tx.loosePayloads = append(tx.loosePayloads, n.PayloadDigest)
	}
	tx.set(rowKey(detailRows, string(n.ID)), encode(&n, layoutDetail))
	tx.add(nodes, t.ID, 1)
	tx.keepNode(&n, nil)
	return lean(&n), nil
}

func (tx *Tx) nextOrdinal(parent ids.Node) int32 {
	if k, ok := nodesByParent.last(tx.reader, under(parent, "nd_")); ok {
		return int32(binary.BigEndian.Uint32(k[16:])) + 1
	}
	return 0
}

// named refuses ids that aren't as package ids makes them: rows are keyed by what
// they are in binary.
func named(n *Node) error {
	for _, x := range []struct{ id, prefix string }{
		{string(n.ID), "nd_"}, {string(n.Tree), "tr_"}, {string(n.Parent), "nd_"}, {string(n.Checkpoint), "ck_"}, {string(n.Sandbox), "sb_"},
		{string(n.ReplayOf), "nd_"},
	} {
		if _, ok := ids.Binary(x.id, x.prefix); !ok && (x.id != "" || x.prefix == "tr_") {
			return invalid("node %q names %q, which is no id that starts with %s", n.ID, x.id, x.prefix)
		}
	}
	if n.ID == "" {
		return invalid("a node needs an id")
	}
	return nil
}

// refers checks what a node points to.
func (tx *Tx) refers(n *Node) error {
	if n.Checkpoint != "" {
		if _, err := tx.Checkpoint(n.Checkpoint); err != nil {
			return err
		}
	}
	if n.PayloadDigest != "" && !tx.hasPayload(n.PayloadDigest) {
		return invalid("node %s names the payload %s, which was never put", n.ID, n.PayloadDigest)
	}
	return nil
}

// PutNode changes a node that is there. What its turn did (see Node) and its
// place in the tree were written by AddNode and stay.
func (tx *Tx) PutNode(n Node) error {
	old, err := tx.Node(n.ID)
	if err != nil {
		return err
	}
	return tx.rewrite(old, n)
}

func (tx *Tx) rewrite(old *Node, n Node) error {
	if err := tx.resident(old.Tree); err != nil {
		return err
	}
	n.Tree, n.Parent, n.Depth, n.Ordinal = old.Tree, old.Parent, old.Depth, old.Ordinal
	n.CreateIndex, n.EffectCount, n.Observation, n.ReplayOf = old.CreateIndex, old.EffectCount, old.Observation, old.ReplayOf
	if err := named(&n); err != nil {
		return err
	}
	if err := finite(&n); err != nil {
		return err
	}
	if err := tx.refers(&n); err != nil {
		return err
	}
	if old.Checkpoint != n.Checkpoint && old.Checkpoint != "" {
		tx.loose = append(tx.loose, old.Checkpoint)
	}
	if old.PayloadDigest != n.PayloadDigest && old.PayloadDigest != "" {
		tx.loosePayloads = append(tx.loosePayloads, old.PayloadDigest)
	}
	n.ModifyIndex = tx.step()
	tx.keepNode(&n, old)
	return nil
}

// PutCheckpoint makes or changes a checkpoint. One that no node points to when
// the change ends is dropped, and its snapshot condemned.
func (tx *Tx) PutCheckpoint(k Checkpoint) error {
	if k.ID == "" {
		return invalid("a checkpoint needs an id")
	}
	if old, ok := find[Checkpoint](tx.reader, checkpoints, byID, key(k.ID)); ok {
		if old.Snapshot != k.Snapshot && old.Snapshot != "" {
			tx.looseSnaps = append(tx.looseSnaps, old.Snapshot)
		}
		if old.State != k.State && old.State != "" {
			tx.looseStates = append(tx.looseStates, old.State)
		}
		if old.Tree != k.Tree {
			return invalid("checkpoint %s is of tree %s", k.ID, old.Tree)
		}
	} else {
		tx.add(checkpoints, k.Tree, 1)
	}
	if d, ok := find[condemned](tx.reader, doomed, byID, key(k.Snapshot)); ok {
		return fault.New(fault.Precondition, "snapshot_condemned", "snapshot %s is being removed", d.Snapshot)
	}
	if (k.State == "") != (k.Process != Shells && k.Process != Dump) {
		return invalid("checkpoint %s has process state %q, and its kind is %d", k.ID, k.State, k.Process)
	}
	if k.State != "" {
		p, err := tx.Process(k.State)
		switch {
		case err != nil:
			return err
		case p.Condemned:
			return fault.New(fault.Precondition, "process_condemned", "process state %s is being removed", p.ID)
		case p.Kind != k.Process:
			return invalid("checkpoint %s has kind %d, and its process state %s is of kind %d", k.ID, k.Process, p.ID, p.Kind)
		}
	}
	k.ModifyIndex = tx.step()
	put(tx, checkpoints, checkpointRows, string(k.ID), &k, layoutCheckpoint)
	tx.loose = append(tx.loose, k.ID)
	return nil
}

// PutProcess makes or changes a process state. One that no checkpoint has when the
// change ends is condemned.
func (tx *Tx) PutProcess(p ProcessState) error {
	if p.ID == "" || p.Kind != Shells && p.Kind != Dump || p.Digest == "" {
		return invalid("a process state needs an id, a digest and a kind that has content")
	}
	if old, ok := find[ProcessState](tx.reader, processes, byID, key(p.ID)); ok && old.Condemned {
		return fault.New(fault.Precondition, "process_condemned", "process state %s is being removed", p.ID)
	}
	p.Condemned = false
	p.ModifyIndex = tx.step()
	put(tx, processes, processRows, string(p.ID), &p, layoutProcess)
	tx.looseStates = append(tx.looseStates, p.ID)
	return nil
}

// PutSandbox makes or changes a sandbox; the node it stands at must be there.
func (tx *Tx) PutSandbox(sb Sandbox) error {
	if sb.ID == "" {
		return invalid("a sandbox needs an id")
	}
	if sb.Head != "" {
		if _, err := tx.Node(sb.Head); err != nil {
			return err
		}
	}
	if err := tx.resident(sb.Tree); err != nil {
		return err
	}
	old, ok := find[Sandbox](tx.reader, sandboxes, byID, key(sb.ID))
	if !ok || old.Tree != sb.Tree { // every turn moves a sandbox on, and most counts stay
		if ok {
			tx.add(sandboxes, old.Tree, -1)
		}
		tx.add(sandboxes, sb.Tree, 1)
	}
	sb.ModifyIndex = tx.step()
	put(tx, sandboxes, sandboxRows, string(sb.ID), &sb, layoutSandbox)
	return nil
}

// DeleteSandbox forgets a sandbox; one that is gone already is no error.
func (tx *Tx) DeleteSandbox(id ids.Sandbox) error {
	tx.removes = true
	if old, ok := find[Sandbox](tx.reader, sandboxes, byID, key(id)); ok {
		tx.step()
		tx.add(sandboxes, old.Tree, -1)
		remove(tx, sandboxes, sandboxRows, string(id), old)
	}
	return nil
}

// PutImage makes or changes an image. A name that another image had moves to it.
func (tx *Tx) PutImage(i Image) error {
	if i.Digest == "" {
		return invalid("an image needs a digest")
	}
	for _, name := range i.Names {
		other, ok := find[Image](tx.reader, images, byName, key(name))
		if !ok || other.Digest == i.Digest {
			continue
		}
		less := *other
		less.Names = nil
		for _, n := range other.Names {
			if n != name {
				less.Names = append(less.Names, n)
			}
		}
		less.ModifyIndex = tx.step()
		put(tx, images, imageRows, string(less.Digest), &less, layoutImage)
	}
	if old, ok := find[Image](tx.reader, images, byID, key(i.Digest)); !ok {
		tx.add(images, "", 1)
	} else if old.Base != i.Base && old.Base != "" {
		tx.looseSnaps = append(tx.looseSnaps, old.Base)
	}
	i.ModifyIndex = tx.step()
	put(tx, images, imageRows, string(i.Digest), &i, layoutImage)
	return nil
}

// DeleteImage is refused with Precondition "image_in_use" while a tree stands
// on it. Its base is condemned.
func (tx *Tx) DeleteImage(id ids.Image) error {
	tx.removes = true
	i, ok := find[Image](tx.reader, images, byID, key(id))
	if !ok {
		return fault.New(fault.NotFound, "image_not_found", "there is no image %q", id)
	}
	for t := range tx.TreesOf(id) {
		return fault.New(fault.Precondition, "image_in_use", "tree %s stands on image %s", t.ID, id).
			WithHint("close the tree and prune its root first")
	}
	tx.step()
	tx.add(images, "", -1)
	remove(tx, images, imageRows, string(id), i)
	if i.Base != "" {
		tx.looseSnaps = append(tx.looseSnaps, i.Base)
	}
	return nil
}

// PutSetup remembers where a set-up led. It is forgotten with its node.
func (tx *Tx) PutSetup(s Setup) error {
	if s.Digest == "" {
		return invalid("a set-up needs a digest")
	}
	if _, err := tx.Node(s.Node); err != nil {
		return err
	}
	tx.step()
	put(tx, setups, setupRows, s.Digest, &s, layoutSetup)
	return nil
}

// PutPayload keeps bytes and returns their digest. They stay as long as a node
// names the digest, judged from the end of this change on.
func (tx *Tx) PutPayload(b []byte) (digest string, err error) {
	if len(b) == 0 || len(b) > MaxPayload {
		return "", invalid("a payload has 1 to %d bytes, this one %d", MaxPayload, len(b))
	}
	sum := sha256.Sum256(b)
	digest = hex.EncodeToString(sum[:])
	tx.step()
	tx.set(rowKey(payloadRows, digest), append([]byte{}, b...))
	tx.loosePayloads = append(tx.loosePayloads, digest)
	return digest, nil
}

// hasPayload: a node has it, or this change has put it.
func (tx *Tx) hasPayload(digest string) bool {
	if tx.payloadUsed(digest) {
		return true
	}
	for _, d := range tx.loosePayloads {
		if d == digest {
			return true
		}
	}
	return false
}

// settle drops what has no user at the end of the change: checkpoints, snapshots and
// process states (condemned, as what they stand for is the caller's to remove), payloads.
func (tx *Tx) settle() {
	for _, id := range tx.loose {
		k, ok := find[Checkpoint](tx.reader, checkpoints, byID, key(id))
		if !ok {
			continue
		}
		if tx.checkpointUsed(id) || len(tx.archivedUsers(id)) > 0 {
			continue
		}
		tx.step()
		tx.add(checkpoints, k.Tree, -1)
		remove(tx, checkpoints, checkpointRows, string(id), k)
		for _, p := range tx.pruned {
			p.Checkpoints = append(p.Checkpoints, id)
		}
		if k.Snapshot != "" {
			tx.looseSnaps = append(tx.looseSnaps, k.Snapshot)
		}
		if k.State != "" {
			tx.looseStates = append(tx.looseStates, k.State)
		}
	}
	for _, id := range tx.looseStates {
		_, used := find[Checkpoint](tx.reader, checkpoints, byState, key(id))
		p, known := find[ProcessState](tx.reader, processes, byID, key(id))
		if used || !known || p.Condemned {
			continue
		}
		d := *p
		d.Condemned, d.ModifyIndex = true, tx.step()
		put(tx, processes, processRows, string(id), &d, layoutProcess)
	}
	for _, id := range tx.looseSnaps {
		_, used := find[Checkpoint](tx.reader, checkpoints, bySnapshot, key(id))
		_, base := find[Image](tx.reader, images, bySnapshot, key(id))
		_, known := find[condemned](tx.reader, doomed, byID, key(id))
		if used || base || known || sabotage.On("condemned") {
			continue
		}
		d := condemned{Snapshot: string(id), ModifyIndex: tx.step()}
		put(tx, doomed, condemnedRows, string(id), &d, layoutCondemned)
		for _, p := range tx.pruned {
			p.Condemned = append(p.Condemned, id)
		}
	}
	for _, digest := range tx.loosePayloads {
		if !tx.payloadUsed(digest) && !tx.payloadHeld(digest) {
			tx.set(rowKey(payloadRows, digest), nil)
		}
	}
}

// collect reads a scan to its end, so that what it gave can be written.
func collect[T any](rows iter.Seq[*T]) iter.Seq[*T] { return slices.Values(slices.Collect(rows)) }

func invalid(format string, args ...any) error {
	return fault.New(fault.Invalid, "bad_record", format, args...)
}
