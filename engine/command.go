package engine

import (
	"maps"
	"slices"
	"time"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/tree"
)

// Command is one command of a turn.
type Command struct {
	Argv  []string // or Shell, which runs as `bash -lc`, or in a session
	Shell string
	// Session names the shell that lives on between commands in which Shell runs. Stdin
	// is typed into its terminal then.
	Session     string
	Cwd, User   string
	Env         map[string]string
	Secrets     map[string]string // environment that is recorded nowhere
	Stdin       []byte
	Deadline    time.Duration
	OutputLimit int
	// Output gets chunks as they come. It must not block.
	Output func(stderr bool, p []byte)
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
	text = t.b.veil().maskText(text)
	t.steps++
	if room := tree.MaxAction - len(t.text); room > 0 {
		t.text = append(t.text, text[:min(room, len(text))]...)
	}
}

// command resolves a command against the tree's defaults and the image.
func (t *turn) command(c Command) (box.Command, error) {
	if err := checkSessionCommand(c); err != nil {
		return box.Command{}, err
	}
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
	for _, list := range []map[string]string{d.Env, c.Env, c.Secrets} {
		for k, v := range list {
			if k == "" || containsAny(k, "=\x00") || containsAny(v, "\x00") {
				return box.Command{}, fault.New(fault.Invalid, "bad_env", "the environment variable %q can't be set: its name is empty or has '=', or a NUL is in it", k)
			}
		}
	}
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
	if sabotage.On("deadline") {
		deadline = time.Hour
	}
	return box.Command{
		Argv: argv, Env: environment(d, t.b.gen, t.s.seed, c.Env, c.Secrets), Cwd: first(c.Cwd, d.Cwd, "/"), User: first(c.User, d.User, "0"),
		Stdin: c.Stdin, Deadline: time.Now().Add(deadline),
	}, nil
}

// environment of a command, sorted: the usual, the tree's, its own, and what tells this generation from others.
func environment(d tree.Defaults, gen ids.Generation, seed string, own ...map[string]string) []string {
	env := map[string]string{
		"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb",
	}
	maps.Copy(env, d.Env)
	for _, more := range own {
		maps.Copy(env, more)
	}
	env["BOXWOOD_GENERATION"] = string(gen)
	if seed != "" {
		env["BOXWOOD_SEED"] = seed
	}
	flat := make([]string, 0, len(env))
	for k, v := range env {
		flat = append(flat, k+"="+v)
	}
	slices.Sort(flat)
	return flat
}
