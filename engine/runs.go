package engine

import (
	"context"
	"errors"

	"github.com/boxwood-rl/boxwood/internal/ids"
)

// TakeOver gives a new attempt what the earlier ones left alive in the run's trees: it adopts their
// sandboxes, whose leases begin anew, or releases them. Whoever calls has ended their calls.
func (e *Engine) TakeOver(ctx context.Context, run string, adopt bool) (adopted []Sandbox, released int, err error) {
	left := e.sandboxesOfRun(run)
	if adopt {
		for _, id := range left {
			if s, rerr := e.find(id); rerr == nil {
				s.cancelTurn() // one that was begun and whose end nobody will ask for
				s.renew(0)
				adopted = append(adopted, s.describe())
			}
		}
		return adopted, 0, nil
	}
	released, err = e.Release(ctx, left)
	return nil, released, err
}

// EndRun releases what is alive in a run's trees, and closes them if asked to.
func (e *Engine) EndRun(ctx context.Context, run string, closeTrees bool) (released, closed int, err error) {
	released, err = e.Release(ctx, e.sandboxesOfRun(run))
	if !closeTrees {
		return released, 0, err
	}
	for t := range e.Store.View().TreesOfRun(run) {
		if t.Closed {
			continue
		}
		_, n, cerr := e.CloseTree(ctx, t.ID)
		released, closed, err = released+n, closed+1, errors.Join(err, cerr)
	}
	return released, closed, err
}

func (e *Engine) sandboxesOfRun(run string) (list []ids.Sandbox) {
	of := map[ids.Tree]bool{}
	for t := range e.Store.View().TreesOfRun(run) {
		of[t.ID] = true
	}
	for _, s := range e.live() {
		if of[s.tree] {
			list = append(list, s.id)
		}
	}
	return list
}
