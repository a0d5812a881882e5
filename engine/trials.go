package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

const (
	// lastMax is how many bodies may wait for a trial before they end, idleMax how many
	// checkpoints for a quiet moment. Past either, the first fork is the trial.
	lastMax, idleMax = 256, 64
	// trialLimit bounds one trial, with both its tries.
	trialLimit = 2 * time.Minute
)

// trials restore dumps that nobody has restored yet, each into a body that never runs and is thrown away. One that is
// found equal makes its nodes proven; one that can't be restored, or comes out otherwise than it was saved, twice, withholds
// them. What says nothing about the dump (a full host, a time limit, a shutdown) changes nothing.
//
// A dump is tried before the body that it was made of ends, by release, rollback or the end of its lease: the caller isn't
// kept waiting, and the body stands frozen for as long. The others are tried when nothing has gone on for a moment: no turn, no
// capture and nothing being made. One trial runs at a time. An orderly end of the daemon tries nothing more.
//
// No record names what a trial makes, nor the bodies that wait: a start sweeps what a killed daemon left.
type trials struct {
	e *Engine

	mu      sync.Mutex
	changed *sync.Cond
	last    []*leaver
	idle    []trial // the newest last
	quiet   bool    // tick says so
	trying  bool
	closed  bool
	done    chan struct{}

	begun atomic.Int64 // turns, captures and children, so that tick sees that there was one
	seen  int64        // begun at the last tick

	proved, failed, unclear, leftOut int64
}

type trial struct {
	checkpoint ids.Checkpoint
	limits     tree.Limits // of the sandbox that it was made in
}

// leaver is a body that nobody uses any more.
type leaver struct {
	trial
	b      *body
	frozen chan struct{} // closed when it is, or can't be
}

func newTrials(e *Engine) *trials {
	t := &trials{e: e, done: make(chan struct{})}
	t.changed = sync.NewCond(&t.mu)
	return t
}

// captured says that a dump was made, or kept, for a checkpoint.
func (t *trials) captured(ck *tree.Checkpoint, limits tree.Limits) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.idle) == idleMax {
		t.idle = slices.Delete(t.idle, 0, 1)
		t.leftOut++
	}
	t.idle = append(t.idle, trial{ck.ID, limits})
}

// before takes a body whose checkpoint is to be tried before it ends; false: it need not be.
func (t *trials) before(b *body) bool {
	if b.checkpoint == nil || b.checkpoint.Process != tree.Dump || t.e.life.Err() != nil {
		return false
	}
	ck, err := t.e.Store.View().Checkpoint(b.checkpoint.ID)
	if err != nil || ck.Proven {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || len(t.last) >= lastMax {
		t.leftOut++
		return false
	}
	end := &leaver{trial: trial{ck.ID, b.limits}, b: b, frozen: make(chan struct{})}
	t.last = append(t.last, end)
	go func() { // nobody waits for what it computes
		defer close(end.frozen)
		ctx, cancel := context.WithTimeout(t.e.life, 5*time.Second)
		defer cancel()
		if err := b.box.Freeze(ctx); err != nil {
			t.e.log.DebugContext(ctx, "freezing a body before its end", "generation", b.gen, "error", err)
		}
	}()
	t.changed.Broadcast()
	return true
}

// retire ends a body that nobody uses any more, after its checkpoint was tried, if that is due.
func (e *Engine) retire(b *body) {
	if !e.trials.before(b) {
		e.bury(b)
	}
}

// tick is called once a second.
func (t *trials) tick() {
	begun := t.begun.Load()
	quiet := begun == t.seen && t.e.resting()
	t.seen = begun
	t.mu.Lock()
	t.quiet = quiet
	t.mu.Unlock()
	if quiet {
		t.changed.Broadcast()
	}
}

// resting: no turn runs, nothing is captured and nothing is being made.
func (e *Engine) resting() bool {
	e.mu.Lock()
	busy := e.reserved > 0
	e.mu.Unlock()
	return !busy && e.captures.Pending() == 0 && !slices.ContainsFunc(e.live(), func(s *sandbox) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.turn != nil
	})
}

// run makes trials until close.
func (t *trials) run() {
	defer close(t.done)
	for {
		end, what, ok := t.next()
		if !ok {
			return
		}
		ctx, cancel := context.WithTimeout(t.e.life, trialLimit)
		err := t.e.try(ctx, what)
		cancel()
		t.mu.Lock()
		t.trying = false
		switch {
		case errors.Is(err, errNothingToTry):
		case err == nil:
			t.proved++
		case faulty(err):
			t.failed++
		default:
			t.unclear++
		}
		t.mu.Unlock()
		if end != nil {
			<-end.frozen
			t.e.bury(end.b)
		}
	}
}

// next waits for what is to be tried: before a body ends, or in a quiet moment the newest. A moment is good for one.
func (t *trials) next() (*leaver, trial, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for ; !t.closed; t.changed.Wait() {
		switch n := len(t.idle); {
		case len(t.last) > 0:
			end := t.last[0]
			t.last = t.last[1:]
			t.trying = true
			return end, end.trial, true
		case t.quiet && n > 0:
			what := t.idle[n-1]
			t.idle = t.idle[:n-1]
			t.quiet, t.trying = false, true
			return nil, what, true
		}
	}
	return nil, trial{}, false
}

// close ends what is still waiting, untried.
func (t *trials) close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.changed.Broadcast()
	<-t.done
	for _, end := range t.last {
		<-end.frozen
		t.e.bury(end.b)
	}
	t.last = nil
}

// pending counts the bodies that wait for their end.
func (t *trials) pending() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(t.last)
	if t.trying {
		n++
	}
	return n
}

// capability tells the figures in Info.
func (t *trials) capability() Capability {
	t.mu.Lock()
	defer t.mu.Unlock()
	return Capability{Name: "trial restores", State: 1, Detail: fmt.Sprintf(
		"%d proved, %d failed, %d unclear, %d left out; %d wait before the end of a sandbox, %d for a quiet moment",
		t.proved, t.failed, t.unclear, t.leftOut, len(t.last), len(t.idle))}
}

// errNothingToTry: it was proven, withheld or removed meanwhile.
var errNothingToTry = errors.New("nothing is left to try")

// faulty: the failure of a restore is one of what was saved.
func faulty(err error) bool {
	return fault.Is(err, fault.DataLoss) || fault.Is(err, fault.Precondition)
}

// try restores a checkpoint, throws away what came of it, and says so on its nodes.
func (e *Engine) try(ctx context.Context, what trial) error {
	ck, err := e.Store.View().Checkpoint(what.checkpoint)
	if err != nil || ck.Proven {
		return errNothingToTry
	}
	defer e.hold(ctx, string(ck.Snapshot), string(ck.State))()
	state, err := e.stateOf(ck)
	if _, gone := e.Store.View().Checkpoint(ck.ID); err != nil || gone != nil { // before it was held
		return errNothingToTry
	}
	for tries := 1; ; tries++ {
		b, err := e.embody(ctx, e.work(sched.Audit, ck.Tree), ck, state, ids.NewGeneration(), "", what.limits, stats.ForTrial, nil)
		if err == nil {
			e.bury(b)
			e.prove(context.WithoutCancel(ctx), ck)
			return nil
		}
		switch {
		case ctx.Err() != nil || !faulty(err):
			err = e.hideIn(ck.Tree, err)
			e.log.WarnContext(ctx, "a trial restore says nothing", "checkpoint", ck.ID, "error", err)
			return fault.New(fault.Unavailable, "trial_unclear", "%w", err)
		case tries > 1:
			err = e.hideIn(ck.Tree, err)
			e.distrust(ctx, ck, "its processes can't be restored: "+fault.As(err).Message)
			return err
		}
	}
}

// distrust withholds the nodes of a checkpoint that failed its trial.
func (e *Engine) distrust(ctx context.Context, ck *tree.Checkpoint, reason string) {
	e.log.ErrorContext(ctx, "a checkpoint failed its trial", "checkpoint", ck.ID, "node", ck.Node, "reason", reason)
	for n := range e.Store.View().CheckpointUsers(ck.ID) {
		e.withhold(ctx, n.ID, reason)
	}
}
