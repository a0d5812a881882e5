package box

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/tree"
)

// Each slot has a range of host ids of its own, so that two boxes share no user.
// A slot is used again only after its box is gone.
const (
	firstID  = 100_000
	idsEach  = 65_536
	slotsMax = 30_000 // ids stay below 2^31
)

func idBase(slot int) int { return firstID + slot*idsEach }

// Host makes boxes and keeps zygotes ready. Its methods are safe for concurrent use.
//
// Lock order: spawning, then mu.
type Host struct {
	cfg     Config
	root    *cgroup.Root
	lock    *os.File // the cgroup's folder, locked
	control string   // folder of control folders, by slot

	// spawning serves one maker of zygotes at a time.
	spawning sync.Mutex
	nursery  *nursery

	mu       sync.Mutex
	changed  *sync.Cond // any of the fields below
	ready    []*zygote
	slots    map[int]bool // in use, also by leftovers of a former daemon
	owned    map[int]bool // slots whose zygote or box is ours
	next     int
	blocks   *idBlocks
	starting int  // Starts under way, which refilling yields to
	backoff  bool // making one failed a moment ago
	lastErr  error
	closed   bool
	refilled chan struct{} // closed when the refiller is gone
	inLine   func(do func() error) error
}

// Open makes a Host and starts filling its pool. What a former daemon left is
// kept until Sweep, so that Adopt can be called before.
func Open(cfg Config) (*Host, error) {
	if cfg.wire == 0 {
		cfg.wire = wireNow
	}
	h := &Host{cfg: cfg, slots: map[int]bool{}, owned: map[int]bool{}, refilled: make(chan struct{}), inLine: func(do func() error) error { return do() }}
	h.changed = sync.NewCond(&h.mu)
	if cfg.RunDir == "" || !filepath.IsAbs(cfg.RunDir) {
		return nil, fault.New(fault.Invalid, "bad_config", "the run folder %q must be an absolute path", cfg.RunDir)
	}
	h.control = filepath.Join(cfg.RunDir, controlFolder)
	var err error
	if h.root, err = cgroup.OpenRoot(cfg.CgroupRoot); err != nil {
		return nil, err
	}
	opened := false
	defer func() {
		if !opened {
			h.letGo()
		}
	}()
	if err := h.lockGroup(); err != nil {
		return nil, err
	}
	defer func() {
		if !opened {
			h.leave()
			_ = os.Remove(h.control)
		}
	}()
	// Not before the lock: what is there may be another daemon's.
	if err := os.MkdirAll(h.control, 0o711); err != nil {
		return nil, fmt.Errorf("opening the run folder: %w", err)
	}
	if err := writeProgram(h.control); err != nil {
		return nil, err
	}
	if err := h.root.Confine(cfg.Share); err != nil {
		return nil, err
	}
	left, err := h.leftovers()
	if err != nil {
		return nil, err
	}
	if h.blocks, err = openBlocks(idsFolder, cfg.RunDir); err != nil {
		return nil, err
	}
	for _, slot := range left {
		h.slots[slot] = true
		if _, err := h.blocks.take(slot / slotsEach); err != nil {
			return nil, err
		}
	}
	if h.nursery, err = startNursery(h.control); err != nil {
		return nil, err
	}
	go h.refill()
	opened = true
	return h, nil
}

// controlFolder lies in the run folder.
const controlFolder = "boxes"

// idsFolder is where the daemons of a host share ids out.
const idsFolder = "/run/lock/boxwood-ids"

// lockPatience is for a daemon that was killed a moment ago: what it was starting just then has its locks until it is executed.
const lockPatience = time.Second

// lockGroup refuses a second daemon on one cgroup: each would sweep the other's boxes.
func (h *Host) lockGroup() error {
	f, err := os.Open(h.root.V2)
	if err != nil {
		return fmt.Errorf("opening the cgroup: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	for until := time.Now().Add(lockPatience); err == unix.EWOULDBLOCK && time.Now().Before(until); {
		time.Sleep(20 * time.Millisecond)
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		f.Close()
		if err == unix.EWOULDBLOCK {
			return fault.New(fault.Precondition, "cgroup_in_use", "another daemon has the cgroup %s", h.cfg.CgroupRoot).
				WithHint("a second daemon of a host needs a --cgroup, a --state and a --socket of its own")
		}
		return fmt.Errorf("locking the cgroup %s: %w", h.root.V2, err)
	}
	h.lock = f
	return nil
}

// letGo gives the cgroup and the ids to other daemons.
func (h *Host) letGo() {
	if h.lock != nil {
		h.lock.Close()
	}
	if h.blocks != nil {
		h.blocks.close()
	}
}

// Missing names the cgroup controllers whose limits this host can't enforce.
func (h *Host) Missing() []string { return h.root.Missing }

// RunDepth is the level of a box's Run group in the v2 hierarchy.
func (h *Host) RunDepth() int { return h.root.Depth() }

// Ready counts the zygotes that wait.
func (h *Host) Ready() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.ready)
}

// WaitReady waits until n zygotes wait, or the pool is full.
func (h *Host) WaitReady(ctx context.Context, n int) error {
	stop := context.AfterFunc(ctx, func() { h.mu.Lock(); h.changed.Broadcast(); h.mu.Unlock() })
	defer stop()
	h.mu.Lock()
	defer h.mu.Unlock()
	for len(h.ready) < min(n, h.cfg.Zygotes) {
		if h.closed {
			return errClosed()
		}
		if err := ctx.Err(); err != nil {
			return errors.Join(err, h.lastErr)
		}
		h.changed.Wait()
	}
	return nil
}

func errClosed() error {
	return fault.New(fault.Unavailable, "closing", "the host is shutting down")
}

// leftovers finds slots that have a cgroup or a control folder.
func (h *Host) leftovers() ([]int, error) {
	names, err := h.root.Names()
	if err != nil {
		return nil, fmt.Errorf("looking for boxes of a former daemon: %w", err)
	}
	entries, err := os.ReadDir(h.control)
	if err != nil {
		return nil, fmt.Errorf("looking for boxes of a former daemon: %w", err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	var slots []int
	seen := map[int]bool{}
	for _, name := range names {
		if slot, err := strconv.Atoi(name); err == nil && slot >= 0 && slot < slotsMax && !seen[slot] {
			seen[slot] = true
			slots = append(slots, slot)
		}
	}
	return slots, nil
}

// takeSlot reserves a slot. Slots go round, so that a fresh box rarely has the
// ids of one that has just gone.
func (h *Host) takeSlot() (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for {
		for range h.blocks.slots() {
			slot := h.blocks.slot(h.next % h.blocks.slots())
			h.next = (h.next + 1) % h.blocks.slots()
			if !h.slots[slot] {
				h.slots[slot], h.owned[slot] = true, true
				return slot, nil
			}
		}
		if err := h.blocks.more(); err != nil {
			return 0, err
		}
	}
}

func (h *Host) freeSlot(slot int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.slots, slot)
	delete(h.owned, slot)
}

// RefillInLine has each zygote that refills the pool made by inLine, which calls do when its turn has come and gives back what came of it, or says
// why it didn't.
func (h *Host) RefillInLine(inLine func(do func() error) error) {
	h.mu.Lock()
	h.inLine = inLine
	h.mu.Unlock()
}

// refill keeps the pool full, one zygote at a time, and yields to Starts that
// have one: what they wait for is the processor.
func (h *Host) refill() {
	defer close(h.refilled)
	for h.wanted() {
		h.mu.Lock()
		inLine := h.inLine
		h.mu.Unlock()
		var z *zygote
		err := inLine(func() (err error) {
			z, err = h.newZygote()
			return err
		})
		h.mu.Lock()
		h.lastErr = err
		if err != nil {
			h.backoff = true
			time.AfterFunc(time.Second, func() {
				h.mu.Lock()
				h.backoff = false
				h.changed.Broadcast()
				h.mu.Unlock()
			})
		} else if !h.closed {
			h.ready = append(h.ready, z)
			z = nil
		}
		h.changed.Broadcast()
		h.mu.Unlock()
		if z != nil { // closed meanwhile
			z.discard()
		}
	}
}

func (h *Host) wanted() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for !h.closed && (h.backoff || h.starting > 0 || len(h.ready) >= h.cfg.Zygotes) {
		h.changed.Wait()
	}
	return !h.closed
}

// take gives a zygote: the one that has waited longest, or a new one.
func (h *Host) take() (*zygote, error) {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return nil, errClosed()
	}
	for len(h.ready) > 0 {
		z := h.ready[0]
		h.ready = h.ready[1:]
		if !exited(z.pidfd) {
			h.mu.Unlock()
			return z, nil
		}
		go z.discard() // somebody killed it
	}
	h.mu.Unlock()
	return h.newZygote()
}

func (h *Host) begin() {
	h.mu.Lock()
	h.starting++
	h.mu.Unlock()
}

func (h *Host) end() {
	h.mu.Lock()
	h.starting--
	if h.starting == 0 {
		h.changed.Broadcast()
	}
	h.mu.Unlock()
}

// Close lets zygotes die and stops refilling. Boxes live on; a Host opened later
// on the same folder adopts them. Idempotent.
func (h *Host) Close() error {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		<-h.refilled
		return nil
	}
	h.closed = true
	h.changed.Broadcast()
	h.mu.Unlock()
	<-h.refilled
	h.mu.Lock()
	ready := h.ready
	h.ready = nil
	h.mu.Unlock()
	for _, z := range ready {
		z.discard()
	}
	h.spawning.Lock()
	defer h.spawning.Unlock()
	h.nursery.close()
	defer h.letGo()
	return h.leave()
}

// leave removes what boxes need, unless some live on.
func (h *Host) leave() error {
	if left, err := h.root.Names(); err != nil || len(left) > 0 {
		return err
	}
	removeProgram(h.control) // the next daemon has its own
	return h.root.Remove()
}

// Sweep kills and removes what a former daemon left and nobody has adopted; it
// says how many boxes that were.
func (h *Host) Sweep(ctx context.Context) (int, error) {
	left, err := h.leftovers()
	if err != nil {
		return 0, err
	}
	var errs []error
	n := 0
	for _, slot := range left {
		h.mu.Lock()
		ours := h.owned[slot]
		h.slots[slot] = true
		h.mu.Unlock()
		if ours {
			continue
		}
		if err := h.removeTraces(ctx, slot); err != nil {
			errs = append(errs, fmt.Errorf("sweeping slot %d: %w", slot, err))
			continue
		}
		h.freeSlot(slot)
		n++
	}
	return n, errors.Join(errs...)
}

// removeTraces ends what runs in a slot and removes its groups and folder.
func (h *Host) removeTraces(ctx context.Context, slot int) error {
	g := h.root.Leftover(strconv.Itoa(slot))
	if err := g.KillAll(ctx); err != nil {
		return err
	}
	return errors.Join(g.Remove(), os.RemoveAll(h.controlDir(slot)))
}

func (h *Host) controlDir(slot int) string {
	return filepath.Join(h.control, strconv.Itoa(slot))
}

func groupLimits(l, defaults tree.Limits) cgroup.Limits {
	or := func(a, b int64) int64 {
		if a > 0 {
			return a
		}
		return b
	}
	return cgroup.Limits{
		MemoryBytes: or(l.MemoryBytes, defaults.MemoryBytes),
		Pids:        or(l.Pids, defaults.Pids),
		CPUMillis:   or(l.CPUMillis, defaults.CPUMillis),
	}
}
