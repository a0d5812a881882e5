package trajectory

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/agenttools"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/parquetrows"
)

// Rows of data sets of trajectories of SWE-agent, as JSON lines or Parquet:
//
//	SWE-smith {"messages": [{"role", "content", "tool_calls"}, ...] or that as text, "instance_id", ...}
//	nebius    {"trajectory": [{"role", "text"}, ...], "instance_id", ...}
//
// The action is a call of a tool, an element <function=NAME> or the last block
// of code of a message.

type rowMessage struct {
	Role    *string  `json:"role"`
	Content *content `json:"content"`
	Text    content  `json:"text"`
	CallID  string   `json:"tool_call_id"`
	CallIDs []string `json:"tool_call_ids"`
	Calls   []struct {
		ID       string `json:"id"`
		Function struct {
			Name      string          `json:"name"`
			Arguments json.RawMessage `json:"arguments"`
		} `json:"function"`
	} `json:"tool_calls"`
}

var (
	rowFunction  = regexp.MustCompile(`(?s)<function=([^>\s]+)>(.*?)</function>`)
	rowParameter = regexp.MustCompile(`(?s)<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>`)
	rowBlock     = regexp.MustCompile("(?ms)^```[a-z]*[ \t]*\n(.*?)^```[ \t]*$")
)

// readRows gives each row of a file to yield. A row that is broken is one
// error; the next line goes on.
func readRows(name string, f format, s *stream, found shape, yield func(*Trajectory, error) bool) bool {
	for row := 1; ; row++ {
		at := s.base + s.dec.InputOffset()
		end, err := s.end()
		if end {
			return true
		}
		t := &Trajectory{Format: f.name, Name: fmt.Sprintf("row %d", row)}
		if err == nil {
			err = f.read(s, found, t)
		}
		if err == nil {
			if !yield(t, nil) {
				return false
			}
			continue
		}
		if !yield(nil, bad(name, "as %s: row %d: %w", f.name, row, err)) {
			return false
		}
		if s = s.nextLine(at); s == nil {
			return true
		}
	}
}

// readParquet gives each row of a Parquet file to yield. What is broken there
// is one error of a group of rows; the next group goes on.
func readParquet(name string, f io.ReadSeeker, yield func(*Trajectory, error) bool) bool {
	in, err := parquetrows.Open(f, func(column string) bool { return rowColumns[column] })
	if err != nil {
		return yield(nil, bad(name, "as Parquet: %w", err))
	}
	format := ""
	switch {
	case in.Has("trajectory"):
		format = "nebius"
	case in.Has("messages"):
		format = "swe-smith"
	default:
		return yield(nil, fault.New(fault.Unsupported, "unknown_trajectory", "%s is a Parquet file without a column messages or trajectory", name).
			WithHint("%s", known))
	}
	for row := 1; ; row++ {
		t := &Trajectory{Format: format, Name: fmt.Sprintf("row %d", row)}
		text, err := in.Next()
		if err == io.EOF {
			return true
		}
		if err != nil {
			err = fmt.Errorf("from row %d on: %w", row, err)
		} else if err = readOneRow(text, t); err != nil {
			err = fmt.Errorf("row %d: %w", row, err)
		}
		if err != nil {
			t, err = nil, bad(name, "as Parquet: %w", err)
		}
		if !yield(t, err) {
			return false
		}
	}
}

// rowColumns are those that readRow takes.
var rowColumns = words("messages trajectory instance_id traj_id")

func readOneRow(row []byte, t *Trajectory) error {
	s, err := newStream(bytes.NewReader(row), 0)
	if err != nil {
		return err
	}
	return readRow(s, shape{}, t)
}

// nextLine is a stream from the line after the one that begins at an offset
// of the file, if an object begins it; nil: none does.
func (s *stream) nextLine(at int64) *stream {
	if _, err := s.file.Seek(at, io.SeekStart); err != nil {
		return nil
	}
	in := bufio.NewReader(s.file)
	for begun := false; ; at++ {
		b, err := in.ReadByte()
		if err != nil {
			return nil
		}
		if b == '\n' && begun {
			if next, err := in.Peek(1); err != nil || next[0] != '{' {
				return nil
			}
			rest, err := newStream(s.file, at+1)
			if err != nil {
				return nil
			}
			return rest
		}
		begun = begun || !strings.ContainsRune(" \t\r\n", rune(b))
	}
}

// readRow reads the next row.
func readRow(s *stream, _ shape, t *Trajectory) error {
	run := &rowRun{t: t}
	t.Kept = true
	return s.object(func(name string) error {
		switch name {
		case "instance_id", "traj_id":
			var id *string
			if err := s.decode(&id); err != nil {
				return fmt.Errorf("field %s: %w", name, err)
			}
			if id != nil {
				t.Name += " " + *id
			}
			return nil
		case "messages", "trajectory":
			at, err := s.peek()
			if err != nil {
				return err
			}
			if at != '"' {
				return s.array(func(i int) error { return run.next(s, i) })
			}
			var text string // the list as text
			if err := s.decode(&text); err != nil {
				return fmt.Errorf("field %s: %w", name, err)
			}
			inner, err := newStream(strings.NewReader(text), 0)
			if err == nil {
				err = inner.array(func(i int) error { return run.next(inner, i) })
			}
			if err != nil {
				return fmt.Errorf("field %s: %w", name, err)
			}
			return nil
		}
		return s.skip()
	})
}

// rowRun is a row being read: its last events, which have yet to be observed,
// and the calls that they were.
type rowRun struct {
	t       *Trajectory
	waiting []int
	calls   []string
	cwd     string
	// aci says that the agent is OpenHands, as its shell's name tells.
	aci bool
}

func (r *rowRun) next(s *stream, i int) error {
	var m rowMessage
	if err := s.decode(&m); err != nil {
		return fmt.Errorf("step %d: %w", i, err)
	}
	if m.Role == nil {
		return errorf("step %d: field role is missing", i)
	}
	text := string(m.Text)
	if m.Content != nil {
		text = string(*m.Content)
	}
	switch {
	case *m.Role == "assistant" || *m.Role == "ai":
		return r.act(i, m, text)
	case len(r.waiting) == 0:
		_, r.cwd = sweObservation(text, r.cwd)
		r.t.other("message of role " + *m.Role)
		return nil
	}
	at := 0
	for k, call := range r.calls {
		if call != "" && (call == m.CallID || len(m.CallIDs) > 0 && call == m.CallIDs[0]) {
			at = k
		}
	}
	var out string
	out, r.cwd = sweObservation(text, r.cwd)
	exit, out := openHandsFoot(out)
	r.t.observe(r.waiting[at], exit, &out)
	r.waiting = append(r.waiting[:at], r.waiting[at+1:]...)
	r.calls = append(r.calls[:at], r.calls[at+1:]...)
	return nil
}

func (r *rowRun) act(step int, m rowMessage, text string) error {
	r.waiting, r.calls = nil, nil
	give := func(e Event, call string) error {
		e.Step = step
		r.waiting, r.calls = append(r.waiting, len(r.t.Events)), append(r.calls, call)
		return r.t.add(e)
	}
	for _, call := range m.Calls {
		if err := give(r.call(call.Function.Name, call.Function.Arguments), call.ID); err != nil {
			return err
		}
	}
	if len(m.Calls) > 0 {
		return nil
	}
	functions := rowFunction.FindAllStringSubmatch(text, -1)
	blocks := rowBlock.FindAllStringSubmatch(text, -1)
	switch {
	case len(functions) == 1:
		a := map[string]string{}
		for _, p := range rowParameter.FindAllStringSubmatch(functions[0][2], -1) {
			a[p[1]] = p[2]
		}
		arguments, _ := json.Marshal(a)
		return give(r.call(functions[0][1], arguments), "")
	case len(functions) == 0 && len(blocks) > 0:
		return give(shell(step, blocks[len(blocks)-1][1], r.cwd), "")
	}
	e := Event{Step: step}
	e.skip(map[bool]string{true: "a message without a command", false: "a message with several commands, which are refused"}[len(functions) == 0])
	return r.t.add(e)
}

// call reads a call, whose arguments are an object or that as text.
func (r *rowRun) call(tool string, arguments json.RawMessage) Event {
	var text string
	if json.Unmarshal(arguments, &text) == nil {
		arguments = json.RawMessage(text)
	}
	var a struct {
		Command string `json:"command"`
		IsInput truth  `json:"is_input"`
		agenttools.Arguments
	}
	err := json.Unmarshal(arguments, &a)
	e := Event{Tool: tool}
	switch {
	case (tool == "bash" || tool == "execute_bash") && err != nil:
		e.skip("a call of a shell whose arguments are not understood")
	case tool == "bash":
		return shell(0, a.Command, r.cwd)
	case tool == "execute_bash" && bool(a.IsInput):
		e.skip("input to a running command")
	case tool == "execute_bash": // of OpenHands
		r.aci = true
		e.Command, e.Cwd = a.Command, r.cwd
	case editors[tool] && err == nil:
		call, why := a.Call(a.Command, r.aci)
		if e.Call = call; call == nil {
			e.skip(why)
		}
	default:
		e.skip("a tool of the agent (" + tool + ")")
	}
	return e
}

// editors are names that agents have for one and the same.
var editors = words("str_replace_editor file_editor str_replace_based_edit_tool")
