package check

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// processes: what records say of process states lies in the state folder, and
// nothing else does.
func (c *checker) processes(context.Context) error {
	dir := filepath.Join(c.o.State, "processes")
	known := map[ids.Process]bool{}
	for p := range c.v.Processes() {
		known[p.ID] = true
		folder, id := filepath.Join(dir, string(p.ID)), p.ID
		if p.Condemned {
			c.say(Finding{Kind: "condemned", What: fmt.Sprintf("no record needs process state %s, and its removal isn't finished", id),
				Fix: "remove it", mend: func(ctx context.Context, m *mender) error {
					if err := os.RemoveAll(folder); err != nil {
						return err
					}
					return m.update(ctx, func(tx *tree.Tx) error { return tx.FinishProcessRemoval([]ids.Process{id}) })
				}})
			continue
		}
		if err := engine.VerifyContent(c.o.State, c.o.RunDir, p); err != nil {
			c.lostProcess(p, err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for _, d := range entries {
		if !known[ids.Process(d.Name())] {
			path := filepath.Join(dir, d.Name())
			c.say(Finding{Kind: "orphan_state", What: "no record names " + path, Fix: "remove it",
				mend: func(context.Context, *mender) error { return os.RemoveAll(path) }})
		}
	}
	return nil
}

func (c *checker) lostProcess(p *tree.ProcessState, err error) {
	var users []ids.Node
	for k := range c.v.Checkpoints() {
		if k.State == p.ID {
			for n := range c.v.CheckpointUsers(k.ID) {
				users = append(users, n.ID)
			}
		}
	}
	c.say(Finding{Kind: "lost_state", What: fmt.Sprintf("process state %s of %d nodes: %v", p.ID, len(users), err),
		Fix: "withhold " + these(users, "node"), mend: withhold("state lost: the process state isn't what was saved", users...)})
}
