// Package check holds a state folder that no daemon uses against itself: the
// store row by row, the store against the pool, and both against what the kernel
// and the run folder have of sandboxes. Each thing that doesn't fit is one Finding.
//
// It changes nothing: the pool is mounted read-only, what a start would clear away
// is only named. Repair then does what can be done without guessing, saying
// each step first; what it does is what a start of the daemon would do, except that it
// adopts nothing and ends no sandbox that a start could adopt.
//
// `boxwood check` calls it, and tests do after everything that they did to a daemon.
package check

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// Options say where to look.
type Options struct {
	State string
	// RunDir, PoolDir and Cgroup as the daemon has them; empty: its defaults.
	RunDir, PoolDir, Cgroup string
}

// Finding is one thing that doesn't fit.
type Finding struct {
	// Kind is a short stable code, such as "orphan_snapshot".
	Kind string `json:"kind"`
	// What is wrong, in one line.
	What string `json:"what"`
	// Fix is what Repair does about it; empty: nothing.
	Fix string `json:"fix,omitempty"`
	// Hint is what a person can do where Repair can't.
	Hint string `json:"hint,omitempty"`

	mend func(context.Context, *mender) error
}

func (f Finding) String() string { return f.Kind + ": " + f.What }

// Report is what a check looked at and found.
type Report struct {
	Trees       int `json:"trees"`
	Nodes       int `json:"nodes"`
	Checkpoints int `json:"checkpoints"`
	Images      int `json:"images"`
	Snapshots   int `json:"snapshots"`
	Layers      int `json:"layers"`
	// Sandboxes that live without a daemon; a start adopts them.
	Sandboxes int       `json:"sandboxes"`
	Findings  []Finding `json:"findings"`
}

// Run checks. An error means that it couldn't look: Precondition "state_in_use"
// while a daemon has the folder, NotFound "no_state" if it is none.
func Run(ctx context.Context, o Options) (*Report, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	c := &checker{o: o, report: &Report{Findings: []Finding{}}}
	store, err := tree.Open(filepath.Join(o.State, "tree"), tree.Options{})
	if err != nil && !fault.Is(err, fault.DataLoss) {
		return nil, err
	}
	if err == nil {
		defer store.Close()
		c.v = store.View()
	} else {
		c.damaged(err)
	}
	if err := c.openPool(); err != nil {
		return nil, err
	}
	if c.pool != nil {
		defer c.pool.Close()
	}
	steps := []func(context.Context) error{c.bodies}
	if c.v != nil {
		steps = append(steps, c.rows(store), c.nodes, c.sandboxes, c.processes)
		if c.pool != nil {
			steps = append(steps, c.states, c.orphans)
		}
	}
	for _, step := range append(steps, c.host) {
		if err := step(ctx); err != nil {
			return nil, err
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
	return c.report, nil
}

// Refuse says what is wrong with the options, before anything is touched.
func (o Options) Refuse() error { return o.fill() }

func (o *Options) fill() error {
	abs, err := filepath.Abs(o.State)
	if err != nil {
		return err
	}
	o.State = abs
	if fi, err := os.Stat(filepath.Join(o.State, "tree")); err != nil || !fi.IsDir() {
		return fault.New(fault.NotFound, "no_state", "%s is not a state folder: it has no tree in it", o.State).
			WithHint("name the folder that `boxwood serve --state` uses")
	}
	if o.RunDir == "" {
		o.RunDir = engine.FindRunDir(o.State)
	}
	if o.Cgroup == "" {
		o.Cgroup = "boxwood"
	}
	return nil
}

type checker struct {
	o      Options
	v      *tree.View // nil if the log is damaged
	pool   *pool.Inspection
	report *Report

	// What lives without a daemon and can be adopted.
	alive map[ids.Sandbox]engine.Birth
	slots map[int]bool // of those
}

func (c *checker) say(f Finding) { c.report.Findings = append(c.report.Findings, f) }

// damaged: the store can't be opened. What of it can still be read is said row by row.
func (c *checker) damaged(err error) {
	c.say(Finding{Kind: "log_damaged", What: fault.As(err).Message,
		Hint: "keep a copy of the folder before anything else is tried"})
}

func (c *checker) openPool() error {
	p, err := pool.Inspect(pool.Options{Dir: c.o.State, ExistingBtrfs: c.o.PoolDir})
	reason := ""
	if err != nil {
		reason = fault.As(err).Reason
	}
	switch {
	case err == nil:
		c.pool = p
		if p.Unclean() {
			c.say(Finding{Kind: "pool_unclean", What: "the host went down while the pool was in use; it hasn't been read since",
				Hint: "start the daemon: it reads all of it and withholds what was lost"})
		}
		return nil
	case reason == "no_pool" && (c.v == nil || c.v.CheckpointCount("") == 0):
		return nil // a daemon that never got so far
	case reason == "no_pool", fault.Is(err, fault.DataLoss):
		c.say(Finding{Kind: reason, What: fault.As(err).Message, Hint: fault.As(err).Hint})
		return nil
	}
	return err
}

// rows are what the store says of itself.
func (c *checker) rows(store *tree.Store) func(context.Context) error {
	return func(ctx context.Context) error {
		wrong, err := store.Check(ctx)
		for _, w := range wrong {
			c.say(Finding{Kind: "store", What: w})
		}
		if err != nil && fault.Is(err, fault.DataLoss) {
			c.damaged(err)
			return nil
		}
		return err
	}
}

// bodies are what lives without a daemon.
func (c *checker) bodies(context.Context) error {
	c.alive, c.slots = map[ids.Sandbox]engine.Birth{}, map[int]bool{}
	births, err := engine.Births(c.o.RunDir)
	if err != nil {
		return err
	}
	for _, b := range births {
		path := b.Path
		remove := Finding{Kind: "stray_birth", Fix: "remove " + path,
			mend: func(context.Context, *mender) error { return os.Remove(path) }}
		if b.Err != nil {
			remove.What = fmt.Sprintf("%s can't be read: %v", path, b.Err)
			c.say(remove)
			continue
		}
		slot, living, err := box.Standing(b.Box)
		if err != nil || !living {
			remove.What = fmt.Sprintf("%s is of sandbox %s, whose pid 1 is gone", path, b.Sandbox.ID)
			c.say(remove)
			continue
		}
		if why := c.stray(b); why != "" {
			remove.What = path + " is " + why
			c.say(remove)
			continue
		}
		c.alive[b.Sandbox.ID], c.slots[slot] = b, true
	}
	c.report.Sandboxes = len(c.alive)
	return nil
}

// stray says why a start wouldn't adopt a body that lives; empty: it would.
func (c *checker) stray(b engine.Birth) string {
	if c.v == nil {
		return ""
	}
	if s, err := c.v.Sandbox(b.Sandbox.ID); err == nil {
		if s.Generation != b.Generation {
			return fmt.Sprintf("of generation %s of sandbox %s, which has become %s", b.Generation, s.ID, s.Generation)
		}
		return ""
	}
	if _, err := c.v.Node(b.Sandbox.Head); err != nil {
		return fmt.Sprintf("of sandbox %s, which no record names, at node %s, which isn't there", b.Sandbox.ID, b.Sandbox.Head)
	}
	return "" // it was handed out a moment before its record would have been on the disk
}

// nodes: each is reached from its tree's root, and says of itself what can be.
func (c *checker) nodes(context.Context) error {
	v, r := c.v, c.report
	r.Trees, r.Nodes, r.Checkpoints = v.TreeCount(), v.NodeCount(""), v.CheckpointCount("")
	for t := range v.Trees() {
		if _, err := v.Image(string(t.Image)); err != nil {
			c.say(Finding{Kind: "image", What: fmt.Sprintf("tree %s stands on image %s, of which there is no record", t.ID, t.Image)})
		}
		reached := 0
		for range v.Subtree(t.Root) {
			reached++
		}
		if have := v.NodeCount(t.ID); reached != have {
			c.unreached(t)
		}
		for n := range v.NodesOf(t.ID) {
			c.status(n)
		}
	}
	return nil
}

func (c *checker) unreached(t *tree.Tree) {
	reached := map[ids.Node]bool{}
	for n := range c.v.Subtree(t.Root) {
		reached[n.ID] = true
	}
	for n := range c.v.NodesOf(t.ID) {
		if !reached[n.ID] {
			c.say(Finding{Kind: "unreachable", What: fmt.Sprintf("node %s isn't reached from root %s of tree %s: its path is a cycle or has a gap", n.ID, t.Root, t.ID)})
		}
	}
}

func (c *checker) status(n *tree.Node) {
	bad := func(format string, args ...any) {
		c.say(Finding{Kind: "status", What: fmt.Sprintf("node %s ", n.ID) + fmt.Sprintf(format, args...)})
	}
	switch n.Capture {
	case tree.Captured, tree.Proven:
		if n.Checkpoint == "" {
			bad("is captured and has no checkpoint")
		}
	case tree.Withheld:
		if n.Checkpoint != "" {
			bad("is withheld and has checkpoint %s", n.Checkpoint)
		}
		if n.WithheldReason == "" {
			bad("is withheld without a reason")
		}
	case tree.Recorded:
		if n.Checkpoint != "" {
			bad("waits for its capture and has checkpoint %s", n.Checkpoint)
		}
		if s, err := c.v.Sandbox(n.Sandbox); err == nil && s.Head == n.ID {
			if _, ok := c.alive[s.ID]; ok {
				return // a start captures it again
			}
		}
		id := n.ID
		c.say(Finding{Kind: "pending_capture", What: fmt.Sprintf("node %s waits for a capture, and its sandbox is gone or has moved on", id),
			Fix:  "withhold node " + string(id) + ": capture lost",
			mend: withhold("capture lost: its sandbox ended before it was made", id)})
	default:
		bad("has capture status %d, which doesn't exist", n.Capture)
	}
}

// sandboxes: each record has a body, and each body a record.
func (c *checker) sandboxes(context.Context) error {
	for s := range c.v.Sandboxes() {
		id := s.ID
		if b, ok := c.alive[id]; ok && b.Generation == s.Generation {
			continue
		}
		c.say(Finding{Kind: "dead_sandbox", What: fmt.Sprintf("sandbox %s is on record and doesn't live", id), Fix: "remove its record",
			mend: func(ctx context.Context, m *mender) error {
				return m.update(ctx, func(tx *tree.Tx) error { return tx.DeleteSandbox(id) })
			}})
	}
	return nil
}

// host: what is left of sandboxes that nobody can adopt.
func (c *checker) host(context.Context) error {
	traces, err := box.Traces(c.o.RunDir, c.o.Cgroup)
	if err != nil {
		return err
	}
	populated := false
	for _, t := range traces {
		populated = populated || t.Populated
		if c.slots[t.Slot] {
			continue
		}
		var has []string
		if t.Control {
			has = append(has, "a control folder")
		}
		if t.Group {
			has = append(has, "a cgroup")
		}
		if t.Populated {
			has = append(has, "processes")
		}
		f := Finding{Kind: "leftover_box", What: fmt.Sprintf("slot %d has %s and no sandbox that could be adopted", t.Slot, strings.Join(has, ", "))}
		if t.Populated && !t.Control {
			f.Hint = "another daemon may use the cgroup " + c.o.Cgroup + ", too: name this one's with --cgroup"
		} else {
			slot := t.Slot
			f.Fix = fmt.Sprintf("end what runs in slot %d and remove its traces", slot)
			f.mend = func(ctx context.Context, m *mender) error {
				return box.RemoveTrace(ctx, c.o.RunDir, c.o.Cgroup, slot)
			}
		}
		c.say(f)
	}
	if c.pool != nil && c.pool.Held() && !populated && len(c.alive) == 0 {
		c.say(Finding{Kind: "pool_held", What: "something still has the pool's file system mounted, and no sandbox does",
			Hint: "look for it in /proc/*/mountinfo; a mount namespace that somebody joined holds it until they leave"})
	}
	return nil
}

func withhold(why string, list ...ids.Node) func(context.Context, *mender) error {
	return func(ctx context.Context, m *mender) error {
		return m.update(ctx, func(tx *tree.Tx) error {
			for _, id := range list {
				if err := tx.SetWithheld(id, why); err != nil && !fault.Is(err, fault.NotFound) {
					return err
				}
			}
			return nil
		})
	}
}
