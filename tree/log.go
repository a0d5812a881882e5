package tree

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// Keys in the log are one letter and an id. docs/TREE.md has the same table.
type rows byte

const (
	metaRows           rows = 'm' // format, index, horizon
	treeRows           rows = 't' // tree id       -> layoutTree
	nodeRows           rows = 'n' // node id       -> layoutNode
	detailRows         rows = 'd' // node id       -> layoutDetail
	checkpointRows     rows = 'c' // checkpoint id -> layoutCheckpoint
	processRows        rows = 'o' // process id    -> layoutProcess
	sandboxRows        rows = 's' // sandbox id    -> layoutSandbox
	imageRows          rows = 'i' // digest        -> layoutImage
	setupRows          rows = 'u' // digest        -> layoutSetup
	replyRows          rows = 'r' // key           -> layoutFullReply
	payloadRows        rows = 'p' // sha256 in hex -> the bytes as they are
	condemnedRows      rows = 'x' // snapshot id   -> layoutCondemned
	runRows            rows = 'R' // name -> layoutRun
	archiveRows        rows = 'a' // tree and node, 16 bytes each -> layoutNode, of an archived tree
	whereRows          rows = 'b' // archived node, 16 bytes -> its tree, 16 bytes
	checkpointHoldRows rows = 'k' // checkpoint and tree, 16 bytes each: an archived node has it
	payloadHoldRows    rows = 'h' // sha256, 32 bytes, and tree, 16 bytes: an archived node has it
	removalRows        rows = 'w' // 8 bytes, big-endian index -> layoutRemoval
)

// formatVersion is raised when an older program would misread what a newer one
// writes: opening an older log signs it with this one.
//
//	1  the first
//	2  process states; a checkpoint names one
//	3  node rows have ids and digests in binary, and not their own id; archived trees; runs
//	4  limits name system calls, and nodes what repeats their turns, which an older program would drop when it writes them again
//	5  checkpoints say that secrets may be in them, which an older program would export
//	6  trees have a capture policy, which an older program would drop when it writes them again
//	7  trees say that programs gain no rights, which an older program would drop when it writes them again
const formatVersion = 7

var (
	formatKey  = rowKey(metaRows, "format")
	indexKey   = rowKey(metaRows, "index")   // of the last write
	horizonKey = rowKey(metaRows, "horizon") // removals up to this index are forgotten
)

func rowKey(r rows, id string) []byte {
	return append(append(make([]byte, 0, 1+len(id)), byte(r)), id...)
}

func varint(v uint64) []byte { return binary.AppendUvarint(nil, v) }

// disk is the durable log: an embedded pebble store, of which the tree uses
// atomic batches, one flush per batch, and reads by key.
//
// pebble calls Fatalf where it can't go on, and Fatalf must not return. Instead
// of ending the daemon, whose sandboxes and readers are well, that ends the
// goroutine it was called from: a background one of pebble's, or guard's. Only
// below commit, whose goroutine is a caller's, it panics. The store then takes no write.
type disk struct {
	db  *pebble.DB
	fs  vfs.FS
	dir string

	mu     sync.RWMutex // read-held while db is in use
	closed bool
	unlock func() error

	failure sync.Once
	failed  chan struct{} // closed after cause is set
	cause   error
}

// Bounds of pebble, chosen for a daemon that shares its host: memory for writes
// that aren't in tables yet, and for blocks read again.
const (
	memTable   = 32 << 20
	blockCache = 16 << 20
)

func openDisk(dir string, o Options) (*disk, error) {
	d := &disk{fs: o.FS, dir: dir, failed: make(chan struct{})}
	if d.fs == nil {
		d.fs = vfs.Default
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fault.New(fault.Internal, "state_dir", "making the state directory: %w", err)
		}
		if err := refuseVolatile(dir); err != nil && !o.AllowTmpfs {
			return nil, err
		}
	}
	logDir := d.fs.PathJoin(dir, "log")
	if err := d.fs.MkdirAll(logDir, 0o700); err != nil {
		return nil, fault.New(fault.Internal, "state_dir", "making the log's directory: %w", err)
	}
	// The entries of dir and of its parent have to be as durable as what is below.
	for _, p := range []string{dir, d.fs.PathDir(dir)} {
		if err := syncDir(d.fs, p); err != nil {
			return nil, fault.New(fault.Internal, "state_dir", "flushing the directory %s: %w", p, err)
		}
	}
	lock, err := pebble.LockDirectory(logDir, d.fs)
	if err != nil {
		return nil, lockFault(dir, err)
	}
	if err := intact(d.fs, logDir); err != nil {
		_ = lock.Close()
		return nil, openFault(dir, err)
	}
	cache := pebble.NewCache(blockCache)
	defer cache.Unref()
	merging := &merging{ConcurrencyLimitScheduler: pebble.NewConcurrencyLimitSchedulerWithNoPeriodicGrantingForTest()}
	opts := &pebble.Options{
		FS:                          d.fs,
		Lock:                        lock,
		Logger:                      d,
		Cache:                       cache,
		MemTableSize:                memTable,
		MemTableStopWritesThreshold: 4,
		FormatMajorVersion:          pebble.FormatWALSyncChunks,
		// Whoever reads what is damaged gets an error that says so. pebble's own answer is
		// Fatalf, which would end that reader's goroutine, and all writing with it.
		EventListener: &pebble.EventListener{
			DataCorruption: func(pebble.DataCorruptionInfo) {},
			WALCreated:     func(pebble.WALCreateInfo) { _ = failpoint.Hit("log made") },
			FlushBegin:     func(pebble.FlushInfo) { _ = failpoint.Hit("table begun") },
			FlushEnd:       func(pebble.FlushInfo) { _ = failpoint.Hit("table made") },
		},
	}
	opts.Experimental.CompactionScheduler = merging
	err = guard(func() error {
		var err error
		d.db, err = pebble.Open(logDir, opts)
		return err
	})
	if err == nil {
		select {
		case <-d.failed:
			err = d.cause
		default:
		}
	}
	if err != nil {
		_ = lock.Close()
		return nil, openFault(dir, err)
	}
	// pebble refuses to close a lock that it still uses; ours is let go in close.
	d.unlock = lock.Close
	merging.begin()
	if err := d.checkFormat(); err != nil {
		_ = d.close()
		return nil, err
	}
	return d, nil
}

// merging has pebble merge tables one at a time, and none before it is open: an Open that fails
// doesn't wait for those that it has begun, and they end the process. (The scheduler that it makes itself leaves a
// goroutine then. This one lacks its clock, which is for limits that change.)
type merging struct {
	*pebble.ConcurrencyLimitScheduler
	db   pebble.DBForCompaction
	open atomic.Bool
}

func (m *merging) Register(n int, db pebble.DBForCompaction) {
	m.db = db
	m.ConcurrencyLimitScheduler.Register(n, db)
}

func (m *merging) TrySchedule() (bool, pebble.CompactionGrantHandle) {
	if !m.open.Load() {
		return false, nil
	}
	return m.ConcurrencyLimitScheduler.TrySchedule()
}

// begin lets what waits be merged.
func (m *merging) begin() {
	m.open.Store(true)
	if waiting, _ := m.db.GetWaitingCompaction(); !waiting {
		return
	}
	if ok, grant := m.TrySchedule(); ok && !m.db.Schedule(grant) {
		grant.Done()
	}
}

// checkFormat refuses what a newer program wrote, and signs what is new.
func (d *disk) checkFormat() error {
	sign := func() error {
		batch := d.db.NewBatch()
		_ = batch.Set(formatKey, varint(formatVersion), nil)
		return d.commit(batch)
	}
	b, err := d.get(formatKey)
	if errors.Is(err, pebble.ErrNotFound) {
		return sign()
	}
	if err != nil {
		return openFault(d.dir, err)
	}
	v, n := binary.Uvarint(b)
	if n <= 0 || n != len(b) || v == 0 {
		return fault.New(fault.DataLoss, "log_damaged", "the log in %s has no readable format version", d.dir)
	}
	if v > formatVersion {
		return fault.New(fault.Unsupported, "newer_format",
			"the state in %s has format %d, and this boxwood knows formats up to %d", d.dir, v, formatVersion).
			WithHint("use the boxwood that wrote it, or a newer one")
	}
	if v < formatVersion { // before the first row that the older program would misread
		return sign()
	}
	return nil
}

// commit makes a batch durable: one append and one flush. Nil means that it is
// on the disk; an error, that it may or may not be.
func (d *disk) commit(b *pebble.Batch) error {
	select {
	case <-d.failed:
		return d.cause
	default:
	}
	opts := pebble.Sync
	if sabotage.On("fsync") {
		opts = pebble.NoSync
	}
	if sabotage.On("torn") {
		_ = commitHere(d.half(b), opts)
	}
	if err := commitHere(b, opts); err != nil {
		d.fail(err)
		return d.cause
	}
	return nil
}

// half of a batch, which a saboteur has flushed before the whole.
func (d *disk) half(b *pebble.Batch) *pebble.Batch {
	h := d.db.NewBatch()
	for r := b.Reader(); h.Count() < b.Count()/2; {
		if kind, k, v, _, _ := r.Next(); kind == pebble.InternalKeyKindSet {
			_ = h.Set(k, v, nil)
		} else {
			_ = h.Delete(k, nil)
		}
	}
	return h
}

// commitHere commits in the caller's goroutine: a turn waits for it, and two hops to
// another and back cost as much as the flush. Fatalf finds it on the stack by its name.
//
//go:noinline
func commitHere(b *pebble.Batch, opts *pebble.WriteOptions) (err error) {
	defer func() { recovered(recover(), &err) }()
	if err := failpoint.Hit("log appending"); err != nil {
		return err
	}
	if err := b.Commit(opts); err != nil {
		return err
	}
	return failpoint.Hit("log appended")
}

// inCommit: commitHere is on this goroutine's stack. For Fatalf only, where time doesn't matter.
func inCommit() bool {
	pcs := make([]uintptr, 256)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(1, pcs)])
	for {
		f, more := frames.Next()
		if strings.HasSuffix(f.Function, "/tree.commitHere") {
			return true
		}
		if !more {
			return false
		}
	}
}

// guard runs f in a goroutine that Fatalf may end.
func guard(f func() error) (err error) {
	err = errors.New("the log gave up")
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { recovered(recover(), &err) }()
		err = f()
	}()
	<-done
	return err
}

// recovered makes an error of a panic. pebble panics where a directory can't be
// flushed; here that is a failure like the others. (In a goroutine of pebble's own it
// ends the process, which is what a crash does: what was acknowledged is there at the
// next start.)
func recovered(p any, err *error) {
	switch p := p.(type) {
	case nil:
	case error:
		*err = fmt.Errorf("the log gave up: %w", p)
	default:
		*err = fmt.Errorf("the log gave up: %v", p)
	}
}

func (d *disk) get(key []byte) ([]byte, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.closed {
		return nil, errClosed()
	}
	v, c, err := d.db.Get(key)
	if err != nil {
		return nil, unread(d.dir, err)
	}
	defer c.Close()
	return append([]byte{}, v...), nil
}

// each calls f with every row of a kind, in the order of keys. Neither slice may be kept.
func (d *disk) each(r rows, f func(id, value []byte) error) error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.closed {
		return errClosed()
	}
	return d.scan([]byte{byte(r)}, []byte{byte(r) + 1}, func(k, v []byte) error { return f(k[1:], v) })
}

// within calls f with every row whose key, given whole, starts with prefix.
func (d *disk) within(prefix []byte, f func(key, value []byte) error) error {
	return d.withinFrom(prefix, prefix, f)
}

// withinFrom is within, from a key on.
func (d *disk) withinFrom(prefix, from []byte, f func(key, value []byte) error) error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.closed {
		return errClosed()
	}
	return d.scan(from, append(bytes.Clone(prefix), bytes.Repeat([]byte{0xff}, 64)...), f)
}

// scan is called with mu read-held.
func (d *disk) scan(low, high []byte, f func(key, value []byte) error) error {
	it, err := d.db.NewIter(&pebble.IterOptions{LowerBound: low, UpperBound: high})
	if err != nil {
		return unread(d.dir, err)
	}
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		v, err := it.ValueAndErr()
		if err != nil {
			return unread(d.dir, err)
		}
		if err := f(it.Key(), v); err != nil {
			return err
		}
	}
	// A scan that ends because the disk failed says so.
	if sabotage.On("unread") {
		return nil
	}
	return unread(d.dir, it.Error())
}

// free is how many bytes the disk has left; all, where it can't tell.
func (d *disk) free() uint64 {
	u, err := d.fs.GetDiskUsage(d.dir)
	if err != nil {
		return ^uint64(0)
	}
	return u.AvailBytes
}

// close lets go of the directory. After a failure pebble may be unable to
// close: then the lock stays until the process ends, since what is left of the
// old log could still write beside a new one.
func (d *disk) close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	select {
	case <-d.failed:
		return fault.New(fault.Unavailable, "store_failed",
			"the log in %s failed and is left as it is: %w", d.dir, d.cause).
			WithHint("start the daemon again: what was acknowledged is there")
	default:
	}
	last, err := d.last()
	closing := guard(d.db.Close)
	if closing == nil {
		if err == nil {
			err = closedAt(d.fs, d.dir, last)
		}
		err = errors.Join(err, d.unlock())
	}
	if err = errors.Join(err, closing); err != nil {
		return fault.New(fault.Internal, "state_dir", "closing the log in %s: %w", d.dir, err)
	}
	return nil
}

// last is the index of the last write. It is called with mu held.
func (d *disk) last() (uint64, error) {
	v, c, err := d.db.Get(indexKey)
	if errors.Is(err, pebble.ErrNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer c.Close()
	n, _ := binary.Uvarint(v)
	return n, nil
}

// ---- pebble's Logger -------------------------------------------------------

func (d *disk) Infof(string, ...any)  {}
func (d *disk) Errorf(string, ...any) {}

func (d *disk) Fatalf(format string, args ...any) {
	g := &gaveUp{message: fmt.Sprintf(format, args...)}
	for _, a := range args {
		if err, ok := a.(error); ok {
			g.cause = err
		}
	}
	d.fail(g)
	if inCommit() {
		panic(g)
	}
	runtime.Goexit()
}

// gaveUp is what pebble told Fatalf.
type gaveUp struct {
	message string
	cause   error
}

func (g *gaveUp) Error() string { return g.message }
func (g *gaveUp) Unwrap() error { return g.cause }

func (d *disk) fail(err error) {
	d.failure.Do(func() {
		d.cause = err
		close(d.failed)
	})
}

// ---- faults ----------------------------------------------------------------

func errClosed() error {
	return fault.New(fault.Unavailable, "store_closed", "the store is closed")
}

// unread is what a read failed with: damage, or a disk that didn't give what is on it. A row that
// isn't there stays pebble.ErrNotFound.
func unread(dir string, err error) error {
	if err == nil || errors.Is(err, pebble.ErrNotFound) {
		return err
	}
	var known *fault.Error
	if err := damaged(dir, err); errors.As(err, &known) {
		return err
	}
	return fault.New(fault.Unavailable, "state_unreadable", "reading the log in %s: %w", dir, err).
		WithHint("look at the disk; what couldn't be read is asked for again when it answers")
}

// reading says what was being read when err came; what can't be decoded is damage.
func reading(err error, format string, args ...any) error {
	f := fault.Error{Kind: fault.DataLoss, Reason: "log_damaged"}
	if known := (*fault.Error)(nil); errors.As(err, &known) {
		f = *known
	}
	return fault.New(f.Kind, f.Reason, "reading "+format+": %w", append(args, err)...).WithHint("%s", f.Hint)
}

func lockFault(dir string, err error) error {
	if errors.Is(err, fs.ErrPermission) && !errors.Is(err, unix.EACCES) || errors.Is(err, unix.EROFS) || errors.Is(err, fs.ErrNotExist) {
		return fault.New(fault.Internal, "state_dir", "locking %s: %w", dir, err)
	}
	return fault.New(fault.Precondition, "state_in_use", "another process uses the state in %s: %w", dir, err).
		WithHint("one daemon per state directory: stop the other one or name another directory")
}

func openFault(dir string, err error) error {
	if err := damaged(dir, err); fault.Is(err, fault.DataLoss) {
		return err
	}
	return fault.New(fault.Internal, "state_dir", "opening the log in %s: %w", dir, err)
}

// refuseVolatile refuses file systems that a reboot empties.
func refuseVolatile(dir string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fault.New(fault.Internal, "state_dir", "looking at the file system of %s: %w", dir, err)
	}
	if st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC {
		abs, _ := filepath.Abs(dir)
		return fault.New(fault.Precondition, "state_on_tmpfs", "%s lies in memory (tmpfs): a reboot would lose every node", abs).
			WithHint("put the state directory on a disk")
	}
	return nil
}

func syncDir(fs vfs.FS, dir string) error {
	d, err := fs.OpenDir(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
