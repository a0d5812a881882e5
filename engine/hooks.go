package engine

import (
	"context"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/internal/fault"
)

// runHooks runs what a body has in box.HooksDir, one program after the other, before anybody hears of it: what goes on in it learns
// there that it is another generation now. A program that fails, or that isn't done in time, makes the child a failed one. What
// they leave running is ended.
//
// What they change is no turn's effect: it counts for the verdict of the first.
func (e *Engine) runHooks(ctx context.Context, b *body, env []string) error {
	hooks := b.box.Hooks()
	if len(hooks) == 0 {
		return nil
	}
	if err := b.box.BeginTurn(); err != nil {
		return err
	}
	deadline := time.Now().Add(e.cfg.HookLimit)
	for _, hook := range hooks {
		var said []byte
		hear := func(p []byte) { said = append(said, p[:min(len(p), 1024-len(said))]...) }
		exit, err := b.box.Exec(ctx, box.Command{Argv: []string{hook}, Env: env, Cwd: "/", User: "0", Deadline: deadline, Stdout: hear, Stderr: hear})
		switch {
		case err != nil:
			return err
		case exit.Cancelled:
			return fault.New(fault.Deadline, "fork_deadline", "%s was still running: %w", hook, context.Cause(ctx))
		case exit.TimedOut:
			return fault.New(fault.Precondition, "hook_slow", "the programs in %s took more than %s; %s was running%s", box.HooksDir, e.cfg.HookLimit, hook, quoted(said))
		case exit.Lost || exit.Code != 0:
			return fault.New(fault.Precondition, "hook_failed", "%s %s%s", hook, howEnded(exit), quoted(said))
		}
	}
	return b.box.KillTurn(ctx)
}

func howEnded(exit box.Exit) string {
	switch {
	case exit.Lost:
		return "was running when the sandbox was lost"
	case exit.OOMKilled:
		return "was out of memory"
	case exit.Signal != 0:
		return fmt.Sprintf("was killed by signal %d (%s)", exit.Signal, unix.SignalName(unix.Signal(exit.Signal)))
	}
	return fmt.Sprintf("ended with status %d", exit.Code)
}

// quoted is the beginning of what a program wrote, behind a colon; nothing if it wrote nothing.
func quoted(said []byte) string {
	text := strings.TrimSpace(brief(said, 200))
	if text == "" {
		return ""
	}
	return ": " + text
}
