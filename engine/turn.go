package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/about"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/tree"
)

// NodeInput is what a node is born with.
type NodeInput struct {
	Labels        map[string]string
	PolicyVersion string
	Payload       []byte
}

// check refuses what no node takes, before anything runs that would have one.
func (in NodeInput) check() error {
	switch {
	case len(in.Payload) > tree.MaxPayload:
		return fault.New(fault.Invalid, "payload_too_large", "the payload has %d bytes; at most %d are kept", len(in.Payload), tree.MaxPayload)
	case len(in.PolicyVersion) > tree.MaxLabelBytes:
		return fault.New(fault.Invalid, "bad_record", "the policy version is over %d bytes", tree.MaxLabelBytes)
	}
	return tree.CheckLabels(in.Labels)
}

// CommandResult is how one command of a turn went.
type CommandResult struct {
	Observation tree.Observation
	Status      tree.TurnStatus
	Wall        time.Duration
	// SessionEnded: the shell that ran the command is gone, by the command or since it
	// couldn't be stopped otherwise.
	SessionEnded bool
}

// TurnResult is what a turn led to. Node.ID is empty for a scratch sandbox,
// which writes none.
type TurnResult struct {
	Node        *tree.Node
	Timings     tree.Timings
	SandboxLost bool
	// SessionEnded: the shell of a command of this turn is gone.
	SessionEnded bool
}

// Commit runs inside the transaction that makes a result durable, so that the
// answer to an idempotency key is recorded with it or not at all.
type Commit func(tx *tree.Tx, r TurnResult) error

// turn is an open turn. Its sandbox's slot is held until it ends.
type turn struct {
	id      ids.Turn
	e       *Engine
	s       *sandbox
	b       *body
	started time.Time
	exposed time.Duration

	ctx    context.Context // ends with interrupt
	cancel context.CancelFunc
	expiry *time.Timer

	one sync.Mutex // one command or End at a time

	mu          sync.Mutex
	interrupted tree.TurnStatus // why it was stopped, if it was

	over   func()      // gives up the slot, if that is the turn's
	repeat ids.Node    // the node whose turn this one runs again, if any
	broken atomic.Bool // into, by a call from outside

	// Guarded by one.
	recipe  tree.Recipe
	size    int // of the recipe
	steps   int
	text    []byte
	argv    [][]byte
	out     [2]*headTail
	last    box.Exit
	spent   time.Duration
	ended   bool
	touched bool // whether anything ran at all

	sessionEnded bool
}

// begin opens a turn: it takes the slot, and the capture of the turn before is
// over.
func (e *Engine) begin(ctx context.Context, id ids.Sandbox, wait time.Duration) (*turn, error) {
	s, err := e.find(id)
	if err != nil {
		return nil, err
	}
	arrived := time.Now()
	exposed, err := s.acquire(ctx, wait)
	if err != nil {
		return nil, err
	}
	if rested := s.lastTurn(); !rested.IsZero() {
		e.captures.Waited(string(s.tree), arrived.Sub(rested))
	}
	return e.open(ctx, s, exposed, s.releaseSlot)
}

// open opens a turn of a sandbox whose slot the caller has, and whose last capture is
// over. over is called once: when the turn has ended, or couldn't begin.
func (e *Engine) open(ctx context.Context, s *sandbox, exposed time.Duration, over func()) (*turn, error) {
	begun := false
	defer func() {
		if !begun { // by a panic: what it has come to isn't known
			s.ruin(e)
			over()
		}
	}()
	s.renew(0)
	s.mu.Lock()
	b := s.body
	s.mu.Unlock()
	e.trials.begun.Add(1)
	e.noteObjects(ctx, b)
	b.watch.BeginTurn()
	if err := b.box.BeginTurn(); err != nil {
		begun = true
		over()
		return nil, fmt.Errorf("beginning a turn in sandbox %s: %w", s.id, err)
	}
	t := &turn{id: ids.NewTurn(), e: e, s: s, b: b, over: over, started: time.Now(), exposed: exposed}
	t.ctx, t.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := failpoint.Hit("turn begun"); err != nil {
		begun = true
		return nil, errors.Join(err, t.abandon())
	}
	limit := e.cfg.OutputLimit
	t.out = [2]*headTail{newHeadTail(limit), newHeadTail(limit)}
	s.mu.Lock()
	s.turn = t
	leaving := s.leaving > 0
	s.mu.Unlock()
	if leaving {
		t.interrupt(tree.Stopped)
	}
	begun = true
	return t, nil
}

// interrupt stops what the turn runs; its node says why.
func (t *turn) interrupt(why tree.TurnStatus) {
	t.mu.Lock()
	if t.interrupted == 0 {
		t.interrupted = why
	}
	t.mu.Unlock()
	t.cancel()
}

// expire ends a turn that was opened and left.
func (t *turn) expire() { t.close(tree.TimedOut) }

// close ends an open turn in its client's place.
func (t *turn) close(why tree.TurnStatus) {
	t.interrupt(why)
	if _, err := t.end(context.Background(), NodeInput{}, nil); err != nil && !fault.Is(err, fault.NotFound) {
		t.e.log.ErrorContext(t.ctx, "ending an open turn", "sandbox", t.s.id, "error", err)
	}
}

// dismiss stops a turn whose sandbox somebody else needs. One that was opened ends without its client, who
// may never come to end it.
func (t *turn) dismiss() {
	t.interrupt(tree.Stopped)
	t.e.mu.Lock()
	opened := t.e.turns[t.id] == t
	t.e.mu.Unlock()
	if opened {
		go t.close(tree.Stopped)
	}
}

func (t *turn) stopped() tree.TurnStatus {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.interrupted
}

func errTurnOver(id ids.Turn) error {
	return fault.New(fault.NotFound, "turn_over", "no open turn %s", id).
		WithHint("it ended, its deadline passed or it was cancelled")
}

// alone runs a step of the turn: one at a time, and none once the turn is over. A client
// that goes away cancels the whole turn. A step that panics ends the sandbox.
func (t *turn) alone(ctx context.Context, step func() error) error {
	t.one.Lock()
	defer t.one.Unlock()
	if t.ended || t.stopped() != 0 {
		return errTurnOver(t.id)
	}
	done := false
	defer func() {
		if !done { // by a panic
			t.shut()
			t.cancel()
			t.forget()
			t.s.ruin(t.e)
			t.over()
		}
	}()
	stop := context.AfterFunc(ctx, func() { t.interrupt(tree.Stopped) })
	err := step()
	stop()
	if err == nil {
		err = failpoint.Hit("turn ran")
	}
	done = true
	return err
}

// exec runs one command of the turn to its end.
func (t *turn) exec(ctx context.Context, c Command) (r CommandResult, err error) {
	err = t.alone(ctx, func() (err error) {
		r, err = t.run(c)
		return err
	})
	return r, err
}

func (t *turn) run(c Command) (CommandResult, error) {
	cmd, err := t.command(c)
	if err != nil {
		return CommandResult{}, err
	}
	if err := t.confide(c); err != nil {
		return CommandResult{}, err
	}
	limit := t.e.cfg.OutputLimit
	if c.OutputLimit > 0 {
		limit = min(c.OutputLimit, tree.MaxObservation)
		if t.steps == 0 {
			t.out = [2]*headTail{newHeadTail(limit), newHeadTail(limit)}
		}
	}
	own := [2]*headTail{newHeadTail(limit), newHeadTail(limit)}
	sink := func(i int) func([]byte) {
		return func(p []byte) {
			own[i].Write(p)
			t.out[i].Write(p)
			if c.Output != nil {
				c.Output(i == 1, p)
			}
		}
	}
	hide := t.b.veil()
	var flush [2]func()
	cmd.Stdout, flush[0] = hide.masked(sink(0))
	cmd.Stderr, flush[1] = hide.masked(sink(1))
	t.note(c)
	step := c.step()

	var exit box.Exit
	ended := false
	if c.Session != "" {
		exit, ended, err = t.execInSession(c, cmd)
		t.sessionEnded = t.sessionEnded || ended
	} else {
		exit, err = t.b.box.Exec(t.ctx, cmd)
	}
	flush[0]()
	flush[1]()
	t.touched = t.touched || !fault.Is(err, fault.Invalid) && !fault.Is(err, fault.NotFound) // the box refuses before it starts anything
	if err != nil {
		if t.touched {
			t.once("the engine failed in the middle of it")
		}
		return CommandResult{}, fmt.Errorf("running a command in sandbox %s: %w", t.s.id, err)
	}
	t.last = exit
	t.spent += exit.Wall
	step.Status, step.ExitCode, step.Signal = t.status(), int32(exit.Code), int32(exit.Signal)
	t.keep(step)
	return CommandResult{Observation: observe(own, exit), Status: t.status(), Wall: exit.Wall, SessionEnded: ended}, nil
}

func (t *turn) status() tree.TurnStatus {
	switch why := t.stopped(); {
	case t.last.Lost:
		return tree.Lost
	case t.last.TimedOut:
		return tree.TimedOut
	case why != 0:
		return why
	}
	return tree.Completed
}

func observe(out [2]*headTail, exit box.Exit) tree.Observation {
	o := tree.Observation{ExitCode: int32(exit.Code), Signal: int32(exit.Signal), OOMKilled: exit.OOMKilled}
	o.Stdout, o.StdoutOmitted, o.StdoutCutAt = out[0].kept()
	o.Stderr, o.StderrOmitted, o.StderrCutAt = out[1].kept()
	return o
}

// end closes the turn: what it changed is judged, its node made durable and
// its capture put in line. After end has returned the node survives a crash.
func (t *turn) end(ctx context.Context, in NodeInput, commit Commit) (TurnResult, error) {
	t.one.Lock()
	defer t.one.Unlock()
	if t.ended {
		return TurnResult{}, errTurnOver(t.id)
	}
	if err := in.check(); err != nil {
		return TurnResult{}, err
	}
	t.shut()
	defer t.cancel()
	done := false
	defer func() {
		t.s.renew(0)
		t.forget()
		if !done { // by a panic: its node may be there or not
			t.s.ruin(t.e)
		}
		t.over()
	}()
	r, err := t.finish(context.WithoutCancel(ctx), in, commit)
	done = true
	return r, err
}

// finish is the part of end that may find out anything about the turn.
func (t *turn) finish(ctx context.Context, in NodeInput, commit Commit) (TurnResult, error) {
	e, s, b := t.e, t.s, t.b
	if t.stopped() != 0 {
		// Whatever an interrupted turn left in the background goes, too.
		if err := b.box.KillTurn(ctx); err != nil {
			t.last.Lost = true
		}
	}
	observed := time.Now()
	shells := e.judgeShells(ctx, b)
	report := b.watch.Barrier(ctx)
	b.shells.beyond = report.Beyond
	if err := failpoint.Hit("turn judged"); err != nil {
		return TurnResult{}, errors.Join(err, e.drop(ctx, s, stats.TurnFailed))
	}

	n := t.node(in, observed)
	if !s.scratch {
		about.Note(ctx, about.Node, string(n.ID))
	}
	n.Verdict, n.External, n.Reasons = report.Verdict, report.External, report.Reasons
	n.Effects, n.EffectCount = report.Effects, report.Count
	shells.into(n)
	n.Reasons = append(n.Reasons, e.ignores.note(report.Survivors)...)
	b.veilNode(n)
	n.Timings.Barrier = report.Barrier
	lost := n.TurnStatus == tree.Lost
	e.decide(n, s, b, lost)

	result := TurnResult{Node: n, SandboxLost: lost, SessionEnded: t.sessionEnded}
	if s.scratch {
		n.ID, n.Capture, n.Checkpoint, n.WithheldReason = "", 0, "", ""
		n.Timings.Total = time.Since(t.started) + t.exposed
		result.Timings = n.Timings
		if n.Verdict != tree.None {
			b.watch.Tainted(n.Verdict != tree.Files, "a scratch sandbox is never captured")
		}
		if lost {
			return result, e.drop(ctx, s, stats.Lost)
		}
		return result, nil
	}
	recording := time.Now()
	next := s.record()
	next.Head, next.Commands = n.ID, b.box.Commands()
	_, err := e.Store.Update(ctx, func(tx *tree.Tx) error {
		if len(in.Payload) > 0 {
			digest, err := tx.PutPayload(in.Payload)
			if err != nil {
				return err
			}
			n.PayloadDigest, n.PayloadBytes = digest, int64(len(in.Payload))
		}
		if n.Checkpoint != "" {
			switch k, err := tx.Checkpoint(n.Checkpoint); { // as it stands now
			case fault.Is(err, fault.NotFound): // it failed its trial
				n.Checkpoint, n.Verdict = "", tree.Both
				n.Reasons = []string{"what was saved last can't be restored"}
				e.decide(n, s, b, false)
			case err != nil:
				return err
			case k.Proven:
				n.Capture = tree.Proven
			}
		}
		added, err := tx.AddNode(*n)
		if err != nil {
			return err
		}
		n.Depth, n.Ordinal, n.ModifyIndex = added.Depth, added.Ordinal, added.ModifyIndex
		if lost {
			if err := tx.DeleteSandbox(s.id); err != nil {
				return err
			}
		} else if err := tx.PutSandbox(*next); err != nil {
			return err
		}
		if commit == nil {
			return nil
		}
		n.Timings.Total = time.Since(t.started) + t.exposed
		result.Timings = n.Timings
		return commit(tx, result)
	})
	if err != nil {
		// The sandbox has moved on from a node that nobody will ever hear of.
		return TurnResult{}, errors.Join(fmt.Errorf("recording the turn of sandbox %s: %w", s.id, err), e.drop(ctx, s, stats.TurnFailed))
	}
	_ = failpoint.Hit("turn recorded") // it is there: nothing is left that could fail
	s.mu.Lock()
	s.head = n.ID
	s.mu.Unlock()
	n.Timings.Record = time.Since(recording)
	n.Timings.Total = time.Since(t.started) + t.exposed
	result.Node, result.Timings = n, n.Timings
	e.countTurn(t, n, report)
	switch {
	case lost:
		return result, e.drop(ctx, s, stats.Lost)
	case n.Capture == tree.Recorded:
		e.submitCapture(ctx, s, b, n)
	case e.auditing():
		e.submitAudit(ctx, s, b, n)
	}
	return result, nil
}

// node is the record of the turn without what the inspector and the capture say.
func (t *turn) node(in NodeInput, observed time.Time) *tree.Node {
	t.s.mu.Lock()
	parent := t.s.head
	t.s.mu.Unlock()
	return &tree.Node{
		ID: ids.NewNode(), Tree: t.s.tree, Parent: parent, Sandbox: t.s.id,
		Action:      tree.Action{Text: t.text, Argv: t.argv, Steps: int32(t.steps)},
		Observation: observe(t.out, t.last), TurnStatus: t.status(),
		Labels: in.Labels, PolicyVersion: in.PolicyVersion, Recipe: t.recorded(), ReplayOf: t.repeat,
		StartedAt: t.started, EndedAt: observed,
		Timings: tree.Timings{CaptureWait: t.exposed, Command: t.spent},
	}
}

// decide says what becomes of the node's state: shared with the last successful
// capture, captured in the shadow, or withheld.
func (e *Engine) decide(n *tree.Node, s *sandbox, b *body, lost bool) {
	withhold := func(format string, args ...any) {
		n.Capture, n.WithheldReason = tree.Withheld, fmt.Sprintf(format, args...)
	}
	b.touchedProcesses = b.touchedProcesses || n.Verdict == tree.Process || n.Verdict == tree.Both
	policy, left := s.defaults.Capture, ""
	if n.Verdict != tree.None {
		left = e.leftOut(policy, b)
	}
	switch {
	case lost:
		n.Verdict = tree.Both
		withhold("the sandbox died in this turn")
	case n.Verdict == tree.None && policy != tree.Full, left != "" && sabotage.On("policy"):
		n.Checkpoint = b.checkpoint.ID
		n.Capture = tree.Captured // or proven meanwhile
	case left != "":
		withhold("%s", left)
	case n.Verdict == tree.None, n.Verdict == tree.Files, e.keepable(b):
		n.Capture = tree.Recorded
	default:
		withhold("process state can't be saved yet: %s", joinReasons(n.Reasons))
	}
}

// RunTurn runs one command as one turn.
func (e *Engine) RunTurn(ctx context.Context, id ids.Sandbox, c Command, in NodeInput, wait time.Duration, commit Commit) (TurnResult, error) {
	if err := in.check(); err != nil {
		return TurnResult{}, err
	}
	t, err := e.begin(ctx, id, wait)
	if err != nil {
		return TurnResult{}, err
	}
	if _, err := t.exec(ctx, c); err != nil {
		return TurnResult{}, errors.Join(err, t.abandon())
	}
	return t.end(ctx, in, commit)
}

// abandon ends a turn that failed in the engine. If nothing ran, the sandbox
// goes on as if the turn had never begun; else its state is unknown and it is
// ended.
func (t *turn) abandon() error {
	t.one.Lock()
	defer t.one.Unlock()
	if t.ended {
		return nil
	}
	t.shut()
	t.cancel()
	defer t.leave()
	if t.touched {
		return t.e.drop(context.Background(), t.s, stats.TurnFailed)
	}
	return nil
}

// shut takes nothing more in. The caller holds one.
func (t *turn) shut() {
	t.ended = true
	if t.expiry != nil {
		t.expiry.Stop()
	}
}

// leave gives the sandbox to whoever comes next.
func (t *turn) leave() {
	t.forget()
	t.over()
}

func (t *turn) forget() {
	t.s.mu.Lock()
	t.s.turn, t.s.rested = nil, time.Now()
	t.s.mu.Unlock()
	t.e.mu.Lock()
	delete(t.e.turns, t.id)
	t.e.mu.Unlock()
}

// BeginTurn opens a turn of several commands and transfers. It ends by itself,
// marked as timed out, after deadline (0: the tree's or the server's default).
func (e *Engine) BeginTurn(ctx context.Context, id ids.Sandbox, wait, deadline time.Duration) (ids.Turn, error) {
	if deadline <= 0 {
		deadline = e.cfg.TurnDeadline
	}
	t, err := e.begin(ctx, id, wait)
	if err != nil {
		return "", err
	}
	t.one.Lock() // the deadline may have passed before this returns
	defer t.one.Unlock()
	e.mu.Lock()
	e.turns[t.id] = t
	e.mu.Unlock()
	t.expiry = time.AfterFunc(deadline, t.expire)
	if t.stopped() != 0 { // the sandbox was being released as it began
		go t.close(tree.Stopped)
	}
	return t.id, nil
}

func (e *Engine) openTurn(id ids.Turn) (*turn, error) {
	if err := ids.Check(string(id), "tn_", "turn"); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := e.turns[id]; t != nil {
		return t, nil
	}
	return nil, errTurnOver(id)
}

// Exec runs one command of an open turn.
func (e *Engine) Exec(ctx context.Context, id ids.Turn, c Command) (CommandResult, error) {
	t, err := e.openTurn(id)
	if err != nil {
		return CommandResult{}, err
	}
	return t.exec(ctx, c)
}

// EndTurn closes an open turn and makes its node.
func (e *Engine) EndTurn(ctx context.Context, id ids.Turn, in NodeInput, commit Commit) (TurnResult, error) {
	t, err := e.openTurn(id)
	if err != nil {
		return TurnResult{}, err
	}
	return t.end(ctx, in, commit)
}

// CancelTurn stops the running turn of a sandbox, if there is one. An open turn
// still has to be ended.
func (e *Engine) CancelTurn(id ids.Sandbox) (was bool, err error) {
	s, err := e.find(id)
	if err != nil {
		return false, err
	}
	return s.cancelTurn(), nil
}
