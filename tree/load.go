package tree

import (
	"encoding/binary"
	"errors"

	"github.com/cockroachdb/pebble/v2"
	"github.com/hashicorp/go-memdb"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// load reads everything that is kept in memory.
func load(log *disk) (*instant, error) {
	db, err := memdb.NewMemDB(schema())
	if err != nil {
		return nil, fault.New(fault.Internal, "schema", "making the tables: %w", err)
	}
	l := &loader{log: log, tx: Tx{reader: reader{txn: db.Txn(true)}}, counts: map[string]int{}, names: map[string]string{}}
	defer l.tx.txn.Abort()
	for _, step := range []func() error{
		rowsOf(l, treeRows, trees, layoutTree, func(t *Tree) { l.add(trees, "") }),
		rowsOf(l, nodeRows, nodes, layoutNode, func(n *Node) { l.share(n); l.add(nodes, n.Tree) }),
		rowsOf(l, checkpointRows, checkpoints, layoutCheckpoint, func(k *Checkpoint) { l.add(checkpoints, k.Tree) }),
		rowsOf(l, processRows, processes, layoutProcess, func(*ProcessState) {}),
		rowsOf(l, sandboxRows, sandboxes, layoutSandbox, func(s *Sandbox) { l.add(sandboxes, s.Tree) }),
		rowsOf(l, imageRows, images, layoutImage, func(*Image) { l.add(images, "") }),
		rowsOf(l, setupRows, setups, layoutSetup, func(*Setup) {}),
		rowsOf(l, replyRows, replies, layoutReply, func(*Reply) { l.add(replies, "") }),
		rowsOf(l, condemnedRows, doomed, layoutCondemned, func(*condemned) {}),
		rowsOf(l, removalRows, removals, layoutRemoval, func(r *removal) { l.counts[removals] += len(r.Nodes) }),
	} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	for of, n := range l.counts {
		l.tx.insert(counts, &count{of, n})
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
	return &instant{db.Snapshot(), last}, nil
}

type loader struct {
	log    *disk
	tx     Tx
	counts map[string]int
	names  map[string]string
}

func (l *loader) add(table string, tree ids.Tree) {
	l.counts[table]++
	if tree != "" {
		l.counts[counter(table, string(tree))]++
	}
}

// share lets nodes have one string for what many of them name: a third of
// their memory otherwise.
func (l *loader) share(n *Node) {
	n.Tree = intern(l, n.Tree)
	n.Parent = intern(l, n.Parent)
	n.Sandbox = intern(l, n.Sandbox)
	n.Checkpoint = intern(l, n.Checkpoint)
	n.PolicyVersion = intern(l, n.PolicyVersion)
	l.names[string(n.ID)] = string(n.ID)
}

func intern[T ~string](l *loader, s T) T {
	if known, ok := l.names[string(s)]; ok {
		return T(known)
	}
	l.names[string(s)] = string(s)
	return s
}

func rowsOf[T any](l *loader, r rows, table string, layout func(*coder, *T), seen func(*T)) func() error {
	return func() error {
		err := l.log.each(r, func(id, value []byte) error {
			v, err := decode(value, layout)
			if err != nil {
				return fault.New(fault.DataLoss, "log_damaged", "row %c%q: %w", r, id, err)
			}
			seen(v)
			return l.tx.txn.Insert(table, v)
		})
		if err != nil && fault.As(err).Kind != fault.DataLoss {
			return openFault(l.log.dir, err)
		}
		return err
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
