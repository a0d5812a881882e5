package pool

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/btrfs"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// Options of OpenBtrfs.
type Options struct {
	// Dir is the daemon's state folder; the pool is mounted at Dir/pool.
	Dir string
	// SizeBytes is the size of the sparse file that holds the pool; it counts
	// when the pool is made. 0: 64 GiB.
	SizeBytes int64
	// ExistingBtrfs is a folder on a btrfs file system to use instead of a file
	// of our own. Its mount options, and whether it survives a power cut, are its
	// owner's; boxwood turns no quotas on there.
	ExistingBtrfs string
	// LowWater is how much must stay free; 0: a twentieth of the pool, within
	// 256 MiB and 10 GiB.
	LowWater int64
	// Unclean says what to do with a pool that was in use when the host stopped.
	Unclean Unclean

	hook func(step string) // for tests: called between the steps of each operation
}

// Unclean is how OpenBtrfs treats a pool that wasn't closed before the host
// went down: it is mounted without write barriers, so anything may be missing.
type Unclean int

const (
	// Check reads all of it and compares checksums, and refuses it with
	// fault.DataLoss "pool_unclean" unless they are right.
	Check Unclean = iota
	// Rebuild throws images and snapshots away and starts empty.
	Rebuild
)

// Btrfs is the pool on btrfs.
//
// What lies where below the root of the file system:
//
//	format                       "boxwood pool 1"
//	numbers/                     subvolume: where inode numbers go on, see numbers.go
//	layers/<hex of diff id>/     subvolume, read-only
//	    root/                    the layer's tree
//	snapshots/<id>/              subvolume, read-only; bases, too
//	    upper/                   what differs from the stack
//	    work/                    empty
//	    stack                    the layers it lies on, lowest first, one a line
//	uppers/<0..f>/<generation>/  subvolume, a writable clone of a snapshot
//
// A name that starts with ".new-" is half made, one with ".gone-" is being
// removed: Open deletes both. What is complete gets its name by one rename
// within its folder (a read-only subvolume can't change folders).
//
// Lock order: layerMu before mu; no system call that waits for the disk is made
// under mu.
type Btrfs struct {
	opts   Options
	device *device // nil on an existing btrfs
	lock   *os.File
	root   string

	// Open folders that names are made in and removed from.
	top, layers, snapshots *os.File
	// uppers are shards: the kernel locks the folder that a clone is made in until
	// the clone's transaction is on disk, so that clones in one folder neither share
	// a transaction nor wait for it idly. 64 clones by 16 threads, each: 0.29 ms
	// and as much of a processor in 16 folders; 1.5 and 1.2 ms in one.
	uppers [16]*os.File

	quotas bool
	sweep  *sweeper

	layerMu sync.Mutex // one layer is filled at a time: see numbers.go

	mu     sync.Mutex
	made   map[string]uint64 // snapshot -> transaction since which its bytes are its own
	since  map[string]uint64 // generation -> transaction of its last snapshot
	space  Usage
	asOf   time.Time
	closed bool
}

var _ Pool = (*Btrfs)(nil)

const format = "boxwood pool 1\n"

// OpenBtrfs opens the pool of a state folder and makes it if there is none. One
// process at a time has it: a second gets fault.Busy "pool_in_use".
func OpenBtrfs(o Options) (_ *Btrfs, err error) {
	if o.SizeBytes == 0 {
		o.SizeBytes = 64 << 30
	}
	if o.hook == nil {
		o.hook = func(string) {}
	}
	p := &Btrfs{opts: o, made: map[string]uint64{}, since: map[string]uint64{}}
	defer func() {
		if err != nil {
			p.letGo()
		}
	}()
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the state folder: %w", err)
	}
	if p.lock, err = lockFile(filepath.Join(o.Dir, "pool.lock")); err != nil {
		return nil, err
	}
	if o.ExistingBtrfs != "" {
		p.root = o.ExistingBtrfs
		if err := os.MkdirAll(p.root, 0o700); err != nil {
			return nil, fmt.Errorf("making the pool's folder: %w", err)
		}
	} else {
		p.root = filepath.Join(o.Dir, "pool")
		if p.device, err = openDevice(o); err != nil {
			return nil, err
		}
	}
	if err := p.layOut(); err != nil {
		return nil, err
	}
	p.sweep = newSweeper(p)
	if err := p.clearLeftovers(); err != nil {
		return nil, err
	}
	return p, nil
}

func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the pool's lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fault.New(fault.Busy, "pool_in_use", "another process has the pool in %s: %w", filepath.Dir(path), err).
			WithHint("one daemon a state folder; is `boxwood serve` running already?")
	}
	return f, nil
}

// layOut opens the pool's folders and makes those that are missing.
func (p *Btrfs) layOut() (err error) {
	if p.top, err = os.Open(p.root); err != nil {
		return err
	}
	if !btrfs.Is(p.top) {
		return fault.New(fault.Invalid, "not_btrfs", "%s isn't on btrfs", p.root).
			WithHint("leave the option out to let boxwood make a pool of its own")
	}
	stamp := filepath.Join(p.root, "format")
	switch b, err := os.ReadFile(stamp); {
	case errors.Is(err, os.ErrNotExist):
		if p.device != nil {
			// From the first extent on, or it counts for nobody.
			if err := btrfs.EnableSimpleQuotas(p.top); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOTTY) {
				return err
			}
		}
		if err := os.WriteFile(stamp, []byte(format), 0o600); err != nil {
			return err
		}
	case err != nil:
		return err
	case string(b) != format:
		return fault.New(fault.Precondition, "pool_format", "the pool in %s has format %q, this boxwood knows %q", p.root, strings.TrimSpace(string(b)), strings.TrimSpace(format)).
			WithHint("use the version that made it, or another state folder")
	}
	p.quotas = btrfs.SimpleQuotas(p.top)
	for name, f := range map[string]**os.File{"layers": &p.layers, "snapshots": &p.snapshots} {
		dir := filepath.Join(p.root, name)
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		if *f, err = os.Open(dir); err != nil {
			return err
		}
	}
	for i := range p.uppers {
		dir := filepath.Join(p.root, "uppers", strconv.FormatInt(int64(i), 16))
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		if p.uppers[i], err = os.Open(dir); err != nil {
			return err
		}
	}
	return p.startNumbers()
}

// folders are all that hold subvolumes.
func (p *Btrfs) folders() []*os.File {
	return append([]*os.File{p.top, p.layers, p.snapshots}, p.uppers[:]...)
}

// uppersOf is the folder of a generation's upper.
func (p *Btrfs) uppersOf(as ids.Generation) *os.File {
	h := fnv.New32a()
	h.Write([]byte(as))
	return p.uppers[h.Sum32()%uint32(len(p.uppers))]
}

// clearLeftovers removes what a killed process left half made or half removed,
// and snapshots that never got their seal.
func (p *Btrfs) clearLeftovers() error {
	for _, dir := range p.folders() {
		names, err := os.ReadDir(dir.Name())
		if err != nil {
			return err
		}
		for _, n := range names {
			if strings.HasPrefix(n.Name(), newPrefix) || strings.HasPrefix(n.Name(), gonePrefix) {
				p.sweep.add(dir, n.Name())
			}
		}
	}
	return nil
}

const (
	newPrefix  = ".new-"
	gonePrefix = ".gone-"
)

// temporary makes a name that no one had: the sweeper may still be busy with an
// earlier one of the same thing.
func temporary(prefix, name string) string {
	return prefix + name + "." + strconv.FormatInt(time.Now().UnixNano(), 36) + strconv.FormatInt(temporaries.Add(1), 36)
}

var temporaries atomic.Int64

// Quotas reports whether a sandbox can be held to a limit. Without (Linux < 6.7,
// or an existing btrfs without simple quotas) only the low watermark protects
// the pool.
func (p *Btrfs) Quotas() bool { return p.quotas }

func (p *Btrfs) Distrusted() bool { return p.device != nil && p.device.distrusted }

// Dir is where the pool is mounted.
func (p *Btrfs) Dir() string { return p.root }

// PendingRemovals also makes the kernel hurry with them.
func (p *Btrfs) PendingRemovals() int { return p.sweep.pending() }

// Drain waits until all that was released or removed is really gone, and its
// space is free. For tests and benchmarks.
func (p *Btrfs) Drain(ctx context.Context) error { return p.sweep.drain(ctx) }

// Close finishes pending removals, writes everything out, unmounts and marks
// the pool clean. If sandboxes still have parts of it mounted, it stays in use
// by them and unmarked. Idempotent.
func (p *Btrfs) Close() error {
	p.mu.Lock()
	closed := p.closed
	p.closed = true
	p.mu.Unlock()
	if closed {
		return nil
	}
	p.sweep.stop()
	err := btrfs.Sync(p.top)
	return errors.Join(err, p.letGo())
}

// letGo closes what is open. The device is unmounted and marked by its close.
func (p *Btrfs) letGo() error {
	for _, f := range p.folders() {
		if f != nil {
			f.Close()
		}
	}
	var err error
	if p.device != nil {
		err = p.device.close()
	}
	if p.lock != nil {
		p.lock.Close()
	}
	return err
}
