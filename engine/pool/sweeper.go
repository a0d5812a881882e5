package pool

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"github.com/boxwood-rl/boxwood/internal/btrfs"
)

// sweeper removes subvolumes behind the callers' backs, one after the other, in
// one goroutine that stop waits for.
type sweeper struct {
	p    *Btrfs
	done chan struct{}

	mu       sync.Mutex
	changed  sync.Cond // queue, busy or stopping
	queue    []sweepItem
	failed   []sweepItem // for lack of space, on a full pool
	busy     bool
	stopping bool
	removed  []uint64 // perhaps not yet taken apart by the kernel, in this order
	settling bool
	hurried  time.Time
}

type sweepItem struct {
	dir  *os.File
	name string
}

const (
	// settleAt is how many removed subvolumes are remembered before the sweeper
	// looks which of them are really gone.
	settleAt = 1024
	// hurryEvery bounds how often we end a transaction only to wake the cleaner.
	hurryEvery = 20 * time.Millisecond
)

func newSweeper(p *Btrfs) *sweeper {
	s := &sweeper{p: p, done: make(chan struct{})}
	s.changed.L = &s.mu
	go s.run()
	return s
}

// add never blocks; the name must be of no more use to anybody.
func (s *sweeper) add(dir *os.File, name string) {
	s.mu.Lock()
	s.queue = append(s.queue, sweepItem{dir, name})
	s.mu.Unlock()
	s.changed.Broadcast()
}

func (s *sweeper) run() {
	defer close(s.done)
	full := settleAt
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		for len(s.queue) == 0 && !s.stopping {
			s.changed.Wait()
		}
		if len(s.queue) == 0 {
			return
		}
		item := s.queue[0]
		s.queue = s.queue[1:]
		s.busy = true
		s.mu.Unlock()
		id, err := s.remove(item)
		s.mu.Lock()
		s.busy = false
		if id != 0 {
			s.removed = append(s.removed, id)
		}
		if lacksSpace(err) {
			s.failed = append(s.failed, item)
		}
		s.changed.Broadcast()
		if len(s.removed) >= full {
			s.mu.Unlock()
			full = 2*s.settle() + settleAt
			s.mu.Lock()
		}
	}
}

// remove gives the id of what it removed, or 0 if it is gone already. What can't be
// removed keeps its name, and the next Open tries again; where only space was
// lacking, retry does.
func (s *sweeper) remove(item sweepItem) (uint64, error) {
	f, err := os.Open(item.dir.Name() + "/" + item.name)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	id, err := btrfs.ID(f)
	f.Close()
	if err != nil {
		return 0, err
	}
	if err := btrfs.Destroy(item.dir, item.name); err != nil {
		return 0, err
	}
	return id, nil
}

// retry puts what couldn't be removed in line again. The caller holds mu.
func (s *sweeper) retry() {
	if len(s.failed) > 0 {
		s.queue, s.failed = append(s.queue, s.failed...), nil
		s.changed.Broadcast()
	}
}

// settle forgets the removed subvolumes that the kernel is done with, and says
// how many it isn't. The kernel takes them in the order in which they were
// removed, so it looks no further than the first that is still there (one that is
// mounted somewhere holds up the count of those behind it). It drops the
// quota groups of the others, which the kernel keeps; it refuses for a group
// whose extents live on in others.
func (s *sweeper) settle() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.removed) > 0 && !s.settling {
		id := s.removed[0]
		s.settling = true // nobody else takes from the front meanwhile
		s.mu.Unlock()
		there, err := btrfs.Exists(s.p.top, id)
		gone := err == nil && !there
		if gone && s.p.quotas {
			btrfs.ForgetQuota(s.p.top, id)
		}
		s.mu.Lock()
		s.settling = false
		if !gone {
			break
		}
		s.removed = s.removed[1:]
	}
	return len(s.removed)
}

// pending counts what isn't gone yet, and wakes the kernel's cleaner.
func (s *sweeper) pending() int {
	left := s.settle()
	s.mu.Lock()
	n := len(s.queue) + len(s.failed)
	if s.busy {
		n++
	}
	hurry := (left > 0 && n == 0 || len(s.failed) > 0) && time.Since(s.hurried) > hurryEvery && !s.stopping
	if hurry {
		s.hurried = time.Now()
		s.retry()
	}
	s.mu.Unlock()
	if hurry {
		btrfs.StartCommit(s.p.top) // only to be quicker
	}
	return n + left
}

// hurry ends the transaction, so that the kernel gives space back now: it takes one
// until it removes a subvolume, and another until its blocks are free.
func (s *sweeper) hurry() {
	s.mu.Lock()
	due := time.Since(s.hurried) > hurryEvery && !s.stopping
	if due {
		s.hurried = time.Now()
		s.retry()
	}
	s.mu.Unlock()
	if due {
		btrfs.StartCommit(s.p.top) // only to be quicker
	}
}

// stop finishes the queue.
func (s *sweeper) stop() {
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	s.changed.Broadcast()
	<-s.done
}

// drain looks again and again: the kernel tells nobody when its cleaner is done.
func (s *sweeper) drain(ctx context.Context) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for s.pending() > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}
