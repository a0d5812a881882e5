package trajectory

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/boxwood-rl/boxwood/internal/agenttools"
)

// OpenHands V0: a list of events; an observation names the action that is its
// cause.

type openHandsEvent struct {
	ID     *int   `json:"id"`
	Source string `json:"source"`
	Time   string `json:"timestamp"`
	Action string `json:"action"`
	Args   struct {
		Command content `json:"command"`
		IsInput truth   `json:"is_input"`
		agenttools.Arguments
		Impl    string          `json:"impl_source"`
		Content json.RawMessage `json:"content"`
		Start   int             `json:"start"`
		End     int             `json:"end"`
	} `json:"args"`
	// Metadata has the model's own call, whose arguments early versions left out
	// of Args.
	Metadata struct {
		Call     string `json:"tool_call_id"`
		Response struct {
			Choices []struct {
				Message struct {
					Calls []struct {
						ID       string `json:"id"`
						Function struct {
							Arguments string `json:"arguments"`
						} `json:"function"`
					} `json:"tool_calls"`
				} `json:"message"`
			} `json:"choices"`
		} `json:"model_response"`
	} `json:"tool_call_metadata"`
	Observation string  `json:"observation"`
	Cause       *int    `json:"cause"`
	Content     content `json:"content"`
	Extras      struct {
		Metadata struct {
			ExitCode *int `json:"exit_code"`
		} `json:"metadata"`
		ExitCode *int `json:"exit_code"` // of older files
	} `json:"extras"`
}

// openHandsRun is a run being read; at is where an action's event stands.
type openHandsRun struct {
	t  *Trajectory
	at map[int]int
}

func readOpenHands(s *stream, found shape, t *Trajectory) error {
	run := openHandsRun{t, map[int]int{}}
	t.Kept = true
	return s.elements(found.list, func(i int) error { return run.next(s, i) })
}

func (r *openHandsRun) next(s *stream, i int) error {
	var ev openHandsEvent
	if err := s.decode(&ev); err != nil {
		return fmt.Errorf("step %d: %w", i, err)
	}
	if ev.ID == nil {
		return errorf("step %d: field id is missing", i)
	}
	if ev.Observation != "" {
		r.observe(ev)
		return nil
	}
	if ev.Source != "agent" || ev.Action == "" || ev.Action == "change_agent_state" || ev.Action == "system" {
		r.t.other(fmt.Sprintf("action %q of source %q", ev.Action, ev.Source))
		return nil
	}
	e := Event{Step: *ev.ID, Tool: ev.Action, Command: string(ev.Args.Command), At: r.t.at(ev.Time)}
	switch {
	case ev.Action == "edit" || ev.Action == "read" || ev.Action == "write":
		call, why := ev.edit()
		if e.Call, e.Command = call, ""; call == nil {
			e.skip(why)
		}
	case ev.Action != "run":
		e.skip("a tool of the agent (" + ev.Action + ")")
	case e.Command == "" || bool(ev.Args.IsInput):
		e.skip("input to a running command")
	}
	r.at[*ev.ID] = len(r.t.Events)
	return r.t.add(e)
}

// edit is the call of the editor that an action was. Before there was the
// editor, "edit" was done by a model, and "read" and "write" had lines.
func (ev openHandsEvent) edit() (*agenttools.Call, string) {
	a := ev.Args
	whole := a.Start <= 0 && a.End <= 0
	switch {
	case ev.Action == "edit" && a.Command != "":
		return a.Call(string(a.Command), true)
	case a.Impl == "oh_aci":
		if call := ev.modelsCall(); call != nil {
			return call, ""
		}
		if ev.Action == "read" {
			return a.Call("view", true)
		}
	case ev.Action == "write" && whole && len(a.Content) > 0:
		a.FileText = a.Content
		call, why := a.Call("write", true)
		return call, why
	}
	return nil, "a tool of the agent (" + ev.Action + ")"
}

// modelsCall is the call of the editor as the model made it; nil: it isn't told.
func (ev openHandsEvent) modelsCall() *agenttools.Call {
	for _, choice := range ev.Metadata.Response.Choices {
		for _, c := range choice.Message.Calls {
			var a struct {
				Command string `json:"command"`
				agenttools.Arguments
			}
			if c.ID == ev.Metadata.Call && json.Unmarshal([]byte(c.Function.Arguments), &a) == nil {
				call, _ := a.Call(a.Command, true)
				return call
			}
		}
	}
	return nil
}

func (r *openHandsRun) observe(ev openHandsEvent) {
	k, caused := 0, false
	if ev.Cause != nil {
		k, caused = r.at[*ev.Cause]
	}
	switch {
	case !caused:
		r.t.other("observation " + ev.Observation)
	case r.t.Events[k].Skip != "":
	case r.t.Events[k].Call != nil && ev.Observation != "user_rejected":
		// Of a write, and of early edits, the record has nothing that the agent saw.
		if ev.Observation == "write" || ev.Observation == "edit" && (ev.Content == "" || strings.HasPrefix(string(ev.Content), "--- ")) {
			return
		}
		r.t.observe(k, nil, (*string)(&ev.Content))
	case ev.Observation == "run":
		r.took(k, ev.Time)
		exit := ev.Extras.Metadata.ExitCode
		if exit == nil {
			exit = ev.Extras.ExitCode
		}
		r.t.Events[k].Hung = exit != nil && *exit < 0
		r.t.observe(k, ended(exit), (*string)(&ev.Content))
	case ev.Observation == "error" || ev.Observation == "user_rejected":
		r.t.Events[k].skip("a command that the agent's shell refused")
	}
}

// took notes how long an action took, by when it was observed.
func (r *openHandsRun) took(k int, observed string) {
	if at := r.t.at(observed); r.t.Events[k].At > 0 && at > r.t.Events[k].At {
		r.t.Events[k].Took = (at - r.t.Events[k].At).Truncate(time.Millisecond)
	}
}

// foot is what OpenHands writes below an observation for its model.
var foot = regexp.MustCompile(`(?s)\n*(?:\[The command completed with exit code (-?\d+)\.\][^\n]*)?(?:\n?\[Current working directory: [^\n]*\])?(?:\n?\[Python interpreter: [^\n]*\])?` +
	`(?:\n?\[Command finished with exit code (-?\d+)\])?\s*$`)

// openHandsFoot takes the exit status from below an observation.
func openHandsFoot(text string) (exit *int, out string) {
	at := foot.FindStringSubmatchIndex(text)
	for _, group := range []int{2, 4} {
		if at != nil && at[group] >= 0 {
			if n, err := strconv.Atoi(text[at[group]:at[group+1]]); err == nil {
				return ended(&n), text[:at[0]]
			}
		}
	}
	return nil, text
}

// ended is an exit status, or nil for the -1 of a command that still ran.
func ended(exit *int) *int {
	if exit != nil && *exit < 0 {
		return nil
	}
	return exit
}
