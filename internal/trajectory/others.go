package trajectory

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// ---- SWE-agent: {"trajectory": [{"action", "observation", "state"}, ...]} ----

// sweTools are commands of SWE-agent's own that exist in its sandbox only.
var sweTools = words("create insert edit open goto scroll_up scroll_down find_file search_file search_dir submit str_replace_editor " +
	"view_image exit_cost exit_context exit_format skip exit_forfeit review_on_submit")

func words(s string) map[string]bool {
	set := map[string]bool{}
	for _, w := range strings.Fields(s) {
		set[w] = true
	}
	return set
}

func readSWEAgent(data []byte) (*Trajectory, error) {
	var file struct {
		Trajectory []struct {
			Action      *string         `json:"action"`
			Observation *string         `json:"observation"`
			State       json.RawMessage `json:"state"`
		} `json:"trajectory"`
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, err
	}
	t := &Trajectory{}
	cwd := ""
	for i, step := range file.Trajectory {
		if step.Action == nil {
			return nil, fmt.Errorf("step %d: field action is missing", i+1)
		}
		e := Event{Step: i + 1, Tool: "bash", Command: strings.TrimRight(*step.Action, "\n"), Cwd: cwd, Output: step.Observation, Merged: true}
		if first, _, _ := strings.Cut(strings.TrimSpace(e.Command), " "); sweTools[first] {
			e.Tool = first
			e.skip("a tool of SWE-agent (" + first + ")")
		}
		t.add(e)
		cwd = sweCwd(step.State, cwd) // the state is the one after the action
	}
	return t, nil
}

// sweCwd reads the working folder from a state, which old files write as a
// string that holds JSON.
func sweCwd(state json.RawMessage, before string) string {
	var text string
	if json.Unmarshal(state, &text) == nil {
		state = json.RawMessage(text)
	}
	var s struct {
		WorkingDir string `json:"working_dir"`
	}
	if json.Unmarshal(state, &s) != nil || s.WorkingDir == "" || s.WorkingDir == "n/a" {
		return before
	}
	return s.WorkingDir
}

// ---- mini-swe-agent: messages; actions in `extra`, or in a block of bash ----

var (
	miniBlock  = regexp.MustCompile("(?s)```(?:bash|sh|mswea_bash_command)[ \t]*\n(.*?)\n?```")
	miniCode   = regexp.MustCompile(`(?s)^\s*<returncode>(-?\d+)</returncode>\s*`)
	miniOutput = regexp.MustCompile(`(?s)<output>\n?(.*?)</output>`)
)

const miniDone = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

type miniMessage struct {
	Role    *string `json:"role"`
	Content content `json:"content"`
	Extra   struct {
		Actions []struct {
			Command string `json:"command"`
		} `json:"actions"`
		ReturnCode *int    `json:"returncode"`
		RawOutput  *string `json:"raw_output"`
	} `json:"extra"`
}

func readMini(data []byte) (*Trajectory, error) {
	var messages []miniMessage
	if strings.HasPrefix(string(data), "[") {
		if err := json.Unmarshal(data, &messages); err != nil {
			return nil, err
		}
	} else {
		var file struct {
			Format   string        `json:"trajectory_format"`
			Messages []miniMessage `json:"messages"`
		}
		if err := json.Unmarshal(data, &file); err != nil {
			return nil, err
		}
		switch file.Format {
		case "", "mini-swe-agent-1", "mini-swe-agent-1.1":
		default:
			return nil, fmt.Errorf("field trajectory_format: version %q is not known", file.Format)
		}
		messages = file.Messages
	}
	t := &Trajectory{}
	for i, m := range messages {
		if m.Role == nil {
			return nil, fmt.Errorf("step %d: field role is missing", i+1)
		}
		if *m.Role != "assistant" {
			continue
		}
		var commands []string
		for _, a := range m.Extra.Actions {
			commands = append(commands, a.Command)
		}
		if len(commands) == 0 {
			if found := miniBlock.FindStringSubmatch(string(m.Content)); found != nil {
				commands = []string{found[1]}
			}
		}
		if len(commands) == 0 {
			e := Event{Step: i + 1}
			e.skip("a message without a command")
			t.add(e)
		}
		for k, command := range commands {
			e := Event{Step: i + 1, Tool: "bash", Command: command, Merged: true}
			if strings.Contains(command, miniDone) {
				e.skip("the agent's submission")
			} else if at := i + 1 + k; at < len(messages) && messages[at].Role != nil && *messages[at].Role != "assistant" {
				e.observeMini(messages[at])
			}
			t.add(e)
		}
	}
	return t, nil
}

func (e *Event) observeMini(m miniMessage) {
	if m.Extra.ReturnCode != nil {
		e.ExitCode, e.Output = m.Extra.ReturnCode, m.Extra.RawOutput
		return
	}
	text := string(m.Content)
	if found := miniCode.FindStringSubmatch(text); found != nil {
		if code, err := strconv.Atoi(found[1]); err == nil {
			e.ExitCode = &code
		}
	}
	if found := miniOutput.FindStringSubmatch(text); found != nil {
		e.Output = &found[1]
	}
}

// ---- ATIF: {"schema_version": "ATIF-v1.N", "steps": [...]} ----

func readATIF(data []byte) (*Trajectory, error) {
	var file struct {
		Version string `json:"schema_version"`
		Steps   []struct {
			ID      int     `json:"step_id"`
			Source  string  `json:"source"`
			Message content `json:"message"`
			Copied  bool    `json:"is_copied_context"`
			Calls   []struct {
				ID        string          `json:"tool_call_id"`
				Function  string          `json:"function_name"`
				Arguments json.RawMessage `json:"arguments"`
			} `json:"tool_calls"`
			Observation struct {
				Results []struct {
					Call    string  `json:"source_call_id"`
					Content content `json:"content"`
				} `json:"results"`
			} `json:"observation"`
		} `json:"steps"`
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, err
	}
	if minor, ok := strings.CutPrefix(file.Version, "ATIF-v1."); !ok {
		return nil, fmt.Errorf("field schema_version: %q is not known", file.Version)
	} else if n, err := strconv.Atoi(minor); err != nil || n > 8 {
		return nil, fmt.Errorf("field schema_version: %q is newer than ATIF-v1.8", file.Version)
	}
	t := &Trajectory{}
	for i, step := range file.Steps {
		if step.ID == 0 {
			return nil, fmt.Errorf("step %d: field step_id is missing", i+1)
		}
		if step.Source != "agent" {
			continue
		}
		from := len(t.Events)
		for _, call := range step.Calls {
			for _, e := range atifCall(call.Function, call.Arguments) {
				for _, r := range step.Observation.Results {
					if r.Call == call.ID && call.ID != "" {
						text := string(r.Content)
						e.Output, e.Merged = &text, true
					}
				}
				t.add(e)
			}
		}
		if len(step.Calls) == 0 {
			for _, e := range terminusMessage(string(step.Message)) {
				t.add(e)
			}
		}
		if from == len(t.Events) {
			var e Event
			e.skip("a message without a command")
			t.add(e)
		}
		for k := from; k < len(t.Events); k++ {
			t.Events[k].Step = step.ID
			if step.Copied {
				t.Events[k].skip("context copied from an earlier file")
			}
		}
	}
	return t, nil
}

func atifCall(function string, arguments json.RawMessage) []Event {
	var a struct {
		Command    string  `json:"command"`
		Keystrokes *string `json:"keystrokes"`
		IsInput    any     `json:"is_input"`
	}
	_ = json.Unmarshal(arguments, &a) // of another tool: skipped below
	e := Event{Tool: function, Command: a.Command}
	switch {
	case a.Keystrokes != nil:
		e = typed(*a.Keystrokes)
	case !words("bash execute_bash bash_command run_shell_command shell terminal Bash")[function]:
		e.skip("a tool of the agent (" + function + ")")
	case a.Command == "" || a.IsInput == true || a.IsInput == "true":
		e.skip("input to a running command")
	}
	return []Event{e}
}

// terminusMessage reads the commands of terminus-2, which writes them as JSON
// into its message; its terminal shows several at once, so there is no output
// that belongs to one.
func terminusMessage(message string) (events []Event) {
	var m struct {
		Commands []struct {
			Keystrokes string `json:"keystrokes"`
		} `json:"commands"`
	}
	if json.Unmarshal([]byte(message), &m) != nil {
		return nil
	}
	for _, c := range m.Commands {
		events = append(events, typed(c.Keystrokes))
	}
	return events
}

// typed turns keystrokes into a command if they are one: text and a line end.
func typed(keystrokes string) Event {
	e := Event{Tool: "keystrokes", Command: strings.TrimRight(keystrokes, "\r\n")}
	switch {
	case strings.TrimSpace(keystrokes) == "":
		e.skip("keystrokes that only wait")
	case e.Command == keystrokes || strings.ContainsFunc(e.Command, func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' }) ||
		strings.HasPrefix(e.Command, "C-"):
		e.skip("keystrokes that are not a command line")
	}
	return e
}

// ---- OpenHands V0: a list of events, an observation names its cause ----

func readOpenHands(data []byte) (*Trajectory, error) {
	var file []struct {
		ID     *int   `json:"id"`
		Source string `json:"source"`
		Action string `json:"action"`
		Args   struct {
			Command string `json:"command"`
			IsInput any    `json:"is_input"`
		} `json:"args"`
		Observation string  `json:"observation"`
		Cause       *int    `json:"cause"`
		Content     content `json:"content"`
		Extras      struct {
			Metadata struct {
				ExitCode *int `json:"exit_code"`
			} `json:"metadata"`
		} `json:"extras"`
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, err
	}
	t := &Trajectory{}
	at := map[int]int{} // event id -> place in t.Events
	for i, ev := range file {
		if ev.ID == nil {
			return nil, fmt.Errorf("step %d: field id is missing", i+1)
		}
		if ev.Observation == "run" && ev.Cause != nil {
			if k, ok := at[*ev.Cause]; ok && t.Events[k].Skip == "" {
				text := string(ev.Content)
				t.Events[k].Output, t.Events[k].Merged = &text, true
				if code := ev.Extras.Metadata.ExitCode; code != nil && *code >= 0 {
					t.Events[k].ExitCode = code
				}
			}
			continue
		}
		if ev.Source != "agent" || ev.Action == "" || ev.Action == "change_agent_state" || ev.Action == "system" {
			continue
		}
		e := Event{Step: *ev.ID, Tool: ev.Action, Command: ev.Args.Command}
		switch {
		case ev.Action != "run":
			e.skip("a tool of the agent (" + ev.Action + ")")
		case e.Command == "" || ev.Args.IsInput == true || ev.Args.IsInput == "true":
			e.skip("input to a running command")
		}
		at[*ev.ID] = len(t.Events)
		t.add(e)
	}
	return t, nil
}

func (e *Event) skip(reason string) {
	e.Skip, e.Command, e.Output, e.ExitCode = reason, "", nil, nil
}

func (t *Trajectory) add(e Event) {
	if e.Skip == "" && strings.TrimSpace(e.Command) == "" {
		e.skip("an empty command")
	}
	t.Events = append(t.Events, e)
}
