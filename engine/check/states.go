package check

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// states: what records say of snapshots is what is there.
func (c *checker) states(ctx context.Context) error {
	layers, err := c.pool.Layers()
	if err != nil {
		return err
	}
	c.report.Layers, c.report.Images = len(layers), c.v.ImageCount()
	sealed := map[ids.Snapshot]tree.Seal{}
	for k := range c.v.Checkpoints() {
		if err := ctx.Err(); err != nil {
			return err
		}
		if known, ok := sealed[k.Snapshot]; ok && fmt.Sprint(known) != fmt.Sprint(k.Seal) {
			c.say(Finding{Kind: "seals_differ", What: fmt.Sprintf("checkpoints share snapshot %s and give it different seals", k.Snapshot)})
		}
		sealed[k.Snapshot] = k.Seal
		if err := c.pool.Verify(k.Snapshot, k.Seal); err != nil {
			c.lost(k, err)
		}
	}
	for i := range c.v.Images() {
		if err := c.pool.Verify(i.Base, i.BaseSeal); err != nil {
			c.say(Finding{Kind: "image", What: fmt.Sprintf("the base of image %s: %s", i.Digest, fault.As(err).Message), Hint: "import it again"})
		}
		for _, l := range i.Layers {
			if !slices.Contains(layers, l) {
				c.say(Finding{Kind: "image", What: fmt.Sprintf("image %s has layer %s, which the pool lacks", i.Digest, l), Hint: "import it again"})
			}
		}
	}
	return nil
}

func (c *checker) lost(k *tree.Checkpoint, err error) {
	var users []ids.Node
	for n := range c.v.CheckpointUsers(k.ID) {
		users = append(users, n.ID)
	}
	f := Finding{Kind: "lost_state", What: fmt.Sprintf("checkpoint %s of %d nodes: %s", k.ID, len(users), fault.As(err).Message)}
	if !c.pool.Unclean() {
		f.Fix = "withhold " + these(users, "node")
		f.mend = withhold("state lost: the pool has not what was saved", users...)
	}
	c.say(f)
}

// orphans: what is in the pool is needed by a record.
func (c *checker) orphans(context.Context) error {
	needed, below := map[ids.Snapshot]bool{}, map[ids.Layer]bool{}
	for k := range c.v.Checkpoints() {
		needed[k.Snapshot] = true
		for _, l := range k.Seal.Layers {
			below[l] = true
		}
	}
	for i := range c.v.Images() {
		needed[i.Base] = true
		for _, l := range i.Layers {
			below[l] = true
		}
	}
	for id := range c.v.Condemned() {
		needed[id] = true // of the removal
		c.say(Finding{Kind: "condemned", What: fmt.Sprintf("no record needs snapshot %s, and its removal isn't finished", id),
			Fix: "remove it", mend: func(ctx context.Context, m *mender) error {
				if err := m.remove(id); err != nil {
					return err
				}
				return m.update(ctx, func(tx *tree.Tx) error { return tx.FinishRemoval([]ids.Snapshot{id}) })
			}})
	}
	snapshots, err := c.pool.Snapshots()
	if err != nil {
		return err
	}
	c.report.Snapshots = len(snapshots)
	for _, id := range snapshots {
		if !needed[id] {
			c.say(Finding{Kind: "orphan_snapshot", What: fmt.Sprintf("no record names snapshot %s", id), Fix: "remove it",
				mend: func(_ context.Context, m *mender) error { return m.remove(id) }})
		}
	}
	return c.orphanUppers(below)
}

func (c *checker) orphanUppers(below map[ids.Layer]bool) error {
	live := map[ids.Generation]bool{}
	for _, b := range c.alive {
		live[b.Generation] = true
	}
	uppers, err := c.pool.Uppers()
	if err != nil {
		return err
	}
	for _, gen := range uppers {
		if !live[gen] {
			c.say(Finding{Kind: "orphan_upper", What: fmt.Sprintf("no sandbox that lives has the upper of generation %s", gen), Fix: "remove it",
				mend: func(_ context.Context, m *mender) error { return m.release(gen) }})
		}
	}
	layers, err := c.pool.Layers()
	if err != nil {
		return err
	}
	for _, l := range layers {
		if !below[l] {
			c.say(Finding{Kind: "orphan_layer", What: fmt.Sprintf("no image has layer %s", l), Fix: "remove it",
				mend: func(ctx context.Context, m *mender) error { return m.removeLayer(ctx, l) }})
		}
	}
	left, err := c.pool.Leftovers()
	if err != nil {
		return err
	}
	if len(left) > 0 {
		c.say(Finding{Kind: "half_made", What: "the pool has " + these(left, "thing") + ", half made or half removed", Fix: "remove them",
			mend: func(_ context.Context, m *mender) error { return m.openPool() }}) // opening does that
	}
	return nil
}

// these names some of a list.
func these[T ~string](list []T, what string) string {
	if len(list) != 1 {
		what += "s"
	}
	names := make([]string, 0, 3)
	for _, x := range list[:min(3, len(list))] {
		names = append(names, string(x))
	}
	if len(list) > 3 {
		names = append(names, "...")
	}
	return fmt.Sprintf("%d %s (%s)", len(list), what, strings.Join(names, ", "))
}
