package engine

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// birthFile is what a live body has in the run folder, from before its child is
// handed out until its end begins. It outlives a killed daemon as the box itself does, and lasts
// no longer than the host, as the box: it needs no flush. So the store's record of a
// child may reach the disk after the child has been handed out; a start puts it
// on record from here if it didn't.
type birthFile struct {
	Box     json.RawMessage // what Adopt needs
	Sandbox tree.Sandbox    // as it was born
	Secret  bool            // processes that were given secrets run in it, or did
}

func (e *Engine) birthPath(gen ids.Generation) string {
	return filepath.Join(e.boxDir(), string(gen))
}

func (e *Engine) writeBirth(b *body, rec *tree.Sandbox) error {
	text, err := json.Marshal(birthFile{Box: b.box.Record(), Sandbox: *rec, Secret: b.secret})
	if err != nil {
		return err
	}
	return os.WriteFile(e.birthPath(b.gen), text, 0o600)
}

// changeBirth replaces the file of a body that lives, as a whole.
func (e *Engine) changeBirth(gen ids.Generation, change func(*birthFile)) error {
	f, err := e.readBirth(gen)
	if err != nil {
		return err
	}
	change(&f)
	text, err := json.Marshal(f)
	if err != nil {
		return err
	}
	next := e.birthPath(gen) + ".new"
	if err := os.WriteFile(next, text, 0o600); err != nil {
		return err
	}
	return os.Rename(next, e.birthPath(gen))
}

func (e *Engine) readBirth(gen ids.Generation) (birthFile, error) { return readBirth(e.boxDir(), gen) }

func readBirth(dir string, gen ids.Generation) (f birthFile, err error) {
	text, err := os.ReadFile(filepath.Join(dir, string(gen)))
	if err != nil {
		return f, err
	}
	if err := json.Unmarshal(text, &f); err != nil || f.Sandbox.Generation != gen {
		return f, fault.New(fault.Invalid, "bad_record", "the file of generation %s isn't one", gen) // cut off by a full disk
	}
	return f, nil
}

func (e *Engine) removeBirth(gen ids.Generation) { _ = os.Remove(e.birthPath(gen)) }

// recordFound puts children on record that had been handed out before their
// records reached the disk. One that has lived on since has a record.
func (e *Engine) recordFound(ctx context.Context) error {
	entries, err := os.ReadDir(e.boxDir())
	if err != nil {
		return err
	}
	_, err = e.Store.Update(ctx, func(tx *tree.Tx) error {
		for _, d := range entries {
			f, err := e.readBirth(ids.Generation(d.Name()))
			if err != nil {
				continue
			}
			if _, err := tx.Sandbox(f.Sandbox.ID); !fault.Is(err, fault.NotFound) {
				continue
			}
			if _, err := tx.Node(f.Sandbox.Head); fault.Is(err, fault.NotFound) {
				continue // pruned meanwhile
			} else if err != nil {
				return err
			}
			if err := tx.PutSandbox(f.Sandbox); err != nil {
				return err
			}
		}
		return nil
	})
	return err
}

// removeBirths removes the files of all other bodies.
func (e *Engine) removeBirths(keep map[ids.Generation]bool) {
	entries, err := os.ReadDir(e.boxDir())
	if err != nil {
		e.log.ErrorContext(e.life, "reading the folder of box records", "error", err)
		return
	}
	for _, d := range entries {
		if gen := ids.Generation(d.Name()); !keep[gen] {
			e.removeBirth(gen)
		}
	}
}

// Birth is what the run folder says of a body whose daemon isn't running.
type Birth struct {
	Path       string
	Generation ids.Generation
	Sandbox    tree.Sandbox
	Box        []byte // its record; see box.Standing
	Err        error  // the file isn't one
}

// Births reads what bodies have in a run folder.
func Births(runDir string) ([]Birth, error) {
	dir := filepath.Join(runDir, "births")
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	out := make([]Birth, len(entries))
	for i, d := range entries {
		gen := ids.Generation(d.Name())
		f, err := readBirth(dir, gen)
		out[i] = Birth{Path: filepath.Join(dir, d.Name()), Generation: gen, Sandbox: f.Sandbox, Box: f.Box, Err: err}
	}
	return out, err
}
