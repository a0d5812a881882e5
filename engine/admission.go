package engine

import (
	"fmt"
	"slices"
	"time"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

// work of a class on a tree.
func (e *Engine) work(k sched.Class, of ids.Tree) sched.Work {
	t, err := e.Store.View().Tree(of)
	if err != nil {
		return sched.Work{Class: k, Tenant: string(of)} // it is being removed
	}
	return e.workOf(k, t)
}

func (e *Engine) workOf(k sched.Class, t *tree.Tree) sched.Work {
	w := sched.Work{Class: k, Tenant: string(t.ID)}
	// The host is shared between clients first, and between the trees of each then.
	if !sabotage.On("tenants") {
		w.Client = t.Labels[OwnerLabel]
		w.ClientWeight = e.cfg.ClientWeights[w.Client]
	}
	return w
}

// admit gives a call's children places in the line for bodies, or refuses them all with when to try again.
func (e *Engine) admit(points []point, wants []Want) (leave func(), err error) {
	of := map[ids.Tree]int{}
	trees := map[ids.Tree]*tree.Tree{}
	for i, p := range points {
		of[p.tree.ID] += wants[i].Count
		trees[p.tree.ID] = p.tree
	}
	var places []func()
	leave = func() {
		for _, back := range places {
			back()
		}
	}
	for id, n := range of {
		back, err := e.attaches.Admit(sched.Fork, trees[id].Labels[OwnerLabel], string(id), n)
		if err != nil {
			leave()
			return nil, fmt.Errorf("forking nodes of tree %s: %w", id, err)
		}
		places = append(places, back)
	}
	return leave, nil
}

// reserve admits n more sandboxes, or says when there will be room for them.
func (e *Engine) reserve(n int) error {
	e.mu.Lock()
	have := len(e.sandboxes) + e.reserved
	closing := e.closing
	if !closing && have+n <= e.cfg.MaxSandboxes {
		e.reserved += n
		e.mu.Unlock()
		return nil
	}
	e.mu.Unlock()
	switch {
	case closing:
		return fault.New(fault.Unavailable, "shutting_down", "the daemon is shutting down")
	case n > e.cfg.MaxSandboxes:
		return fault.New(fault.Invalid, "too_many_sandboxes", "%d sandboxes are more than the limit of %d", n, e.cfg.MaxSandboxes).
			WithHint("ask for fewer, or start the daemon with a higher --max-sandboxes")
	}
	return fault.New(fault.Exhausted, "too_many_sandboxes", "%d sandboxes live or are being made, %d more would pass the limit of %d", have, n, e.cfg.MaxSandboxes).
		WithHint("release some, or start the daemon with a higher --max-sandboxes").After(e.roomAfter(have + n - e.cfg.MaxSandboxes))
}

// roomAfter is when so many sandboxes will have ended: at the pace of those that ended last, and at the latest when the leases
// of as many are over, as far as nobody renews them.
func (e *Engine) roomAfter(n int) time.Duration {
	now := time.Now()
	var leases []time.Duration
	for _, s := range e.live() {
		s.mu.Lock()
		leases = append(leases, s.leaseUntil.Sub(now))
		s.mu.Unlock()
	}
	most := e.cfg.Lease
	if slices.Sort(leases); len(leases) > 0 {
		most = leases[min(n, len(leases))-1]
	}
	return e.ends.Retry(now, n, most)
}

func (e *Engine) unreserve(n int) {
	e.mu.Lock()
	e.reserved -= n
	if e.closing && e.reserved == 0 { // nothing is reserved any more
		close(e.settled)
	}
	e.mu.Unlock()
}
