package tree

import (
	"iter"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

func (r reader) Run(name string) (*Run, error) { return get[Run](r, runs, "run", name) }

func (r reader) Runs() iter.Seq[*Run] { return scan[Run](r, runs, byID, nil) }

// TreesOfRun are in no order.
func (r reader) TreesOfRun(name string) iter.Seq[*Tree] {
	return scan[Tree](r, trees, byRun, key(name))
}

// OpenRun starts the next attempt of a run, the first if there was none. A closed run opens again.
func (tx *Tx) OpenRun(name string) (*Run, error) {
	if name == "" || len(name) > MaxRunName || strings.Contains(name, "/") {
		return nil, invalid("the name of a run has 1 to %d bytes and no slash: %.200q", MaxRunName, name)
	}
	r := Run{Name: name}
	if old, ok := find[Run](tx.reader, runs, byID, key(name)); ok {
		r = *old
	}
	r.Attempt, r.OpenedAt, r.Closed = r.Attempt+1, tx.now, false
	r.ModifyIndex = tx.step()
	return put(tx, runs, runRows, name, &r, layoutRun), nil
}

// CloseRun ends a run; its newest attempt must be named.
func (tx *Tx) CloseRun(name string, attempt int64) error {
	r, err := tx.Run(name)
	if err != nil {
		return err
	}
	if err := r.Admits(attempt); err != nil {
		return err
	}
	c := *r
	c.Closed, c.ModifyIndex = true, tx.step()
	put(tx, runs, runRows, name, &c, layoutRun)
	return nil
}

// Admits refuses work of any attempt but the newest of an open run.
func (r *Run) Admits(attempt int64) error {
	switch {
	case attempt < 1 || attempt > r.Attempt:
		return fault.New(fault.Invalid, "no_such_attempt", "run %q has no attempt %d: the newest is %d", r.Name, attempt, r.Attempt)
	case attempt < r.Attempt && !sabotage.On("fence"):
		return fault.New(fault.Precondition, "attempt_superseded", "attempt %d of run %q was followed by attempt %d", attempt, r.Name, r.Attempt).
			WithHint("this process was taken for crashed: end it, or open the run again to take over")
	case r.Closed:
		return fault.New(fault.Precondition, "run_closed", "run %q is closed", r.Name).WithHint("OpenRun opens it again, as a new attempt")
	}
	return nil
}
