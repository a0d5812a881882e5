package trajectory

import (
	"fmt"
	"strings"
	"time"

	"github.com/boxwood-rl/boxwood/internal/agenttools"
)

// OpenHands SDK: events that are told apart by their "kind", as JSON lines, as
// a list or a file each. An event may name the one that it follows; a person
// who went back in a conversation leaves a branch behind.

type sdkEvent struct {
	Kind   string  `json:"kind"`
	ID     string  `json:"id"`
	Source string  `json:"source"`
	Parent *string `json:"parent_id"`
	Tool   string  `json:"tool_name"`
	Time   string  `json:"timestamp"`
	// Response groups the calls of one answer of the model.
	Response string `json:"llm_response_id"`
	Action   *struct {
		Kind    string  `json:"kind"`
		Command content `json:"command"`
		IsInput truth   `json:"is_input"`
		Reset   truth   `json:"reset"`
		agenttools.Arguments
	} `json:"action"`
	ActionID    string `json:"action_id"`
	Observation struct {
		Content  content `json:"content"`
		Output   string  `json:"output"` // of older files
		Error    truth   `json:"is_error"`
		ExitCode *int    `json:"exit_code"`
		Metadata struct {
			ExitCode *int `json:"exit_code"`
		} `json:"metadata"`
	} `json:"observation"`
}

var (
	sdkShells = words("terminal execute_bash bash")
	// sdkRefused begins the observation of several commands, of which none ran.
	sdkRefused = "Cannot execute multiple commands at once"
)

// sdkRun is a conversation being read.
type sdkRun struct {
	t *Trajectory
	// at is where an action's event stands.
	at     map[string]int
	parent map[string]string
	forks  bool
	last   string
	// ids of t.Events, and the answers that they are of.
	ids, responses []string
}

func newSDKRun(t *Trajectory) *sdkRun {
	t.Kept = true
	return &sdkRun{t: t, at: map[string]int{}, parent: map[string]string{}}
}

func readOpenHandsSDK(s *stream, found shape, t *Trajectory) error {
	run := newSDKRun(t)
	if err := s.elements(found.list, func(i int) error { return run.next(s, i) }); err != nil {
		return err
	}
	run.prune()
	return nil
}

func (r *sdkRun) next(s *stream, i int) error {
	var ev sdkEvent
	if err := s.decode(&ev); err != nil {
		return fmt.Errorf("step %d: %w", i, err)
	}
	switch {
	case ev.Kind == "":
		return errorf("step %d: field kind is missing", i)
	case ev.ID == "":
		return errorf("step %d: field id is missing", i)
	}
	before := r.last
	r.last = ev.ID
	r.parent[ev.ID] = before
	if ev.Parent != nil {
		r.parent[ev.ID] = *ev.Parent
		r.forks = r.forks || *ev.Parent != before
	}
	switch ev.Kind {
	case "ActionEvent":
		r.at[ev.ID] = len(r.t.Events)
		r.ids, r.responses = append(r.ids, ev.ID), append(r.responses, ev.Response)
		e := ev.event(i)
		e.At = r.t.at(ev.Time)
		return r.t.add(e)
	case "ObservationEvent":
		if k, ok := r.at[ev.ActionID]; ok {
			r.observe(k, ev)
			return nil
		}
		r.t.other("observation of no action")
	case "UserRejectObservation":
		if k, ok := r.at[ev.ActionID]; ok {
			r.t.Events[k].skip("an action that the user rejected")
			return nil
		}
		r.t.other("observation of no action")
	default:
		r.t.other(ev.Kind)
	}
	return nil
}

func (ev sdkEvent) event(i int) Event {
	e := Event{Step: i, Tool: ev.Tool}
	switch {
	case ev.Action == nil:
		e.skip("an action that was not valid")
	case editors[ev.Tool]:
		call, why := ev.Action.Call(string(ev.Action.Command), true)
		if e.Call = call; call == nil {
			e.skip(why)
		}
	case !sdkShells[ev.Tool]:
		e.skip("a tool of the agent (" + ev.Tool + ")")
	case bool(ev.Action.Reset):
		e.skip("a new start of the agent's shell")
	case ev.Action.Command == "" || bool(ev.Action.IsInput):
		e.skip("input to a running command")
	default:
		e.Command = string(ev.Action.Command)
	}
	return e
}

func (r *sdkRun) observe(k int, ev sdkEvent) {
	o := ev.Observation
	text := string(o.Content)
	if text == "" {
		text = o.Output
	}
	if o.ExitCode == nil {
		o.ExitCode = o.Metadata.ExitCode
	}
	if bool(o.Error) && ended(o.ExitCode) == nil && strings.HasPrefix(text, sdkRefused) {
		r.t.Events[k].skip("a command that the agent's shell refused")
		return
	}
	if at := r.t.at(ev.Time); r.t.Events[k].At > 0 && at > r.t.Events[k].At {
		r.t.Events[k].Took = (at - r.t.Events[k].At).Truncate(time.Millisecond)
	}
	r.t.Events[k].Hung = o.ExitCode != nil && *o.ExitCode < 0 && r.t.Events[k].Command != ""
	r.t.observe(k, ended(o.ExitCode), &text)
}

// prune skips what isn't on the way to the last event. An event without
// a parent, or with one that isn't there, begins a conversation. Calls of one
// answer belong together, whether they follow each other or a common event.
func (r *sdkRun) prune() {
	if !r.forks {
		return
	}
	on := map[string]bool{}
	for id := r.last; id != "" && !on[id]; id = r.parent[id] {
		on[id] = true
	}
	answers := map[string]bool{"": false}
	for i, id := range r.ids {
		if on[id] && r.responses[i] != "" {
			answers[r.responses[i]] = true
		}
	}
	for i, id := range r.ids {
		if !on[id] && !answers[r.responses[i]] {
			r.t.Events[i].skip("on a branch of the conversation that was left")
		}
	}
}
