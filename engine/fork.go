package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"runtime/debug"
	"strconv"
	"sync"
	"time"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/inspector"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

// MaxChildren of one want.
const MaxChildren = 1024

// Want asks for count children of a node, or of the node a sandbox stands at.
type Want struct {
	Node    ids.Node
	Sandbox ids.Sandbox
	Count   int
}

// ForkOptions go for all children of one call.
type ForkOptions struct {
	Scratch       bool
	Labels        map[string]string
	Lease         time.Duration
	Limits        tree.Limits
	MinReady      int
	ReplaceFailed bool
	Seed          uint64
	SameSeed      bool   // for all children of a node
	Replay        bool   // make withheld nodes again: see Replayed
	Request       string // names the call in statistics
	// Secrets that shells of the nodes had and that aren't known any more, by name.
	Secrets map[string]string
}

// Child is the outcome of one child: a sandbox or why there is none.
type Child struct {
	Want, Child int
	Sandbox     Sandbox
	Err         error
	Ready       time.Duration // from the request to ready
	Replayed    []Replayed    // the turns that were run again in it, in order
}

// point is what all children of one want are made from: one checkpoint,
// captured at most once (law 1).
type point struct {
	node       *tree.Node
	checkpoint *tree.Checkpoint
	state      *tree.ProcessState // nil: none
	tree       *tree.Tree
	asked      ids.Node   // node, or what is made again from there
	turns      []ids.Node // by running these
}

// forkPoint finds the checkpoint of a node, waiting for its capture if that is
// still on its way. With replay, a withheld node's is that of the nearest one above it.
func (e *Engine) forkPoint(ctx context.Context, w Want, replay bool) (point, error) {
	id := w.Node
	if w.Sandbox != "" {
		s, err := e.find(w.Sandbox)
		if err != nil {
			return point{}, err
		}
		id = s.describe().Head
	}
	if err := ids.Check(string(id), "nd_", "node"); err != nil {
		return point{}, err
	}
	v, n, err := e.decidedNode(ctx, id)
	if err != nil {
		return point{}, err
	}
	t, err := v.Tree(n.Tree)
	if err != nil {
		return point{}, err
	}
	if t.Closed {
		return point{}, errClosed(t.ID).WithHint("start a new tree from the node: create_tree(node=%s)", n.ID)
	}
	p := point{node: n, tree: t, asked: id}
	if replay && n.Capture == tree.Withheld {
		if p.node, p.turns, err = e.replayable(v, n); err != nil {
			return point{}, err
		}
	}
	if p.checkpoint, err = restorable(v, p.node); err != nil {
		return point{}, err
	}
	p.state, err = e.stateOf(p.checkpoint)
	return p, err
}

// decidedNode gives a node whose capture is over, waiting for it if need be.
func (e *Engine) decidedNode(ctx context.Context, id ids.Node) (*tree.View, *tree.Node, error) {
	v := e.Store.View()
	n, err := v.Node(id)
	if err != nil || decided(n) {
		return v, n, err
	}
	if _, err := e.WaitCaptured(ctx, []ids.Node{id}); err != nil {
		return nil, nil, err
	}
	v = e.Store.View()
	n, err = v.Node(id)
	return v, n, err
}

// restorable gives the checkpoint of a decided node.
func restorable(v *tree.View, n *tree.Node) (*tree.Checkpoint, error) {
	if n.Capture == tree.Withheld {
		return nil, errWithheld(v, n)
	}
	return v.Checkpoint(n.Checkpoint)
}

// Fork makes children. Each is given to result as it becomes ready or fails;
// result is called from one goroutine at a time. The error is for the call as a whole: a bad
// request, a node that can't be forked, or fewer than MinReady children (those
// that were ready are released then).
func (e *Engine) Fork(ctx context.Context, arrived time.Time, wants []Want, o ForkOptions, result func(Child)) error {
	total := 0
	for _, w := range wants {
		if w.Count < 1 || w.Count > MaxChildren {
			return fault.New(fault.Invalid, "bad_count", "%d children asked for; 1 to %d can be", w.Count, MaxChildren)
		}
		total += w.Count
	}
	if total == 0 || total > 4*MaxChildren {
		return fault.New(fault.Invalid, "bad_count", "%d children asked for in one call; 1 to %d can be", total, 4*MaxChildren)
	}
	if err := e.reserve(total); err != nil {
		return err
	}
	defer e.unreserve(total)
	points := make([]point, len(wants))
	for i, w := range wants {
		p, err := e.forkPoint(ctx, w, o.Replay)
		if err != nil {
			return err
		}
		points[i] = p
		if len(o.Secrets) > 0 {
			if err := e.supplySecrets(p, o.Secrets); err != nil {
				return err
			}
		}
	}

	leave, err := e.admit(points, wants)
	if err != nil {
		return err
	}
	defer leave()

	e.trials.begun.Add(1)
	e.spares.begin()
	defer e.spares.end()
	var births []*birth
	for i, w := range wants {
		for k := range w.Count {
			births = append(births, e.conceive(points[i], i, k, o))
		}
		e.spares.wish(points[i], births[len(births)-1].rec.Limits, w.Count)
	}
	if err := e.recordBirths(ctx, births); err != nil {
		for _, b := range births {
			e.miscarry(b)
		}
		return err
	}

	var mu sync.Mutex
	var ready []ids.Sandbox
	var wg sync.WaitGroup
	deliver := func(b *birth) {
		c := e.deliver(ctx, b, o)
		c.Ready = time.Since(arrived)
		b.row.Ready, b.row.Batch = c.Ready, int64(total)
		mu.Lock()
		if c.Err == nil {
			ready = append(ready, b.rec.ID)
		}
		result(c)
		mu.Unlock()
		e.Stats.Fork(b.row)
	}
	for _, b := range births {
		if total == 1 { // waking another thread takes longer than to hand out a spare
			deliver(b)
			break
		}
		wg.Go(func() { deliver(b) })
	}
	wg.Wait()
	if len(ready) < o.MinReady {
		_, err := e.Release(context.WithoutCancel(ctx), ready)
		if err != nil {
			e.log.ErrorContext(ctx, "releasing the children of a failed fork", "error", err)
		}
		return fault.New(fault.Unavailable, "min_ready", "%d of %d children became ready, %d were asked for at least", len(ready), total, o.MinReady)
	}
	return nil
}

// deliver brings a child into the world.
func (e *Engine) deliver(ctx context.Context, b *birth, o ForkOptions) Child {
	s, err := e.raise(ctx, b, o)
	err = e.hideIn(b.rec.Tree, err)
	c := Child{Want: b.want, Child: b.child, Err: err}
	if err == nil && len(b.point.turns) > 0 {
		c.Replayed, c.Err = e.replay(ctx, s, b.point.turns)
		err = c.Err
		s.releaseSlot()
	}
	if err != nil {
		e.miscarry(b)
		e.forget(ctx, b)
		b.row.Reason = fault.As(err).Reason
		return c
	}
	c.Sandbox = s.describe()
	b.row.Outcome = stats.OK
	return c
}

// raise bears a child and enlists it. A defect on the way is that child's failure
// (law 1); what there is of it is found by the next start.
func (e *Engine) raise(ctx context.Context, b *birth, o ForkOptions) (s *sandbox, err error) {
	ctx = aboutNode(ctx, ctx, b.point.node, b.rec.ID)
	defer func() {
		if p := recover(); p != nil {
			e.log.ErrorContext(ctx, "making a child panicked", "sandbox", b.rec.ID, "panic", p, "stack", string(debug.Stack()))
			s, err = nil, fault.New(fault.Internal, "panic", "a defect in the daemon ended the making of this child").
				WithHint("the daemon's log has the details under %s", b.rec.ID)
			e.mu.Lock()
			delete(e.sandboxes, b.rec.ID)
			e.mu.Unlock()
			if b.body != nil {
				e.bury(b.body)
			}
		}
	}()
	if err := e.bear(ctx, b, o); err != nil {
		return nil, err
	}
	if b.rec.Commands > 0 { // its hooks, which its record doesn't know of
		_, err := e.Store.Update(context.WithoutCancel(ctx), func(tx *tree.Tx) error {
			if _, err := tx.Sandbox(b.rec.ID); err != nil {
				return err
			}
			return tx.PutSandbox(*b.rec)
		})
		if err != nil {
			e.bury(b.body)
			return nil, fmt.Errorf("recording what a child's hooks did: %w", err)
		}
	}
	return e.enlist(ctx, b)
}

// miscarry ends the spare of a birth that didn't come to take it.
func (e *Engine) miscarry(b *birth) {
	if b.spare != nil {
		e.bury(b.spare)
		b.spare = nil
	}
}

// birth is a child being made.
type birth struct {
	point       point
	want, child int
	rec         *tree.Sandbox
	seed        string
	spare       *body // made ahead
	body        *body
	purpose     stats.Purpose
	row         stats.ForkRow
}

func (e *Engine) conceive(p point, want, child int, o ForkOptions) *birth {
	b := &birth{point: p, want: want, child: child, purpose: stats.ForFork}
	limits := e.LimitsFor(p.tree, o.Limits)
	gen := ids.NewGeneration()
	if o.Seed != 0 {
		of := child
		if o.SameSeed {
			of = 0
		}
		b.seed = childSeed(o.Seed, p.asked, of)
	}
	// The seed is in the environment of what runs there already.
	if b.seed == "" || p.state == nil {
		b.spare = e.spares.take(p.checkpoint, limits)
	}
	if b.spare != nil {
		gen = b.spare.gen
	}
	lease := o.Lease
	if lease <= 0 {
		lease = p.tree.Defaults.Lease
	}
	if lease <= 0 {
		lease = e.cfg.Lease
	}
	b.rec = &tree.Sandbox{
		ID: ids.NewSandbox(), Tree: p.node.Tree, Head: p.node.ID, Generation: gen, Scratch: o.Scratch,
		Lease: lease, LeaseUntil: time.Now().Add(lease), Labels: o.Labels, Hostname: hostname(gen), Limits: limits,
	}
	b.row = stats.ForkRow{
		Request: o.Request, Node: p.node.ID, Tree: p.node.Tree, Child: int64(child), Sandbox: b.rec.ID, Checkpoint: p.checkpoint.ID,
		StartedAt: time.Now(), Outcome: stats.Failed, Scratch: o.Scratch,
	}
	return b
}

// childSeed is f(seed, node, child): the first 8 bytes of a sha256, in decimal.
func childSeed(seed uint64, node ids.Node, child int) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d/%s/%d", seed, node, child))
	v, _ := strconv.ParseUint(hex.EncodeToString(sum[:8]), 16, 64)
	return strconv.FormatUint(v>>1, 10)
}

func mergeLimits(l ...tree.Limits) (out tree.Limits) {
	pick := func(dst *int64, v int64) {
		if *dst == 0 {
			*dst = v
		}
	}
	for _, v := range l {
		pick(&out.MemoryBytes, v.MemoryBytes)
		pick(&out.Pids, v.Pids)
		pick(&out.CPUMillis, v.CPUMillis)
		pick(&out.DiskBytes, v.DiskBytes)
	}
	return out
}

// recordBirths puts children on record, in order with all that comes after. It
// doesn't wait for the disk: against a killed daemon stands the file of each body (see birthFile), and
// a host that goes down takes the sandboxes with it.
func (e *Engine) recordBirths(ctx context.Context, births []*birth) error {
	done, err := e.Store.Start(context.WithoutCancel(ctx), func(tx *tree.Tx) error {
		for _, b := range births {
			if n, err := tx.Node(b.rec.Head); err != nil {
				return err // pruned in the meantime
			} else if n.Checkpoint != b.point.checkpoint.ID {
				return fault.New(fault.Precondition, "node_withheld", "node %s is withheld: %s", n.ID, n.WithheldReason)
			}
			if err := tx.PutSandbox(*b.rec); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("recording sandboxes: %w", err)
	}
	_ = failpoint.Hit("fork recorded") // like a failure of the disk, it has nobody to go to
	e.recording.Go(func() {
		if err := done(); err != nil { // the store takes nothing any more, and says so to all
			e.log.ErrorContext(ctx, "recording sandboxes", "error", err)
		}
	})
	return nil
}

// forget removes the record of a child that wasn't born.
func (e *Engine) forget(ctx context.Context, b *birth) {
	_, err := e.Store.Update(context.WithoutCancel(ctx), func(tx *tree.Tx) error { return tx.DeleteSandbox(b.rec.ID) })
	if err != nil {
		e.log.ErrorContext(ctx, "removing the record of a child that failed", "sandbox", b.rec.ID, "error", err)
	}
}

// bear makes the child's body, trying once more if that may help and is asked for.
func (e *Engine) bear(ctx context.Context, b *birth, o ForkOptions) error {
	err := e.materialise(ctx, b)
	if err == nil || !o.ReplaceFailed || !fault.As(err).Retryable() || ctx.Err() != nil {
		return err
	}
	return e.materialise(ctx, b)
}

// materialise makes a body that stands at the birth's checkpoint, or takes the
// spare that it was given, and a watch that is there before anything runs. What
// was made is undone if a later step fails.
func (e *Engine) materialise(ctx context.Context, b *birth) error {
	made := b.spare
	b.spare = nil
	if made == nil {
		var err error
		w := e.workOf(sched.Fork, b.point.tree)
		w.Rank = b.child
		if made, err = e.embody(ctx, w, b.point.checkpoint, b.point.state, b.rec.Generation, b.seed, b.rec.Limits, b.purpose, &b.row); err != nil {
			return err
		}
	}
	made.box.SetSeed(b.seed)
	made.seed = b.seed
	made.hides = func() *veil { return e.secrets.of(b.rec.Tree) }
	made.secret = made.secret || b.point.checkpoint.Secrets
	err := failpoint.Hit("fork started")
	var watch inspector.Watch
	if err == nil {
		watch, err = e.watch(made.box, made.upper, b.point.checkpoint, b.point.checkpoint.Process == tree.Dump)
	}
	if err == nil {
		made.watch, made.checkpoint = watch, b.point.checkpoint // a spare's may be another tree's over the same snapshot
		err = made.box.Resume()                                 // what was restored has waited for its watch
	}
	if err == nil {
		err = e.runHooks(ctx, made, environment(b.point.tree.Defaults, made.gen, made.seed))
	}
	if err == nil && sabotage.Hundredth("hundredth") {
		sabotage.FlipByte(made.upper.Dir)
	}
	if err == nil {
		b.rec.Commands = made.box.Commands()
		err = e.writeBirth(made, b.rec)
	}
	if err == nil {
		err = failpoint.Hit("birth written")
	}
	if err != nil {
		if terr := e.tearDown(context.WithoutCancel(ctx), made); terr != nil {
			e.log.ErrorContext(ctx, "ending a half-made box", "generation", made.gen, "error", terr)
		}
		return err
	}
	if b.point.state != nil && b.point.state.Kind == tree.Dump && !b.point.checkpoint.Proven {
		e.prove(ctx, b.point.checkpoint)
	}
	b.body = made
	return nil
}

// embody makes a body that nobody watches yet, and that stands at no checkpoint
// of a tree yet: a clone, checked against its
// seal, and a box with it as its root in which the processes of state run. row, if
// any, is told how long that took. w is what the scheduler is told of it: which tree's it is, and whether somebody waits.
func (e *Engine) embody(ctx context.Context, w sched.Work, ck *tree.Checkpoint, state *tree.ProcessState, gen ids.Generation, seed string, limits tree.Limits, purpose stats.Purpose, row *stats.ForkRow) (_ *body, err error) {
	w.Deadline, _ = ctx.Deadline()
	restore := stats.RestoreRow{
		Purpose: purpose, Node: ck.Node, Tree: ids.Tree(w.Tenant), Checkpoint: ck.ID, Generation: gen, StartedAt: time.Now(), Kind: ck.Process, Outcome: stats.Failed,
	}
	defer func() {
		restore.Total = time.Since(restore.StartedAt)
		if err != nil {
			restore.Reason = fault.As(err).Reason
		} else if restore.Outcome != stats.OK {
			restore.Reason = "panic"
		}
		e.Stats.Restore(restore)
	}()
	var began, cloned time.Time
	var upper *pool.Upper
	err = inLine(ctx, e.clones, w, ck.Node, func() (err error) {
		began = time.Now()
		upper, err = e.Pool.Clone(ctx, ck.Snapshot, ck.Seal, gen, limits.DiskBytes)
		cloned = time.Now()
		restore.Clone = cloned.Sub(began)
		if err != nil {
			return fmt.Errorf("cloning the snapshot of node %s: %w", ck.Node, err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err == nil {
			return
		}
		if uerr := e.Pool.Release(gen); uerr != nil {
			e.log.ErrorContext(ctx, "releasing a clone", "generation", gen, "error", uerr)
		}
	}()
	if err := failpoint.Hit("fork cloned"); err != nil {
		return nil, err
	}
	if sabotage.On("files") {
		sabotage.FlipByte(upper.Dir)
	}
	var attaching time.Time
	id := identity(gen, seed, limits)
	made := &body{gen: gen, hostname: id.Hostname, upper: upper, seed: seed, limits: limits, trees: []ids.Tree{ck.Tree, ids.Tree(w.Tenant)}}
	err = inLine(ctx, e.attaches, w, ck.Node, func() error {
		attaching = time.Now()
		if err := e.startHalf(ctx, made, box.Root{Lower: upper.Layers, Upper: upper.Dir, Work: upper.Work}, id, state); err != nil {
			return fmt.Errorf("starting a box: %w", err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if err = e.compareFiles(ctx, made, ck); err != nil {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		return nil, errors.Join(err, made.box.Kill(end))
	}
	if state == nil {
		e.noteLeader(ctx, made.box)
	}
	restore.Attach, restore.Outcome = time.Since(attaching), stats.OK
	made.took = restore.Clone + restore.Attach
	if row != nil {
		row.Clone, row.Attach = restore.Clone, restore.Attach // the check against the seal included
	}
	return made, nil
}

// errUnfinished is what came of work that a panic ended.
var errUnfinished = errors.New("it panicked")

// inLine does a part of a body's making when its turn has come.
func inLine(ctx context.Context, line *sched.Runner, w sched.Work, node ids.Node, do func() error) (err error) {
	release, err := line.Acquire(ctx, w)
	switch {
	case err == nil:
	case fault.Is(err, fault.Unavailable):
		return err
	default:
		return fault.New(fault.Deadline, "fork_deadline", "forking node %s: %w", node, err)
	}
	err = errUnfinished
	defer func() { release(err) }()
	err = do()
	return err
}

// watch begins the epoch of a box that is as ck says. restored: its processes are there
// and stand still.
func (e *Engine) watch(bx box.Box, upper *pool.Upper, ck *tree.Checkpoint, restored bool) (inspector.Watch, error) {
	w, err := e.Inspector.Watch(inspector.Subject{
		Restored: restored,
		Cgroup:   bx.RunCgroup(), Upper: upper.Dir, Subvolume: upper.Subvolume, Lower: upper.Layers,
		Base: e.Pool.SnapshotDir(ck.Snapshot),
		Survivors: func() ([]inspector.Survivor, error) {
			procs, err := bx.Survivors()
			shells := map[int]bool{} // which describe themselves
			for _, s := range bx.Sessions() {
				shells[s.HostPID] = true
			}
			out := make([]inspector.Survivor, len(procs))
			for i, p := range procs {
				out[i] = inspector.Survivor{PID: p.PID, HostPID: p.HostPID, Cmdline: p.Cmdline, Elsewhere: shells[p.HostPID]}
				if e.ignores.has(p) && !shells[p.HostPID] {
					out[i].Elsewhere, out[i].Ignored = true, p.Name
				}
			}
			return out, err
		},
	})
	if err != nil {
		return nil, fmt.Errorf("watching a box: %w", err)
	}
	return w, nil
}

// enlist makes a child known. A tree that is being closed is marked first and then
// looked through for sandboxes, so that a child is either found there or sees the mark.
func (e *Engine) enlist(ctx context.Context, b *birth) (*sandbox, error) {
	s := newSandbox(b.rec, b.point.tree.Defaults)
	s.seed, s.body = b.seed, b.body
	replays := len(b.point.turns) > 0
	if replays {
		s.slot <- struct{}{} // until it stands where it was asked for
	}
	e.mu.Lock()
	e.sandboxes[s.id] = s
	e.mu.Unlock()
	t, err := e.Store.View().Tree(s.tree)
	if err == nil {
		err = failpoint.Hit("fork enlisted")
	}
	if err == nil && t.Closed {
		err = errClosed(t.ID)
	}
	if err != nil {
		if replays {
			s.releaseSlot()
		}
		return nil, errors.Join(err, e.release(context.WithoutCancel(ctx), s, stats.TreeClosed))
	}
	return s, nil
}

func errClosed(id ids.Tree) *fault.Error {
	return fault.New(fault.Precondition, "tree_closed", "tree %s is closed", id)
}
