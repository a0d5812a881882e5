package agenttools

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// here is a machine that is a folder of this one; "/w" stands for it in paths.
type here struct{ dir string }

func (h here) real(path string) string { return h.dir + strings.TrimPrefix(path, "/w") }

func (h here) Cwd(context.Context) (string, error) { return "/w", nil }

func (h here) Kind(_ context.Context, path string) (Kind, error) {
	info, err := os.Stat(h.real(path))
	switch {
	case err != nil:
		return Nothing, nil
	case info.IsDir():
		return Folder, nil
	}
	return File, nil
}

func (h here) Read(_ context.Context, path string) (string, error) {
	text, err := os.ReadFile(h.real(path))
	return string(text), err
}

func (h here) Write(_ context.Context, path, text string) error {
	return os.WriteFile(h.real(path), []byte(text), 0o600)
}

func (h here) Run(ctx context.Context, argv ...string) (string, error) {
	for i, a := range argv {
		if strings.HasPrefix(a, "/w") {
			argv[i] = h.real(a)
		}
	}
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = nil
	}
	return strings.ReplaceAll(string(out), h.dir, "/w"), err
}

func lines(from, to int) string {
	var b strings.Builder
	for i := from; i <= to; i++ {
		fmt.Fprintf(&b, "line %d\n", i)
	}
	return b.String()
}

func ptr[T any](v T) *T { return &v }

// TestTools would fail if a tool did, or said, something else than the agent's
// own does.
func TestTools(t *testing.T) {
	type step struct {
		call any // of SWE-agent as text, or a Call
		want string
		bad  bool
		file string // a file afterwards, "name=content"
	}
	edit := func(aci bool, command, path string, c Call) Call {
		c.Tool, c.Aci, c.Command, c.Path = Editor, aci, command, path
		return c
	}
	for _, c := range []struct {
		name  string
		steps []step
	}{
		{"a window", []step{
			{"goto 3", "No file open. Use the open command first.", true, ""},
			{"open none.txt", "Error: File none.txt not found", true, ""},
			{"open src", "Error: src is a directory. You can only open files. Use cd or ls to navigate directories.", true, ""},
			{"open 'src/long.txt' 200", "[File: src/long.txt (300 lines total)]\n(182 more lines above)\n183:line 183\n", false, ""},
			{"scroll_down", "[File: /w/src/long.txt (300 lines total)]\n(200 more lines above)\n201:line 201\n", false, ""},
			{"scroll_up", "[File: /w/src/long.txt (300 lines total)]\n(102 more lines above)\n103:line 103\n", false, ""},
			{"goto 1", "[File: /w/src/long.txt (300 lines total)]\n1:line 1\n", false, ""},
			{"goto 301", "Error: Line number must be less than or equal to 300", true, ""},
			{"search_file 'line 29.'", "Found 10 matches for \"line 29.\" in /w/src/long.txt:\nLine 290:line 290\n", false, ""},
		}},
		{"edits in a window", []step{
			{"create new.py", "[File: new.py (1 lines total)]\n1:", false, "new.py=\n"},
			{"create new.py", "Warning: File 'new.py' already exists.", true, ""},
			{"insert 'a = 1\nb = 2\n'", "[File: /w/new.py (3 lines total)]\n1:\n2:a = 1\n3:b = 2", false, "new.py=\na = 1\nb = 2"},
			{"edit 'b = 2' \"b = 'x'\"", "Text replaced. Please review the changes and make sure they are correct:\n\n1. The edited file is correctly indented\n", false, "new.py=\na = 1\nb = 'x'"},
			{"edit '= ' '='", "Your edit was not applied (file not modified): Found more than one occurrence of '= ' in", true, ""},
			{"edit '= ' '=' True", "Replaced 2 occurrences. Please review", false, "new.py=\na =1\nb ='x'"},
			{"edit gone x", "Your edit was not applied (file not modified): Text 'gone' not found in displayed lines (or anywhere in the file).", true, ""},
			{"edit 1:2\nimport a\n\nend_of_edit", "File updated. Please review the changes and make sure they are correct\n(correct indentation, no duplicate lines, etc). Edit the file again if necessary.\n[File: /w/new.py (3 lines total)]\n1:import a\n2:\n3:b ='x'", false, "new.py=import a\n\nb ='x'"},
			{"edit 2:2\nend_of_edit", "File updated.", false, "new.py=import a\nb ='x'"},
			{"insert c 1", "[File: /w/new.py (3 lines total)]\n1:import a\n2:c\n3:b ='x'", false, "new.py=import a\nc\nb ='x'"},
		}},
		{"an edit beyond the window", []step{
			{"open src/long.txt", "[File: src/long.txt (300 lines total)]\n1:line 1\n", false, ""},
			{"edit 'line 299' x", "Your edit was not applied (file not modified): Text 'line 299' not found in displayed lines.\n\nHowever, we found the following occurrences of your search string in the file:\n\n- line 299\n", true, ""},
		}},
		{"searches", []step{
			{"find_file '*.txt'", "Found 2 matches for \"*.txt\" in /w:\n/w/src/a.txt\n/w/src/long.txt", false, ""},
			{"find_file no src", "No matches found for \"no\" in /w/src", false, ""},
			{"find_file no nowhere", "Directory nowhere not found", true, ""},
			{"search_dir 'line 30'", "Found 2 matches for \"line 30\" in /w:\n/w/src/long.txt (2 matches)\nEnd of matches for \"line 30\" in /w", false, ""},
			{"search_file ne src/a.txt", "Found 1 matches for \"ne\" in /w/src/a.txt:\nLine 1:one\nEnd of matches for \"ne\" in /w/src/a.txt", false, ""},
		}},
		{"SWE-agent's editor", []step{
			{"str_replace_editor view /w/src/a.txt", "Here's the result of running `cat -n` on /w/src/a.txt:\n     1\tone\n     2\t        two\n     3\t\n", false, ""},
			{"str_replace_editor view /w/src/a.txt --view_range 2 2", "Here's the result of running `cat -n` on /w/src/a.txt:\n     2\t        two\n", false, ""},
			{"str_replace_editor view /w/src", "Here's the files and directories up to 2 levels deep in /w/src, excluding hidden items:\n/w/src\n", false, ""},
			{"str_replace_editor view a.txt", "The path a.txt is not an absolute path, it should start with `/`. Maybe you meant /w/a.txt?", true, ""},
			{"str_replace_editor create /w/b/c --file_text x", "The parent directory /w/b does not exist. Please create it first.", true, ""},
			{"str_replace_editor create /w/src/a.txt --file_text x", "File already exists at: /w/src/a.txt. Cannot overwrite files using command `create`.", true, ""},
			{"str_replace_editor str_replace /w/src/a.txt --old_str one --new_str 'o n e'", "The file /w/src/a.txt has been edited. Here's the result of running `cat -n` on a snippet of /w/src/a.txt:\n     1\to n e\n     2\t        two\nReview the changes and make sure they are as expected. Edit the file again if necessary.", false, "src/a.txt=o n e\n        two\n"},
			{"str_replace_editor str_replace /w/src/a.txt --old_str zero", "No replacement was performed, old_str `zero` did not appear verbatim in /w/src/a.txt.", true, ""},
			{"str_replace_editor str_replace /w/src/a.txt --old_str o", "No replacement was performed. Multiple occurrences of old_str `o` in lines [1, 2]. Please ensure it is unique", true, ""},
			{"str_replace_editor insert /w/src/a.txt --insert_line 1 --new_str new", "The file /w/src/a.txt has been edited. Here's the result of running `cat -n` on a snippet of the edited file:\n     1\to n e\n     2\tnew\n     3\t        two\n     4\t\nReview", false, "src/a.txt=o n e\nnew\n        two\n"},
			{"str_replace_editor undo_edit /w/src/a.txt", "Last edit to /w/src/a.txt undone successfully. Here's", false, "src/a.txt=o n e\n        two\n"},
			{"str_replace_editor undo_edit /w/src/a.txt", "Last edit", false, "src/a.txt=one\n        two\n"},
			{"str_replace_editor undo_edit /w/src/a.txt", "No edit history found for /w/src/a.txt.", true, ""},
		}},
		{"OpenHands' editor", []step{
			{edit(true, "view", "/w/src/a.txt", Call{}), "Here's the result of running `cat -n` on /w/src/a.txt:\n     1\tone\n     2\t\ttwo\n     3\t\n", false, ""},
			{edit(true, "view", "/w/src", Call{}), "Here's the files and directories up to 2 levels deep in /w/src, excluding hidden items:\n/w/src/\n", false, ""},
			{edit(true, "create", "/w/b/c", Call{Text: ptr("x\n")}), "File created successfully at: /w/b/c", false, "b/c=x\n"},
			{edit(true, "create", "/w/b/c", Call{Text: ptr("y")}), "File already exists at: /w/b/c.", true, "b/c=x\n"},
			{edit(true, "write", "/w/b/c", Call{Text: ptr("y")}), "", false, "b/c=y"},
			{edit(true, "str_replace", "/w/src/a.txt", Call{Old: ptr("two"), New: ptr("2")}), "The file /w/src/a.txt has been edited. Here's the result of running `cat -n` on a snippet of /w/src/a.txt:\n     1\tone\n     2\t\t2\n     3\t\nReview", false, "src/a.txt=one\n\t2\n"},
			{edit(true, "insert", "/w/src/a.txt", Call{Line: ptr(0), New: ptr("zero")}), "The file /w/src/a.txt has been edited.", false, "src/a.txt=zero\none\n\t2\n"},
			{edit(true, "insert", "/w/src/a.txt", Call{Line: ptr(9), New: ptr("x")}), "Invalid `insert_line` parameter: 9.", true, "src/a.txt=zero\none\n\t2\n"},
			{edit(true, "view", "/w/none", Call{}), "The path /w/none does not exist. Please provide a valid path.", true, ""},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := errors.Join(os.Mkdir(filepath.Join(dir, "src"), 0o700), os.WriteFile(filepath.Join(dir, "src", "long.txt"), []byte(lines(1, 300)), 0o600),
				os.WriteFile(filepath.Join(dir, "src", "a.txt"), []byte("one\n\ttwo\n"), 0o600)); err != nil {
				t.Fatal(err)
			}
			tools := New(here{dir}, State{})
			for i, s := range c.steps {
				call, ok := s.call.(Call)
				if text, is := s.call.(string); is {
					parsed, why := Parse(text)
					if parsed == nil {
						t.Fatalf("%d: %s: %s", i, text, why)
					}
					call = *parsed
				} else if !ok {
					t.Fatal("a step of neither kind")
				}
				if i > 0 && strings.HasPrefix(c.name, "a window") {
					tools = New(here{dir}, tools.State()) // as a later attempt does
				}
				got, bad, err := tools.Do(context.Background(), &call)
				if err != nil || !strings.HasPrefix(got, s.want) || bad != s.bad {
					t.Errorf("%d: %v: got %q, %v, %v; want %q", i, s.call, got, bad, err, s.want)
				}
				if name, want, ok := strings.Cut(s.file, "="); ok {
					if text, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(text) != want {
						t.Errorf("%d: %v: %s has %q, %v; want %q", i, s.call, name, text, err, want)
					}
				}
			}
		})
	}
}

// TestUnable would fail if a call were done otherwise than the record means it.
func TestUnable(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "binary"), []byte("\xff\x00"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, c := range map[string]struct {
		call Call
		from State
	}{
		"an edit of a file that is not UTF-8":         {Call{Tool: Editor, Command: "view", Path: "/w/binary"}, State{}},
		"a call of the editor that lacks a parameter": {Call{Tool: Editor, Command: "create", Path: "/w/x"}, State{}},
		"an undo of an edit that is forgotten":        {Call{Tool: Editor, Command: "undo_edit", Path: "/w/binary"}, State{Forgot: true}},
		"an edit that replaces nothing":               {Call{Tool: Editor, Command: "str_replace", Path: "/w/empty", Old: ptr("")}, State{}},
		"an edit of lines that the file doesn't have": {Call{Tool: "edit_range", Words: []string{"9", "12", "x"}}, State{Open: "/w/empty"}},
		"an insertion at a line that is none":         {Call{Tool: "insert", Words: []string{"x", "-1"}}, State{Open: "/w/empty"}},
	} {
		if err := os.WriteFile(filepath.Join(dir, "empty"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		_, _, err := New(here{dir}, c.from).Do(context.Background(), &c.call)
		var u Unable
		if !errors.As(err, &u) || string(u) != want {
			t.Errorf("%+v: %v, want %q", c.call, err, want)
		}
	}
}

// TestParse would fail if a line were taken for a call that a shell would make
// something else of.
func TestParse(t *testing.T) {
	for text, want := range map[string]any{
		`open a.py`:                            []string{"a.py"},
		`open "a b.py" 7`:                      []string{"a b.py", "7"},
		`open a\ b.py`:                         []string{"a b.py"},
		`find_file '$x' "it's"`:                []string{"$x", "it's"},
		`edit "a\"b\\" ''`:                     []string{`a"b\`, ""},
		`open`:                                 []string(nil),
		`open $(cat x)`:                        "a tool of SWE-agent in a line that only its shell understands (open)",
		`open "$x"`:                            "a tool of SWE-agent in a line that only its shell understands (open)",
		`open a && ls`:                         "a tool of SWE-agent in a line that only its shell understands (open)",
		`open a; ls`:                           "a tool of SWE-agent in a line that only its shell understands (open)",
		`open *.py`:                            "a tool of SWE-agent in a line that only its shell understands (open)",
		`open 'a`:                              "a tool of SWE-agent in a line that only its shell understands (open)",
		"open a\nls":                           "a tool of SWE-agent in a line that only its shell understands (open)",
		`open a 1 2`:                           "a call of a tool with the wrong number of words (open)",
		"edit 1:2\nx\nend_of_edit\nls":         "a tool of SWE-agent in a line that only its shell understands (edit)",
		"edit 1:2\nx":                          "a tool of SWE-agent in a line that only its shell understands (edit)",
		`submit`:                               "a tool of SWE-agent (submit)",
		`str_replace_editor view`:              "a call of the editor whose words are not understood",
		`str_replace_editor view /a --x y`:     "a call of the editor whose words are not understood",
		`str_replace_editor view /a --old_str`: "a call of the editor whose words are not understood",
	} {
		call, why := Parse(text)
		var got any = why
		if call != nil {
			got = call.Words
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
	if c, _ := Parse("edit 3:4\na\nb\nend_of_edit\n"); c == nil || !reflect.DeepEqual(c.Words, []string{"3", "4", "a\nb"}) {
		t.Errorf("%+v", c)
	}
}

func TestArguments(t *testing.T) {
	for text, want := range map[string]string{
		`{"path": "/a", "file_text": "x"}`:                           "/a x [] nil",
		`{"path": "/a", "view_range": [1, 2], "insert_line": null}`:  "/a nil [1 2] nil",
		`{"path": "/a", "view_range": "[1, 2]", "insert_line": "3"}`: "/a nil [1 2] 3",
		`{"path": 7}`:                        "a call of the editor whose arguments are not understood",
		`{}`:                                 "a call of the editor whose arguments are not understood",
		`{"path": "/a", "insert_line": "x"}`: "a call of the editor whose arguments are not understood",
		`{"path": "/a\u0000"}`:               "a call of the editor whose arguments are not understood",
	} {
		var a Arguments
		if err := json.Unmarshal([]byte(text), &a); err != nil {
			t.Fatal(err)
		}
		c, got := a.Call("view", true)
		if c != nil {
			file, line := "nil", "nil"
			if c.Text != nil {
				file = *c.Text
			}
			if c.Line != nil {
				line = fmt.Sprint(*c.Line)
			}
			got = fmt.Sprint(c.Path, " ", file, " ", c.Range, " ", line)
		}
		if got != want {
			t.Errorf("%s: got %q, want %q", text, got, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, text := range []string{"open a 3", "edit 1:2\nx\nend_of_edit", "edit 'a' \"b\" 1", "str_replace_editor view /w --view_range 1 2"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		dir := t.TempDir()
		if call, why := Parse(text); (call == nil) == (why == "") {
			t.Fatalf("neither or both: %v, %q", call, why)
		} else if call != nil && call.Tool != Editor && !strings.HasPrefix(call.Tool, "search") && call.Tool != "find_file" && call.Tool != "create" && call.Tool != "open" {
			if err := os.WriteFile(filepath.Join(dir, "f"), []byte("a\nb\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			_, _, _ = New(here{dir}, State{Open: "/w/f", First: 1}).Do(context.Background(), call)
		}
	})
}
