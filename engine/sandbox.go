package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/inspector"
	"github.com/boxwood-rl/boxwood/internal/about"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

// sandbox is one live sandbox. Its id stays over rollbacks; what it is made of
// (body) is replaced as a whole.
type sandbox struct {
	id       ids.Sandbox
	tree     ids.Tree
	scratch  bool
	labels   map[string]string
	lease    time.Duration
	limits   tree.Limits
	defaults tree.Defaults
	seed     string

	// slot holds one token: who has it may start a turn, roll back or release.
	slot chan struct{}

	mu         sync.Mutex
	body       *body
	head       ids.Node
	turn       *turn // the open turn
	leaving    int   // releases under way, which stop every turn
	read       context.CancelFunc
	capture    *sched.Job // pending or running capture of head
	leaseUntil time.Time
	gone       bool
	rested     time.Time // when its last turn was over; zero: it has had none
}

// body is one materialised generation: file state, processes, and the watch
// over both. checkpoint is its last successful capture; an epoch of the watch
// began there.
type body struct {
	gen        ids.Generation
	hostname   string
	upper      *pool.Upper
	box        box.Box
	watch      inspector.Watch
	checkpoint *tree.Checkpoint
	objects    []string // kernel objects before the first turn, for audits
	// touchedProcesses: a verdict said that the process half changed, or nobody knows.
	touchedProcesses bool
	seed             string
	limits           tree.Limits
	took             time.Duration // to make
	shells           shells
	dumped           dumped
	// unkept is the checkpoint whose process state was found to be no longer true, or isn't to be used again.
	unkept ids.Checkpoint
	// hides gives what hides the secrets that may show in it; nil: none is known. secret: processes
	// that were given some run here, or did.
	hides  func() *veil
	secret bool
	// trees whose secrets its sessions may be given again: that in which they were saved, and its own.
	trees []ids.Tree
}

func newSandbox(r *tree.Sandbox, d tree.Defaults) *sandbox {
	return &sandbox{
		id: r.ID, tree: r.Tree, scratch: r.Scratch, labels: r.Labels, lease: r.Lease, limits: r.Limits,
		defaults: d, head: r.Head, slot: make(chan struct{}, 1), leaseUntil: time.Now().Add(r.Lease),
	}
}

// acquire takes the slot: at once, or within wait while another turn runs. It
// then waits for the capture of the last turn (law 9) and says how long that
// took: the exposed delay.
func (s *sandbox) acquire(ctx context.Context, wait time.Duration) (exposed time.Duration, err error) {
	select {
	case s.slot <- struct{}{}:
	default:
		if err := s.waitSlot(ctx, wait); err != nil {
			return 0, err
		}
	}
	exposed, err = s.settled(ctx)
	if err != nil {
		s.releaseSlot()
	}
	return exposed, err
}

// settled waits for the capture of the last turn. The caller has the slot.
func (s *sandbox) settled(ctx context.Context) (exposed time.Duration, err error) {
	s.mu.Lock()
	gone, job := s.gone, s.capture
	s.mu.Unlock()
	if gone {
		return 0, errGone(s.id)
	}
	if job == nil || sabotage.On("shadow") {
		return 0, nil
	}
	began := time.Now()
	select {
	case <-job.Done():
		return 0, nil
	default:
	}
	job.Promote()
	select {
	case <-job.Done(): // its failure is the node's affair: withheld, and the watch is tainted
		return time.Since(began), nil
	case <-ctx.Done():
		return 0, fault.New(fault.Deadline, "capture_wait", "waiting for the capture of sandbox %s: %w", s.id, context.Cause(ctx))
	}
}

func (s *sandbox) waitSlot(ctx context.Context, wait time.Duration) error {
	busy := fault.New(fault.Busy, "sandbox_busy", "sandbox %s is running another turn", s.id).
		WithHint("one turn at a time: wait for it, cancel it, or fork the node and run both")
	if wait <= 0 {
		return busy
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case s.slot <- struct{}{}:
		return nil
	case <-timer.C:
		return busy
	case <-ctx.Done():
		return fault.New(fault.Deadline, "busy_wait", "waiting for the running turn of sandbox %s: %w", s.id, context.Cause(ctx))
	}
}

func (s *sandbox) releaseSlot() { <-s.slot }

// ruin ends a sandbox in which a defect of ours ended a call half-way. The caller has the
// slot. A node that the call has recorded gets no capture any more.
func (s *sandbox) ruin(e *Engine) {
	ctx := context.Background()
	if err := e.drop(ctx, s, stats.Defect); err != nil {
		e.log.ErrorContext(ctx, "ending a sandbox after a panic", "sandbox", s.id, "error", err)
	}
	var left []ids.Node
	v := e.Store.View()
	e.mu.Lock()
	for n := range v.PendingCaptures() {
		if n.Sandbox == s.id && e.pending[n.ID] == nil {
			left = append(left, n.ID)
		}
	}
	e.mu.Unlock()
	for _, id := range left {
		e.withhold(about.With(ctx, about.Tree, string(s.tree), about.Sandbox, string(s.id), about.Node, string(id)), id, "capture lost: a defect in the daemon ended its sandbox")
	}
}

// lastTurn is when the last turn was over: since then the model has been thinking.
func (s *sandbox) lastTurn() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rested
}

func (s *sandbox) renew(lease time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if lease > 0 {
		s.lease = lease
	}
	if until := time.Now().Add(s.lease); until.After(s.leaseUntil) || lease > 0 {
		s.leaseUntil = until
	}
}

func (s *sandbox) cancelTurn() (was bool) {
	s.mu.Lock()
	t := s.turn
	s.mu.Unlock()
	if t == nil {
		return false
	}
	t.interrupt(tree.Stopped)
	return true
}

// leave stops the turn or read that runs and those that begin until done.
func (s *sandbox) leave() (done func()) {
	s.mu.Lock()
	s.leaving++
	t, read := s.turn, s.read
	s.mu.Unlock()
	if t != nil {
		t.dismiss()
	}
	if read != nil {
		read()
	}
	return func() {
		s.mu.Lock()
		s.leaving--
		s.mu.Unlock()
	}
}

// reading makes a context for a read, whose slot the caller has. It ends with a release.
func (s *sandbox) reading(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	s.mu.Lock()
	s.read = cancel
	leaving := s.leaving > 0
	s.mu.Unlock()
	if leaving {
		cancel()
	}
	return ctx, func() {
		cancel()
		s.mu.Lock()
		s.read = nil
		s.mu.Unlock()
	}
}

// Sandbox is a snapshot of what a sandbox is now.
type Sandbox struct {
	ID         ids.Sandbox
	Tree       ids.Tree
	Head       ids.Node
	Generation ids.Generation
	Hostname   string
	Scratch    bool
	Busy       bool
	LeaseUntil time.Time
	Labels     map[string]string
	Limits     tree.Limits
}

func (s *sandbox) describe() Sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Sandbox{
		ID: s.id, Tree: s.tree, Head: s.head, Generation: s.body.gen, Hostname: s.body.hostname,
		Scratch: s.scratch, Busy: s.turn != nil, LeaseUntil: s.leaseUntil, Labels: s.labels, Limits: s.limits,
	}
}

func (s *sandbox) record() *tree.Sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &tree.Sandbox{
		ID: s.id, Tree: s.tree, Head: s.head, Generation: s.body.gen, Scratch: s.scratch,
		LeaseUntil: s.leaseUntil, Lease: s.lease, Labels: s.labels, Hostname: s.body.hostname, Limits: s.limits,
		Commands: s.body.box.Commands(),
	}
}

func errGone(id ids.Sandbox) error {
	return fault.New(fault.NotFound, "sandbox_gone", "no live sandbox %s", id).
		WithHint("it was released, its lease ended or it was lost; fork its node to get another")
}

// Sandbox gives what a live sandbox is now.
func (e *Engine) Sandbox(id ids.Sandbox) (Sandbox, error) {
	s, err := e.find(id)
	if err != nil {
		return Sandbox{}, err
	}
	return s.describe(), nil
}

// Sandboxes lists the live ones, of one tree or (empty) of all.
func (e *Engine) Sandboxes(of ids.Tree) []Sandbox {
	out := []Sandbox{}
	for _, s := range e.live() {
		if of == "" || s.tree == of {
			out = append(out, s.describe())
		}
	}
	return out
}

func (e *Engine) find(id ids.Sandbox) (*sandbox, error) {
	if err := ids.Check(string(id), "sb_", "sandbox"); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if s := e.sandboxes[id]; s != nil {
		return s, nil
	}
	return nil, errGone(id)
}

// Renew lengthens leases; 0 keeps each sandbox's own length.
func (e *Engine) Renew(list []ids.Sandbox, lease time.Duration) ([]Sandbox, error) {
	out := make([]Sandbox, 0, len(list))
	for _, id := range list {
		s, err := e.find(id)
		if err != nil {
			return nil, err
		}
		s.renew(lease)
		out = append(out, s.describe())
	}
	return out, nil
}

// Release ends sandboxes. One that is gone already is no error: Release says
// how many it ended. A running turn is cancelled first; a capture that was
// acknowledged is finished first.
func (e *Engine) Release(ctx context.Context, list []ids.Sandbox) (int, error) {
	released := 0
	var errs []error
	for _, id := range list {
		s, err := e.find(id)
		if fault.Is(err, fault.NotFound) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if err := e.release(ctx, s, stats.Released); err != nil {
			errs = append(errs, err)
			continue
		}
		released++
	}
	return released, errors.Join(errs...)
}

// release stops what holds the sandbox's slot, and what gets it before it does.
func (e *Engine) release(ctx context.Context, s *sandbox, why stats.Ending) error {
	defer s.leave()()
	_, err := s.acquire(ctx, time.Minute)
	if fault.Is(err, fault.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer s.releaseSlot()
	return e.drop(ctx, s, why)
}

// drop takes a sandbox out of the engine; the caller has its slot. Its body is
// torn down behind the reply.
func (e *Engine) drop(ctx context.Context, s *sandbox, why stats.Ending) error {
	ctx = about.With(ctx, about.Tree, string(s.tree), about.Sandbox, string(s.id))
	s.mu.Lock()
	s.gone = true
	b, head := s.body, s.head
	s.mu.Unlock()
	e.Stats.Sandbox(stats.SandboxRow{
		Sandbox: s.id, Tree: s.tree, Scratch: s.scratch, Head: head, Generation: b.gen, EndedAt: time.Now(), Ended: why, Limits: s.limits,
	})
	e.mu.Lock()
	delete(e.sandboxes, s.id)
	e.mu.Unlock()
	e.ends.Ended(time.Now())
	_ = failpoint.Hit("sandbox leaving")
	e.removeBirth(b.gen) // first, or a start could find it without its record
	e.retire(b)
	done, err := e.Store.Start(context.WithoutCancel(ctx), func(tx *tree.Tx) error { return tx.DeleteSandbox(s.id) })
	if err != nil {
		return fmt.Errorf("recording that sandbox %s ended (%s): %w", s.id, why, err)
	}
	_ = failpoint.Hit("sandbox dropped")
	e.recording.Go(func() { // a start that finds the record finds no box to it
		if err := done(); err != nil {
			e.log.ErrorContext(ctx, "recording that a sandbox is gone", "sandbox", s.id, "error", err)
		}
	})
	e.log.DebugContext(ctx, "sandbox ended", "sandbox", s.id, "why", why)
	return nil
}

// bury tears a body down in the background, and tries again what couldn't be done.
func (e *Engine) bury(b *body) { e.buryLater(b, time.Second) }

func (e *Engine) buryLater(b *body, again time.Duration) {
	e.removals.Submit(sched.Work{Class: sched.Prune}, func(ctx context.Context, _ time.Duration) error {
		err := e.tearDown(context.WithoutCancel(ctx), b)
		if err != nil {
			e.log.ErrorContext(ctx, "ending a box", "generation", b.gen, "error", err, "again_in", again)
			e.later(again, func() { e.buryLater(b, min(2*again, time.Minute)) })
		}
		return err
	})
}

// later does something after a while, unless the daemon ends before.
func (e *Engine) later(after time.Duration, do func()) {
	e.postponed.Add(1)
	time.AfterFunc(after, func() {
		defer e.postponed.Add(-1)
		if e.life.Err() == nil {
			do()
		}
	})
}

// tearDown ends a body: processes first, then what they could write to. It is safe to
// repeat. What an ended daemon couldn't do waits for the next start, which finds nobody using it.
func (e *Engine) tearDown(ctx context.Context, b *body) error {
	if b.watch != nil {
		b.watch.Close()
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := b.box.Kill(ctx); err != nil {
		return err
	}
	if err := failpoint.Hit("box killed"); err != nil {
		return err
	}
	e.removeBirth(b.gen)
	return e.Pool.Release(b.gen)
}

// reapExpired ends sandboxes whose lease is over and notices those that died.
func (e *Engine) reapExpired(ctx context.Context) {
	defer e.wg.Done()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			e.reapOnce(ctx, now)
			e.spares.expire(now)
			e.trials.tick()
		}
	}
}

func (e *Engine) reapOnce(ctx context.Context, now time.Time) {
	for _, s := range e.live() {
		if !s.over(now) {
			continue
		}
		if _, err := s.acquire(ctx, 0); err != nil {
			continue // a turn came first and renewed it, or it is gone
		}
		if s.over(time.Now()) {
			why := stats.Expired
			if s.dead() {
				why = stats.Lost
			}
			if err := e.drop(ctx, s, why); err != nil {
				e.log.ErrorContext(ctx, "ending an expired sandbox", "sandbox", s.id, "error", err)
			}
		}
		s.releaseSlot()
	}
}

// over reports whether the lease has ended or pid 1 has died.
func (s *sandbox) over(now time.Time) bool {
	if s.dead() {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.turn == nil && now.After(s.leaseUntil)
}

// dead reports whether pid 1 has died.
func (s *sandbox) dead() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.body.box.Done():
		return true
	default:
		return false
	}
}

func (e *Engine) live() []*sandbox {
	e.mu.Lock()
	defer e.mu.Unlock()
	live := make([]*sandbox, 0, len(e.sandboxes))
	for _, s := range e.sandboxes {
		live = append(live, s)
	}
	return live
}

func hostname(gen ids.Generation) string { return "box-" + string(gen[len(gen)-12:]) }

// identity is what tells this generation from its siblings (law 11).
func identity(gen ids.Generation, seed string, limits tree.Limits) box.Identity {
	sum := sha256.Sum256([]byte("machine-id/" + gen))
	return box.Identity{
		Hostname:   hostname(gen),
		MachineID:  hex.EncodeToString(sum[:16]),
		Generation: string(gen),
		Seed:       seed,
		Limits:     limits,
	}
}
