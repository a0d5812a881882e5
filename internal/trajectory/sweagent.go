package trajectory

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/boxwood-rl/boxwood/internal/agenttools"
)

// SWE-agent's .traj files, old and new:
//
//	{"trajectory": [{"action", "observation", "state", "execution_time"}, ...], "history": [...], ...}
//
// Old ones write the state as text that holds JSON. Demonstrations may have
// only the history. A retrying agent writes the attempt it chose as
// "trajectory" and all of them as "attempts".

// sweTools are commands of SWE-agent's own that exist in its sandbox only; some
// can be done again.
var sweTools = words("create insert edit open goto scroll_up scroll_down find_file search_file search_dir submit str_replace_editor " +
	"filemap view_image exit_cost exit_context exit_format skip exit_forfeit review_on_submit")

func errorf(format string, args ...any) error { return fmt.Errorf(format, args...) }

// shell makes an event of an action for SWE-agent's shell.
func shell(step int, action, cwd string) Event {
	e := Event{Step: step, Tool: "bash", Command: strings.TrimRight(action, "\n"), Cwd: cwd}
	first, _, _ := strings.Cut(strings.TrimSpace(e.Command), "\n")
	if first, _, _ = strings.Cut(first, " "); sweTools[first] {
		e.Tool = first
		call, why := agenttools.Parse(action)
		if e.Call, e.Command = call, ""; call == nil {
			e.skip(why)
		}
	}
	return e
}

func readSWEAgent(s *stream, found shape, t *Trajectory) error {
	ran := found.has("trajectory")
	t.Kept = true
	return s.object(func(name string) error {
		switch {
		case name == "trajectory":
			cwd := ""
			return s.array(func(i int) error {
				if err := sweStep(s, t, i, &cwd); err != nil {
					return fmt.Errorf("step %d: %w", i, err)
				}
				return nil
			})
		case name == "history" && !ran:
			return sweHistory(s, t)
		case name == "attempts":
			return s.array(func(int) error {
				t.other("attempt of a retrying agent, beside the one it chose")
				return s.skip()
			})
		}
		return s.skip()
	})
}

func sweStep(s *stream, t *Trajectory, i int, cwd *string) error {
	var step struct {
		Action      *string         `json:"action"`
		Observation *content        `json:"observation"`
		State       json.RawMessage `json:"state"`
		Seconds     float64         `json:"execution_time"`
	}
	if err := s.decode(&step); err != nil {
		return err
	}
	if step.Action == nil {
		return errorf("field action is missing")
	}
	e := shell(i, *step.Action, *cwd)
	e.Output, e.Took = (*string)(step.Observation), seconds(step.Seconds)
	*cwd = sweCwd(step.State, *cwd) // the state is the one after the action
	return t.add(e)
}

func seconds(s float64) time.Duration {
	if !(s > 0 && s < 1e9) {
		return 0
	}
	return time.Duration(s * float64(time.Second))
}

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

// sweHistory reads the messages of a demonstration, each of which names its
// action.
func sweHistory(s *stream, t *Trajectory) error {
	cwd, acted := "", -1
	return s.array(func(i int) error {
		var m struct {
			Role    string  `json:"role"`
			Content content `json:"content"`
			Action  *string `json:"action"`
			Demo    bool    `json:"is_demo"`
		}
		if err := s.decode(&m); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		switch {
		case m.Role == "":
			return errorf("step %d: field role is missing", i)
		case m.Demo:
			t.other("message of a demonstration")
		case m.Role == "assistant" && m.Action != nil:
			acted = len(t.Events)
			return t.add(shell(i, *m.Action, cwd))
		case m.Role == "assistant":
			acted = -1
			e := Event{Step: i}
			e.skip("a message without a command")
			return t.add(e)
		case acted >= 0:
			var out string
			out, cwd = sweObservation(string(m.Content), cwd)
			t.observe(acted, nil, &out)
			acted = -1
		default:
			_, cwd = sweObservation(string(m.Content), cwd)
			t.other("message of role " + m.Role)
		}
		return nil
	})
}

// sweFoot is what SWE-agent's prompts put below an observation.
var sweFoot = regexp.MustCompile(`(?s)\n?(?:\(Open file: [^\n]*\)\n)?\(Current directory: ([^\n]*)\)\nbash-\$\s*$`)

// sweObservation takes an observation out of its prompt, and the folder that
// the next command runs in.
func sweObservation(text, cwd string) (string, string) {
	for _, head := range []string{"OBSERVATION:\n", "Observation: "} {
		text = strings.TrimPrefix(text, head)
	}
	if found := sweFoot.FindStringSubmatchIndex(text); found != nil {
		return text[:found[0]], text[found[2]:found[3]]
	}
	return text, cwd
}
