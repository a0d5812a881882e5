package engine

import (
	"context"
	"fmt"

	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// Rollback puts a live sandbox back to a node of its tree, in place: the same
// id, a new generation. The new body is made first: if that fails the sandbox
// stays as it is.
func (e *Engine) Rollback(ctx context.Context, id ids.Sandbox, to ids.Node, commit func(*tree.Tx, Sandbox) error) (Sandbox, error) {
	s, err := e.find(id)
	if err != nil {
		return Sandbox{}, err
	}
	if _, err := s.acquire(ctx, 0); err != nil {
		return Sandbox{}, err
	}
	done := false
	defer func() {
		if !done { // by a panic: it may stand at either node
			s.ruin(e)
		}
		s.releaseSlot()
	}()
	out, err := e.rollback(ctx, s, to, commit)
	done = true
	return out, err
}

// rollback is Rollback of a sandbox whose slot the caller has.
func (e *Engine) rollback(ctx context.Context, s *sandbox, to ids.Node, commit func(*tree.Tx, Sandbox) error) (Sandbox, error) {
	id := s.id
	s.renew(0)
	p, err := e.forkPoint(ctx, Want{Node: to}, false)
	if err != nil {
		return Sandbox{}, err
	}
	if p.node.Tree != s.tree {
		return Sandbox{}, fault.New(fault.Invalid, "other_tree", "node %s is of tree %s; sandbox %s grows tree %s", to, p.node.Tree, id, s.tree).
			WithHint("fork the node instead")
	}
	if err := e.reserve(1); err != nil {
		return Sandbox{}, err
	}
	defer e.unreserve(1)
	gen := ids.NewGeneration()
	rec := s.record()
	rec.Generation, rec.Hostname, rec.Head, rec.Commands = gen, hostname(gen), to, 0
	b := &birth{point: p, rec: rec, seed: s.seed, purpose: stats.ForRollback}
	if err := e.materialise(ctx, b); err != nil {
		return Sandbox{}, e.hideIn(s.tree, err)
	}
	s.mu.Lock()
	old, oldHead := s.body, s.head
	s.body, s.head, s.capture = b.body, to, nil
	s.mu.Unlock()
	_, err = e.Store.Update(context.WithoutCancel(ctx), func(tx *tree.Tx) error {
		if err := failpoint.Hit("rollback made"); err != nil {
			return err
		}
		if n, err := tx.Node(to); err != nil {
			return err
		} else if n.Checkpoint != p.checkpoint.ID {
			return fault.New(fault.Precondition, "node_withheld", "node %s is withheld: %s", n.ID, n.WithheldReason)
		}
		if err := tx.PutSandbox(*rec); err != nil {
			return err
		}
		if commit == nil {
			return nil
		}
		return commit(tx, s.describe())
	})
	if err != nil {
		s.mu.Lock()
		s.body, s.head = old, oldHead
		s.mu.Unlock()
		e.bury(b.body)
		return Sandbox{}, fmt.Errorf("recording the rollback of sandbox %s: %w", id, err)
	}
	_ = failpoint.Hit("rollback recorded") // it is there: nothing is left that could fail
	e.retire(old)
	return s.describe(), nil
}
