package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/tree"
)

// A withheld node is restored by nobody. Who asks for it gets, with Replay, a child of the
// nearest node above it that can be restored, in which the turns between the two have been run
// again as they were asked for. That is another rollout with the same actions, and the tree
// says so: each turn makes a node of its own below that ancestor, with ReplayOf, and the
// child stands at the last of them. Whether the same came of each turn is told, and for the
// caller to judge. Of what a turn left in files and processes nothing is compared: nothing was saved of it.

// Replayed is one turn that was run again.
type Replayed struct {
	Of ids.Node
	// Node that it made; empty for a scratch child.
	Node ids.Node
	// SameOutput: both streams are equal, byte for byte.
	SameOutput bool
	// SameExit: each command ended with the same status, and each transfer as before.
	SameExit bool
}

// wayTo finds the nearest node above a withheld one that can be restored, and the turns that
// lead from there, oldest first. nil: there is none.
func wayTo(v *tree.View, n *tree.Node) (from *tree.Node, turns []ids.Node) {
	for a := range v.PathToRoot(n.ID) {
		if a.Capture == tree.Captured || a.Capture == tree.Proven {
			slices.Reverse(turns)
			return a, turns
		}
		turns = append(turns, a.ID)
	}
	return nil, nil
}

// errWithheld says why a node can't be restored and from where one can go on.
func errWithheld(v *tree.View, n *tree.Node) error {
	err := fault.New(fault.Precondition, "node_withheld", "node %s is withheld: %s", n.ID, n.WithheldReason)
	from, turns := wayTo(v, n)
	if from == nil {
		return err
	}
	return err.From(string(from.ID), len(turns)).
		WithHint("the nearest node that can be forked is %s; %d turns would have to be run again from there, which a fork with replay does", from.ID, len(turns))
}

// replayable finds the way to a withheld node, and refuses one that can't be gone again.
func (e *Engine) replayable(v *tree.View, n *tree.Node) (*tree.Node, []ids.Node, error) {
	from, turns := wayTo(v, n)
	if from == nil {
		return nil, nil, errWithheld(v, n)
	}
	for _, id := range turns {
		was, err := e.Store.FullNode(id)
		if err != nil {
			return nil, nil, err
		}
		if why := unrepeatable(was); why != "" {
			return nil, nil, fault.New(fault.Precondition, "not_repeatable",
				"node %s is withheld, and the turn of node %s on the way to it can't be run again: %s", n.ID, id, why).
				From(string(from.ID), len(turns)).WithHint("fork %s, the nearest node that can be restored, and go on from there", from.ID)
		}
	}
	return from, turns, nil
}

func unrepeatable(n *tree.Node) string {
	switch r := n.Recipe; {
	case r.Once != "":
		return r.Once
	case len(r.Steps) == 0 && n.Action.Steps > 0:
		return "it was recorded by a Boxwood that kept no steps"
	default:
		return ""
	}
}

// replay runs turns again in a child that is enlisted, and whose slot the caller has. A child
// that doesn't come to its end is ended.
func (e *Engine) replay(ctx context.Context, s *sandbox, turns []ids.Node) (out []Replayed, err error) {
	done := false
	defer func() {
		if done {
			return
		}
		if p := recover(); p != nil {
			e.log.ErrorContext(ctx, "replaying turns panicked", "sandbox", s.id, "panic", p, "stack", string(debug.Stack()))
			out, err = nil, fault.New(fault.Internal, "panic", "a defect in the daemon ended the replay").
				WithHint("the daemon's log has the details under %s", s.id)
		}
		s.mu.Lock()
		gone := s.gone
		s.mu.Unlock()
		if !gone {
			err = errors.Join(err, e.drop(context.WithoutCancel(ctx), s, stats.NotReplayed))
		}
	}()
	for i, id := range turns {
		row := stats.ReplayRow{Of: id, Tree: s.tree, Sandbox: s.id, StartedAt: time.Now(), Outcome: stats.OK}
		r, err := e.runAgain(ctx, s, id)
		row.Node, row.SameOutput, row.SameExit, row.Took = r.Node, r.SameOutput, r.SameExit, time.Since(row.StartedAt)
		if err != nil {
			row.Outcome, row.Reason = stats.Failed, fault.As(err).Reason
		}
		e.Stats.Replay(row)
		if err != nil {
			return nil, fmt.Errorf("running the turn of node %s again, %d of %d: %w", id, i+1, len(turns), err)
		}
		out = append(out, r)
		if err := failpoint.Hit("turn replayed"); err != nil {
			return nil, err
		}
	}
	done = true
	return out, nil
}

// runAgain runs one turn again.
func (e *Engine) runAgain(ctx context.Context, s *sandbox, id ids.Node) (Replayed, error) {
	was, err := e.Store.FullNode(id)
	if err != nil {
		return Replayed{}, err
	}
	exposed, err := s.settled(ctx)
	if err != nil {
		return Replayed{}, err
	}
	t, err := e.open(ctx, s, exposed, func() {})
	if err != nil {
		return Replayed{}, err
	}
	t.repeat = id
	for i := range was.Recipe.Steps {
		if err := t.again(ctx, was.Recipe.Steps[i]); err != nil {
			return Replayed{}, errors.Join(err, t.abandon())
		}
	}
	r, err := t.end(ctx, NodeInput{}, nil)
	switch {
	case err != nil:
		return Replayed{}, err
	case r.SandboxLost:
		return Replayed{}, fault.New(fault.Unavailable, "sandbox_lost", "the sandbox died in it")
	case ctx.Err() != nil:
		return Replayed{}, fault.New(fault.Deadline, "fork_deadline", "%w", context.Cause(ctx))
	case t.stopped() != 0:
		return Replayed{}, fault.New(fault.Cancelled, "replay_stopped", "it was stopped from outside")
	}
	return Replayed{Of: id, Node: r.Node.ID, SameOutput: sameOutput(was, r.Node), SameExit: sameExit(was, r.Node)}, nil
}

// again carries out a step as it was asked for. A transfer may fail again, or now; a
// step that can't be asked for any more is an error.
func (t *turn) again(ctx context.Context, s tree.Step) error {
	var do transfer
	switch s.Kind {
	case tree.CommandStep:
		_, err := t.exec(ctx, commandOf(&s))
		return err
	case tree.WriteStep:
		do = func(ctx context.Context, b box.Box) error {
			return b.WriteFile(ctx, s.Path, s.Content, uint32(s.Mode), s.Append)
		}
	case tree.UploadStep:
		do = func(ctx context.Context, b box.Box) error {
			_, _, err := b.Unpack(ctx, s.Path, bytes.NewReader(s.Content))
			return err
		}
	case tree.OpenSessionStep:
		do = func(ctx context.Context, _ box.Box) error {
			_, err := t.openSession(ctx, NewSession{Name: s.Session, TTY: s.TTY, Rows: uint16(s.Rows), Cols: uint16(s.Cols), Cwd: s.Cwd, User: s.User, Env: s.Env})
			return err
		}
	case tree.CloseSessionStep:
		do = func(ctx context.Context, b box.Box) error { return b.CloseSession(ctx, s.Session) }
	default:
		return fault.New(fault.Unsupported, "unknown_step", "it has a step of kind %d, which this boxwood doesn't know", s.Kind)
	}
	before := s.Failed
	s.Failed = ""
	err := t.step(ctx, &s, do)
	if before != "" && s.Failed != "" {
		return nil // as before, or otherwise: sameExit says which
	}
	return err
}

func sameOutput(a, b *tree.Node) bool {
	x, y := a.Observation, b.Observation
	return sabotage.On("replay") || x.StdoutOmitted == y.StdoutOmitted && x.StderrOmitted == y.StderrOmitted &&
		bytes.Equal(x.Stdout, y.Stdout) && bytes.Equal(x.Stderr, y.Stderr) &&
		bytes.Equal(a.Recipe.Stdout, b.Recipe.Stdout) && bytes.Equal(a.Recipe.Stderr, b.Recipe.Stderr)
}

func sameExit(a, b *tree.Node) bool {
	return sabotage.On("replay") || slices.EqualFunc(a.Recipe.Steps, b.Recipe.Steps, func(x, y tree.Step) bool {
		return x.Status == y.Status && x.ExitCode == y.ExitCode && x.Signal == y.Signal && x.Failed == y.Failed
	})
}
