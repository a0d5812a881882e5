package tree

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"

	"github.com/cockroachdb/pebble/v2"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// Check compares memory with the log row by row and follows every reference;
// it names what is wrong, damage among it, and nothing if all is well. That memory differs
// from the log also shows a caller who wrote to a record that was given out.
// No change is made meanwhile, so it isn't for a busy daemon.
func (s *Store) Check(ctx context.Context) (wrong []string, err error) {
	unlock, err := s.settled()
	if err != nil {
		return nil, err
	}
	defer unlock()
	c := &checker{reader: reader{s.head.Txn(false), s.next, s.totals, nil}, log: s.log}
	for _, step := range []func() error{
		func() error {
			return same(c, treeRows, layoutTree, c.Trees(), func(t *Tree) string { return string(t.ID) })
		},
		func() error { return same(c, runRows, layoutRun, c.Runs(), func(r *Run) string { return r.Name }) },
		c.nodes, c.indexes, c.archive,
		func() error {
			return same(c, checkpointRows, layoutCheckpoint, c.Checkpoints(), func(k *Checkpoint) string { return string(k.ID) })
		},
		func() error {
			return same(c, processRows, layoutProcess, c.Processes(), func(p *ProcessState) string { return string(p.ID) })
		},
		func() error {
			return same(c, sandboxRows, layoutSandbox, c.Sandboxes(), func(x *Sandbox) string { return string(x.ID) })
		},
		func() error {
			return same(c, imageRows, layoutImage, c.Images(), func(i *Image) string { return string(i.Digest) })
		},
		func() error {
			return same(c, setupRows, layoutSetup, scan[Setup](c.reader, setups, byID, nil), func(x *Setup) string { return x.Digest })
		},
		c.details, c.payloads, c.replies,
	} {
		if err := step(); fault.Is(err, fault.DataLoss) { // the rest may be well
			c.say("%s", fault.As(err).Message)
		} else if err != nil {
			return c.wrong, err
		}
		if err := ctx.Err(); err != nil {
			return c.wrong, waitFault(err)
		}
	}
	c.references()
	c.totals()
	return c.wrong, nil
}

// settled returns when head is durable, with mu held.
func (s *Store) settled() (unlock func(), err error) {
	for {
		s.mu.Lock()
		switch g := s.latest; {
		case s.closed:
			s.mu.Unlock()
			return nil, errClosed()
		case s.failed != nil:
			s.mu.Unlock()
			return nil, s.failed
		case g == nil:
			return s.mu.Unlock, nil
		default:
			select {
			case <-g.done:
				return s.mu.Unlock, nil
			default:
			}
			s.mu.Unlock()
			<-g.done
		}
	}
}

type checker struct {
	reader
	archived map[nodeKey]nodeKey // archived nodes, to their trees
	log      *disk
	wrong    []string
}

func (c *checker) say(format string, args ...any) {
	c.wrong = append(c.wrong, fmt.Sprintf(format, args...))
}

// nodes are bytes in memory, too.
func (c *checker) nodes() error {
	want := map[string]string{}
	for row := range c.allNodes() {
		want[ids.Text("nd_", row.id)] = row.b
	}
	return c.compare(nodeRows, want)
}

// indexes of nodes have what they should, and no more.
func (c *checker) indexes() error {
	have := make([]int, len(nodeIndexes))
	for row := range c.allNodes() {
		ks := row.mustRefs().keys()
		for i, t := range nodeIndexes {
			for k := range ks.of(i) {
				have[i]++
				if _, ok := t.get(c.reader, k); !ok {
					c.say("node %s isn't in the index %s", ids.Text("nd_", row.id), t.name)
				}
			}
		}
	}
	for i, t := range nodeIndexes {
		n := 0
		for range t.scan(c.reader, nil) {
			n++
		}
		if n != have[i] {
			c.say("the index %s has %d nodes, and should have %d", t.name, n, have[i])
		}
	}
	return nil
}

// archive: an archived node is there once, found by its id, and what it points to is held.
func (c *checker) archive() error {
	c.archived = map[nodeKey]nodeKey{}
	of, holds, payloads := map[nodeKey]int64{}, map[string]bool{}, map[string]bool{}
	if err := c.log.each(archiveRows, func(k, value []byte) error {
		if len(k) != 32 {
			c.say("an archived node has the key %x, which is no tree and node", k)
			return nil
		}
		row := nodeRow{nodeKey(k[16:]), string(value)}
		id, tree := ids.Text("nd_", row.id), nodeKey(k)
		f, err := row.refs()
		if err != nil {
			c.say("archived node %s can't be read: %v", id, err)
			return nil
		}
		c.archived[row.id] = tree
		of[tree]++
		if _, here := c.row(row.id); here || f.tree != tree {
			c.say("archived node %s is in memory, too, or of another tree", id)
		}
		if b, err := c.log.get(whereKey(row.id)); err != nil || !bytes.Equal(b, tree[:]) {
			c.say("archived node %s isn't found by its id", id)
		}
		if f.checkpoint != (nodeKey{}) {
			holds[string(f.checkpoint[:])+string(tree[:])] = true
			if _, err := c.Checkpoint(ids.Checkpoint(ids.Text("ck_", f.checkpoint))); err != nil {
				c.say("archived node %s: %v", id, err)
			}
		}
		if f.hasPayload {
			payloads[string(f.payload[:])+string(tree[:])] = true
			if _, err := c.log.get(rowKey(payloadRows, hex.EncodeToString(f.payload[:]))); err != nil {
				c.say("archived node %s: its payload: %v", id, err)
			}
		}
		return nil
	}); err != nil {
		return err
	}
	for t := range c.Trees() {
		k, _ := keyOf(t.ID, "tr_")
		if of[k] != t.ArchivedNodes || t.Archive == InMemory && of[k] > 0 {
			c.say("tree %s has %d archived nodes, and there are %d", t.ID, t.ArchivedNodes, of[k])
		}
		delete(of, k)
	}
	for k, n := range of {
		c.say("%d archived nodes are of tree %s, which isn't there", n, ids.Text("tr_", k))
	}
	where := 0
	if err := c.log.each(whereRows, func(_, _ []byte) error { where++; return nil }); err != nil {
		return err
	}
	if where != len(c.archived) {
		c.say("%d nodes are archived, and %d can be found", len(c.archived), where)
	}
	held := 0
	for k := range archivedUses.scan(c.reader, nil) {
		held++
		if _, err := c.log.get(append(rowKey(checkpointHoldRows, ""), k...)); err != nil {
			c.say("a checkpoint is held in memory and not in the log: %x, %v", k, err)
		}
	}
	if err := c.log.each(checkpointHoldRows, func(k, _ []byte) error {
		if held--; !holds[string(k)] && !c.moving(k[16:]) {
			c.say("a checkpoint is held for no archived node: %x", k)
		}
		delete(holds, string(k))
		return nil
	}); err != nil {
		return err
	}
	err := c.log.each(payloadHoldRows, func(k, _ []byte) error {
		if len(k) != 48 || !payloads[string(k)] && !c.moving(k[32:]) {
			c.say("a payload is held for no archived node: %x", k)
		}
		delete(payloads, string(k))
		return nil
	})
	if held != 0 || len(holds) > 0 || len(payloads) > 0 {
		c.say("%d checkpoints and %d payloads of archived nodes aren't held (%d)", len(holds), len(payloads), held)
	}
	return err
}

// moving: a tree on its way back holds what it held.
func (c *checker) moving(tree []byte) bool {
	t, err := c.Tree(ids.Tree(ids.Text("tr_", nodeKey(tree))))
	return err == nil && t.Archive == Moving
}

// isThere: in memory or archived.
func (c *checker) isThere(id ids.Node) bool {
	k, _ := keyOf(id, "nd_")
	_, here := c.row(k)
	_, there := c.archived[k]
	return here || there
}

// same compares the rows of one kind.
func same[T any](c *checker, r rows, layout func(*coder, *T), memory iter.Seq[*T], id func(*T) string) error {
	want := map[string]string{}
	for v := range memory {
		want[id(v)] = string(encode(v, layout))
	}
	return c.compare(r, want)
}

// compare holds the rows of one kind against what memory has.
func (c *checker) compare(r rows, want map[string]string) error {
	err := c.log.each(r, func(k, value []byte) error {
		b, ok := want[string(k)]
		if !ok {
			c.say("row %c %s is in the log and not in memory", r, k)
		} else if b != string(value) {
			c.say("row %c %s differs between the log and memory", r, k)
		}
		delete(want, string(k))
		return nil
	})
	for k := range want {
		c.say("row %c %s is in memory and not in the log", r, k)
	}
	return err
}

// details: each node has one, readable, and none is left over.
func (c *checker) details() error {
	seen := 0
	err := c.log.each(detailRows, func(id, value []byte) error {
		seen++
		if !c.isThere(ids.Node(id)) {
			c.say("what the turn of %s did is kept, and the node isn't there", id)
		}
		if err := decodeInto(new(Node), value, layoutDetail); err != nil {
			c.say("what the turn of %s did can't be read: %v", id, err)
		}
		return nil
	})
	if n := c.NodeCount(""); err == nil && seen != n {
		c.say("there are %d nodes, and %d have what their turn did", n, seen)
	}
	return err
}

func (c *checker) payloads() error {
	err := c.log.each(payloadRows, func(digest, value []byte) error {
		if sum := sha256.Sum256(value); hex.EncodeToString(sum[:]) != string(digest) {
			c.say("payload %s has other bytes than were put", digest)
		}
		b, err := hex.DecodeString(string(digest))
		if err != nil {
			c.say("payload %q has no digest", digest)
			return nil
		}
		held := false
		if err := c.log.within(append(rowKey(payloadHoldRows, ""), b...), func(_, _ []byte) error { held = true; return nil }); err != nil {
			return err
		}
		if !held && !c.payloadUsed(string(digest)) {
			c.say("payload %s has no node", digest)
		}
		return nil
	})
	for n := range c.nodesIn(nodesByPayload, nil) {
		if _, err := c.log.get(rowKey(payloadRows, n.PayloadDigest)); errors.Is(err, pebble.ErrNotFound) {
			c.say("node %s names payload %s, which isn't there", n.ID, n.PayloadDigest)
		} else if err != nil {
			return err
		}
	}
	return err
}

func (c *checker) replies() error {
	seen := 0
	err := c.log.each(replyRows, func(k, _ []byte) error {
		seen++
		if _, ok := find[Reply](c.reader, replies, byID, key(string(k))); !ok {
			c.say("reply %q is in the log and not in memory", k)
		}
		return nil
	})
	if n := c.count(replies, ""); err == nil && n != seen {
		c.say("there are %d replies in the log and %d in memory", seen, n)
	}
	return err
}

// references: everything that is pointed to is there, and everything that
// needs a user has one.
func (c *checker) references() {
	for t := range c.Trees() {
		if n, err := c.Node(t.Root); (err != nil || n.Tree != t.ID || n.Parent != "") && (t.Archive == InMemory || !c.isThere(t.Root)) {
			c.say("tree %s: its root %s isn't there or isn't a root of it", t.ID, t.Root)
		}
	}
	for row := range c.allNodes() {
		n := row.node()
		if _, err := c.Tree(n.Tree); err != nil {
			c.say("node %s: %v", n.ID, err)
		}
		if n.Parent != "" {
			if p, err := c.Node(n.Parent); err != nil {
				if !c.isThere(n.Parent) {
					c.say("node %s: its parent: %v", n.ID, err)
				}
			} else if p.Depth+1 != n.Depth || p.Tree != n.Tree {
				c.say("node %s at depth %d of %s hangs on %s at depth %d of %s", n.ID, n.Depth, n.Tree, p.ID, p.Depth, p.Tree)
			}
		}
		if n.Checkpoint != "" {
			if _, err := c.Checkpoint(n.Checkpoint); err != nil {
				c.say("node %s: %v", n.ID, err)
			}
		}
	}
	for k := range c.Checkpoints() {
		if !c.checkpointUsed(k.ID) && len(c.archivedUsers(k.ID)) == 0 {
			c.say("checkpoint %s has no node", k.ID)
		}
		if k.State != "" {
			if p, err := c.Process(k.State); err != nil {
				c.say("checkpoint %s: %v", k.ID, err)
			} else if p.Condemned {
				c.say("process state %s is condemned, and checkpoint %s has it", p.ID, k.ID)
			}
		}
	}
	for p := range c.Processes() {
		if _, used := find[Checkpoint](c.reader, checkpoints, byState, key(p.ID)); !used && !p.Condemned {
			c.say("process state %s has no checkpoint", p.ID)
		}
	}
	for s := range c.Sandboxes() {
		if s.Head != "" {
			if _, err := c.Node(s.Head); err != nil {
				c.say("sandbox %s: %v", s.ID, err)
			}
		}
	}
	for d := range scan[condemned](c.reader, doomed, byID, nil) {
		if k, used := find[Checkpoint](c.reader, checkpoints, bySnapshot, key(d.Snapshot)); used {
			c.say("snapshot %s is condemned, and checkpoint %s has it", d.Snapshot, k.ID)
		}
	}
}

func (c *checker) totals() {
	of := map[string]int{}
	for t := range c.Trees() {
		of[trees]++
		of[nodes] += int(t.ArchivedNodes)
		if t.ArchivedNodes > 0 {
			of[counter(nodes, string(t.ID))] += int(t.ArchivedNodes)
		}
		for range c.NodesOf(t.ID) {
			of[nodes]++
			of[counter(nodes, string(t.ID))]++
		}
	}
	for k := range c.Checkpoints() {
		of[checkpoints]++
		of[counter(checkpoints, string(k.Tree))]++
	}
	for s := range c.Sandboxes() {
		of[sandboxes]++
		of[counter(sandboxes, string(s.Tree))]++
	}
	for range c.Images() {
		of[images]++
	}
	for r := range scan[removal](c.reader, removals, byID, nil) {
		of[removals] += len(r.Nodes)
	}
	of[replies] = c.count(replies, "") // compared in replies
	for x := range scan[count](c.reader, counts, byID, nil) {
		if x.n != of[x.of] {
			c.say("%s are counted as %d, and there are %d", x.of, x.n, of[x.of])
		}
		delete(of, x.of)
	}
	for _, table := range counted {
		if n := c.count(table, ""); n != of[table] {
			c.say("%s are counted as %d, and there are %d", table, n, of[table])
		}
		delete(of, table)
	}
	for name, n := range of {
		if n != 0 {
			c.say("%s aren't counted, and there are %d", name, n)
		}
	}
}
