package tree

import (
	"context"
	"iter"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/boxwood-rl/boxwood/internal/ids"
)

// Options of a store. The zero value is what a daemon uses.
type Options struct {
	// Clock gives the time for expiry; nil: time.Now.
	Clock func() time.Time
	// FS is where the log is written; nil: the disk. Tests inject faults with it.
	FS vfs.FS
	// MaxWatchBuffer is how many events wait for one watcher before it is cut; 0: 4096.
	MaxWatchBuffer int
	// AllowTmpfs lets the state lie where a reboot loses it. For tests.
	AllowTmpfs bool
	// ReplyTTL is how long replies are kept; 0: 24 hours.
	ReplyTTL time.Duration
	// MaxReplies bounds how many; the oldest go first; 0: 100,000.
	MaxReplies int
	// MinFree is how many bytes must stay free on the disk: below it writes are
	// refused with Exhausted "disk_full", and work again once there is space; 0: 64 MiB.
	MinFree uint64
}

// Store is safe for concurrent use.
type Store struct{}

// Open opens the state in dir, making it if it isn't there. One process at a
// time: a second is refused with Precondition "state_in_use".
func Open(dir string, o Options) (*Store, error) { panic("being written") }

// Close waits for running updates, ends watchers, and lets go of the
// directory. Idempotent.
func (s *Store) Close() error { panic("being written") }

// Update makes one change. f runs alone and sees all earlier changes; if it
// returns an error nothing of it stays, and Update returns that error as it is.
// Otherwise the change is made durable (sharing the disk's flush with those
// that wait at the same time), then visible, then sent to watchers. index is
// that of its last write.
//
// ctx is looked at before f runs; after that Update waits until the outcome is
// known. On failure of the disk: Unavailable "store_failed"; the change isn't
// visible, no further write is taken until the store is opened again, and
// after that it may be there or not. On a full disk: Exhausted "disk_full";
// nothing was written and the store works again when there is space.
//
// f must not call Update, nor keep tx.
func (s *Store) Update(ctx context.Context, f func(tx *Tx) error) (index uint64, err error) {
	panic("being written")
}

// View is the newest durable instant.
func (s *Store) View() *View { panic("being written") }

// View is a consistent, read-only instant of the store. It needs no closing.
type View struct{ reader }

// reader has what View and Tx can both read. A look-up of what isn't there is
// NotFound. Iterators may be left early.
type reader struct{}

func (r reader) Tree(id ids.Tree) (*Tree, error)                   { panic("being written") }
func (r reader) Trees() iter.Seq[*Tree]                            { panic("being written") } // in creation order
func (r reader) Node(id ids.Node) (*Node, error)                   { panic("being written") } // without Detail: see FullNode
func (r reader) Children(id ids.Node) iter.Seq[*Node]              { panic("being written") } // by ordinal
func (r reader) NodesOf(id ids.Tree) iter.Seq[*Node]               { panic("being written") } // in creation order
func (r reader) Subtree(id ids.Node) iter.Seq[*Node]               { panic("being written") } // id first, parents before children
func (r reader) PathToRoot(id ids.Node) iter.Seq[*Node]            { panic("being written") } // id first
func (r reader) PendingCaptures() iter.Seq[*Node]                  { panic("being written") } // Capture is Recorded
func (r reader) Checkpoint(id ids.Checkpoint) (*Checkpoint, error) { panic("being written") }
func (r reader) CheckpointsOf(id ids.Tree) iter.Seq[*Checkpoint]   { panic("being written") }
func (r reader) Checkpoints() iter.Seq[*Checkpoint]                { panic("being written") }
func (r reader) CheckpointUsers(id ids.Checkpoint) iter.Seq[*Node] { panic("being written") }
func (r reader) Sandbox(id ids.Sandbox) (*Sandbox, error)          { panic("being written") }
func (r reader) Sandboxes() iter.Seq[*Sandbox]                     { panic("being written") }
func (r reader) SandboxesOf(id ids.Tree) iter.Seq[*Sandbox]        { panic("being written") }
func (r reader) SandboxesAt(id ids.Node) iter.Seq[*Sandbox]        { panic("being written") }

// Image finds an image by digest or by name.
func (r reader) Image(ref string) (*Image, error)        { panic("being written") }
func (r reader) Images() iter.Seq[*Image]                { panic("being written") }
func (r reader) TreesOf(image ids.Image) iter.Seq[*Tree] { panic("being written") }
func (r reader) Setup(digest string) (*Setup, error)     { panic("being written") }

// Condemned are the snapshots that no record needs any more and whose file
// state the caller has yet to remove; FinishRemoval strikes them off.
func (r reader) Condemned() iter.Seq[ids.Snapshot] { panic("being written") }
func (r reader) NodeCount(id ids.Tree) int         { panic("being written") } // "" counts all
func (r reader) CheckpointCount(id ids.Tree) int   { panic("being written") } // "" counts all
func (r reader) SandboxCount(id ids.Tree) int      { panic("being written") } // "" counts all
func (r reader) TreeCount() int                    { panic("being written") }
func (r reader) ImageCount() int                   { panic("being written") }
func (r reader) Index() uint64                     { panic("being written") }

// FullNode is Node with action, output, effects and reasons, read from disk.
func (v *View) FullNode(id ids.Node) (*Node, error) { panic("being written") }

// Reply finds the recorded answer to a key; NotFound when there is none or it has expired.
func (v *View) Reply(key string) (*Reply, error) { panic("being written") }

// Payload reads the trainer's bytes by digest, from disk, checked.
func (s *Store) Payload(digest string) ([]byte, error) { panic("being written") }

// Tx is one change being made. It reads what it has written.
type Tx struct{ reader }

// Now is the store's clock.
func (tx *Tx) Now() time.Time { panic("being written") }

func (tx *Tx) PutTree(t Tree) error { panic("being written") }

// AddNode records a new node of an existing tree, details included. The store
// sets Depth, Ordinal and the indexes; the parent must be there, unless the
// node is the tree's Root. Exists if the id is taken.
func (tx *Tx) AddNode(n Node) (*Node, error) { panic("being written") }

// PutNode changes a node that is there. What its turn did (see Detail) and its place
// in the tree were written by AddNode and stay.
func (tx *Tx) PutNode(n Node) error               { panic("being written") }
func (tx *Tx) PutCheckpoint(c Checkpoint) error   { panic("being written") }
func (tx *Tx) PutSandbox(s Sandbox) error         { panic("being written") }
func (tx *Tx) DeleteSandbox(id ids.Sandbox) error { panic("being written") } // gone already: no error
func (tx *Tx) PutImage(i Image) error             { panic("being written") } // takes its names from other images

// DeleteImage is refused with Precondition "image_in_use" while a tree stands
// on it. Its base is condemned.
func (tx *Tx) DeleteImage(id ids.Image) error { panic("being written") }
func (tx *Tx) PutSetup(s Setup) error         { panic("being written") }

// PutReply records an answer; Exists if the key was used for another request.
func (tx *Tx) PutReply(r Reply) error { panic("being written") }

// PutPayload keeps bytes and returns their digest. They stay as long as a node has the
// digest, from the end of this change on.
func (tx *Tx) PutPayload(b []byte) (digest string, err error) { panic("being written") }

// SetCaptured stores c and makes it the checkpoint of its node, which becomes
// Captured (or Proven if c is). FrozenAt is the instant of the freeze.
func (tx *Tx) SetCaptured(c Checkpoint, frozenAt time.Time, survivorsRan bool, took time.Duration) error {
	panic("being written")
}

// SetWithheld marks nodes as not restorable exactly, and why. Node reads say so.
func (tx *Tx) SetWithheld(id ids.Node, reason string) error { panic("being written") }

// Annotation changes what the trainer knows of a node; nil leaves things alone.
type Annotation struct {
	Node          ids.Node
	Rewards       map[string]float64
	Value         *float64
	Visits        *int64
	Labels        map[string]string // an empty value removes the label
	PolicyVersion *string
	Payload       *[]byte // empty removes it
}

func (tx *Tx) Annotate(as []Annotation) error { panic("being written") }

// BackupRule says how a value is carried up a path. Each node of the path, the
// leaf included, gets one visit more and a value by the rule.
type BackupRule uint8

const (
	Sum        BackupRule = iota + 1 // value += v
	Mean                             // value = mean of all v seen
	Max                              // value = max(value, v); the first v is taken as it is
	Discounted                       // value += v * discount^(distance from the leaf)
)

// BackupItem is one leaf (any node may be one) and its value.
type BackupItem struct {
	Node  ids.Node
	Value float64
}

// Backup carries values to the root; it says how many nodes changed.
func (tx *Tx) Backup(items []BackupItem, rule BackupRule, discount float64) (changed int, err error) {
	panic("being written")
}

// Pruned says what a Prune removed.
type Pruned struct {
	Nodes       []ids.Node
	Checkpoints []ids.Checkpoint
	Condemned   []ids.Snapshot
}

// Prune removes a node and all below it, or only what lies below. Phase one:
// the records go and snapshots without a user are condemned. Phase two is the
// caller's, after Update has returned: remove their file state, then FinishRemoval.
// Refused with Precondition "pinned", "sandbox_there", "checkpoint_shared" (another tree
// was started from it) or "root" (a tree's root goes only if the tree is
// closed; the tree goes with it), naming by what.
func (tx *Tx) Prune(id ids.Node, keepNode bool) (Pruned, error) { panic("being written") }

// FinishRemoval strikes snapshots off the condemned: their file state is gone.
func (tx *Tx) FinishRemoval(gone []ids.Snapshot) error { panic("being written") }

// Pin keeps a node from being pruned until Unpin. Both idempotent.
func (tx *Tx) Pin(id ids.Node) error   { panic("being written") }
func (tx *Tx) Unpin(id ids.Node) error { panic("being written") }

// ExpireReplies removes replies older than ReplyTTL and those beyond MaxReplies.
func (s *Store) ExpireReplies(ctx context.Context) (removed int, err error) { panic("being written") }

// Event is one change of a tree. Exactly one of Node, Removed, Tree is set.
type Event struct {
	Index   uint64
	Node    *Node
	Removed ids.Node
	Tree    *Tree
}

// Watcher gives the changes of one tree.
type Watcher struct{}

// Watch gives the changes of a tree after an index, then goes on with live ones.
// What changed before the call comes once each, in its newest state, in the order
// of the last changes; live, each change comes once, in order. Every event has its own
// index: a watcher continues after the last one it saw, over restarts, too.
// OutOfRange histories: Precondition "resync": start again from 0.
func (s *Store) Watch(ctx context.Context, id ids.Tree, after uint64) (*Watcher, error) {
	panic("being written")
}

// Next waits for the next event. A watcher that fell behind gets Exhausted
// "watch_behind" after what was kept for it: watch again after its last index.
func (w *Watcher) Next(ctx context.Context) (Event, error) { panic("being written") }
func (w *Watcher) Close()                                  { panic("being written") }

// WaitNodes waits until done says true of each node; a node that is removed is NotFound.
func (s *Store) WaitNodes(ctx context.Context, nodes []ids.Node, done func(*Node) bool) error {
	panic("being written")
}

// Check compares memory with the log and follows every reference; it names
// what is wrong, nothing if all is well.
func (s *Store) Check(ctx context.Context) ([]string, error) { panic("being written") }
