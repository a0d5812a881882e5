// Package agenttools does what tools of recorded agents did, so that their
// calls can be run again: the editor with str_replace that SWE-agent and
// OpenHands have, and SWE-agent's windows and searches. They exist in these
// agents' own sandboxes only.
//
// A tool works on a Machine, which is somebody else's: this package starts and
// writes nothing itself. It says what the tools say, word for word, since
// that is compared with the record.
package agenttools

import (
	"encoding/json"
	"strconv"
	"strings"
)

// Call of a tool.
type Call struct {
	// Tool is "str_replace_editor", or one of SWE-agent's by its name.
	Tool string
	// Aci says that it is the editor as OpenHands has it, which differs in small
	// things: it leaves tabs alone, for one.
	Aci bool
	// Of the editor. A nil is a parameter that wasn't given.
	Command, Path  string
	Text, Old, New *string
	Line           *int
	Range          []int
	// Words of the others, as a shell would hand them over.
	Words []string
}

// Size is about what it holds in memory.
func (c *Call) Size() int {
	n := len(c.Command) + len(c.Path) + 128
	for _, s := range []*string{c.Text, c.Old, c.New} {
		if s != nil {
			n += len(*s)
		}
	}
	for _, w := range c.Words {
		n += len(w)
	}
	return n
}

// String is the call as a person would type it, without its texts.
func (c *Call) String() string {
	if c.Tool != Editor {
		return strings.Join(c.Words, " ")
	}
	return c.Command + " " + c.Path
}

// Editor is the name that the editor has here; agents call it by several.
const Editor = "str_replace_editor"

// windows are SWE-agent's other tools, with how many words they take.
var windows = map[string][2]int{
	"open": {0, 2}, "goto": {1, 1}, "scroll_up": {0, 0}, "scroll_down": {0, 0}, "create": {1, 1}, "edit": {1, 3}, "insert": {1, 2},
	"find_file": {1, 2}, "search_file": {1, 2}, "search_dir": {1, 2},
}

// Parse reads a call as SWE-agent types it into its shell. If the text is no
// call that can be done here, why says so.
func Parse(text string) (call *Call, why string) {
	first, rest, _ := strings.Cut(strings.TrimSpace(text), " ")
	if name, ok := strings.CutPrefix(first, "edit"); ok && name == "" {
		if c := parseRange(strings.TrimSpace(text)); c != nil {
			return c, ""
		}
	}
	words, ok := Words(rest)
	if !ok {
		return nil, "a tool of SWE-agent in a line that only its shell understands (" + first + ")"
	}
	if first == Editor {
		return parseEditor(words)
	}
	takes, ok := windows[first]
	if !ok {
		return nil, "a tool of SWE-agent (" + first + ")"
	}
	if len(words) < takes[0] || len(words) > takes[1] {
		return nil, "a call of a tool with the wrong number of words (" + first + ")"
	}
	return &Call{Tool: first, Words: words}, ""
}

// parseRange reads "edit 3:5", the text, and "end_of_edit", each from the
// beginning of a line.
func parseRange(text string) *Call {
	head, body, more := strings.Cut(text, "\n")
	lines := strings.TrimSpace(strings.TrimPrefix(head, "edit"))
	from, to, ok := strings.Cut(lines, ":")
	if _, err := strconv.Atoi(from); err != nil || !ok || !more {
		return nil
	}
	if _, err := strconv.Atoi(to); err != nil {
		return nil
	}
	body += "\n"
	end := strings.Index("\n"+body, "\nend_of_edit\n")
	if end < 0 || strings.TrimSpace(body[end+len("end_of_edit\n"):]) != "" {
		return nil
	}
	return &Call{Tool: "edit_range", Words: []string{from, to, strings.TrimSuffix(body[:end], "\n")}}
}

func parseEditor(words []string) (*Call, string) {
	bad := "a call of the editor whose words are not understood"
	c := &Call{Tool: Editor}
	var place []string
	for i := 0; i < len(words); i++ {
		option, ok := strings.CutPrefix(words[i], "--")
		if !ok {
			place = append(place, words[i])
			continue
		}
		option, value, given := strings.Cut(option, "=")
		if !given {
			if i++; i == len(words) {
				return nil, bad
			}
			value = words[i]
		}
		switch option {
		case "file_text":
			c.Text = &value
		case "old_str":
			c.Old = &value
		case "new_str":
			c.New = &value
		case "insert_line":
			n, err := strconv.Atoi(value)
			if err != nil {
				return nil, bad
			}
			c.Line = &n
		case "view_range":
			if i++; i == len(words) {
				return nil, bad
			}
			from, err := strconv.Atoi(value)
			to, err2 := strconv.Atoi(words[i])
			if err != nil || err2 != nil {
				return nil, bad
			}
			c.Range = []int{from, to}
		default:
			return nil, bad
		}
	}
	if len(place) != 2 {
		return nil, bad
	}
	c.Command, c.Path = place[0], place[1]
	return c, ""
}

// Arguments of a call of the editor as agents record them, in JSON. They are
// read when they are used: other tools have members of these names, too.
type Arguments struct {
	Path       json.RawMessage `json:"path"`
	FileText   json.RawMessage `json:"file_text"`
	OldStr     json.RawMessage `json:"old_str"`
	NewStr     json.RawMessage `json:"new_str"`
	InsertLine json.RawMessage `json:"insert_line"`
	ViewRange  json.RawMessage `json:"view_range"`
}

// Call makes a call of the editor. If the arguments are none of it, why says so.
func (a Arguments) Call(command string, aci bool) (call *Call, why string) {
	c := &Call{Tool: Editor, Aci: aci, Command: command}
	var place *string
	for _, m := range []struct {
		from json.RawMessage
		into any
	}{{a.Path, &place}, {a.FileText, &c.Text}, {a.OldStr, &c.Old}, {a.NewStr, &c.New}, {a.InsertLine, &c.Line}, {a.ViewRange, &c.Range}} {
		if len(m.from) == 0 || json.Unmarshal(m.from, m.into) == nil {
			continue
		}
		var quoted string // some write numbers and lists as text
		if json.Unmarshal(m.from, &quoted) != nil || json.Unmarshal([]byte(quoted), m.into) != nil {
			return nil, "a call of the editor whose arguments are not understood"
		}
	}
	if place == nil || command == "" || strings.ContainsRune(*place, 0) {
		return nil, "a call of the editor whose arguments are not understood"
	}
	c.Path = *place
	if len(c.Range) == 0 {
		c.Range = nil
	}
	return c, ""
}

// Words splits a line as a POSIX shell does, if it has quotes and nothing else
// that a shell would do something about.
func Words(line string) (words []string, ok bool) {
	var word strings.Builder
	begun := false
	for i := 0; i < len(line); i++ {
		switch b := line[i]; {
		case b == ' ' || b == '\t':
			if begun {
				words = append(words, word.String())
				word.Reset()
				begun = false
			}
		case b == '\'':
			end := strings.IndexByte(line[i+1:], '\'')
			if end < 0 {
				return nil, false
			}
			begun = true
			word.WriteString(line[i+1 : i+1+end])
			i += end + 1
		case b == '"':
			begun = true
			n, good := double(&word, line[i+1:])
			if !good {
				return nil, false
			}
			i += n + 1
		case b == '\\' && i+1 < len(line):
			if i++; line[i] != '\n' {
				begun = true
				word.WriteByte(line[i])
			}
		case strings.IndexByte("|&;<>()$`\\*?[#~{}!\n", b) >= 0:
			return nil, false
		default:
			begun = true
			word.WriteByte(b)
		}
	}
	if begun {
		words = append(words, word.String())
	}
	return words, true
}

// double reads what is between double quotes, and says how long it was.
func double(word *strings.Builder, line string) (n int, ok bool) {
	for i := 0; i < len(line); i++ {
		switch b := line[i]; {
		case b == '"':
			return i, true
		case b == '$' || b == '`' || b == '!':
			return 0, false
		case b == '\\' && i+1 < len(line) && strings.IndexByte("\"\\$`\n", line[i+1]) >= 0:
			if i++; line[i] != '\n' {
				word.WriteByte(line[i])
			}
		default:
			word.WriteByte(b)
		}
	}
	return 0, false
}
