package tree

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sort"
	"sync"

	"github.com/cockroachdb/pebble/v2"
	"github.com/hashicorp/go-memdb"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// load reads everything that is kept in memory.
func load(log *disk) (*instant, error) {
	db, err := memdb.NewMemDB(schema())
	if err != nil {
		return nil, fault.New(fault.Internal, "schema", "making the tables: %w", err)
	}
	l := &loader{log: log, tx: Tx{reader: reader{txn: db.Txn(true)}}, counts: map[string]int{}}
	defer l.tx.txn.Abort()
	answered := replyRows
	if sabotage.On("keys") {
		answered = '~' // there are none
	}
	for _, step := range []func() error{
		rowsOf(l, treeRows, trees, layoutTree, func(t *Tree) { l.add(trees, ""); l.archived(t) }),
		rowsOf(l, runRows, runs, layoutRun, func(*Run) {}),
		l.nodes, l.holds,
		rowsOf(l, checkpointRows, checkpoints, layoutCheckpoint, func(k *Checkpoint) { l.add(checkpoints, k.Tree) }),
		rowsOf(l, processRows, processes, layoutProcess, func(*ProcessState) {}),
		rowsOf(l, sandboxRows, sandboxes, layoutSandbox, func(s *Sandbox) { l.add(sandboxes, s.Tree) }),
		rowsOf(l, imageRows, images, layoutImage, func(*Image) { l.add(images, "") }),
		rowsOf(l, setupRows, setups, layoutSetup, func(*Setup) {}),
		rowsOf(l, answered, replies, layoutReply, func(*Reply) { l.add(replies, "") }),
		rowsOf(l, condemnedRows, doomed, layoutCondemned, func(*condemned) {}),
		rowsOf(l, removalRows, removals, layoutRemoval, func(r *removal) { l.counts[removals] += len(r.Nodes) }),
	} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	var all totals
	for i, table := range counted {
		all[i] = l.counts[table]
		delete(l.counts, table)
	}
	for of, n := range l.counts {
		l.tx.insert(counts, &count{of: of, n: n})
	}
	gone, err := log.number(horizonKey)
	if err != nil {
		return nil, err
	}
	l.tx.insert(marks, &mark{horizon, gone})
	last, err := log.number(indexKey)
	if err != nil {
		return nil, err
	}
	l.tx.txn.Commit()
	return &instant{db.Snapshot(), last, all}, nil
}

type loader struct {
	log    *disk
	tx     Tx
	counts map[string]int
}

func (l *loader) add(table string, tree ids.Tree) {
	l.counts[table]++
	if tree != "" {
		l.counts[counter(table, string(tree))]++
	}
}

// nodes loads what there is most of: one goroutine reads the log, one for each processor
// takes rows apart, and tables are made of sorted keys, not key by key.
func (l *loader) nodes() error {
	type part struct {
		nodeColumns
		at  int
		of  map[nodeKey]int // nodes of each tree
		err error
	}
	todo, done := make(chan *part, 4), make(chan *part, 4)
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for p := range todo {
				p.of = map[nodeKey]int{}
				for i, b := range p.rows {
					f, err := nodeRow{nodeKey(p.ids[16*i:]), b}.refs()
					if err != nil {
						p.err = damagedRow(nodeRows, ids.Text("nd_", nodeKey(p.ids[16*i:])), err)
						break
					}
					p.of[f.tree]++
					p.addKeys(f)
				}
				done <- p
			}
		})
	}
	var parts []*part
	gathered := make(chan struct{})
	go func() {
		defer close(gathered)
		for p := range done {
			parts = append(parts, p)
		}
	}()
	const partSize = 4096
	next := &part{}
	read := l.log.each(nodeRows, func(id, value []byte) error {
		k, ok := ids.Binary(string(id), "nd_")
		if !ok {
			return damagedRow(nodeRows, string(id), errors.New("it has no id"))
		}
		next.ids, next.rows = append(next.ids, k[:]...), append(next.rows, string(value))
		if len(next.rows) == partSize {
			todo <- next
			next = &part{at: next.at + 1, nodeColumns: nodeColumns{ids: make([]byte, 0, 16*partSize), rows: make([]string, 0, partSize)}}
		}
		return nil
	})
	todo <- next
	close(todo)
	workers.Wait()
	close(done)
	<-gathered
	if read != nil {
		return l.fault(read)
	}

	slices.SortFunc(parts, func(a, b *part) int { return a.at - b.at })
	var all nodeColumns
	for _, p := range parts {
		if p.err != nil {
			return p.err
		}
		all.ids, all.rows = append(all.ids, p.ids...), append(all.rows, p.rows...)
		for j, ks := range p.keys {
			all.keys[j] = append(all.keys[j], ks...)
		}
		for tree, n := range p.of {
			l.counts[counter(nodes, ids.Text("tr_", tree))] += n
		}
		*p = part{}
	}
	l.counts[nodes] += len(all.rows)
	return all.fill(l.tx.txn)
}

// nodeColumns are nodes on their way into empty tables, by id.
type nodeColumns struct {
	ids  []byte // back to back
	rows []string
	keys [len(refsKeys{})][]byte // of each of nodeIndexes, in no order
}

func (c *nodeColumns) add(row nodeRow, f *refs) {
	c.ids, c.rows = append(c.ids, row.id[:]...), append(c.rows, row.b)
	c.addKeys(f)
}

func (c *nodeColumns) addKeys(f *refs) {
	for j, k := range f.keys() {
		c.keys[j] = append(c.keys[j], k...)
	}
}

func (c *nodeColumns) fill(txn *memdb.Txn) error {
	var sorting sync.WaitGroup
	for j, t := range nodeIndexes {
		sorting.Go(func() { sort.Sort(&flat{c.keys[j], t.size, make([]byte, t.size)}) })
	}
	sorting.Wait()
	// NodesWhere finds nodes by their CreateIndex.
	for i, t, ks := 1, nodesByTree, c.keys[0]; i < len(ks)/t.size; i++ {
		if one, two := ks[(i-1)*t.size:], ks[i*t.size:]; bytes.Equal(one[:24], two[:24]) {
			return damagedRow(nodeRows, ids.Text("nd_", nodeKey(two[24:])), fmt.Errorf("it was made by the same write as %s", ids.Text("nd_", nodeKey(one[24:]))))
		}
	}
	if err := nodeTable.fill(txn, c.ids, c.rows); err != nil {
		return err
	}
	for j, t := range nodeIndexes {
		if err := t.fill(txn, c.keys[j], make([]struct{}, len(c.keys[j])/t.size)); err != nil {
			return err
		}
	}
	return nil
}

// archived counts the nodes of a tree that stay on the disk.
func (l *loader) archived(t *Tree) {
	if t.ArchivedNodes > 0 {
		l.counts[nodes] += int(t.ArchivedNodes)
		l.counts[counter(nodes, string(t.ID))] += int(t.ArchivedNodes)
	}
}

// holds loads which archived trees have nodes with which checkpoint.
func (l *loader) holds() error {
	var keys []byte
	err := l.log.each(checkpointHoldRows, func(k, _ []byte) error {
		if len(k) != archivedUses.size {
			return damagedRow(checkpointHoldRows, fmt.Sprintf("%x", k), errors.New("it names no checkpoint and tree"))
		}
		keys = append(keys, k...)
		return nil
	})
	if err != nil {
		return l.fault(err)
	}
	return archivedUses.fill(l.tx.txn, keys, make([]struct{}, len(keys)/archivedUses.size))
}

// flat sorts keys of one size that lie back to back.
type flat struct {
	keys []byte
	size int
	hold []byte
}

func (f *flat) at(i int) []byte    { return f.keys[i*f.size : (i+1)*f.size] }
func (f *flat) Len() int           { return len(f.keys) / f.size }
func (f *flat) Less(i, j int) bool { return bytes.Compare(f.at(i), f.at(j)) < 0 }
func (f *flat) Swap(i, j int) {
	copy(f.hold, f.at(i))
	copy(f.at(i), f.at(j))
	copy(f.at(j), f.hold)
}

func damagedRow(r rows, id string, err error) error {
	return fault.New(fault.DataLoss, "log_damaged", "row %c%q: %w", r, id, err)
}

// fault is what reading rows came to.
func (l *loader) fault(err error) error {
	if err != nil && fault.As(err).Kind != fault.DataLoss {
		return openFault(l.log.dir, err)
	}
	return err
}

func rowsOf[T any](l *loader, r rows, table string, layout func(*coder, *T), seen func(*T)) func() error {
	return func() error {
		return l.fault(l.log.each(r, func(id, value []byte) error {
			v, err := decode(value, layout)
			if err != nil {
				return damagedRow(r, string(id), err)
			}
			seen(v)
			return l.tx.txn.Insert(table, v)
		}))
	}
}

// number reads a varint; 0 if it isn't there.
func (d *disk) number(key []byte) (uint64, error) {
	b, err := d.get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, openFault(d.dir, err)
	}
	v, n := binary.Uvarint(b)
	if n <= 0 || n != len(b) {
		return 0, fault.New(fault.DataLoss, "log_damaged", "row %q is no number", key)
	}
	return v, nil
}
