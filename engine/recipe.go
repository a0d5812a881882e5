package engine

import (
	"fmt"
	"maps"
	"slices"

	"github.com/boxwood-rl/boxwood/tree"
)

// A turn's node keeps what the turn was asked for, step by step, so that a withheld
// node can be made again from the nearest one that can be restored (replay.go). What
// can't be asked for a second time, or is too large to keep, is said instead.

// keep notes a step that has run.
func (t *turn) keep(s tree.Step) {
	if t.recipe.Once != "" {
		return
	}
	if t.b.veil().secretIn(&s) {
		t.once("a secret is in what it was given")
		return
	}
	if t.size += s.Size(); t.size > tree.MaxRecipe {
		t.once(fmt.Sprintf("what it was given, its commands and files, is over the %d bytes that are kept", tree.MaxRecipe))
		return
	}
	s.Env, s.Argv = maps.Clone(s.Env), slices.Clone(s.Argv)
	t.recipe.Steps = append(t.recipe.Steps, s)
}

// once notes why the turn can't be run again; the first reason stays.
func (t *turn) once(why string) {
	if t.recipe.Once == "" {
		t.recipe.Once, t.recipe.Steps = why, nil
	}
}

// recorded is the recipe of a turn that ends.
func (t *turn) recorded() tree.Recipe {
	switch {
	case t.last.Lost:
		t.once("the sandbox died in it")
	case t.stopped() != 0:
		t.once("it was stopped from outside, at a moment that doesn't come again")
	case t.broken.Load():
		t.once("a session was interrupted in it, at a moment that doesn't come again")
	}
	t.recipe.Stdout, t.recipe.Stderr = t.out[0].digest(), t.out[1].digest()
	return t.recipe
}

func (c Command) step() tree.Step {
	return tree.Step{
		Kind: tree.CommandStep, Text: c.Shell, Argv: c.Argv, Session: c.Session, Cwd: c.Cwd, User: c.User, Env: c.Env,
		Content: c.Stdin, Deadline: c.Deadline, OutputLimit: int64(c.OutputLimit),
	}
}

func commandOf(s *tree.Step) Command {
	return Command{
		Argv: s.Argv, Shell: s.Text, Session: s.Session, Cwd: s.Cwd, User: s.User, Env: s.Env,
		Stdin: s.Content, Deadline: s.Deadline, OutputLimit: int(s.OutputLimit),
	}
}

// textOf is a transfer as a person would read it.
func textOf(s *tree.Step) string {
	switch s.Kind {
	case tree.WriteStep:
		return fmt.Sprintf("# write %d bytes to %s", len(s.Content), s.Path)
	case tree.UploadStep:
		return "# upload to " + s.Path
	case tree.OpenSessionStep:
		return "# open session " + s.Session
	default:
		return "# close session " + s.Session
	}
}

// firstBytes keeps what is written to it, up to a limit.
type firstBytes struct {
	b     []byte
	limit int
}

func (f *firstBytes) Write(p []byte) (int, error) {
	f.b = append(f.b, p[:min(len(p), f.limit-len(f.b))]...)
	return len(p), nil
}
