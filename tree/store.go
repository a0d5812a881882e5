package tree

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/go-memdb"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
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
	// MaxRemovals bounds how many removed nodes are remembered for watchers
	// that come back; 0: 65,536.
	MaxRemovals int
	// MinFree is how many bytes must stay free on the disk: below it changes are
	// refused with Exhausted "disk_full", and work again once there is space; 0: 64 MiB.
	// Changes that withhold or remove something go on down to a quarter of it.
	MinFree uint64
	// SlowFlush is how long the disk may be at one flush before further changes are
	// refused with Exhausted "disk_slow"; 0: 30 s.
	SlowFlush time.Duration

	archiveStep int // how many nodes of a tree one change archives; 0: 512
	maxBackup   int // how many nodes a Backup of several items may change; 0: 100,000
}

func (o Options) withDefaults() Options {
	if o.Clock == nil {
		o.Clock = time.Now
	}
	for _, d := range []struct {
		p *int
		v int
	}{{&o.MaxWatchBuffer, 4096}, {&o.MaxReplies, 100_000}, {&o.MaxRemovals, 65_536}, {&o.maxBackup, 100_000}} {
		if *d.p == 0 {
			*d.p = d.v
		}
	}
	if o.ReplyTTL == 0 {
		o.ReplyTTL = 24 * time.Hour
	}
	if o.archiveStep == 0 {
		o.archiveStep = 512 // a few ms of the writers' time
	}
	if o.SlowFlush == 0 {
		o.SlowFlush = 30 * time.Second
	}
	if o.MinFree == 0 {
		o.MinFree = 64 << 20
	}
	return o
}

// Store is safe for concurrent use.
//
// There are two instants: head, which has every change whose function has run,
// and state, which has those that are durable. Functions run over head; all
// reads see state. Between them lie at most two groups of changes: one being
// flushed, one collecting those that come meanwhile. A flush that fails takes
// head back to state.
//
// Lock order: mu, then watchers' mu.
type Store struct {
	o   Options
	log *disk

	state atomic.Pointer[instant]

	mu     sync.Mutex // held while a change's function runs
	head   *memdb.MemDB
	next   uint64 // index of the last write in head
	groups uint64 // how many there have been
	totals totals // of head
	open   *group // collects; nil if there is none
	latest *group // that was opened last, maybe flushed long ago
	// flushing: one goroutine has a sealed group, and sees to it that what is open when it has
	// flushed that is flushed next. It becomes true under mu only.
	flushing atomic.Bool
	idle     sync.Cond    // of mu: nothing is flushed, and nothing open
	sealed   *group       // the one being flushed
	began    atomic.Int64 // when its flush did, in ns since 1970; 0: nothing is flushed
	failed   error        // why no more writes are taken
	closed   bool

	archiving sync.Mutex             // one tree at a time moves; before mu
	recalled  map[ids.Tree]time.Time // guarded by mu; when trees were

	closing  sync.Once
	closeErr error

	watch watchers
}

type instant struct {
	db     *memdb.MemDB
	index  uint64
	totals totals
}

// group is what one flush makes durable.
//
// Its changes share one transaction over the tables, so that a path of a radix tree
// is copied once a group; one that is refused is undone in it.
type group struct {
	number uint64
	txn    *memdb.Txn
	recent recent
	batch  *pebble.Batch
	events []Event
	moved  moved
	free   uint64        // bytes on the disk, at its first change
	after  instant       // the store with it, once sealed
	done   chan struct{} // closed when err is decided
	err    error
}

// Open opens the state in dir, making it if it isn't there. One process at a
// time: a second is refused with Precondition "state_in_use". A state on tmpfs is
// refused with "state_on_tmpfs", one that a newer boxwood wrote with Unsupported
// "newer_format", and a damaged one with DataLoss "log_damaged"; a torn end
// is what a crash leaves, and no damage.
func Open(dir string, o Options) (*Store, error) {
	o = o.withDefaults()
	log, err := openDisk(dir, o)
	if err != nil {
		return nil, err
	}
	s := &Store{o: o, log: log}
	s.idle.L = &s.mu
	s.watch.init(o.MaxWatchBuffer)
	now, err := load(log)
	if err == nil {
		err = reaches(log.fs, dir, now.index)
	}
	if err != nil {
		_ = log.close()
		return nil, err
	}
	s.state.Store(now)
	s.head, s.next, s.totals = now.db.Snapshot(), now.index, now.totals
	return s, nil
}

// Close waits for running updates, ends watchers, and lets go of the
// directory. Idempotent.
func (s *Store) Close() error {
	s.closing.Do(func() {
		s.mu.Lock()
		s.closed = true
		for s.flushing.Load() || s.collected() {
			s.idle.Wait()
		}
		s.mu.Unlock()
		s.watch.close(errClosed())
		s.closeErr = s.log.close()
	})
	return s.closeErr
}

// Update makes one change. f runs alone and sees all earlier changes; if it
// returns an error nothing of it stays, and Update returns that error as it is.
// (All that either answer may rest on is durable by then.)
// Otherwise the change is made durable (sharing the disk's flush with those
// that wait at the same time), then visible, then sent to watchers. index is
// that of its last write.
//
// ctx is looked at before f runs; after that Update waits until the outcome is
// known. On failure of the disk: Unavailable "store_failed"; the change isn't
// visible, no further write is taken until the store is opened again, and
// after that it may be there or not. On a full disk: Exhausted "disk_full";
// nothing was written and the store works again when there is space. On a disk that doesn't answer:
// Exhausted "disk_slow"; nothing was written.
//
// f must not call Update, nor keep tx.
//
// f may run more than once: when it changes a node of an archived tree, what it has written
// is undone, the tree is brought back, and f runs again. So whatever f leaves outside the
// change must be as if only the last run had been: results are set and not added to, nothing outside that
// f reads is changed by it, and errors of tx that aren't expected are returned. The build
// tag rehearse has every f run twice.
func (s *Store) Update(ctx context.Context, f func(tx *Tx) error) (index uint64, err error) {
	g, first, index, err := s.applyHere(ctx, f)
	if first {
		s.flush(g)
	}
	return index, g.wait(err)
}

// wait waits until what a change wrote, or saw, is durable; err is how its function ended.
func (g *group) wait(err error) error {
	if g == nil || err != nil && sabotage.On("answers") {
		return err
	}
	<-g.done
	if g.err != nil {
		return g.err
	}
	return err
}

// Start is Update in two steps, for a change that must be in order but that
// nobody has to wait for: when it returns, later changes see this one; done then
// waits until it is durable and visible, and must be called once. For what has
// to survive the daemon without that, something else must vouch.
func (s *Store) Start(ctx context.Context, f func(tx *Tx) error) (done func() error, err error) {
	g, first, _, err := s.applyHere(ctx, f)
	if err != nil {
		return nil, g.wait(err)
	}
	if first {
		go s.flush(g)
	}
	return func() error { return g.wait(nil) }, nil
}

// applyHere is apply with the trees in memory that f wants.
func (s *Store) applyHere(ctx context.Context, f func(tx *Tx) error) (g *group, first bool, index uint64, err error) {
	recalls := map[nodeKey]int{}
	for {
		g, first, index, err = s.apply(ctx, f)
		var a archived
		if !errors.As(err, &a) {
			return g, first, index, err
		}
		if recalls[a.tree]++; recalls[a.tree] > 10 { // more than once, if others archive again what was brought back
			return nil, false, 0, fault.New(fault.Unavailable, "tree_archived", "bringing a tree back into memory: %w", err)
		}
		if err := s.Recall(ctx, ids.Tree(ids.Text("tr_", a.tree))); err != nil {
			return nil, false, 0, err
		}
	}
}

// apply runs f over head and adds what it wrote to the open group, g. If it wrote nothing or was refused, g is
// the last group that it may have seen changes of; nil: none. Who answers before that is durable
// says what a read doesn't show yet, and what a crash could undo. If first, nobody flushes: g is
// sealed, and the caller has to.
func (s *Store) apply(ctx context.Context, f func(tx *Tx) error) (g *group, first bool, index uint64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, false, 0, contextFault(err)
	}
	if s.closed {
		return nil, false, 0, errClosed()
	}
	if s.failed != nil {
		return nil, false, 0, s.failed
	}
	if err := s.slow(); err != nil {
		return nil, false, 0, err
	}
	if s.open == nil {
		s.groups++
		s.open = &group{number: s.groups, txn: s.head.Txn(true), batch: s.log.db.NewBatch(), done: make(chan struct{})}
	}
	g = s.open
	if rehearse {
		if err := s.rehearse(g, f); err != nil {
			return s.latest, false, 0, err
		}
	}
	tx := s.begin(g)
	kept := false
	defer func() { // also when f panics
		if !kept {
			tx.undo()
		}
	}()
	if err := tx.run(f); err != nil {
		return s.latest, false, 0, err
	}
	if len(tx.ops) == 0 {
		return s.latest, false, s.next, nil
	}
	if err := s.room(tx, g); err != nil {
		return nil, false, 0, err
	}
	g.events = append(g.events, tx.newest()...)
	g.moved.add(tx.moved)
	kept = true
	s.next, s.totals, s.latest = tx.index, tx.totals, g
	for _, op := range tx.ops {
		if op.value == nil {
			_ = g.batch.Delete(op.key, nil)
		} else {
			_ = g.batch.Set(op.key, op.value, nil)
		}
	}
	if first = s.flushing.CompareAndSwap(false, true); first {
		s.seal()
	}
	return g, first, s.next, nil
}

// begin starts a change over what a group has.
func (s *Store) begin(g *group) *Tx {
	return &Tx{reader: reader{g.txn, s.next, s.totals, &g.recent}, s: s, group: g.number, now: s.o.Clock().UTC()}
}

func (s *Store) rehearse(g *group, f func(tx *Tx) error) error {
	tx := s.begin(g)
	defer tx.undo()
	return tx.run(f)
}

// slow refuses a change while the disk is at one flush for too long, rather than let all that comes
// wait for it. What waits already goes on waiting: it may be on the disk.
func (s *Store) slow() error {
	began := s.began.Load()
	if began == 0 {
		return nil
	}
	since := time.Since(time.Unix(0, began))
	if since < s.o.SlowFlush {
		return nil
	}
	return fault.New(fault.Exhausted, "disk_slow", "the disk of the state directory has been at one flush for %s", since.Round(time.Millisecond)).
		WithHint("look at the disk; reads go on, and changes are taken again when it answers").After(10 * time.Second)
}

// room refuses a change on a nearly full disk. One that removes something may
// use most of what is kept free: it is how space comes back.
func (s *Store) room(tx *Tx, g *group) error {
	need := s.o.MinFree
	if tx.removes {
		need /= 4
	}
	if g.batch.Empty() || g.free < need {
		g.free = s.log.free() // asked once for a group
	}
	if g.free >= need {
		return nil
	}
	return fault.New(fault.Exhausted, "disk_full",
		"the disk of the state directory has %d bytes left, and %d must stay free", g.free, need).
		WithHint("free some space; nothing needs to be started again").After(10 * time.Second)
}

// flush makes a sealed group durable, then visible, then known: log, memory, watchers, those
// who wait for the reply. The change that finds nobody at it flushes in its own goroutine,
// since each hand-over to another costs a good part of a flush; what has come meanwhile goes
// to the next change, or to a goroutine of its own, so that no change waits for a later one.
func (s *Store) flush(g *group) {
	_ = g.batch.Set(indexKey, varint(g.after.index), nil)
	s.began.Store(time.Now().UnixNano())
	err := s.log.commit(g.batch)
	s.began.Store(0)
	if err != nil {
		s.giveUp(g, err)
	} else {
		_ = g.batch.Close()
		s.state.Store(&g.after)
		s.watch.publish(g.events)
		close(g.done)
	}
	// From here on whoever makes a change flushes: many may stand before us at mu, and the
	// disk shall not wait for all of them.
	s.flushing.Store(false)
	if s.mu.TryLock() {
		s.follow(g)
	} else {
		go func() { s.mu.Lock(); s.follow(g) }()
	}
}

// follow has what is open flushed, if nobody does; g is what was flushed before. It is called with mu held, and lets go
// of it.
func (s *Store) follow(g *group) {
	defer s.mu.Unlock()
	if s.sealed == g {
		s.sealed = nil
	}
	if s.flushing.Load() {
		return
	}
	if s.collected() {
		s.flushing.Store(true)
		go s.flush(s.seal())
		return
	}
	s.idle.Broadcast()
}

// collected: the open group has a change.
func (s *Store) collected() bool { return s.open != nil && !s.open.batch.Empty() }

// seal closes the open group to further changes. It is called with mu held.
func (s *Store) seal() *group {
	g := s.open
	s.open, s.sealed = nil, g
	g.txn.Commit()
	g.after = instant{s.head.Snapshot(), s.next, s.totals}
	return g
}

// giveUp ends a group that could not be flushed, and the one built upon it.
func (s *Store) giveUp(g *group, cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failed = fault.New(fault.Unavailable, "store_failed",
		"the state directory can't be written: %w", cause).
		WithHint("look at the disk, then start the daemon again: what was acknowledged is there")
	if s.open != nil {
		s.open.txn.Abort()
		s.open.err = s.failed
		close(s.open.done)
		s.open = nil
	}
	g.err = s.failed
	close(g.done)
	now := s.state.Load()
	s.head, s.next, s.totals = now.db.Snapshot(), now.index, now.totals
}

func contextFault(err error) error {
	if err == context.DeadlineExceeded {
		return fault.New(fault.Deadline, "deadline", "the deadline passed before the change was made: %w", err)
	}
	return fault.New(fault.Cancelled, "cancelled", "cancelled before the change was made: %w", err)
}
