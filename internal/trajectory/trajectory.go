// Package trajectory reads recorded rollouts, ours and those of other
// programs, into one kind of event, so that they can be run again.
//
// It promises that nothing is dropped silently: an action that can't be run
// again is an event with the reason in Skip, records that are no actions are
// counted in Other, and a file that isn't understood is an error that names
// the file, the step and the field. Files are walked, not held: what is kept
// of one is bounded, however large it is.
//
// A reader for a further format is a file and a line in formats.
package trajectory

import (
	"encoding/json"
	"iter"
	"path/filepath"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/boxwood-rl/boxwood/internal/agenttools"
	"github.com/boxwood-rl/boxwood/internal/fault"
)

// Event is one action of an agent and what it observed.
type Event struct {
	// Step is its place in the file, from 1, counted as the format does.
	Step int
	// File it is from, if the trajectory goes on in further ones.
	File string
	// Tool that the agent used: "bash", "str_replace_editor" ...
	Tool string
	// Command is a line for bash; empty if it is a call, or Skip says why there is none.
	Command string
	// Call of a tool of the agent's that can be done again.
	Call *agenttools.Call
	// Keystrokes as they were typed into a terminal, where the format has those.
	// Command is what they are as a line of it.
	Keystrokes string
	// Cwd it ran in; empty: the start state's.
	Cwd string
	// Skip is why it can't be run again; empty: it can.
	Skip string
	// Copied says that it is the copy of an event of an earlier file.
	Copied bool
	// ExitCode as recorded; nil: the format doesn't tell.
	ExitCode *int
	// Output as recorded; nil: the format doesn't tell.
	Output *string
	// Hung says that it still ran when the agent stopped waiting for it.
	Hung bool
	// Merged says that Output has standard error mixed in.
	Merged bool
	// At is when it began, after the start of the recording; 0: not told.
	At time.Duration
	// Took is how long it ran or, of keystrokes, was waited for; 0: not told.
	Took time.Duration
}

// Trajectory is one recorded rollout.
type Trajectory struct {
	// Name tells the trajectories of a file or folder apart.
	Name   string
	Format string
	Events []Event
	// Other counts records that are no actions of the agent, by kind.
	Other map[string]int
	// Kept says that the agent's commands ran in one shell that stayed; else each
	// had its own.
	Kept bool
	// Start is the manifest of the state it began in, relative to the file; only
	// our format names one.
	Start string
	// continued is the file that it goes on in.
	continued string
	held      int
	// began is when the recording did, if the format tells times of day.
	began time.Time
}

// Skipped counts the events that can't be run again, by reason.
func (t *Trajectory) Skipped() map[string]int {
	reasons := map[string]int{}
	for _, e := range t.Events {
		if e.Skip != "" {
			reasons[e.Skip]++
		}
	}
	return reasons
}

// Limits of what is kept of one trajectory. Past maxHeld, outputs are left
// out: a turn is still run, but compared by less.
const (
	maxOutput   = 4 << 20
	maxHeld     = 256 << 20
	maxCommands = 512 << 20
)

var errTooMuch = fault.New(fault.Unsupported, "trajectory_too_large", "its commands are larger than %d MiB in all", maxCommands>>20)

func (e *Event) skip(reason string) {
	e.Skip, e.Command, e.Call, e.Output, e.ExitCode = reason, "", nil, nil, nil
}

// add gives an event to a trajectory.
func (t *Trajectory) add(e Event) error {
	switch {
	case e.Skip != "":
		e.skip(e.Skip)
	case e.Call != nil:
		t.held += e.Call.Size()
	case strings.TrimSpace(e.Command) == "":
		e.skip("an empty command")
	case strings.ContainsRune(e.Command, 0):
		e.skip("a command with a zero byte")
	case strings.ContainsRune(e.Command, utf8.RuneError):
		e.skip("a command that lost bytes when it was recorded")
	}
	t.held += len(e.Command) + len(e.Keystrokes)
	if t.held > maxCommands {
		return errTooMuch
	}
	t.Events = append(t.Events, e)
	t.observe(len(t.Events)-1, e.ExitCode, e.Output)
	return nil
}

// observe gives what was recorded to an event that runs again.
func (t *Trajectory) observe(event int, exit *int, output *string) {
	e := &t.Events[event]
	if e.Skip != "" {
		return
	}
	e.ExitCode, e.Output = exit, nil
	switch {
	case output == nil:
	case e.Call != nil && strings.HasPrefix(strings.TrimSpace(*output), "Your proposed edit has introduced new syntax error"):
		e.skip("an edit that the agent's linter refused")
	case len(*output) > maxOutput || t.held+len(*output) > maxHeld:
		t.other("output too large to compare")
	default:
		text := strings.Clone(*output)
		e.Output, e.Merged = &text, t.Format != formatName
		t.held += len(text)
	}
}

// at is a time of day after the recording's begin; 0: it isn't told.
func (t *Trajectory) at(text string) time.Duration {
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04:05.999999999", "2006-01-02 15:04:05.999999999"} {
		when, err := time.Parse(layout, text)
		if err != nil {
			continue
		}
		if t.began.IsZero() {
			t.began = when
		}
		return max(0, when.Sub(t.began))
	}
	return 0
}

func (t *Trajectory) other(kind string) {
	if t.Other == nil {
		t.Other = map[string]int{}
	}
	t.Other[kind]++
}

// All reads the trajectories of a path: of a file, of its rows, or of a folder
// of jobs. An error is one item's; the others follow.
func All(path string) iter.Seq2[*Trajectory, error] {
	return func(yield func(*Trajectory, error) bool) { open(path, yield) }
}

// Open reads a path that has one trajectory.
func Open(path string) (only *Trajectory, err error) {
	for t, err := range All(path) {
		if err != nil {
			return nil, err
		}
		if only != nil {
			return nil, fault.New(fault.Invalid, "several_trajectories", "%s has several trajectories", filepath.Base(path))
		}
		only = t
	}
	if only == nil {
		return nil, bad(filepath.Base(path), "it has no trajectory")
	}
	return only, nil
}

func bad(name, format string, args ...any) error {
	return fault.New(fault.Invalid, "bad_trajectory", "reading %s: "+format, append([]any{name}, args...)...)
}

func words(s string) map[string]bool {
	set := map[string]bool{}
	for _, w := range strings.Fields(s) {
		set[w] = true
	}
	return set
}

// content is text that formats write as a string or as a list of parts.
type content string

func (c *content) UnmarshalJSON(data []byte) error {
	var parts []struct {
		Text string `json:"text"`
	}
	var text *string
	if json.Unmarshal(data, &text) == nil {
		if text != nil {
			*c = content(*text)
		}
		return nil
	}
	if err := json.Unmarshal(data, &parts); err != nil {
		return err
	}
	var b strings.Builder
	for _, p := range parts {
		b.WriteString(p.Text)
	}
	*c = content(b.String())
	return nil
}

// truth is a bool that some writers put in quotes.
type truth bool

func (b *truth) UnmarshalJSON(data []byte) error {
	switch strings.ToLower(strings.Trim(string(data), `"`)) {
	case "true":
		*b = true
	case "false", "null", "":
		*b = false
	default:
		return &json.UnmarshalTypeError{Value: "text " + string(data)}
	}
	return nil
}
