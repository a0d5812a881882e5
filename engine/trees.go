package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/boxwood-rl/boxwood/internal/about"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/seccomp"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

// SetupLabel marks the trees in which set-ups ran. Their nodes are pinned: trees
// stand on them.
const SetupLabel = "boxwood.setup"

// flights runs each set-up once however many ask for it at the same time.
type flights struct{ g singleflight.Group }

// SetupStep is one step of a tree's set-up: a command or a file.
type SetupStep struct {
	Command string
	Path    string
	Content []byte
	Mode    uint32
}

// Start says where a tree starts: at an image or at a node of another tree.
type Start struct {
	Image string // name or digest
	Node  ids.Node
}

// NewTree is what a tree is made from.
type NewTree struct {
	Start       Start
	Setup       []SetupStep
	Defaults    tree.Defaults
	Labels      map[string]string
	WithSandbox bool
	Run         string // that it belongs to; may be empty
}

// CreatedTree is a new tree and, if asked for, a sandbox at its root.
type CreatedTree struct {
	Tree        *tree.Tree
	Root        *tree.Node
	Sandbox     *Sandbox
	SetupCached bool
}

// CreateTree starts a tree. Its root is captured from the start: it shares the
// checkpoint of the image, of the node, or of the set-up that was run there.
func (e *Engine) CreateTree(ctx context.Context, n NewTree, commit func(*tree.Tx, CreatedTree) error) (CreatedTree, error) {
	arrived := time.Now()
	from, image, err := e.start(ctx, n.Start, n.Defaults.Limits.Calls)
	if err != nil {
		return CreatedTree{}, err
	}
	d := n.Defaults
	d.Env = maps.Clone(image.Env)
	if d.Env == nil {
		d.Env = map[string]string{}
	}
	maps.Copy(d.Env, n.Defaults.Env)
	if d.Cwd == "" {
		d.Cwd = image.Cwd
	}
	if d.User == "" {
		d.User = image.User
	}
	out := CreatedTree{}
	if len(n.Setup) > 0 {
		var node ids.Node
		if node, out.SetupCached, err = e.setup(ctx, n.Start, image, d, n.Setup, n.Labels[OwnerLabel]); err != nil {
			return CreatedTree{}, err
		}
		p, err := e.forkPoint(ctx, Want{Node: node}, false)
		if err != nil {
			return CreatedTree{}, err
		}
		from = p.checkpoint
	}
	out.Tree, out.Root, err = e.plant(ctx, image, from, d, n.Labels, n.Run, func(tx *tree.Tx, t *tree.Tree, root *tree.Node) error {
		if commit == nil || n.WithSandbox {
			return nil
		}
		return commit(tx, CreatedTree{Tree: t, Root: root, SetupCached: out.SetupCached})
	})
	if err == nil {
		about.Note(ctx, about.Tree, string(out.Tree.ID))
		about.Note(ctx, about.Node, string(out.Root.ID))
	}
	if err == nil && from != nil {
		err = e.secrets.inherit(out.Tree.ID, from.Tree)
	}
	if err == nil {
		err = failpoint.Hit("tree planted")
	}
	if err != nil || !n.WithSandbox {
		return out, err
	}
	var unborn error
	err = e.Fork(ctx, arrived, []Want{{Node: out.Root.ID, Count: 1}}, ForkOptions{}, func(c Child) {
		if unborn = c.Err; unborn == nil {
			out.Sandbox = &c.Sandbox
		}
	})
	if err = errors.Join(err, unborn); err == nil && commit != nil {
		_, err = e.Store.Update(ctx, func(tx *tree.Tx) error { return commit(tx, out) })
	}
	if err != nil {
		return CreatedTree{}, errors.Join(err, e.uproot(ctx, out.Tree))
	}
	return out, nil
}

// uproot removes a tree that nobody has heard of, with all that is in it.
func (e *Engine) uproot(ctx context.Context, t *tree.Tree) error {
	ctx = context.WithoutCancel(ctx)
	if _, _, err := e.closeTree(ctx, t.ID); err != nil {
		return err
	}
	_, err := e.Prune(ctx, t.Root, false, true, func(*tree.Tx, Pruned) error { return nil })
	return err
}

// start finds the checkpoint that a tree starts from; nil means the image's base.
func (e *Engine) start(ctx context.Context, s Start, calls seccomp.Groups) (*tree.Checkpoint, *tree.Image, error) {
	if (s.Image != "") == (s.Node != "") {
		return nil, nil, fault.New(fault.Invalid, "bad_start", "a tree starts from an image or from a node, and one of them must be named")
	}
	if s.Image != "" {
		image, err := findImage(e.Store.View(), s.Image)
		if fault.Is(err, fault.NotFound) {
			return nil, nil, fault.New(fault.NotFound, "no_image", "no image %q", s.Image).
				WithHint("`boxwood image list` shows what is there; `boxwood image import` brings more")
		}
		return nil, image, err
	}
	v, n, err := e.decidedNode(ctx, s.Node)
	if err != nil {
		return nil, nil, err
	}
	ck, err := restorable(v, n)
	if err != nil {
		return nil, nil, err
	}
	t, err := v.Tree(n.Tree)
	if err != nil {
		return nil, nil, err
	}
	was := t.Defaults.Limits.Calls
	if other := was ^ calls; ck.Process == tree.Dump && other != 0 || ck.Process == tree.Shells && other&seccomp.Setuid != 0 {
		return nil, nil, fault.New(fault.Precondition, "other_calls",
			"processes are saved in node %s, which keep what they were allowed beyond the usual, %q; the tree asks for %q", n.ID, was, calls)
	}
	image, err := v.Image(string(t.Image))
	return ck, image, err
}

// plant records a tree and its root.
func (e *Engine) plant(ctx context.Context, image *tree.Image, from *tree.Checkpoint, d tree.Defaults, labels map[string]string, run string,
	then func(*tree.Tx, *tree.Tree, *tree.Node) error) (*tree.Tree, *tree.Node, error) {
	now := time.Now()
	t := &tree.Tree{ID: ids.NewTree(), Root: ids.NewNode(), Image: image.Digest, Labels: labels, Defaults: d, CreatedAt: now, Run: run}
	root := tree.Node{
		ID: t.Root, Tree: t.ID, TurnStatus: tree.Completed, Verdict: tree.None, Capture: tree.Captured,
		StartedAt: now, EndedAt: now, Action: tree.Action{Text: []byte("# start")},
	}
	var added *tree.Node
	_, err := e.Store.Update(ctx, func(tx *tree.Tx) error {
		if _, err := tx.Image(string(image.Digest)); err != nil {
			return err // removed in the meantime
		}
		ck := from
		if ck == nil {
			ck = &tree.Checkpoint{
				ID: ids.NewCheckpoint(), Tree: t.ID, Node: root.ID, Snapshot: image.Base, Seal: image.BaseSeal,
				Process: tree.Empty, CreatedAt: now,
			}
			if err := tx.PutCheckpoint(*ck); err != nil {
				return err
			}
		} else if _, err := tx.Checkpoint(ck.ID); err != nil {
			return err // pruned in the meantime
		}
		root.Checkpoint = ck.ID
		if ck.Proven {
			root.Capture = tree.Proven
		}
		if err := tx.PutTree(*t); err != nil {
			return err
		}
		var err error
		if added, err = tx.AddNode(root); err != nil {
			return err
		}
		return then(tx, t, added)
	})
	if err != nil {
		return nil, nil, fmt.Errorf("recording a tree: %w", err)
	}
	return t, added, nil
}

// setup gives the node that a set-up leads to, running it if it isn't there: for a client, whose state it is then, whoever uses it.
func (e *Engine) setup(ctx context.Context, s Start, image *tree.Image, d tree.Defaults, steps []SetupStep, owner string) (ids.Node, bool, error) {
	start := string(image.Digest)
	if s.Node != "" {
		start = string(s.Node)
	}
	spec, err := json.Marshal(struct {
		Start, User string
		Env         map[string]string
		Steps       []SetupStep
		Calls       seccomp.Groups `json:",omitempty"`
	}{start, d.User, d.Env, steps, d.Limits.Calls})
	if err != nil {
		return "", false, err
	}
	sum := sha256.Sum256(spec)
	digest := hex.EncodeToString(sum[:])
	if node, ok := e.knownSetup(digest); ok {
		return node, true, nil
	}
	type flight struct {
		node   ids.Node
		cached bool
	}
	got, err, _ := e.setups.g.Do(digest, func() (any, error) {
		if node, ok := e.knownSetup(digest); ok {
			return flight{node, true}, nil
		}
		node, err := e.runSetup(context.WithoutCancel(ctx), s, d, steps, digest, owner)
		return flight{node, false}, err
	})
	if err != nil {
		return "", false, err
	}
	return got.(flight).node, got.(flight).cached, nil
}

// knownSetup finds the node of an earlier run that can still be forked.
func (e *Engine) knownSetup(digest string) (ids.Node, bool) {
	v := e.Store.View()
	known, err := v.Setup(digest)
	if err != nil {
		return "", false
	}
	n, err := v.Node(known.Node)
	return known.Node, err == nil && (n.Capture == tree.Captured || n.Capture == tree.Proven)
}

// runSetup runs the steps as turns of a tree of their own.
func (e *Engine) runSetup(ctx context.Context, s Start, d tree.Defaults, steps []SetupStep, digest, owner string) (_ ids.Node, err error) {
	d.Cwd = "/" // the tree's own folder may be what the set-up makes
	d.Capture = tree.Sparse
	labels := map[string]string{SetupLabel: digest[:16]}
	if owner != "" {
		labels[OwnerLabel] = owner
	}
	made, err := e.CreateTree(ctx, NewTree{Start: s, Defaults: d, Labels: labels, WithSandbox: true}, nil)
	if err != nil {
		return "", err
	}
	box := made.Sandbox.ID
	defer func() {
		ctx := context.WithoutCancel(ctx)
		_, rerr := e.Release(ctx, []ids.Sandbox{box})
		if err != nil { // nobody needs what it came to
			rerr = errors.Join(rerr, e.uproot(ctx, made.Tree))
		}
		if rerr != nil {
			e.log.ErrorContext(ctx, "clearing up after a set-up", "sandbox", box, "error", rerr)
		}
	}()
	last := made.Root
	for i, step := range steps {
		r, err := e.runStep(ctx, box, step)
		if err != nil {
			return "", fmt.Errorf("running step %d of the set-up: %w", i+1, err)
		}
		if o := r.Node.Observation; r.Node.TurnStatus != tree.Completed || o.ExitCode != 0 {
			return "", fault.New(fault.Precondition, "setup_failed", "step %d of the set-up (%s) ended with %s: %s",
				i+1, brief(r.Node.Action.Text, 80), ending(r.Node), brief(append(o.Stdout, o.Stderr...), 400))
		}
		last = r.Node
	}
	waited, err := e.WaitCaptured(ctx, []ids.Node{last.ID})
	if err != nil {
		return "", err
	}
	if waited[0].Capture == tree.Withheld {
		return "", fault.New(fault.Precondition, "setup_withheld", "the set-up's state can't be kept: %s", waited[0].WithheldReason).
			WithHint("a set-up may not leave processes running")
	}
	_, err = e.Store.Update(ctx, func(tx *tree.Tx) error {
		if err := tx.Pin(last.ID); err != nil {
			return err
		}
		return tx.PutSetup(tree.Setup{Digest: digest, Node: last.ID})
	})
	return last.ID, err
}

func (e *Engine) runStep(ctx context.Context, box ids.Sandbox, step SetupStep) (TurnResult, error) {
	if step.Command != "" {
		return e.RunTurn(ctx, box, Command{Shell: step.Command}, NodeInput{}, 0, nil)
	}
	mode := step.Mode
	if mode == 0 {
		mode = 0o644
	}
	archive, err := oneFile(path.Base(step.Path), step.Content, mode)
	if err != nil {
		return TurnResult{}, err
	}
	// Unpacking makes the folders that are missing.
	r, _, err := e.Upload(ctx, box, "", path.Dir(step.Path), archive, func(*tree.Tx, TurnResult, Unpacked) error { return nil })
	if err != nil {
		return TurnResult{}, err
	}
	return *r, nil
}

func oneFile(name string, content []byte, mode uint32) (*bytes.Buffer, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: int64(mode), Size: int64(len(content)), ModTime: time.Now()})
	if err == nil {
		_, err = w.Write(content)
	}
	if err == nil {
		err = w.Close()
	}
	return &b, err
}

func ending(n *tree.Node) string {
	switch {
	case n.TurnStatus == tree.TimedOut:
		return "its deadline"
	case n.TurnStatus != tree.Completed:
		return "the loss of the sandbox"
	case n.Observation.Signal != 0:
		return fmt.Sprintf("signal %d", n.Observation.Signal)
	}
	return fmt.Sprintf("exit status %d", n.Observation.ExitCode)
}

// CloseTree releases a tree's sandboxes and refuses new work on it. Soon after, its nodes leave
// memory.
func (e *Engine) CloseTree(ctx context.Context, id ids.Tree) (*tree.Tree, int, error) {
	t, n, err := e.closeTree(ctx, id)
	select {
	case e.closedTree <- struct{}{}:
	default:
	}
	return t, n, err
}

// OpenTree takes new work on a closed tree again.
func (e *Engine) OpenTree(ctx context.Context, id ids.Tree) (*tree.Tree, error) {
	_, err := e.Store.Update(ctx, func(tx *tree.Tx) error {
		now, err := tx.Tree(id)
		if err != nil || !now.Closed {
			return err
		}
		open := *now
		open.Closed = false
		return tx.PutTree(open)
	})
	if err != nil {
		return nil, err
	}
	return e.Store.View().Tree(id)
}

// Trees that were changed after they were closed stay in memory for a while: trainers write
// the rewards of a tree one after the other.
const (
	archiveEvery = 10 * time.Second
	keepRecalled = 5 * time.Minute
)

// archiveClosed takes closed trees out of memory.
func (e *Engine) archiveClosed(ctx context.Context) {
	defer e.wg.Done()
	tick := time.NewTicker(archiveEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-e.closedTree:
		}
		if _, err := e.Store.ArchiveIdle(ctx, keepRecalled); err != nil && ctx.Err() == nil {
			e.log.WarnContext(ctx, "archiving closed trees", "error", err)
		}
	}
}

func (e *Engine) closeTree(ctx context.Context, id ids.Tree) (*tree.Tree, int, error) {
	t, err := e.Store.View().Tree(id)
	if err != nil {
		return nil, 0, err
	}
	closed := *t
	closed.Closed = true
	if _, err := e.Store.Update(ctx, func(tx *tree.Tx) error {
		now, err := tx.Tree(id)
		if err != nil || now.Closed {
			return err
		}
		closed = *now
		closed.Closed = true
		return tx.PutTree(closed)
	}); err != nil {
		return nil, 0, err
	}
	var live []ids.Sandbox
	for _, s := range e.Sandboxes(id) {
		live = append(live, s.ID)
	}
	n, err := e.Release(ctx, live)
	return &closed, n, err
}

// Pruned is what a prune gave back.
type Pruned struct {
	Nodes, Checkpoints int
	FreedBytes         int64
}

// Prune removes a subtree. With release, sandboxes that stand in it go first;
// without, they are a reason to refuse. commit runs inside the transaction that prunes.
func (e *Engine) Prune(ctx context.Context, id ids.Node, keep, release bool, commit func(*tree.Tx, Pruned) error) (Pruned, error) {
	if release {
		if err := e.releaseUnder(ctx, id, keep); err != nil {
			return Pruned{}, err
		}
	}
	bytes := e.bytesUnder(id)
	var gone *tree.Pruned
	var out Pruned
	_, err := e.Store.Update(ctx, func(tx *tree.Tx) (err error) {
		if gone, err = tx.Prune(id, keep); err != nil {
			return err
		}
		tx.Finally(func() error {
			out = Pruned{Nodes: len(gone.Nodes), Checkpoints: len(gone.Checkpoints)}
			for _, s := range gone.Condemned {
				out.FreedBytes += bytes[s]
			}
			return commit(tx, out)
		})
		return nil
	})
	if err != nil {
		return Pruned{}, err
	}
	if err := failpoint.Hit("prune recorded"); err != nil {
		return Pruned{}, err
	}
	e.mu.Lock()
	for _, n := range gone.Nodes {
		if job := e.pending[n]; job != nil {
			job.Cancel(fault.New(fault.Cancelled, "pruned", "node %s was pruned", n))
			delete(e.pending, n)
		}
	}
	e.mu.Unlock()
	e.removeCondemned(ctx)
	return out, nil
}

// bytesUnder is what each snapshot that was made at a node or below it has alone. It is read
// before the change that removes them, as nothing else changes while that runs.
func (e *Engine) bytesUnder(id ids.Node) map[ids.Snapshot]int64 {
	bytes := map[ids.Snapshot]int64{}
	v := e.Store.View()
	for n := range v.Subtree(id) {
		if n.Checkpoint == "" {
			continue
		}
		if ck, err := v.Checkpoint(n.Checkpoint); err == nil && ck.Node == n.ID {
			bytes[ck.Snapshot] = e.Pool.ExclusiveBytes(ck.Snapshot)
		}
	}
	return bytes
}

// releaseUnder goes by what is live: a child's record may still be on its way.
func (e *Engine) releaseUnder(ctx context.Context, id ids.Node, keep bool) error {
	under := map[ids.Node]bool{}
	for n := range e.Store.View().Subtree(id) {
		under[n.ID] = !keep || n.ID != id
	}
	var live []ids.Sandbox
	for _, s := range e.live() {
		if under[s.describe().Head] {
			live = append(live, s.id)
		}
	}
	_, err := e.Release(ctx, live)
	return err
}

// removeAgain is how long what couldn't be removed waits for the next try.
const removeAgain = 5 * time.Second

// removeCondemned is the second phase of every removal: file and process state that no
// record needs is given back and struck off. It is safe to repeat, and repeats itself while
// something couldn't be removed.
func (e *Engine) removeCondemned(ctx context.Context) {
	var gone []ids.Snapshot
	left := false
	defer func() {
		if left && e.condemned.CompareAndSwap(false, true) {
			e.later(removeAgain, func() {
				e.removals.Submit(sched.Work{Class: sched.Prune}, func(ctx context.Context, _ time.Duration) error {
					e.condemned.Store(false)
					e.removeCondemned(ctx)
					return nil
				})
			})
		}
	}()
	for id := range e.Store.View().Condemned() {
		if e.isHeld(string(id)) {
			continue // whoever reads it comes back to this
		}
		e.spares.drop(id)
		e.walks.drop(id)
		if err := e.Pool.Remove(id); err != nil {
			e.log.ErrorContext(ctx, "removing a condemned snapshot", "snapshot", id, "error", err)
			left = true
			continue
		}
		gone = append(gone, id)
	}
	var lost []ids.Process
	for p := range e.Store.View().CondemnedProcesses() {
		if e.isHeld(string(p.ID)) {
			continue
		}
		if err := e.dropContent(p.ID); err != nil {
			e.log.ErrorContext(ctx, "removing a condemned process state", "state", p.ID, "error", err)
			left = true
			continue
		}
		lost = append(lost, p.ID)
	}
	if len(gone)+len(lost) == 0 {
		return
	}
	err := failpoint.Hit("condemned removed")
	if err == nil {
		_, err = e.Store.Update(context.WithoutCancel(ctx), func(tx *tree.Tx) error {
			if err := tx.FinishRemoval(gone); err != nil {
				return err
			}
			return tx.FinishProcessRemoval(lost)
		})
	}
	if err != nil {
		e.log.ErrorContext(ctx, "striking off what was removed", "error", err)
		left = true
	}
	_ = failpoint.Hit("prune finished")
}

// hold keeps snapshots and process states from being removed, until what it returns is called.
func (e *Engine) hold(ctx context.Context, what ...string) (done func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, w := range what {
		e.held[w]++
	}
	return func() {
		e.mu.Lock()
		for _, w := range what {
			if e.held[w]--; e.held[w] == 0 {
				delete(e.held, w)
			}
		}
		e.mu.Unlock()
		e.removeCondemned(context.WithoutCancel(ctx))
	}
}

// isHeld: somebody reads it, although no record may need it.
func (e *Engine) isHeld(what string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.held[what] > 0
}
