package trajectory

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/agenttools"
)

// ATIF, the interchange format of Harbor, versions 1.0 to 1.8:
//
//	{"schema_version": "ATIF-v1.N", "steps": [{"step_id", "source", "message", "tool_calls", "observation"}, ...],
//	 "continued_trajectory_ref": "FILE"}

const atifNewest = 8

var atifShells = words("bash execute_bash bash_command run_shell_command shell terminal Bash")

type atifStep struct {
	ID      int             `json:"step_id"`
	Source  string          `json:"source"`
	Time    string          `json:"timestamp"`
	Message content         `json:"message"`
	Copied  bool            `json:"is_copied_context"`
	Extra   json.RawMessage `json:"extra"`
	Calls   []struct {
		ID        string          `json:"tool_call_id"`
		Function  string          `json:"function_name"`
		Arguments json.RawMessage `json:"arguments"`
	} `json:"tool_calls"`
	Observation struct {
		Results []struct {
			Call     string            `json:"source_call_id"`
			Content  *content          `json:"content"`
			SubAgent []json.RawMessage `json:"subagent_trajectory_ref"`
		} `json:"results"`
	} `json:"observation"`
}

func readATIF(s *stream, _ shape, t *Trajectory) error {
	version := false
	err := s.object(func(name string) error {
		switch name {
		case "schema_version":
			version = true
			return atifVersion(s)
		case "steps":
			return s.array(func(i int) error {
				var step atifStep
				if err := s.decode(&step); err != nil {
					return fmt.Errorf("step %d: %w", i, err)
				}
				if step.ID == 0 {
					return errorf("step %d: field step_id is missing", i)
				}
				return step.read(t)
			})
		case "continued_trajectory_ref":
			var ref *string
			if err := s.decode(&ref); err != nil {
				return fmt.Errorf("field continued_trajectory_ref: %w", err)
			}
			if ref != nil {
				t.continued = *ref
			}
			return nil
		case "subagent_trajectories":
			return s.array(func(int) error {
				t.other("trajectory of a sub-agent")
				return s.skip()
			})
		}
		return s.skip()
	})
	if err == nil && !version {
		return errorf("field schema_version is missing")
	}
	return err
}

func atifVersion(s *stream) error {
	var version string
	if err := s.decode(&version); err != nil {
		return fmt.Errorf("field schema_version: %w", err)
	}
	minor, ok := strings.CutPrefix(version, "ATIF-v1.")
	if !ok {
		return errorf("field schema_version: version %q is not known", version)
	}
	if n, err := strconv.ParseUint(minor, 10, 16); err != nil || n > atifNewest {
		return errorf("field schema_version: %q is newer than ATIF-v1.%d", version, atifNewest)
	}
	return nil
}

func (step *atifStep) read(t *Trajectory) error {
	at := t.at(step.Time)
	if step.Source != "agent" {
		t.other("step of source " + step.Source)
		return nil
	}
	var events []Event
	var ours atifExtra
	_ = json.Unmarshal(step.Extra, &ours) // another writer's is of any kind
	for _, call := range step.Calls {
		e := atifCall(call.Function, call.Arguments)
		for _, r := range step.Observation.Results {
			// A terminal's content is what was on its screen, not what a command wrote.
			if r.Call != call.ID || call.ID == "" || e.Keystrokes != "" || r.Content == nil {
				continue
			}
			if e.ExitCode, e.Output = miniObservation(string(*r.Content)); e.ExitCode == nil {
				exit, out := openHandsFoot(string(*r.Content))
				e.ExitCode, e.Output = exit, &out
			}
			if ours.Boxwood.ExitCode != nil {
				e.ExitCode, e.Output = ours.Boxwood.ExitCode, (*string)(r.Content)
			}
			if ours.Boxwood.Lossy {
				e.Output = nil
			}
		}
		events = append(events, e)
	}
	if len(step.Calls) == 0 {
		events = terminusMessage(string(step.Message))
	}
	for _, r := range step.Observation.Results {
		for range r.SubAgent {
			e := Event{Tool: "sub-agent"}
			e.skip("actions of a sub-agent, which has a trajectory of its own")
			events = append(events, e)
		}
	}
	if len(events) == 0 {
		events = make([]Event, 1)
		events[0].skip("a message without a command")
	}
	for _, e := range events {
		e.Step, e.Copied, e.At = step.ID, step.Copied, at
		if step.Copied {
			e.skip("context copied from an earlier file")
		}
		if err := t.add(e); err != nil {
			return err
		}
	}
	return nil
}

func atifCall(function string, arguments json.RawMessage) Event {
	var a struct {
		Command    string  `json:"command"`
		Keystrokes *string `json:"keystrokes"`
		Seconds    float64 `json:"duration"`
		IsInput    truth   `json:"is_input"`
		agenttools.Arguments
	}
	err := json.Unmarshal(arguments, &a)
	e := Event{Tool: function, Command: a.Command}
	switch {
	case err == nil && a.Keystrokes != nil:
		e = typed(*a.Keystrokes, a.Seconds)
	case editors[function] && err == nil:
		call, why := a.Call(a.Command, true)
		if e.Call, e.Command = call, ""; call == nil {
			e.skip(why)
		}
	case !atifShells[function]:
		e.skip("a tool of the agent (" + function + ")")
	case err != nil:
		e.skip("a call of a shell whose arguments are not understood")
	case a.Command == "" || bool(a.IsInput):
		e.skip("input to a running command")
	}
	return e
}

// terminusMessage reads the commands of terminus-2, which writes them as JSON
// into its message; its terminal shows several at once, so there is no output
// that belongs to one.
func terminusMessage(message string) (events []Event) {
	var m struct {
		Commands []struct {
			Keystrokes string  `json:"keystrokes"`
			Seconds    float64 `json:"duration"`
		} `json:"commands"`
	}
	from, to := strings.Index(message, "{"), strings.LastIndex(message, "}")
	if from < 0 || to < from || json.Unmarshal([]byte(message[from:to+1]), &m) != nil {
		return nil
	}
	for _, c := range m.Commands {
		events = append(events, typed(c.Keystrokes, c.Seconds))
	}
	return events
}

// typed turns keystrokes into a command if they are one: text and a line end.
func typed(keystrokes string, wait float64) Event {
	e := Event{Tool: "keystrokes", Keystrokes: keystrokes, Command: strings.TrimRight(keystrokes, "\r\n"), Took: seconds(wait)}
	switch {
	case strings.TrimSpace(keystrokes) == "":
		e.skip("keystrokes that only wait")
	case e.Command == keystrokes || strings.ContainsFunc(e.Command, func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' }) ||
		strings.HasPrefix(e.Command, "C-"):
		e.skip("keystrokes that are not a command line")
	}
	return e
}
