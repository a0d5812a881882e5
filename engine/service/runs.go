package service

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/grpc/metadata"

	"github.com/boxwood-rl/boxwood/internal/fault"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

// runHeader says which attempt of which run a call is of: "<name>/<attempt>".
const runHeader = "x-boxwood-run"

type attempt struct {
	run string
	n   int64
}

type attemptKey struct{}

// runOf is the run that a call belongs to; "" if none.
func runOf(ctx context.Context) string {
	a, _ := ctx.Value(attemptKey{}).(attempt)
	return a.run
}

// fence lets calls of the newest attempt of a run pass, and no others. It knows which are on
// their way, so that a new attempt begins when the last call of the old one has ended.
type fence struct {
	mu    sync.Mutex
	calls map[attempt]map[*fenced]struct{}
}

type fenced struct {
	cancel context.CancelCauseFunc
	done   chan struct{}
}

// enter is asked by every call. The store is read with mu held, and end takes mu after the
// new attempt is in the store: a call is refused, or end sees it.
// leave is told what the call came to, and gives what to answer.
func (f *fence) enter(ctx context.Context, method string, view func() *tree.View) (_ context.Context, leave func(error) error, _ error) {
	md, _ := metadata.FromIncomingContext(ctx)
	said := md.Get(runHeader)
	if len(said) == 0 || strings.HasSuffix(method, "/OpenRun") || strings.HasSuffix(method, "/CloseRun") {
		return ctx, func(err error) error { return err }, nil
	}
	name, number, ok := strings.Cut(said[0], "/")
	n, err := strconv.ParseInt(number, 10, 64)
	if !ok || err != nil || len(said) > 1 {
		return nil, nil, fault.New(fault.Invalid, "bad_run", "the metadata %s is <name>/<attempt>, not %.200q", runHeader, said)
	}
	a := attempt{name, n}
	f.mu.Lock()
	defer f.mu.Unlock()
	r, err := view().Run(name)
	if err == nil {
		err = r.Admits(n)
	}
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancelCause(context.WithValue(ctx, attemptKey{}, a))
	c := &fenced{cancel, make(chan struct{})}
	if f.calls == nil {
		f.calls = map[attempt]map[*fenced]struct{}{}
	}
	if f.calls[a] == nil {
		f.calls[a] = map[*fenced]struct{}{}
	}
	f.calls[a][c] = struct{}{}
	return ctx, func(err error) error {
		if why := (&fault.Error{}); err != nil && errors.As(context.Cause(ctx), &why) {
			err = why
		}
		cancel(nil)
		f.mu.Lock()
		defer f.mu.Unlock()
		if delete(f.calls[a], c); len(f.calls[a]) == 0 {
			delete(f.calls, a)
		}
		close(c.done)
		return err
	}, nil
}

// end cancels the calls of a run's attempts up to last and waits until they have ended.
func (f *fence) end(ctx context.Context, run string, last int64, why error) error {
	f.mu.Lock()
	var ending []*fenced
	for a, calls := range f.calls {
		if a.run != run || a.n > last {
			continue
		}
		for c := range calls {
			c.cancel(why)
			ending = append(ending, c)
		}
	}
	f.mu.Unlock()
	for _, c := range ending {
		select {
		case <-c.done:
		case <-ctx.Done():
			return fmt.Errorf("waiting for the calls of an earlier attempt of run %q to end: %w", run, ctx.Err())
		}
	}
	return nil
}

// OpenRun records its answer last: what a crash keeps from answering opens another attempt when it is
// repeated, which costs a number.
func (s *Service) OpenRun(ctx context.Context, req *boxwoodv1.OpenRunRequest) (*boxwoodv1.OpenRunResponse, error) {
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.OpenRunResponse{}, func(record) (*boxwoodv1.OpenRunResponse, error) {
		m := &boxwoodv1.OpenRunResponse{}
		if _, err := s.e.Store.Update(ctx, func(tx *tree.Tx) error {
			r, err := tx.OpenRun(req.GetName())
			if err != nil {
				return err
			}
			m.Attempt = r.Attempt
			return nil
		}); err != nil {
			return nil, err
		}
		why := fault.New(fault.Precondition, "attempt_superseded", "attempt %d of run %q was opened", m.GetAttempt(), req.GetName())
		if err := s.fence.end(ctx, req.GetName(), m.GetAttempt()-1, why); err != nil {
			return nil, err
		}
		adopted, released, err := s.e.TakeOver(ctx, req.GetName(), req.GetAdopt())
		if err != nil {
			return nil, err
		}
		for _, sb := range adopted {
			m.Adopted = append(m.Adopted, sandboxMessage(sb))
		}
		m.Released = int64(released)
		return m, nil
	})
	return got, err
}

func (s *Service) CloseRun(ctx context.Context, req *boxwoodv1.CloseRunRequest) (*boxwoodv1.CloseRunResponse, error) {
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.CloseRunResponse{}, func(record) (*boxwoodv1.CloseRunResponse, error) {
		if _, err := s.e.Store.Update(ctx, func(tx *tree.Tx) error { return tx.CloseRun(req.GetName(), req.GetAttempt()) }); err != nil {
			return nil, err
		}
		why := fault.New(fault.Precondition, "run_closed", "run %q was closed", req.GetName())
		if err := s.fence.end(ctx, req.GetName(), req.GetAttempt(), why); err != nil {
			return nil, err
		}
		released, closed, err := s.e.EndRun(ctx, req.GetName(), req.GetCloseTrees())
		return &boxwoodv1.CloseRunResponse{Released: int64(released), ClosedTrees: int64(closed)}, err
	})
	return got, err
}
