package engine

import (
	"context"
	"fmt"
	"time"

	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// reconcile brings host and store together after the daemon ended, however it
// ended. A sandbox is adopted if its pid 1 still lives and has run nothing that
// the store doesn't know of; a capture that was pending is made again if its
// sandbox was adopted, else its node is withheld. What nobody needs any more is
// removed. One bad sandbox never stops it.
func (e *Engine) reconcile(ctx context.Context) error {
	if e.Pool.Distrusted() {
		if err := e.withholdLost(ctx); err != nil {
			return err
		}
	}
	if err := e.recordFound(ctx); err != nil {
		return fmt.Errorf("recording sandboxes of the last run: %w", err)
	}
	v := e.Store.View()
	adopted := map[ids.Generation]bool{}
	var lost []stats.SandboxRow
	recapture := map[ids.Node]*sandbox{}
	for rec := range v.Sandboxes() {
		s, err := e.adopt(ctx, v, rec)
		if err != nil {
			e.log.InfoContext(ctx, "a sandbox of the last run is gone", "sandbox", rec.ID, "why", err)
			lost = append(lost, stats.SandboxRow{
				Sandbox: rec.ID, Tree: rec.Tree, Scratch: rec.Scratch, Head: rec.Head, Generation: rec.Generation,
				EndedAt: time.Now(), Ended: stats.GoneAtStart, Limits: rec.Limits,
			})
			continue
		}
		adopted[rec.Generation] = true
		recapture[s.head] = s
	}
	if err := failpoint.Hit("restart adopted"); err != nil {
		return err
	}
	if _, err := e.Boxes.Sweep(ctx); err != nil {
		e.log.ErrorContext(ctx, "ending boxes of the last run", "error", err)
	}
	if err := failpoint.Hit("restart swept"); err != nil {
		return err
	}
	var withheld []ids.Node
	var again []*tree.Node
	for n := range v.PendingCaptures() {
		if recapture[n.ID] != nil && recapture[n.ID].id == n.Sandbox {
			again = append(again, n)
		} else {
			withheld = append(withheld, n.ID)
		}
	}
	keep := map[ids.Snapshot]bool{}
	for ck := range v.Checkpoints() {
		keep[ck.Snapshot] = true
	}
	for image := range v.Images() {
		keep[image.Base] = true
	}
	states := map[ids.Process]bool{}
	for p := range v.Processes() {
		states[p.ID] = true
	}
	if _, err := e.vault.reconcile(states); err != nil {
		e.log.ErrorContext(ctx, "removing process states that are on no record", "error", err)
	}
	e.walks.reconcile(keep)
	removed, err := e.Pool.Reconcile(adopted, keep)
	if err != nil {
		return fmt.Errorf("reconciling the pool: %w", err)
	}
	if err := failpoint.Hit("restart pool"); err != nil {
		return err
	}
	_, err = e.Store.Update(ctx, func(tx *tree.Tx) error {
		for _, id := range withheld {
			if err := tx.SetWithheld(id, "capture lost: the daemon ended before it was made"); err != nil {
				return err
			}
		}
		for _, row := range lost {
			if err := tx.DeleteSandbox(row.Sandbox); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("recording what the restart found: %w", err)
	}
	for _, row := range lost {
		e.Stats.Sandbox(row)
	}
	if err := failpoint.Hit("restart recorded"); err != nil {
		return err
	}
	e.removeCondemned(ctx)
	e.removeStrayLayers(ctx)
	e.withholdLostDumps(ctx)
	e.removeBirths(adopted)
	for _, n := range again {
		s := recapture[n.ID]
		e.submitCapture(ctx, s, s.body, n)
	}
	if len(adopted)+len(lost)+len(withheld)+removed > 0 {
		e.log.InfoContext(ctx, "took over from the last run", "adopted", len(adopted), "sandboxes_gone", len(lost),
			"captures_again", len(again), "captures_lost", len(withheld), "file_state_removed", removed)
	}
	return nil
}

// removeStrayLayers removes what an import left that was cut off before its image
// was on record.
func (e *Engine) removeStrayLayers(ctx context.Context) {
	v := e.Store.View()
	needed := map[ids.Layer]bool{}
	for i := range v.Images() {
		for _, l := range i.Layers {
			needed[l] = true
		}
	}
	layers, err := e.Pool.Layers()
	if err != nil {
		e.log.ErrorContext(ctx, "listing the pool's layers", "error", err)
	}
	for _, l := range layers {
		if needed[l] {
			continue
		}
		if _, err := e.Pool.RemoveLayer(ctx, l); err != nil { // below a snapshot: its image was lost
			e.log.WarnContext(ctx, "removing a layer that no image has", "layer", l, "error", err)
		}
	}
}

// adopt takes over a sandbox that is exactly as its record says.
func (e *Engine) adopt(ctx context.Context, v *tree.View, rec *tree.Sandbox) (*sandbox, error) {
	if rec.Scratch {
		return nil, fault.New(fault.NotFound, "scratch", "scratch sandboxes don't outlive the daemon")
	}
	t, err := v.Tree(rec.Tree)
	if err != nil {
		return nil, err
	}
	ck, err := lastCheckpoint(v, rec.Head)
	if err != nil {
		return nil, err
	}
	file, err := e.readBirth(rec.Generation)
	if err != nil {
		return nil, err
	}
	upper, err := e.Pool.FindUpper(rec.Generation)
	if err != nil {
		return nil, err
	}
	bx, err := e.Boxes.Adopt(ctx, file.Box)
	if err != nil {
		return nil, err
	}
	kill := func(err error) error {
		if kerr := bx.Kill(ctx); kerr != nil {
			e.log.ErrorContext(ctx, "ending a box of the last run", "generation", rec.Generation, "error", kerr)
		}
		return err
	}
	if have := bx.Commands(); have != rec.Commands {
		return nil, kill(fault.New(fault.Precondition, "moved_on", "it ran %d commands, its last node knows of %d", have, rec.Commands))
	}
	alive, err := bx.Survivors()
	if err != nil {
		return nil, kill(err)
	}
	if file.Secret && e.secrets.path == "" {
		return nil, kill(fault.New(fault.Precondition, "secrets_lost", "it was given secrets, which only a run folder on a tmpfs keeps over the daemon's end"))
	}
	watch, err := e.watch(bx, upper, ck, false)
	if err != nil {
		return nil, kill(err)
	}
	// Nobody watched while there was no daemon, and what led from the checkpoint
	// to here isn't known any more.
	head, err := v.Node(rec.Head)
	// Sessions are compared with what the checkpoint says of them.
	others := len(alive) - len(bx.Sessions())
	watch.Tainted(err != nil || others > 0 || head.Capture == tree.Withheld, "the daemon was restarted")
	fresh := *rec
	fresh.LeaseUntil = time.Now().Add(rec.Lease)
	fresh.Limits.Calls = t.Defaults.Limits.Calls // a record of an older release doesn't have all
	s := newSandbox(&fresh, t.Defaults)
	s.body = &body{gen: rec.Generation, hostname: rec.Hostname, upper: upper, box: bx, watch: watch, checkpoint: ck, limits: fresh.Limits, touchedProcesses: true}
	s.body.hides = func() *veil { return e.secrets.of(rec.Tree) }
	s.body.secret = file.Secret
	e.mu.Lock()
	e.sandboxes[s.id] = s
	e.mu.Unlock()
	return s, nil
}

// lastCheckpoint is the checkpoint of the nearest node, from id up, that has one.
func lastCheckpoint(v *tree.View, id ids.Node) (*tree.Checkpoint, error) {
	for n := range v.PathToRoot(id) {
		if n.Checkpoint != "" {
			return v.Checkpoint(n.Checkpoint)
		}
	}
	if err := v.Err(); err != nil {
		return nil, err
	}
	return nil, fault.New(fault.DataLoss, "no_checkpoint", "no node from %s up has a checkpoint", id)
}

// withholdLostDumps withholds the nodes whose dump was in memory alone when the host went
// down.
func (e *Engine) withholdLostDumps(ctx context.Context) {
	v := e.Store.View()
	known := map[ids.Process]bool{}
	for p := range v.Processes() {
		if p.Kind == tree.Dump && !p.Condemned {
			known[p.ID] = true
		}
	}
	lost, err := e.dumps.reconcile(known)
	if err != nil {
		e.log.ErrorContext(ctx, "looking for dumps", "error", err)
	}
	if len(lost) == 0 {
		return
	}
	e.log.WarnContext(ctx, "dumps are lost", "states", len(lost))
	var users []ids.Node
	for _, id := range lost {
		for n := range v.StateUsers(id) { // also of archived trees, which a change doesn't see
			users = append(users, n.ID)
		}
	}
	if err := v.Err(); err != nil {
		e.log.ErrorContext(ctx, "looking for nodes whose dumps are lost", "error", err)
	}
	_, err = e.Store.Update(ctx, func(tx *tree.Tx) error {
		for _, id := range users {
			if err := tx.SetWithheld(id, "state lost: the host went down before its processes were on the disk"); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		e.log.ErrorContext(ctx, "withholding nodes whose dumps are lost", "error", err)
	}
}

// withholdLost holds every checkpoint against the pool, after the host went down
// under it or it was rebuilt. The log is flushed at each change and the pool is
// not: what it lost is withheld, never restored approximately.
func (e *Engine) withholdLost(ctx context.Context) error {
	v := e.Store.View()
	var lost []ids.Node
	for ck := range v.Checkpoints() {
		if e.Pool.Verify(ck.Snapshot, ck.Seal) == nil && e.verifyState(v, ck) == nil {
			continue
		}
		for n := range v.CheckpointUsers(ck.ID) {
			lost = append(lost, n.ID)
		}
	}
	if err := v.Err(); err != nil {
		return err
	}
	if len(lost) == 0 {
		return nil
	}
	e.log.WarnContext(ctx, "the host went down under the pool: states are lost", "nodes", len(lost))
	_, err := e.Store.Update(ctx, func(tx *tree.Tx) error {
		for _, id := range lost {
			if err := tx.SetWithheld(id, "state lost: the host went down before it was on the disk"); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("withholding nodes whose state is lost: %w", err)
	}
	return nil
}
