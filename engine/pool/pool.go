// Package pool keeps file state: layers of images, snapshots of what sandboxes
// changed, and the writable clones ("uppers") that live sandboxes write into.
//
// Words. A layer is a read-only tree, stored once by its diff id. An upper is a
// small tree of changes above a stack of layers; a root is the overlay of both.
// A snapshot is a read-only upper with its seal. A base is the empty snapshot
// of a stack, which first sandboxes are cloned from.
//
// Life of file state: AddLayer... -> AddBase -> Clone -> (a sandbox writes) ->
// Snapshot -> Clone of that snapshot ... -> Release of uppers, Remove of
// snapshots, layers. Every Add, Clone and Snapshot is atomic: after a crash the
// thing is there whole or not at all; leftovers are removed by Open.
//
// The pool knows nothing of nodes: who may remove a snapshot is decided by the
// tree store. It never follows a path that came from a sandbox.
//
// Every implementation passes the suite in pooltest.
package pool

import (
	"context"
	"os"

	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// Pool is safe for concurrent use.
type Pool interface {
	// HasLayer reports whether a layer is complete.
	HasLayer(id ids.Layer) bool
	// Layers lists the complete ones, in no order.
	Layers() ([]ids.Layer, error)
	// AddLayer makes a layer: fill writes into dir, which becomes the layer if
	// fill returns nil and is removed if not. Two calls for one id make one layer.
	AddLayer(ctx context.Context, id ids.Layer, fill func(dir string) error) error
	// RemoveLayer removes a layer that no base lies on; else fault.Precondition.
	RemoveLayer(ctx context.Context, id ids.Layer) (freed int64, err error)
	// OpenLayer opens a layer's root folder for reading.
	OpenLayer(id ids.Layer) (*os.File, error)

	// AddBase makes the empty snapshot of a stack of layers, lowest first. Its root
	// folder has the metadata of the highest layer's. What is written into clones
	// of it gets inode numbers that no layer of the stack has, so that
	// (st_dev, st_ino) is unique over the merged tree.
	AddBase(ctx context.Context, id ids.Snapshot, layers []ids.Layer) (tree.Seal, error)

	// AddSnapshot makes a snapshot whose content comes from elsewhere: fill changes the
	// folder of changes, which starts as that of over or, over a stack of layers alone,
	// empty. The snapshot is there if fill returns nil, and not at all if not. It does
	// not outlive a restart unless Reconcile is told to keep it.
	AddSnapshot(ctx context.Context, id ids.Snapshot, over Made, fill func(upper string) error) (tree.Seal, error)

	// Clone makes a writable upper from a snapshot, after checking that the
	// snapshot is as its seal says (else fault.DataLoss). limit bounds the bytes
	// that this upper may come to hold of its own; 0: none. Refused with
	// fault.Exhausted "pool_full" below the low watermark.
	Clone(ctx context.Context, from ids.Snapshot, seal tree.Seal, as ids.Generation, limit int64) (*Upper, error)
	// FindUpper gives the upper of a generation again after a restart.
	FindUpper(as ids.Generation) (*Upper, error)

	// Flush writes an upper's dirty data out, so that the Snapshot that follows
	// inside a freeze is short. It never waits for another sandbox's data.
	Flush(ctx context.Context, of ids.Generation) error
	// Snapshot freezes the present content of an upper as a read-only snapshot.
	// The upper stays in use. Work that need not be inside the freeze is done by
	// Finish, which returns the seal; until then the snapshot doesn't survive Open.
	Snapshot(ctx context.Context, of ids.Generation, as ids.Snapshot) (*Pending, error)

	// Verify compares a snapshot with its seal.
	Verify(id ids.Snapshot, seal tree.Seal) error
	// OpenSnapshot opens the folder of changes of a snapshot for reading: plain
	// files, and whiteouts as character devices 0:0.
	OpenSnapshot(id ids.Snapshot) (*os.File, error)
	// SnapshotDir is the path of that folder on the host.
	SnapshotDir(id ids.Snapshot) string
	// LayerDirs are those of the layers that a snapshot lies on, by its seal.
	LayerDirs(seal tree.Seal) []string

	// Release and Remove return at once; the space comes back behind them. What
	// is gone already is no error.
	Release(of ids.Generation) error
	Remove(id ids.Snapshot) error

	// PendingRemovals counts the uppers and snapshots whose space isn't back yet.
	PendingRemovals() int

	// Reconcile removes every upper and snapshot not named; it says how many.
	Reconcile(uppers map[ids.Generation]bool, snapshots map[ids.Snapshot]bool) (removed int, err error)

	// Distrusted reports whether the host went down while the pool was in use: what
	// records say of snapshots must then be held against Verify, once.
	Distrusted() bool

	Usage() (Usage, error)
	// ExclusiveBytes is what this snapshot added to the one before it (of the same
	// upper, or else the one that was cloned), or 0 if unknown.
	ExclusiveBytes(id ids.Snapshot) int64
	// Close syncs, marks the pool clean and lets go of it. Idempotent.
	Close() error
}

// Made is what AddSnapshot starts from: a snapshot, or the layers of a stack.
type Made struct {
	ID     ids.Snapshot
	Seal   tree.Seal
	Layers []ids.Layer // if ID is empty
}

// Upper is a writable tree of changes and the stack it lies on.
type Upper struct {
	Generation ids.Generation
	// Dir is the folder of changes (overlayfs "upperdir") on the host.
	Dir string
	// Work is overlayfs's workdir, in the same subvolume.
	Work string
	// Subvolume is the btrfs root id; 0 for implementations without one.
	Subvolume uint64
	// Layers are the folders of the stack, lowest first.
	Layers []string
}

// Pending is a snapshot whose atomic part is done.
type Pending struct {
	Finish func(ctx context.Context) (tree.Seal, error)
	Abort  func()
}

// Usage of the pool in bytes.
type Usage struct {
	Total, Used       int64
	Snapshots, Uppers int
	// LowWater is how much must stay free before new work is refused.
	LowWater int64
}
