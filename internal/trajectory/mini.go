package trajectory

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// mini-swe-agent: messages, bare or as a member; version 1 writes the action
// as a block of bash and the observation as the next message of the user,
// version 1.1 writes both into "extra" as well.

var (
	miniBlock  = regexp.MustCompile("(?s)```(?:bash|sh|mswea_bash_command)[ \t]*\n(.*?)\n?```")
	miniCode   = regexp.MustCompile(`(?s)^\s*<returncode>(-?\d+)</returncode>\s*`)
	miniOutput = regexp.MustCompile(`(?s)<output>\n?(.*)</output>`)
)

const miniDone = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

type miniMessage struct {
	Role    *string `json:"role"`
	Content content `json:"content"`
	Call    string  `json:"tool_call_id"`
	Extra   struct {
		Actions []struct {
			Command string `json:"command"`
			Call    string `json:"tool_call_id"`
		} `json:"actions"`
		ReturnCode *int    `json:"returncode"`
		RawOutput  *string `json:"raw_output"`
	} `json:"extra"`
}

// miniRun is a run being read: events of the last message that have yet to be
// observed, and the calls that they were.
type miniRun struct {
	t       *Trajectory
	waiting []int
	calls   []string
}

func readMini(s *stream, found shape, t *Trajectory) error {
	run := &miniRun{t: t}
	message := func(i int) error {
		var m miniMessage
		if err := s.decode(&m); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		if m.Role == nil {
			return errorf("step %d: field role is missing", i)
		}
		return run.message(i, m)
	}
	if found.list {
		return s.array(message)
	}
	return s.object(func(name string) error {
		switch name {
		case "trajectory_format":
			var version *string
			if err := s.decode(&version); err != nil {
				return fmt.Errorf("field trajectory_format: %w", err)
			}
			if version != nil && *version != "mini-swe-agent-1" && *version != "mini-swe-agent-1.1" {
				return errorf("field trajectory_format: version %q is not known", *version)
			}
			return nil
		case "messages":
			return s.array(message)
		}
		return s.skip()
	})
}

func (r *miniRun) message(step int, m miniMessage) error {
	switch {
	case *m.Role == "assistant":
		return r.act(step, m)
	case len(r.waiting) == 0 || *m.Role == "exit":
		r.t.other("message of role " + *m.Role)
		return nil
	}
	at := 0
	for i, call := range r.calls {
		if call != "" && call == m.Call {
			at = i
		}
	}
	exit, out := miniObservation(string(m.Content))
	if m.Extra.ReturnCode != nil {
		exit, out = m.Extra.ReturnCode, m.Extra.RawOutput
	}
	r.t.observe(r.waiting[at], exit, out)
	r.waiting = append(r.waiting[:at], r.waiting[at+1:]...)
	r.calls = append(r.calls[:at], r.calls[at+1:]...)
	return nil
}

func (r *miniRun) act(step int, m miniMessage) error {
	r.waiting, r.calls = nil, nil
	var commands, calls []string
	for _, a := range m.Extra.Actions {
		commands, calls = append(commands, a.Command), append(calls, a.Call)
	}
	if len(commands) == 0 {
		for _, found := range miniBlock.FindAllStringSubmatch(string(m.Content), -1) {
			commands, calls = append(commands, found[1]), append(calls, "")
		}
		if len(commands) != 1 { // the agent runs none of several
			e := Event{Step: step}
			e.skip(map[bool]string{true: "a message without a command", false: "a message with several commands, which are refused"}[len(commands) == 0])
			return r.t.add(e)
		}
	}
	for i, command := range commands {
		e := Event{Step: step, Tool: "bash", Command: command}
		if strings.Contains(command, miniDone) {
			e.skip("the agent's submission")
		}
		r.waiting, r.calls = append(r.waiting, len(r.t.Events)), append(r.calls, calls[i])
		if err := r.t.add(e); err != nil {
			return err
		}
	}
	return nil
}

// miniObservation reads the exit status and the output from a message.
func miniObservation(text string) (exit *int, output *string) {
	if found := miniCode.FindStringSubmatch(text); found != nil {
		if code, err := strconv.Atoi(found[1]); err == nil {
			exit = &code
		}
	}
	if found := miniOutput.FindStringSubmatch(text); found != nil {
		output = &found[1]
	}
	return exit, output
}
