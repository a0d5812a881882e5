package check

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// Repair does what findings say in Fix, calling say before each, and checks again,
// since one repair can lay the next thing open. It goes on after a
// failure. A pool that is unclean is left to the daemon's start, which reads it
// first. The report is of what is left.
func Repair(ctx context.Context, o Options, say func(Finding)) (*Report, error) {
	const rounds = 4
	for round := 0; ; round++ {
		r, err := Run(ctx, o)
		if err != nil {
			return nil, err
		}
		mendable := false
		for _, f := range r.Findings {
			mendable = mendable || f.mend != nil
		}
		if !mendable || round == rounds {
			return r, nil
		}
		if err := mend(ctx, o, r, say); err != nil {
			return r, err
		}
	}
}

func mend(ctx context.Context, o Options, r *Report, say func(Finding)) (err error) {
	if err := o.fill(); err != nil {
		return err
	}
	m := &mender{o: o}
	defer func() { err = errors.Join(err, m.close(ctx)) }()
	if m.store, err = tree.Open(filepath.Join(o.State, "tree"), tree.Options{}); err != nil && !fault.Is(err, fault.DataLoss) {
		return err
	}
	var errs []error
	for _, f := range r.Findings {
		if f.mend == nil {
			continue
		}
		say(f)
		if err := f.mend(ctx, m); err != nil {
			errs = append(errs, fmt.Errorf("mending %s: %w", f.Kind, err))
		}
	}
	return errors.Join(errs...)
}

// mender has what mending needs, opened when it is needed first.
type mender struct {
	o     Options
	store *tree.Store // nil if the log is damaged
	pool  *pool.Btrfs
}

func (m *mender) update(ctx context.Context, f func(*tree.Tx) error) error {
	_, err := m.store.Update(ctx, f)
	return err
}

// openPool also clears away what was half made.
func (m *mender) openPool() (err error) {
	if m.pool != nil {
		return nil
	}
	look, err := pool.Inspect(pool.Options{Dir: m.o.State, ExistingBtrfs: m.o.PoolDir})
	if err != nil {
		return err
	}
	unclean := look.Unclean()
	if err := look.Close(); err != nil {
		return err
	}
	if unclean {
		return fault.New(fault.Precondition, "pool_unclean", "the pool hasn't been read since the host went down").
			WithHint("start the daemon first: it reads all of it and withholds what was lost")
	}
	m.pool, err = pool.OpenBtrfs(pool.Options{Dir: m.o.State, ExistingBtrfs: m.o.PoolDir})
	return err
}

func (m *mender) remove(id ids.Snapshot) error {
	if err := m.openPool(); err != nil {
		return err
	}
	return m.pool.Remove(id)
}

func (m *mender) release(gen ids.Generation) error {
	if err := m.openPool(); err != nil {
		return err
	}
	return m.pool.Release(gen)
}

func (m *mender) removeLayer(ctx context.Context, l ids.Layer) error {
	if err := m.openPool(); err != nil {
		return err
	}
	_, err := m.pool.RemoveLayer(ctx, l)
	return err
}

// close waits until what was removed is gone.
func (m *mender) close(ctx context.Context) error {
	var errs []error
	if m.pool != nil {
		errs = append(errs, m.pool.Drain(ctx), m.pool.Close())
	}
	if m.store != nil {
		errs = append(errs, m.store.Close())
	}
	return errors.Join(errs...)
}
