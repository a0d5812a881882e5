package engine

import (
	"context"
	"sync"
	"time"

	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/about"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

const (
	// sparesEach is how many spares one checkpoint gets at most, half of them while it isn't known how it is
	// asked for, and sparesMax how many there are in all.
	sparesEach, sparesMax = 8, 16
	// spareLife is how long spares wait after the last fork of their checkpoint, at most.
	spareLife = 30 * time.Second
	// sparePause is how long no fork must have been under way before one is made: the
	// replies of the last are still to be sent and read, and turns begin. Without it
	// a fork's median was 0.3 ms higher.
	sparePause = 5 * time.Millisecond
)

// spares are bodies that were made ahead, behind the replies of forks: what was
// forked is likely to be forked again. How many there are of a checkpoint follows from how it was asked for until now:
// as many as come together, and none if the next come when these would have ended. A spare is a clone of the checkpoint's
// snapshot that a zygote has taken as its root: a child in all but its watch,
// its records and its name, which it gets when it is handed out. Until then
// nothing runs in it but pid 1.
//
// A spare is never handed out unless the snapshot still is as its seal says, so
// that a fork with a spare refuses what a fork without one would. Whatever
// is wrong with a spare, it is thrown away, and the fork goes the long way.
//
// Spares are bounded in number and time, and they end with the snapshot or image that they
// come from. A start finds those of a killed daemon as what no record names.
//
// Making one yields to forks: what these wait for is the processor.
type spares struct {
	e *Engine

	mu      sync.Mutex
	changed *sync.Cond // any of the fields below
	shelves map[shelfKey]*shelf
	demands sched.Demands[shelfKey]
	each    time.Duration // what the last one took to make
	forking int
	pausing bool   // after the last fork
	making  *shelf // that a spare is being made for
	closed  bool
	done    chan struct{}
}

// shelfKey is what a spare must agree in with the child that it becomes.
type shelfKey struct {
	snapshot ids.Snapshot
	state    ids.Process
	limits   tree.Limits
}

type shelf struct {
	key    shelfKey
	ck     *tree.Checkpoint
	state  *tree.ProcessState
	bodies []*body
	want   int // 0: what is made for it now is thrown away
	until  time.Time
}

func newSpares(e *Engine) *spares {
	s := &spares{e: e, shelves: map[shelfKey]*shelf{}, demands: sched.Demands[shelfKey]{Most: sparesEach, Life: spareLife}, done: make(chan struct{})}
	s.changed = sync.NewCond(&s.mu)
	return s
}

// begin and end enclose a fork.
func (s *spares) begin() {
	s.mu.Lock()
	s.forking++
	s.mu.Unlock()
}

func (s *spares) end() {
	s.mu.Lock()
	s.forking--
	if s.forking == 0 && !s.pausing {
		s.pausing = true
		time.AfterFunc(sparePause, func() {
			s.mu.Lock()
			s.pausing = false
			s.mu.Unlock()
			s.changed.Broadcast()
		})
	}
	s.mu.Unlock()
}

// wish says that n children of a checkpoint are being asked for.
func (s *spares) wish(p point, limits tree.Limits, n int) {
	if p.state != nil && p.state.Kind == tree.Dump {
		return // timers of what waits would run on, and its memory is all its own
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := shelfKey{p.checkpoint.Snapshot, p.checkpoint.State, limits}
	now := time.Now()
	ahead, keep := s.demands.Asked(now, key, n, sparePause+sparesEach*s.each)
	sh := s.shelves[key]
	if ahead == 0 {
		if sh != nil {
			s.clear(sh)
		}
		return
	}
	if sh == nil {
		sh = &shelf{key: key, ck: p.checkpoint, state: p.state}
		s.shelves[key] = sh
	}
	sh.want, sh.until = ahead, now.Add(keep)
	for s.wanted() > sparesMax {
		oldest := sh
		for _, other := range s.shelves {
			if other.until.Before(oldest.until) {
				oldest = other
			}
		}
		s.clear(oldest)
	}
	s.changed.Broadcast()
}

// offer takes a body that stands at a checkpoint, and that nobody has asked for yet: the next
// fork of it may. It is the spares' own from now on.
func (s *spares) offer(ck *tree.Checkpoint, state *tree.ProcessState, limits tree.Limits, b *body) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.wanted() >= sparesMax {
		s.waste(b)
		return
	}
	key := shelfKey{ck.Snapshot, ck.State, limits}
	if state != nil {
		key.state = state.ID // which ck may not say yet
	}
	sh := s.shelves[key]
	if sh == nil {
		sh = &shelf{key: key, ck: ck, state: state}
		s.shelves[key] = sh
	}
	sh.want, sh.until = max(sh.want, 1), time.Now().Add(spareLife)
	sh.bodies = append(sh.bodies, b)
}

// wanted counts the spares that there should be, or are. The caller holds mu.
func (s *spares) wanted() (n int) {
	for _, sh := range s.shelves {
		n += max(sh.want, len(sh.bodies))
	}
	return n
}

// clear takes a shelf away and buries what lies on it. The caller holds mu.
func (s *spares) clear(sh *shelf) {
	sh.want = 0
	delete(s.shelves, sh.key)
	for _, b := range sh.bodies {
		s.waste(b)
	}
	sh.bodies = nil
}

// waste ends a spare that nobody took.
func (s *spares) waste(b *body) {
	s.e.attaches.Waste(sched.Refill, b.took)
	s.e.bury(b)
}

// take gives a spare that stands at a checkpoint, or nil.
func (s *spares) take(ck *tree.Checkpoint, limits tree.Limits) *body {
	for {
		b := s.pop(shelfKey{ck.Snapshot, ck.State, limits})
		if b == nil {
			return nil
		}
		select {
		case <-b.box.Done():
		default:
			if s.e.Pool.Verify(ck.Snapshot, ck.Seal) == nil {
				return b
			}
		}
		s.waste(b)
	}
}

func (s *spares) pop(key shelfKey) *body {
	s.mu.Lock()
	defer s.mu.Unlock()
	sh := s.shelves[key]
	if sh == nil || len(sh.bodies) == 0 {
		return nil
	}
	b := sh.bodies[0]
	sh.bodies = sh.bodies[1:]
	return b
}

// missing counts the spares that are still to be made. They take zygotes.
func (s *spares) missing() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sh := range s.shelves {
		n += max(0, sh.want-len(sh.bodies))
	}
	if s.making != nil && s.making.want == 0 {
		n++
	}
	return n
}

// expire clears the shelves whose time is over.
func (s *spares) expire(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sh := range s.shelves {
		if now.After(sh.until) {
			s.clear(sh)
		}
	}
}

// drop ends the spares of a snapshot that is about to be removed.
func (s *spares) drop(of ids.Snapshot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, sh := range s.shelves {
		if key.snapshot == of {
			s.clear(sh)
		}
	}
	s.demands.Gone(func(key shelfKey) bool { return key.snapshot == of })
}

// dropAll ends all spares and returns when the pool knows of none.
func (s *spares) dropAll(ctx context.Context) error {
	s.mu.Lock()
	var all []*body
	for _, sh := range s.shelves {
		all = append(all, sh.bodies...)
		sh.bodies = nil
		s.clear(sh)
	}
	for s.making != nil {
		s.changed.Wait()
	}
	s.mu.Unlock()
	for _, b := range all {
		s.e.attaches.Waste(sched.Refill, b.took)
		if err := s.e.tearDown(ctx, b); err != nil {
			return err
		}
	}
	return nil
}

// close ends all spares; none is made any more.
func (s *spares) close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.changed.Broadcast()
	<-s.done
	return s.dropAll(ctx)
}

// run makes spares until close.
func (s *spares) run() {
	defer close(s.done)
	for sh := s.next(); sh != nil; sh = s.next() {
		ctx := about.With(context.Background(), about.Tree, string(sh.ck.Tree), about.Node, string(sh.ck.Node))
		b, err := s.e.embody(ctx, s.e.work(sched.Refill, sh.ck.Tree), sh.ck, sh.state, ids.NewGeneration(), "", sh.key.limits, stats.ForSpare, nil)
		s.mu.Lock()
		switch {
		case err != nil: // a fork would fail in the same way, and say so
			s.e.log.DebugContext(ctx, "making a spare", "checkpoint", sh.ck.ID, "error", err)
			s.clear(sh)
		case sh.want == 0:
			s.mu.Unlock()
			s.e.attaches.Waste(sched.Refill, b.took)
			if err := s.e.tearDown(ctx, b); err != nil {
				s.e.log.ErrorContext(ctx, "ending a spare", "generation", b.gen, "error", err)
			}
			s.mu.Lock()
		default:
			sh.bodies, s.each = append(sh.bodies, b), b.took
		}
		s.making = nil
		s.mu.Unlock()
		s.changed.Broadcast()
	}
}

// next waits for a shelf that lacks a spare; nil when closed.
func (s *spares) next() *shelf {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ; !s.closed; s.changed.Wait() {
		if s.forking > 0 || s.pausing {
			continue
		}
		for _, sh := range s.shelves {
			if len(sh.bodies) < sh.want {
				s.making = sh
				return sh
			}
		}
	}
	return nil
}
