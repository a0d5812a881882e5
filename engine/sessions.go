package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/engine/shell"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// Session is a shell that lives on between turns, to a client.
type Session struct {
	Name string
	PID  int // in the sandbox; the same in every fork
	TTY  bool
}

// NewSession is a session to open.
type NewSession struct {
	Name       string
	TTY        bool
	Rows, Cols uint16 // of the terminal; 0: 24 and 80
	Cwd, User  string
	Env        map[string]string
	Secrets    map[string]string // environment that is recorded nowhere
}

// greetLimit bounds the profiles that a new shell reads.
const greetLimit = time.Minute

// OpenSession opens a session, as a step of an open turn or (turn empty) as a turn of its own.
func (e *Engine) OpenSession(ctx context.Context, id ids.Sandbox, open ids.Turn, n NewSession, commit func(*tree.Tx, Session, TurnResult) error) (Session, *TurnResult, error) {
	var made box.Session
	s := &tree.Step{
		Kind: tree.OpenSessionStep, Session: n.Name, TTY: n.TTY, Rows: int32(n.Rows), Cols: int32(n.Cols), Cwd: n.Cwd, User: n.User, Env: n.Env,
	}
	record := func(tx *tree.Tx, r TurnResult) error { return commit(tx, Session{made.Name, made.PID, made.TTY}, r) }
	r, err := e.withinTurn(ctx, id, open, s, record, func(ctx context.Context, t *turn) (err error) {
		made, err = t.openSession(ctx, n)
		return err
	})
	return Session{made.Name, made.PID, made.TTY}, r, err
}

func (t *turn) openSession(ctx context.Context, n NewSession) (box.Session, error) {
	c := Command{Argv: shell.Argv, Cwd: n.Cwd, User: n.User, Env: n.Env, Secrets: n.Secrets}
	if err := t.confide(c); err != nil {
		return box.Session{}, err
	}
	cmd, err := t.command(c)
	if err != nil {
		return box.Session{}, err
	}
	spec := box.SessionSpec{Name: n.Name, Argv: cmd.Argv, Env: cmd.Env, Cwd: cmd.Cwd, User: cmd.User, TTY: n.TTY, Umask: 0o22, PTS: -1}
	if n.TTY {
		spec.Terminal = box.Terminal{Rows: or(n.Rows, 24), Cols: or(n.Cols, 80)}
	}
	return greet(ctx, t.b.box, spec)
}

func or(v, otherwise uint16) uint16 {
	if v == 0 {
		return otherwise
	}
	return v
}

// greet starts a session and has its shell read its profiles.
func greet(ctx context.Context, bx box.Box, spec box.SessionSpec) (box.Session, error) {
	s, err := bx.OpenSession(ctx, spec)
	if err != nil {
		return box.Session{}, err
	}
	r := &shell.Report{Token: shell.Token()}
	var said []byte
	end, err := bx.Talk(ctx, box.Talk{
		Session:  s.Name,
		Say:      shell.Greet(shell.Greeting{TTY: s.TTY, Profiles: true, Stdin: stdinOf(s), Token: r.Token}),
		Heard:    r.Hear,
		Stdout:   func(p []byte) { said = append(said, p[:min(len(p), 4096-min(4096, len(said)))]...) },
		Stderr:   func(p []byte) { said = append(said, p[:min(len(p), 4096-min(4096, len(said)))]...) },
		Deadline: time.Now().Add(greetLimit),
		Changes:  true,
	})
	switch {
	case err != nil:
	case end.Ended:
		err = fault.New(fault.Precondition, "no_shell", "the shell of session %s ended at once (%s): %s", spec.Name, endOf(end), brief(said, 200)).
			WithHint("a session needs a bash in the image, and a user and folder that exist")
	case end.TimedOut || end.Cancelled:
		err = fault.New(fault.Deadline, "profile_slow", "the profiles of session %s didn't end within %s", spec.Name, greetLimit)
	}
	if err != nil && !end.Ended {
		cerr := bx.CloseSession(context.WithoutCancel(ctx), spec.Name)
		if !fault.Is(cerr, fault.NotFound) {
			err = errors.Join(err, cerr)
		}
	}
	return s, err
}

func endOf(end box.TalkEnd) string {
	if end.Signal != 0 {
		return fmt.Sprintf("signal %d", end.Signal)
	}
	return fmt.Sprintf("status %d", end.Code)
}

// CloseSession ends a session and all that it has started: a step of a turn, or a turn of its own.
func (e *Engine) CloseSession(ctx context.Context, id ids.Sandbox, open ids.Turn, name string, commit Commit) (*TurnResult, error) {
	s := &tree.Step{Kind: tree.CloseSessionStep, Session: name}
	return e.within(ctx, id, open, s, commit, func(ctx context.Context, b box.Box) error {
		return b.CloseSession(ctx, name)
	})
}

// Sessions lists those of a sandbox.
func (e *Engine) Sessions(id ids.Sandbox) ([]Session, error) {
	s, err := e.find(id)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	b := s.body
	s.mu.Unlock()
	list := []Session{}
	for _, s := range b.box.Sessions() {
		list = append(list, Session{Name: s.Name, PID: s.PID, TTY: s.TTY})
	}
	return list, nil
}

// Interrupt sends SIGINT to what runs in a session's foreground, as ^C does, and says
// whether something ran there. The turn goes on. A command that is just being started may miss it.
func (e *Engine) Interrupt(id ids.Sandbox, name string) (bool, error) {
	s, err := e.find(id)
	if err != nil {
		return false, err
	}
	s.renew(0)
	s.mu.Lock()
	b, t := s.body, s.turn
	s.mu.Unlock()
	if t != nil { // it may end before the answer is there
		t.broken.Store(true)
	}
	return b.box.Interrupt(name)
}

// Type types keys into the terminal of a session in which a command runs, gives it a size unless rows is 0, and says whether
// one runs there.
func (e *Engine) Type(id ids.Sandbox, name string, keys []byte, rows, cols uint16) (bool, error) {
	s, err := e.find(id)
	if err != nil {
		return false, err
	}
	s.renew(0)
	s.mu.Lock()
	b, t := s.body, s.turn
	s.mu.Unlock()
	if t != nil { // what was typed isn't in its recipe
		t.broken.Store(true)
	}
	return b.box.Type(name, keys, rows, cols)
}

// execInSession runs a command in a session.
func (t *turn) execInSession(c Command, cmd box.Command) (box.Exit, bool, error) {
	var s box.Session
	for _, one := range t.b.box.Sessions() {
		if one.Name == c.Session {
			s = one
		}
	}
	if s.Name == "" {
		return box.Exit{}, false, fault.New(fault.NotFound, "no_session", "there is no session %q in this sandbox", c.Session).
			WithHint("OpenSession opens one; a shell that exits ends its session")
	}
	if len(cmd.Stdin) > 0 && !s.TTY {
		return box.Exit{}, false, fault.New(fault.Invalid, "no_terminal", "session %s has no terminal to type into", s.Name).
			WithHint("use a here-document, or open the session with a terminal")
	}
	r := &shell.Report{Token: shell.Token()}
	t.touched = true
	end, err := t.b.box.Talk(t.ctx, box.Talk{
		Session: s.Name, Say: shell.Command([]byte(c.Shell), stdinOf(s), r.Token, t.b.shells.shadowed[s.Name]), Heard: r.Hear,
		Stdout: cmd.Stdout, Stderr: cmd.Stderr, Keys: cmd.Stdin, Deadline: cmd.Deadline, Changes: true,
	})
	if err != nil {
		return box.Exit{}, false, err
	}
	if !end.Ended {
		end.Code, end.Signal = r.Status, 0
		t.b.shells.shade(s.Name, r.Shadowed)
	}
	return end.Exit, end.Ended, nil
}

// checkSessionCommand refuses what a session can't be given.
func checkSessionCommand(c Command) error {
	if c.Session == "" {
		return nil
	}
	if len(c.Argv) > 0 || c.Shell == "" || c.Cwd != "" || c.User != "" || len(c.Env)+len(c.Secrets) > 0 {
		return fault.New(fault.Invalid, "bad_command", "a command of a session is text for its shell: folder, user and environment are the session's own")
	}
	return shell.CheckText(c.Shell)
}
