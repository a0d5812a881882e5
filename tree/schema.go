package tree

import (
	"encoding/binary"

	"github.com/hashicorp/go-memdb"
)

// Tables and indexes in memory, each with its reason. Of nodes there are many: they and
// their indexes lie in pages (nodes.go).
const (
	trees       = "trees"
	runs        = "runs"
	nodes       = "nodes"
	checkpoints = "checkpoints"
	processes   = "processes"
	sandboxes   = "sandboxes"
	images      = "images"
	setups      = "setups"
	replies     = "replies"
	doomed      = "condemned"
	removals    = "removals"
	counts      = "counts"
	marks       = "marks"

	byID         = "id"
	byTree       = "tree"
	byCreation   = "creation"
	byParent     = "parent"
	byCheckpoint = "checkpoint"
	byPayload    = "payload"
	byNode       = "node"
	bySnapshot   = "snapshot"
	byState      = "state"
	byImage      = "image"
	byName       = "name"
	byAge        = "age"
	pending      = "pending"
	pinned       = "pinned"
	byChange     = "change"
	byDepth      = "depth"
	byCapture    = "capture"
	byLabel      = "label"
	byRun        = "run"
	byResident   = "resident"
	byCondemned  = "condemned"
)

func schema() *memdb.DBSchema {
	s := &memdb.DBSchema{Tables: map[string]*memdb.TableSchema{}}
	for _, t := range []*memdb.TableSchema{
		treeSchema(), runSchema(), nodeTable.schema(), checkpointSchema(), processSchema(), sandboxSchema(), imageSchema(),
		setupSchema(), replySchema(), condemnedSchema(), removalSchema(), countSchema(), markSchema(),
	} {
		s.Tables[t.Name] = t
	}
	for _, t := range append(nodeIndexes, archivedUses) {
		s.Tables[t.name] = t.schema()
	}
	return s
}

func treeSchema() *memdb.TableSchema {
	return tableOf(trees,
		identity[Tree](),
		// Trees lists in creation order.
		unique(byCreation, func(t *Tree) []byte { return number(t.CreateIndex) }),
		// TreesOf: an image that a tree stands on isn't removed.
		many(byImage, func(t *Tree) []byte { return key(t.Image) }),
		// TreesOfRun: an attempt takes over what the one before left.
		many(byRun, func(t *Tree) []byte { return optional(t.Run) }),
		// ArchiveIdle: closed trees that are in memory; soon none.
		many(byResident, func(t *Tree) []byte {
			if !t.Closed || t.Archive == OnDisk {
				return nil
			}
			return key(t.ID)
		}),
	)
}

func runSchema() *memdb.TableSchema {
	return tableOf(runs, identity[Run]())
}

func checkpointSchema() *memdb.TableSchema {
	return tableOf(checkpoints,
		identity[Checkpoint](),
		// CheckpointsOf: the states of one tree, however many other trees have.
		many(byTree, func(k *Checkpoint) []byte { return key(k.Tree) }),
		// A snapshot is condemned once no checkpoint has it.
		many(bySnapshot, func(k *Checkpoint) []byte { return optional(k.Snapshot) }),
		// The same for the process half; most checkpoints have none.
		many(byState, func(k *Checkpoint) []byte { return optional(k.State) }),
	)
}

func processSchema() *memdb.TableSchema {
	return tableOf(processes,
		identity[ProcessState](),
		// What is still to be removed; nearly always nearly empty.
		unique(byCondemned, func(p *ProcessState) []byte {
			if !p.Condemned {
				return nil
			}
			return key(p.ID)
		}),
	)
}

func sandboxSchema() *memdb.TableSchema {
	return tableOf(sandboxes,
		identity[Sandbox](),
		// SandboxesOf: what closing a tree ends, and what keeps it in memory.
		many(byTree, func(s *Sandbox) []byte { return key(s.Tree) }),
		// A node that a sandbox stands at isn't pruned.
		many(byNode, func(s *Sandbox) []byte { return optional(s.Head) }),
	)
}

func imageSchema() *memdb.TableSchema {
	return tableOf(images,
		identity[Image](),
		// Clients say a name; a name is one image's.
		index(byName, true, indexer[Image]{keys: func(i *Image) [][]byte {
			ks := make([][]byte, len(i.Names))
			for j, n := range i.Names {
				ks[j] = key(n)
			}
			return ks
		}}),
		// A snapshot that is an image's base isn't condemned with its checkpoints.
		many(bySnapshot, func(i *Image) []byte { return optional(i.Base) }),
	)
}

func setupSchema() *memdb.TableSchema {
	return tableOf(setups,
		identity[Setup](),
		// A set-up is forgotten with its node.
		many(byNode, func(s *Setup) []byte { return key(s.Node) }),
	)
}

func replySchema() *memdb.TableSchema {
	return tableOf(replies,
		identity[Reply](),
		// Expiry takes the oldest first.
		many(byAge, func(r *Reply) []byte { return number(uint64(r.At.UnixNano())) }),
	)
}

func condemnedSchema() *memdb.TableSchema {
	return tableOf(doomed,
		identity[condemned](),
	)
}

func removalSchema() *memdb.TableSchema {
	return tableOf(removals,
		identity[removal](),
		// A watcher that catches up wants those of its tree, from where it was: the key goes on with their index.
		many(byTree, func(r *removal) []byte { return key(r.Tree) }),
	)
}

// count is how many rows of a table a tree has ("nodes/tr_..."). In memory only;
// made again at Open. Those of whole tables are totals.
type count struct {
	of   string
	n    int
	made uint64 // as a page's
}

func (x *count) takeBack(c rowChange) { x.n = c.before.(int) }

func countSchema() *memdb.TableSchema {
	return tableOf(counts, identity[count]())
}

func markSchema() *memdb.TableSchema {
	return tableOf(marks, identity[mark]())
}

// rowID is a row's key in its table's id index.
func rowID(row any) []byte {
	switch r := row.(type) {
	case *Tree:
		return key(r.ID)
	case *page[string]:
		return r.upto
	case *page[struct{}]:
		return r.upto
	case *Run:
		return key(r.Name)
	case *Checkpoint:
		return key(r.ID)
	case *ProcessState:
		return key(r.ID)
	case *Sandbox:
		return key(r.ID)
	case *Image:
		return key(r.Digest)
	case *Setup:
		return key(r.Digest)
	case *Reply:
		return key(r.Key)
	case *condemned:
		return key(r.Snapshot)
	case *removal:
		return number(r.First)
	case *count:
		return key(r.of)
	case *mark:
		return key(r.name)
	}
	panic("a row of no table")
}

// ---- indexes ---------------------------------------------------------------

// key is one part of an index key; its end is marked, so that no key is a
// prefix of another's part.
func key[T ~string](part T) []byte {
	b := make([]byte, 0, len(part)+1+32) // room for the id that memdb appends
	return append(append(b, part...), 0)
}

func optional[T ~string](part T) []byte {
	if part == "" {
		return nil
	}
	return key(part)
}

// number is parts and then n, which sorts as a number.
func number(n uint64, parts ...string) []byte {
	b := make([]byte, 0, 72)
	for _, p := range parts {
		b = append(append(b, p...), 0)
	}
	return binary.BigEndian.AppendUint64(b, n)
}

// indexer makes index keys with a typed function instead of reflection. Look-ups hand
// in keys that are made already; a shorter key finds what starts with it.
type indexer[T any] struct {
	key  func(*T) []byte // nil: not in this index
	keys func(*T) [][]byte
}

func (x indexer[T]) FromArgs(args ...any) ([]byte, error)       { return args[0].([]byte), nil }
func (x indexer[T]) PrefixFromArgs(args ...any) ([]byte, error) { return args[0].([]byte), nil }

type single[T any] struct{ indexer[T] }

func (x single[T]) FromObject(o any) (bool, []byte, error) {
	k := x.key(o.(*T))
	return k != nil, k, nil
}

type multi[T any] struct{ indexer[T] }

func (x multi[T]) FromObject(o any) (bool, [][]byte, error) {
	ks := x.keys(o.(*T))
	return len(ks) > 0, ks, nil
}

func index[T any](name string, uniq bool, x indexer[T]) *memdb.IndexSchema {
	s := &memdb.IndexSchema{Name: name, Unique: uniq, AllowMissing: name != byID}
	if x.keys != nil {
		s.Indexer = multi[T]{x}
	} else {
		s.Indexer = single[T]{x}
	}
	return s
}

func identity[T any]() *memdb.IndexSchema {
	return unique(byID, func(v *T) []byte { return rowID(v) })
}

func unique[T any](name string, key func(*T) []byte) *memdb.IndexSchema {
	return index(name, true, indexer[T]{key: key})
}

func many[T any](name string, key func(*T) []byte) *memdb.IndexSchema {
	return index(name, false, indexer[T]{key: key})
}

func tableOf(name string, indexes ...*memdb.IndexSchema) *memdb.TableSchema {
	t := &memdb.TableSchema{Name: name, Indexes: map[string]*memdb.IndexSchema{}}
	for _, x := range indexes {
		t.Indexes[x.Name] = x
	}
	return t
}
