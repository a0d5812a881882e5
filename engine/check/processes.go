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

// processes: what records say of process states lies in the state folder or, a dump, in
// memory, and nothing else does.
func (c *checker) processes(context.Context) error {
	known := map[ids.Process]bool{}
	dirs := []string{filepath.Join(c.o.State, "processes"), engine.MemoryDir(c.o.RunDir)}
	for p := range c.v.Processes() {
		known[p.ID] = true
		if p.Condemned {
			c.condemned(p.ID, dirs)
		} else {
			c.content(p)
		}
	}
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		for _, d := range entries {
			if !known[ids.Process(d.Name())] {
				c.say(remove(Finding{Kind: "orphan_state", What: "no record names " + filepath.Join(dir, d.Name())}, filepath.Join(dir, d.Name())))
			}
		}
	}
	return nil
}

// remove is a finding that the removal of a path mends.
func remove(f Finding, path string) Finding {
	f.Fix = "remove it"
	f.mend = func(context.Context, *mender) error { return os.RemoveAll(path) }
	return f
}

func (c *checker) condemned(id ids.Process, dirs []string) {
	c.say(Finding{Kind: "condemned", What: fmt.Sprintf("no record needs process state %s, and its removal isn't finished", id),
		Fix: "remove it", mend: func(ctx context.Context, m *mender) error {
			for _, dir := range dirs {
				if err := os.RemoveAll(filepath.Join(dir, string(id))); err != nil {
					return err
				}
			}
			return m.update(ctx, func(tx *tree.Tx) error { return tx.FinishProcessRemoval([]ids.Process{id}) })
		}})
}

// content: one whole copy is enough, and one that isn't whole is in its way.
func (c *checker) content(p *tree.ProcessState) {
	var bad []engine.Copy
	copies := engine.Copies(c.o.State, c.o.RunDir, p)
	for _, k := range copies {
		if k.Err != nil {
			bad = append(bad, k)
		}
	}
	switch {
	case len(copies) == 0:
		c.lostProcess(p, errors.New("it is neither on the disk nor in memory"))
	case len(bad) == len(copies):
		c.lostProcess(p, bad[0].Err)
	default:
		for _, k := range bad {
			c.say(remove(Finding{Kind: "damaged_copy", What: fmt.Sprintf("%s isn't what was saved, and another copy is: %v", k.Dir, k.Err)}, k.Dir))
		}
	}
}

func (c *checker) lostProcess(p *tree.ProcessState, err error) {
	var users []ids.Node
	for n := range c.v.StateUsers(p.ID) {
		users = append(users, n.ID)
	}
	c.say(Finding{Kind: "lost_state", What: fmt.Sprintf("process state %s of %d nodes: %v", p.ID, len(users), err),
		Fix: "withhold " + these(users, "node"), mend: withhold("state lost: the process state isn't what was saved", users...)})
}
