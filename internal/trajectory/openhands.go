package trajectory

import "fmt"

// OpenHands V0: a list of events; an observation names the action that is its
// cause.

type openHandsEvent struct {
	ID     *int   `json:"id"`
	Source string `json:"source"`
	Action string `json:"action"`
	Args   struct {
		Command content `json:"command"`
		IsInput truth   `json:"is_input"`
	} `json:"args"`
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
	e := Event{Step: *ev.ID, Tool: ev.Action, Command: string(ev.Args.Command)}
	switch {
	case ev.Action != "run":
		e.skip("a tool of the agent (" + ev.Action + ")")
	case e.Command == "" || bool(ev.Args.IsInput):
		e.skip("input to a running command")
	}
	r.at[*ev.ID] = len(r.t.Events)
	return r.t.add(e)
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
	case ev.Observation == "run":
		exit := ev.Extras.Metadata.ExitCode
		if exit == nil {
			exit = ev.Extras.ExitCode
		}
		r.t.observe(k, ended(exit), (*string)(&ev.Content))
	case ev.Observation == "error" || ev.Observation == "user_rejected":
		r.t.Events[k].skip("a command that the agent's shell refused")
	}
}

// ended is an exit status, or nil for the -1 of a command that still ran.
func ended(exit *int) *int {
	if exit != nil && *exit < 0 {
		return nil
	}
	return exit
}
