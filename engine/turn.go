package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// Command is one command of a turn.
type Command struct {
	Argv        []string // or Shell, which runs as `bash -lc`
	Shell       string
	Cwd, User   string
	Env         map[string]string
	Stdin       []byte
	Deadline    time.Duration
	OutputLimit int
	// Output gets chunks as they come. It must not block.
	Output func(stderr bool, p []byte)
}

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
}

// TurnResult is what a turn led to. Node.ID is empty for a scratch sandbox,
// which writes none.
type TurnResult struct {
	Node        *tree.Node
	Timings     tree.Timings
	SandboxLost bool
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

	// Guarded by one.
	steps   int
	text    []byte
	argv    [][]byte
	out     [2]*headTail
	last    box.Exit
	spent   time.Duration
	ended   bool
	touched bool // whether anything ran at all
}

// begin opens a turn: it takes the slot, and the capture of the turn before is
// over.
func (e *Engine) begin(ctx context.Context, id ids.Sandbox, wait time.Duration) (*turn, error) {
	s, err := e.find(id)
	if err != nil {
		return nil, err
	}
	exposed, err := s.acquire(ctx, wait)
	if err != nil {
		return nil, err
	}
	s.renew(0)
	s.mu.Lock()
	b := s.body
	s.mu.Unlock()
	e.noteObjects(b)
	b.watch.BeginTurn()
	if err := b.box.BeginTurn(); err != nil {
		s.releaseSlot()
		return nil, fmt.Errorf("beginning a turn in sandbox %s: %w", id, err)
	}
	t := &turn{id: ids.NewTurn(), e: e, s: s, b: b, started: time.Now(), exposed: exposed}
	t.ctx, t.cancel = context.WithCancel(context.WithoutCancel(ctx))
	limit := e.cfg.OutputLimit
	t.out = [2]*headTail{newHeadTail(limit), newHeadTail(limit)}
	s.mu.Lock()
	s.turn = t
	leaving := s.leaving > 0
	s.mu.Unlock()
	if leaving {
		t.interrupt(tree.Stopped)
	}
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
func (t *turn) expire() {
	t.interrupt(tree.TimedOut)
	if _, err := t.end(context.Background(), NodeInput{}, nil); err != nil && !fault.Is(err, fault.NotFound) {
		t.e.log.Error("ending an expired turn", "sandbox", t.s.id, "error", err)
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

// exec runs one command of the turn to its end. A client that goes away
// cancels the whole turn.
func (t *turn) exec(ctx context.Context, c Command) (CommandResult, error) {
	t.one.Lock()
	defer t.one.Unlock()
	if t.ended || t.stopped() != 0 {
		return CommandResult{}, errTurnOver(t.id)
	}
	cmd, err := t.command(c)
	if err != nil {
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
	cmd.Stdout, cmd.Stderr = sink(0), sink(1)
	t.note(c)

	stop := context.AfterFunc(ctx, func() { t.interrupt(tree.Stopped) })
	exit, err := t.b.box.Exec(t.ctx, cmd)
	stop()
	t.touched = t.touched || !fault.Is(err, fault.Invalid) // the box refuses before it starts anything
	if err != nil {
		return CommandResult{}, fmt.Errorf("running a command in sandbox %s: %w", t.s.id, err)
	}
	t.last = exit
	t.spent += exit.Wall
	return CommandResult{Observation: observe(own, exit), Status: t.status(), Wall: exit.Wall}, nil
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

// note keeps what ran, as a person would read it, bounded.
func (t *turn) note(c Command) {
	text := c.Shell
	if len(c.Argv) > 0 {
		text = quoteArgv(c.Argv)
		if t.steps == 0 {
			for _, a := range c.Argv {
				t.argv = append(t.argv, []byte(a))
			}
		}
	}
	t.noteText(text)
}

func (t *turn) noteText(text string) {
	if t.steps > 0 {
		t.argv = nil
		text = "\n" + text
	}
	t.steps++
	if room := tree.MaxAction - len(t.text); room > 0 {
		t.text = append(t.text, text[:min(room, len(text))]...)
	}
}

// command resolves a command against the tree's defaults and the image.
func (t *turn) command(c Command) (box.Command, error) {
	if (len(c.Argv) > 0) == (c.Shell != "") {
		return box.Command{}, fault.New(fault.Invalid, "bad_command", "a command has either argv or shell, and one of them must be there")
	}
	d := t.s.defaults
	argv := c.Argv
	if c.Shell != "" {
		argv = []string{"bash", "-lc", c.Shell}
	}
	first := func(a ...string) string {
		for _, v := range a {
			if v != "" {
				return v
			}
		}
		return ""
	}
	env := map[string]string{
		"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb",
	}
	maps.Copy(env, d.Env)
	maps.Copy(env, c.Env)
	env["BOXWOOD_GENERATION"] = string(t.b.gen)
	if t.s.seed != "" {
		env["BOXWOOD_SEED"] = t.s.seed
	}
	flat := make([]string, 0, len(env))
	for k, v := range env {
		if k == "" || containsAny(k, "=\x00") || containsAny(v, "\x00") {
			return box.Command{}, fault.New(fault.Invalid, "bad_env", "the environment variable %q can't be set: its name is empty or has '=', or a NUL is in it", k)
		}
		flat = append(flat, k+"="+v)
	}
	slices.Sort(flat)
	for _, a := range argv {
		if containsAny(a, "\x00") {
			return box.Command{}, fault.New(fault.Invalid, "bad_command", "an argument holds a NUL byte, which no command line can")
		}
	}
	deadline := c.Deadline
	if deadline <= 0 {
		deadline = d.TurnDeadline
	}
	if deadline <= 0 {
		deadline = t.e.cfg.TurnDeadline
	}
	if !keepsDeadlines {
		deadline = time.Hour
	}
	return box.Command{
		Argv: argv, Env: flat, Cwd: first(c.Cwd, d.Cwd, "/"), User: first(c.User, d.User, "0"),
		Stdin: c.Stdin, Deadline: time.Now().Add(deadline),
	}, nil
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
	t.ended = true
	if t.expiry != nil {
		t.expiry.Stop()
	}
	defer t.cancel()
	ctx = context.WithoutCancel(ctx)
	e, s, b := t.e, t.s, t.b
	defer func() {
		s.mu.Lock()
		s.turn = nil
		s.mu.Unlock()
		e.mu.Lock()
		delete(e.turns, t.id)
		e.mu.Unlock()
		s.renew(0)
		s.releaseSlot()
	}()
	if t.stopped() != 0 {
		// Whatever an interrupted turn left in the background goes, too.
		if err := b.box.KillTurn(ctx); err != nil {
			t.last.Lost = true
		}
	}
	observed := time.Now()
	report := b.watch.Barrier(ctx)

	n := t.node(in, observed)
	n.Verdict, n.External, n.Reasons = report.Verdict, report.External, report.Reasons
	n.Effects, n.EffectCount = report.Effects, report.Count
	n.Timings.Barrier = report.Barrier
	lost := n.TurnStatus == tree.Lost
	e.decide(n, b, lost)

	result := TurnResult{Node: n, SandboxLost: lost}
	if s.scratch {
		n.ID, n.Capture, n.Checkpoint, n.WithheldReason = "", 0, "", ""
		n.Timings.Total = time.Since(t.started) + t.exposed
		result.Timings = n.Timings
		if n.Verdict != tree.None {
			b.watch.Tainted(n.Verdict != tree.Files, "a scratch sandbox is never captured")
		}
		if lost {
			return result, e.drop(ctx, s, "lost")
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
		return TurnResult{}, errors.Join(fmt.Errorf("recording the turn of sandbox %s: %w", s.id, err), e.drop(ctx, s, "unrecorded turn"))
	}
	s.mu.Lock()
	s.head = n.ID
	s.mu.Unlock()
	n.Timings.Record = time.Since(recording)
	n.Timings.Total = time.Since(t.started) + t.exposed
	result.Node, result.Timings = n, n.Timings
	e.countTurn(t, n, report)
	switch {
	case lost:
		return result, e.drop(ctx, s, "lost")
	case n.Capture == tree.Recorded:
		e.submitCapture(s, b, n)
	case e.auditing():
		e.submitAudit(s, b, n)
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
		Labels: in.Labels, PolicyVersion: in.PolicyVersion,
		StartedAt: t.started, EndedAt: observed,
		Timings: tree.Timings{CaptureWait: t.exposed, Command: t.spent},
	}
}

// decide says what becomes of the node's state: shared with the last successful
// capture, captured in the shadow, or withheld.
func (e *Engine) decide(n *tree.Node, b *body, lost bool) {
	withhold := func(format string, args ...any) {
		n.Capture, n.WithheldReason = tree.Withheld, fmt.Sprintf(format, args...)
	}
	switch {
	case lost:
		n.Verdict = tree.Both
		withhold("the sandbox died in this turn")
	case n.Verdict == tree.None:
		n.Checkpoint = b.checkpoint.ID
		n.Capture = tree.Captured
		if b.checkpoint.Proven {
			n.Capture = tree.Proven
		}
	case n.Verdict == tree.Files:
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
	t.ended = true
	if t.expiry != nil {
		t.expiry.Stop()
	}
	t.cancel()
	var err error
	if t.touched {
		err = t.e.drop(context.Background(), t.s, "failed turn")
	}
	t.s.mu.Lock()
	t.s.turn = nil
	t.s.mu.Unlock()
	t.e.mu.Lock()
	delete(t.e.turns, t.id)
	t.e.mu.Unlock()
	t.s.releaseSlot()
	return err
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

// transfer moves files into or out of a box. Its context ends with its turn or with
// a release, whatever its client does.
type transfer func(ctx context.Context, b box.Box) error

// within runs one transfer as a step of an open turn or (turn empty) as a turn
// of its own, whose result it returns.
func (e *Engine) within(ctx context.Context, id ids.Sandbox, open ids.Turn, text string, commit Commit, do transfer) (*TurnResult, error) {
	t, err := e.stepTurn(ctx, id, open)
	if err != nil {
		return nil, err
	}
	if err := t.step(ctx, text, do); err != nil {
		if open == "" {
			_, endErr := t.end(ctx, NodeInput{}, nil) // what it wrote before it failed is a change
			err = errors.Join(err, endErr)
		}
		return nil, err
	}
	if open != "" {
		return nil, nil
	}
	r, err := t.end(ctx, NodeInput{}, commit)
	return &r, err
}

func (e *Engine) stepTurn(ctx context.Context, id ids.Sandbox, open ids.Turn) (*turn, error) {
	if open == "" {
		return e.begin(ctx, id, 0)
	}
	t, err := e.openTurn(open)
	if err == nil && id != "" && t.s.id != id {
		return nil, fault.New(fault.Invalid, "wrong_turn", "turn %s belongs to sandbox %s, not %s", open, t.s.id, id)
	}
	return t, err
}

func (t *turn) step(ctx context.Context, text string, do transfer) error {
	t.one.Lock()
	defer t.one.Unlock()
	if t.ended || t.stopped() != 0 {
		return errTurnOver(t.id)
	}
	stop := context.AfterFunc(ctx, func() { t.interrupt(tree.Stopped) })
	defer stop()
	t.noteText(text)
	t.touched = true
	return do(t.ctx, t.b.box)
}

// WriteFile writes or appends to a file of a sandbox.
func (e *Engine) WriteFile(ctx context.Context, id ids.Sandbox, open ids.Turn, path string, content []byte, mode uint32, appendTo bool, commit Commit) (*TurnResult, error) {
	text := fmt.Sprintf("# write %d bytes to %s", len(content), path)
	return e.within(ctx, id, open, text, commit, func(ctx context.Context, b box.Box) error {
		return b.WriteFile(ctx, path, content, mode, appendTo)
	})
}

// Unpacked says what an upload brought.
type Unpacked struct{ Entries, Bytes int64 }

// Upload unpacks a tar stream below a folder of a sandbox.
func (e *Engine) Upload(ctx context.Context, id ids.Sandbox, open ids.Turn, path string, r io.Reader, commit func(*tree.Tx, TurnResult, Unpacked) error) (*TurnResult, Unpacked, error) {
	var u Unpacked
	res, err := e.within(ctx, id, open, "# upload to "+path, func(tx *tree.Tx, r TurnResult) error { return commit(tx, r, u) }, func(ctx context.Context, b box.Box) (err error) {
		// A client that stops sending in the middle must not hold up the turn's end.
		pr, pw := io.Pipe()
		go func() {
			_, err := io.Copy(pw, r)
			pw.CloseWithError(err)
		}()
		defer context.AfterFunc(ctx, func() { pw.CloseWithError(context.Cause(ctx)) })()
		defer pr.Close()
		u.Entries, u.Bytes, err = b.Unpack(ctx, path, pr)
		return err
	})
	return res, u, err
}

// ReadFile reads from a file of a sandbox; it is no turn and changes nothing.
func (e *Engine) ReadFile(ctx context.Context, id ids.Sandbox, open ids.Turn, path string, offset, limit int64) (content []byte, size int64, mode uint32, err error) {
	err = e.reading(ctx, id, open, func(ctx context.Context, b box.Box) error {
		content, size, mode, err = b.ReadFile(ctx, path, offset, limit)
		return err
	})
	return content, size, mode, err
}

// Download packs a file or folder of a sandbox into a tar stream.
func (e *Engine) Download(ctx context.Context, id ids.Sandbox, open ids.Turn, path string, w io.Writer) error {
	// A client that stops reading in the middle holds up this call alone.
	pr, pw := io.Pipe()
	sent := make(chan error, 1)
	go func() {
		_, err := io.Copy(w, pr)
		pr.CloseWithError(err)
		sent <- err
	}()
	err := e.reading(ctx, id, open, func(ctx context.Context, b box.Box) error {
		defer context.AfterFunc(ctx, func() { pr.CloseWithError(context.Cause(ctx)) })()
		return b.Pack(ctx, path, pw)
	})
	pw.CloseWithError(err)
	if serr := <-sent; err == nil {
		err = serr
	}
	return err
}

// reading runs a read-only transfer inside an open turn or between turns.
func (e *Engine) reading(ctx context.Context, id ids.Sandbox, open ids.Turn, do transfer) error {
	if open != "" {
		t, err := e.stepTurn(ctx, id, open)
		if err != nil {
			return err
		}
		t.one.Lock()
		defer t.one.Unlock()
		if t.ended {
			return errTurnOver(open)
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(t.ctx, cancel)()
		return do(ctx, t.b.box)
	}
	s, err := e.find(id)
	if err != nil {
		return err
	}
	if _, err := s.acquire(ctx, 0); err != nil {
		return err
	}
	defer s.releaseSlot()
	s.renew(0)
	ctx, done := s.reading(ctx)
	defer done()
	s.mu.Lock()
	b := s.body
	s.mu.Unlock()
	// A read that is cancelled is killed with its leaf, in which nothing else may be.
	if err := b.box.BeginTurn(); err != nil {
		return fmt.Errorf("reading from sandbox %s: %w", id, err)
	}
	return do(ctx, b.box)
}
