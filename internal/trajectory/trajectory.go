// Package trajectory reads recorded rollouts, ours and those of other
// programs, into one kind of event, so that they can be run again.
//
// It promises that nothing is dropped silently: an action that can't be run
// again is an event with the reason in Skip, and a file that isn't understood
// is an error that names the file, the step and the field.
//
// A reader for a further format is a function and a line in readers.
package trajectory

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// MaxFile is the size of the largest file that is read; all formats but ours
// are one JSON value, which is held in memory.
const MaxFile = 256 << 20

// Event is one action of an agent and what it observed.
type Event struct {
	// Step is its place in the file, from 1, counted as the format does.
	Step int
	// Tool that the agent used: "bash", "str_replace_editor" ...
	Tool string
	// Command is a line for bash; empty if Skip says why there is none.
	Command string
	// Cwd it ran in; empty: the start state's.
	Cwd string
	// Skip is why it can't be run again; empty: it can.
	Skip string
	// ExitCode as recorded; nil: the format doesn't tell.
	ExitCode *int
	// Output as recorded; nil: the format doesn't tell.
	Output *string
	// Merged says that Output has standard error mixed in.
	Merged bool
}

// Trajectory is one recorded rollout.
type Trajectory struct {
	Format string
	Events []Event
	// Start is the manifest of the state it began in, relative to the file; only
	// our format names one.
	Start string
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

// reader turns a decoded JSON value of its format into events. detect must say
// no to every other format.
type reader struct {
	name   string
	detect func(shape) bool
	read   func(data []byte) (*Trajectory, error)
}

var readers = []reader{
	{"swe-agent", func(s shape) bool { return s.has("trajectory") }, readSWEAgent},
	{"mini-swe-agent", func(s shape) bool {
		return s.has("messages") || s.elements && s.has("role") && s.has("content")
	}, readMini},
	{"atif", func(s shape) bool { return s.has("schema_version") && s.has("steps") }, readATIF},
	{"openhands", func(s shape) bool { return s.elements && s.has("id") && s.has("source") }, readOpenHands},
}

// shape is what formats are told apart by: the members of the object, or of
// the first object of a list.
type shape struct {
	elements bool
	members  map[string]json.RawMessage
}

func (s shape) has(member string) bool { _, ok := s.members[member]; return ok }

func shapeOf(data []byte) (s shape, err error) {
	if bytes.HasPrefix(data, []byte("[")) {
		var list []json.RawMessage
		if err := json.Unmarshal(data, &list); err != nil {
			return s, err
		}
		s.elements = true
		if len(list) > 0 {
			_ = json.Unmarshal(list[0], &s.members) // not an object: no format has that
		}
		return s, nil
	}
	return s, json.Unmarshal(data, &s.members)
}

// Open reads a file. Its format is found from its content.
func Open(path string) (*Trajectory, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fault.New(fault.NotFound, "no_trajectory", "opening the trajectory: %w", err)
	}
	defer f.Close()
	return Read(filepath.Base(path), f)
}

// Read is Open for a file that is open already; name is for messages.
func Read(name string, r io.Reader) (*Trajectory, error) {
	data, err := io.ReadAll(io.LimitReader(r, MaxFile+1))
	if err != nil {
		return nil, fault.New(fault.Invalid, "bad_trajectory", "reading %s: %w", name, err)
	}
	bad := func(err error) error {
		return fault.New(fault.Invalid, "bad_trajectory", "reading %s: %w", name, err)
	}
	if len(data) > MaxFile {
		return nil, bad(fmt.Errorf("it is larger than %d MiB", MaxFile>>20))
	}
	data = bytes.TrimSpace(bytes.TrimPrefix(data, []byte("\xef\xbb\xbf")))
	if len(data) == 0 {
		return nil, bad(fmt.Errorf("it is empty"))
	}
	if isOurs(data) {
		t, err := readOurs(data)
		if err != nil {
			return nil, bad(err)
		}
		return t, nil
	}
	s, err := shapeOf(data)
	if err != nil {
		return nil, bad(where(data, err))
	}
	for _, known := range readers {
		if !known.detect(s) {
			continue
		}
		t, err := known.read(data)
		if err != nil {
			return nil, bad(fmt.Errorf("as %s: %w", known.name, where(data, err)))
		}
		t.Format = known.name
		return t, nil
	}
	return nil, fault.New(fault.Unsupported, "unknown_trajectory", "%s has no format that is known", name).
		WithHint("known are %s, SWE-agent, mini-swe-agent, ATIF and OpenHands (V0) files", formatName)
}

// where adds the line to a JSON error.
func where(data []byte, err error) error {
	var offset int64
	switch e := err.(type) {
	case *json.SyntaxError:
		offset = e.Offset
	case *json.UnmarshalTypeError:
		offset = e.Offset
		if e.Field != "" {
			err = fmt.Errorf("field %s must not be a %s", e.Field, e.Value)
		}
	default:
		return err
	}
	line := 1 + bytes.Count(data[:min(int(offset), len(data))], []byte("\n"))
	return fmt.Errorf("line %d: %w", line, err)
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
