package trajectory

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"time"
)

// ATIFRun is a path of turns to be written as ATIF.
type ATIFRun struct {
	// Run groups files, ID tells them apart.
	Run, ID string
	// Agent and Version name who acted.
	Agent, Version string
	Turns          []ATIFTurn
	// Extra of the file, under our name.
	Extra map[string]any
}

// ATIFTurn is one step.
type ATIFTurn struct {
	ID string
	// Copied says that another file has it, and this one its copy.
	Copied bool
	At     time.Time
	// Command is a line for bash. If it is empty, What says what was done that is
	// none; if that is, too, nothing was: it is the start.
	Command, What string
	ExitCode      *int
	// Output, of which Cut is left out. What of it isn't UTF-8 is replaced.
	Output string
	Cut    bool
	// Extra of the step, under our name, beside what is above.
	Extra map[string]any
}

// extraName is ours in members called "extra", which belong to no format.
const extraName = "boxwood"

// The names of calls: of a command, and of a turn that was something else.
const (
	callOfCommand = "bash"
	callOfTurn    = "boxwood_turn"
)

// atifExtra is what our reader takes of a step's extra.
type atifExtra struct {
	Boxwood struct {
		ExitCode *int `json:"exit_code"`
		// Lossy: the output isn't all of it, or not as it was.
		Lossy bool `json:"lossy"`
	} `json:"boxwood"`
}

// WriteATIF writes a path in version 1.7. A step is written whole before the
// next, so that a long path is never held twice.
func WriteATIF(w io.Writer, r ATIFRun) error {
	out := bufio.NewWriter(w)
	enc := json.NewEncoder(out)
	enc.SetEscapeHTML(false)
	head, err := json.Marshal(map[string]any{
		"schema_version": "ATIF-v1.7", "session_id": r.Run, "trajectory_id": r.ID,
		"agent": map[string]any{"name": r.Agent, "version": r.Version}, "extra": map[string]any{extraName: r.Extra},
	})
	if err != nil {
		return err
	}
	_, err = out.WriteString(string(head[:len(head)-1]) + ",\n\"steps\": [\n")
	for i, t := range r.Turns {
		if i > 0 {
			err = errors.Join(err, out.WriteByte(','))
		}
		if err = errors.Join(err, enc.Encode(t.step(i+1))); err != nil {
			return err
		}
	}
	_, last := out.WriteString("]}\n")
	return errors.Join(err, last, out.Flush())
}

// step is a turn as ATIF has it.
func (t ATIFTurn) step(n int) map[string]any {
	ours := map[string]any{"node": t.ID}
	for name, value := range t.Extra {
		ours[name] = value
	}
	step := map[string]any{"step_id": n, "source": "system", "message": "", "extra": map[string]any{extraName: ours}}
	if !t.At.IsZero() {
		step["timestamp"] = t.At.UTC().Format("2006-01-02T15:04:05.000000Z")
	}
	if t.Copied {
		step["is_copied_context"] = true
	}
	name, arguments := callOfCommand, map[string]any{"command": t.Command}
	switch {
	case t.Command != "":
		if t.ExitCode != nil {
			ours["exit_code"] = *t.ExitCode
		}
	case t.What != "":
		name, arguments = callOfTurn, map[string]any{"text": t.What}
	default:
		step["message"] = "start"
		return step
	}
	if text := strings.ToValidUTF8(t.Output, "\uFFFD"); text != t.Output || t.Cut {
		t.Output, ours["lossy"] = text, true
	}
	step["source"] = "agent"
	step["tool_calls"] = []any{map[string]any{"tool_call_id": t.ID, "function_name": name, "arguments": arguments}}
	step["observation"] = map[string]any{"results": []any{map[string]any{"source_call_id": t.ID, "content": t.Output}}}
	return step
}
