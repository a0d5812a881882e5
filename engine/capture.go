package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/about"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

// captureLimit bounds one capture. Past it the node is withheld and the sandbox
// goes on.
const captureLimit = time.Minute

// submitCapture puts the capture of a sandbox's head in line. Until it is over
// nobody gets the sandbox's slot. cause is the work that led to it, for the log.
func (e *Engine) submitCapture(cause context.Context, s *sandbox, b *body, n *tree.Node) {
	w := e.work(sched.Shadow, s.tree)
	e.mu.Lock()
	defer e.mu.Unlock()
	job := e.captures.Submit(w, func(ctx context.Context, queued time.Duration) error {
		defer func() {
			e.mu.Lock()
			delete(e.pending, n.ID)
			e.mu.Unlock()
		}()
		ctx = aboutNode(ctx, cause, n, s.id)
		was := b.checkpoint
		if err := e.capture(ctx, s, b, n, queued); err != nil || !e.auditing() {
			return err
		}
		return e.audit(ctx, s, b, n, was, b.checkpoint)
	})
	e.pending[n.ID] = job
	e.trials.begun.Add(1)
	s.mu.Lock()
	s.capture = job
	s.mu.Unlock()
}

// aboutNode is a context whose lines in the log are about a node and what led to it.
func aboutNode(ctx, cause context.Context, n *tree.Node, s ids.Sandbox) context.Context {
	return about.Inherit(ctx, cause, about.Tree, string(n.Tree), about.Node, string(n.ID), about.Sandbox, string(s))
}

// capture makes the checkpoint of a node whose sandbox stands there untouched.
func (e *Engine) capture(ctx context.Context, s *sandbox, b *body, n *tree.Node, queued time.Duration) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), captureLimit)
	defer cancel()
	row := stats.CaptureRow{
		Node: n.ID, Tree: n.Tree, Sandbox: s.id, Verdict: n.Verdict, Kind: tree.Empty, Queue: queued,
		StartedAt: time.Now(), Outcome: stats.Failed,
	}
	policy := s.defaults.Capture
	if policy == tree.Full {
		b.unkept = b.checkpoint.ID
	}
	ck, state, frozenAt, err := e.captureBoth(ctx, policy, b, n, &row)
	differs := err != nil && fault.As(err).Reason == reasonDiffers && e.keepers[tree.Dump] != nil
	if differs || errors.Is(err, errNotKept) {
		// What runs stands where it stood: a dump has it as it is.
		ck, state, frozenAt, err = e.captureBoth(ctx, policy, b, n, &row)
	}
	if err == nil {
		row.Checkpoint, row.Bytes, row.Outcome = ck.ID, ck.Bytes, stats.OK
		_, err = e.Store.Update(ctx, func(tx *tree.Tx) error {
			if err := failpoint.Hit("snapshot finished"); err != nil {
				return err
			}
			if state != nil {
				if err := tx.PutProcess(*state); err != nil {
					return err
				}
			}
			// Survivors were there when the observation was made, and ran on until the freeze.
			return tx.SetCaptured(*ck, frozenAt, row.Kind == tree.Dump, time.Since(row.StartedAt))
		})
		if err == nil {
			s.mu.Lock()
			b.checkpoint, b.shells.beyond = ck, false
			s.mu.Unlock()
			_ = failpoint.Hit("capture recorded") // nothing is left that could fail
			e.Stats.Capture(row)
			if ck.Process == tree.Dump {
				e.trials.captured(ck, b.limits)
			}
			return nil
		}
		err = fmt.Errorf("recording the capture of node %s: %w", n.ID, err)
		e.spares.drop(ck.Snapshot)
		if !unsettled(err) {
			e.removeSnapshot(ctx, ck.Snapshot)
			if state != nil {
				e.removeState(ctx, state.ID)
			}
		}
	}
	// The sandbox is unharmed, but its next verdict can't lean on this capture.
	if sabotage.On("failed") {
		b.watch.NewEpoch(e.Pool.SnapshotDir(b.checkpoint.Snapshot))
	} else {
		// The epoch may have begun already, with processes that nobody has saved.
		alive, lerr := b.box.Survivors()
		process := n.Verdict == tree.Process || n.Verdict == tree.Both || lerr != nil || len(alive) > 0
		b.watch.Tainted(process, "the last capture failed")
	}
	row.Reason = fault.As(err).Reason
	e.Stats.Capture(row)
	e.log.WarnContext(ctx, "capture failed", "node", n.ID, "sandbox", s.id, "error", b.veil().maskText(err.Error()))
	e.withhold(ctx, n.ID, "capture failed: "+b.veil().maskText(fault.As(err).Message))
	return err
}

// withholdAgain is how long after a full disk kept a node from being withheld that is tried again.
const withholdAgain = time.Second

// withhold marks a node as not restorable exactly: it must be decided, or whoever waits for it would wait until
// a restart. So no deadline of a call bounds it, and what a full disk refuses is tried again until there is
// space or the engine closes; a start decides what is left then.
func (e *Engine) withhold(ctx context.Context, id ids.Node, reason string) {
	if e.tryWithhold(ctx, id, reason) {
		return
	}
	e.recording.Go(func() {
		again := time.NewTicker(withholdAgain)
		defer again.Stop()
		for {
			select {
			case <-e.life.Done():
				return
			case <-again.C:
			}
			if e.tryWithhold(ctx, id, reason) {
				return
			}
		}
	})
}

// tryWithhold is false if it may go better later.
func (e *Engine) tryWithhold(ctx context.Context, id ids.Node, reason string) (over bool) {
	_, err := e.Store.Update(context.WithoutCancel(ctx), func(tx *tree.Tx) error { return tx.SetWithheld(id, reason) })
	if err != nil && !fault.Is(err, fault.NotFound) { // else pruned meanwhile
		e.log.ErrorContext(ctx, "withholding a node", "node", id, "reason", reason, "error", err)
	}
	return !fault.Is(err, fault.Exhausted)
}

// unsettled: the store broke down over a change, which may be found made when it is opened
// again. What it names must stay; a start removes what is on no record.
func unsettled(err error) bool { return fault.As(err).Reason == "store_failed" }

// captureBoth makes both halves of a checkpoint: flush, freeze, process half, snapshot, new
// epoch, thaw; what is left of either half's work is done after the thaw. The
// state is nil for Empty, and for one that the checkpoint before has already.
func (e *Engine) captureBoth(ctx context.Context, policy tree.CapturePolicy, b *body, n *tree.Node, row *stats.CaptureRow) (_ *tree.Checkpoint, _ *tree.ProcessState, _ time.Time, err error) {
	half, kind, err := e.prepareHalf(ctx, policy, b)
	if err != nil {
		return nil, nil, time.Time{}, err
	}
	row.Kind = kind
	defer func() {
		if err != nil {
			half.abort()
		}
	}()
	began := time.Now()
	if err := failpoint.Hit("capture begun"); err != nil {
		return nil, nil, time.Time{}, err
	}
	if err := e.Pool.Flush(ctx, b.gen); err != nil {
		return nil, nil, time.Time{}, fmt.Errorf("flushing: %w", err)
	}
	row.Flush = time.Since(began)
	if err := failpoint.Hit("capture flushed"); err != nil {
		return nil, nil, time.Time{}, err
	}

	id := ids.NewSnapshot()
	tried := time.Now()
	frozenAt := tried
	pending, seen, err := e.snapshotFrozen(ctx, b, half, id, row)
	for try, wait := 1, 5*time.Millisecond; errors.As(err, new(passing)) && (try < passingTries || time.Since(tried) < passingPatience); try, wait = try+1, 2*wait {
		if err := pause(ctx, wait); err != nil {
			return nil, nil, time.Time{}, fmt.Errorf("waiting for what passes: %w", err)
		}
		frozenAt = time.Now()
		pending, seen, err = e.snapshotFrozen(ctx, b, half, id, row)
	}
	if err != nil {
		return nil, nil, time.Time{}, err
	}
	row.Freeze = time.Since(frozenAt)

	finishing := time.Now()
	seal, err := pending.Finish(ctx)
	if err != nil {
		pending.Abort()
		return nil, nil, time.Time{}, fmt.Errorf("finishing the snapshot: %w", err)
	}
	if seen != nil {
		if err := e.walks.keep(id, seen); err != nil {
			e.walks.count(&e.walks.unclear)
			e.log.WarnContext(ctx, "keeping what was seen in files", "snapshot", id, "error", err)
		}
	}
	ck := &tree.Checkpoint{
		ID: ids.NewCheckpoint(), Tree: n.Tree, Node: n.ID, Snapshot: id, Seal: seal, Process: tree.Empty,
		Bytes: e.Pool.ExclusiveBytes(id), CreatedAt: frozenAt, FreezeFor: row.Freeze,
	}
	state, err := half.finish(ctx, ck)
	if err != nil {
		e.removeSnapshot(ctx, id)
		return nil, nil, time.Time{}, err
	}
	if state != nil {
		ck.Process, ck.State = state.Kind, state.ID
		ck.Secrets = state.Kind == tree.Dump && b.secret
		if state.ID == b.checkpoint.State {
			state, row.Kept = nil, true // on record
		}
	}
	row.Finish = time.Since(finishing)
	return ck, state, frozenAt, nil
}

// pause waits, or until ctx ends, which is an error.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// snapshotFrozen is what happens while the box is frozen. The new epoch begins
// before the thaw, so that nothing falls between snapshot and epoch. seen are the files, if they are to be looked at.
func (e *Engine) snapshotFrozen(ctx context.Context, b *body, half saving, id ids.Snapshot, row *stats.CaptureRow) (_ *pool.Pending, seen []string, _ error) {
	if err := b.box.Freeze(ctx); err != nil {
		return nil, nil, fmt.Errorf("freezing: %w", err)
	}
	defer func() {
		if err := b.box.Thaw(); err != nil {
			e.log.ErrorContext(ctx, "thawing a box", "generation", b.gen, "error", err)
		}
	}()
	if err := failpoint.Hit("capture frozen"); err != nil {
		return nil, nil, err
	}
	if err := half.freeze(ctx); err != nil {
		return nil, nil, err
	}
	if err := b.box.CheckRoot(); err != nil && !sabotage.On("root") {
		return nil, nil, err // law 6
	}
	// The snapshot is of the same instant as what was saved of the processes (law 4).
	if sabotage.On("thawed") {
		if err := b.box.Thaw(); err != nil {
			return nil, nil, err
		}
		time.Sleep(20 * time.Millisecond) // as if the host were busy
	}
	began := time.Now()
	pending, err := e.Pool.Snapshot(ctx, b.gen, id)
	if err != nil {
		return nil, nil, fmt.Errorf("taking the snapshot: %w", err)
	}
	row.Snapshot = time.Since(began)
	b.watch.NewEpoch(e.Pool.SnapshotDir(id))
	return pending, e.walkFrozen(ctx, b), nil
}

// removeState gives back the content of a process state that no record names.
func (e *Engine) removeState(ctx context.Context, id ids.Process) {
	if err := e.dropContent(id); err != nil {
		e.log.ErrorContext(ctx, "removing a process state", "state", id, "error", err)
	}
}

// dropContent removes the content of a process state, wherever it is.
func (e *Engine) dropContent(id ids.Process) error { return e.dumps.drop(id) }

// removeSnapshot gives back file state that no record names.
func (e *Engine) removeSnapshot(ctx context.Context, id ids.Snapshot) {
	e.walks.drop(id)
	if err := e.Pool.Remove(id); err != nil {
		e.log.ErrorContext(ctx, "removing a snapshot", "snapshot", id, "error", err)
	}
}

// WaitCaptured waits until each node is captured, proven or withheld, and
// returns them.
func (e *Engine) WaitCaptured(ctx context.Context, nodes []ids.Node) ([]*tree.Node, error) {
	for _, id := range nodes {
		e.promote(id)
	}
	if err := e.Store.WaitNodes(ctx, nodes, decided); err != nil {
		return nil, err
	}
	v := e.Store.View()
	out := make([]*tree.Node, len(nodes))
	for i, id := range nodes {
		n, err := v.Node(id)
		if err != nil {
			return nil, err
		}
		out[i] = n
	}
	return out, nil
}

func decided(n *tree.Node) bool { return n.Capture != tree.Recorded }

// promote makes a pending capture urgent: someone waits for it.
func (e *Engine) promote(id ids.Node) {
	e.mu.Lock()
	job := e.pending[id]
	e.mu.Unlock()
	if job != nil {
		job.Promote()
	}
}
