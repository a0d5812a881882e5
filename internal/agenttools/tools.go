package agenttools

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"unicode/utf8"
)

// Machine is where a tool works.
type Machine interface {
	// Cwd is the folder that the agent's shell stands in.
	Cwd(ctx context.Context) (string, error)
	// Kind tells what is at a path, links followed.
	Kind(ctx context.Context, path string) (Kind, error)
	Read(ctx context.Context, path string) (string, error)
	// Write replaces what a file has, and keeps its mode.
	Write(ctx context.Context, path, text string) error
	// Run gives the standard output of a command.
	Run(ctx context.Context, argv ...string) (string, error)
}

// Kind of what is at a path.
type Kind int

// The kinds.
const (
	Nothing Kind = iota
	File
	Folder
)

// Unable says why a call can't be done here, as in "a file that is no text".
type Unable string

func (u Unable) Error() string { return string(u) }

// MaxFile is the size of the largest file that tools work on.
const MaxFile = 4 << 20

// Tools are those of one trajectory: what is open, and what can be undone.
type Tools struct {
	on      Machine
	history map[string][]string
	held    int
	at      State
}

// State is what of the tools outlives their program.
type State struct {
	Open  string `json:"open,omitempty"`
	First int    `json:"first,omitempty"` // line of the window, from 0
	// Forgot says that edits can't be undone any more, or not all of them.
	Forgot bool `json:"forgot,omitempty"`
}

// New makes the tools of a trajectory, which go on from a state.
func New(on Machine, from State) *Tools {
	return &Tools{on: on, history: map[string][]string{}, at: from}
}

// State is that of the tools now.
func (t *Tools) State() State { return t.at }

// said is a tool's answer that ends its work: what it prints, and whether that
// is a complaint.
type said struct {
	text string
	bad  bool
}

func (s said) Error() string { return s.text }

func complain(format string, args ...any) error { return said{fmt.Sprintf(format, args...), true} }

// Do does a call. It gives what the tool printed, and whether it complained.
// An error is the machine's, or Unable.
func (t *Tools) Do(ctx context.Context, c *Call) (output string, bad bool, err error) {
	if c.Tool == Editor {
		output, err = t.editor(ctx, c)
	} else {
		output, err = t.window(ctx, c)
	}
	var s said
	if errors.As(err, &s) {
		return s.text, s.bad, nil
	}
	return output, false, err
}

// read reads a file that tools can work on.
func (t *Tools) read(ctx context.Context, path string) (string, error) {
	text, err := t.on.Read(ctx, path)
	switch {
	case err != nil:
		return "", err
	case !utf8.ValidString(text):
		return "", Unable("an edit of a file that is not UTF-8")
	}
	return text, nil
}

func (t *Tools) editor(ctx context.Context, c *Call) (string, error) {
	kind, err := t.on.Kind(ctx, c.Path)
	if err != nil {
		return "", err
	}
	if err := t.mayEdit(ctx, c, kind); err != nil {
		return "", err
	}
	if kind == Folder {
		return t.viewFolder(ctx, c)
	}
	switch {
	case c.Command == "view":
		return t.view(ctx, c)
	case (c.Command == "create" || c.Command == "write") && c.Text != nil:
		return t.create(ctx, c)
	case c.Command == "str_replace" && c.Old != nil:
		return t.replace(ctx, c)
	case c.Command == "insert" && c.Line != nil && c.New != nil:
		return t.insert(ctx, c)
	case c.Command == "undo_edit":
		return t.undo(ctx, c)
	}
	return "", Unable("a call of the editor that lacks a parameter")
}

func (t *Tools) mayEdit(ctx context.Context, c *Call, kind Kind) error {
	switch {
	case !path.IsAbs(c.Path):
		cwd, err := t.on.Cwd(ctx)
		if err != nil {
			return err
		}
		return complain("The path %s is not an absolute path, it should start with `/`. Maybe you meant %s?", c.Path, path.Join(cwd, c.Path))
	case kind == Nothing && c.Command != "create" && c.Command != "write":
		return complain("The path %s does not exist. Please provide a valid path.", c.Path)
	case kind != Nothing && c.Command == "create":
		return complain("File already exists at: %s. Cannot overwrite files using command `create`.", c.Path)
	case kind == Folder && c.Command != "view":
		return complain("The path %s is a directory and only the `view` command can be used on directories", c.Path)
	}
	return nil
}

// viewFolder lists two levels. The two editors differ in order and marks,
// which the comparison leaves aside.
func (t *Tools) viewFolder(ctx context.Context, c *Call) (string, error) {
	argv := []string{"find", c.Path, "-maxdepth", "2", "-not", "-path", "*/.*"}
	if c.Aci {
		argv = []string{"find", "-L", c.Path, "-maxdepth", "2", "-not", "(", "-path", c.Path + "/.*", "-o", "-path", c.Path + "/*/.*", ")", "(", "-type", "d", "-printf", `%p/\n`, "-o", "-print", ")"}
	}
	list, err := t.on.Run(ctx, argv...)
	if err != nil {
		return "", err
	}
	out := fmt.Sprintf("Here's the files and directories up to 2 levels deep in %s, excluding hidden items:\n%s\n", c.Path, list)
	if !c.Aci {
		return out, nil
	}
	hidden, err := t.on.Run(ctx, "find", "-L", c.Path, "-mindepth", "1", "-maxdepth", "1", "-name", ".*")
	if err != nil {
		return "", err
	}
	if n := strings.Count(hidden, "\n"); n > 0 {
		out += fmt.Sprintf("\n%d hidden files/directories in this directory are excluded. You can use 'ls -la %s' to see them.", n, c.Path)
	}
	return out, nil
}

func (t *Tools) view(ctx context.Context, c *Call) (string, error) {
	text, err := t.read(ctx, c.Path)
	if err != nil {
		return "", err
	}
	from := 1
	if c.Range != nil {
		lines := strings.Split(text, "\n")
		n := len(lines)
		if c.Aci && strings.HasSuffix(text, "\n") {
			n-- // it counts lines, the other what is between their ends
		}
		to := n
		if len(c.Range) == 2 {
			from, to = c.Range[0], c.Range[1]
		}
		if to == -1 || c.Aci && to > n {
			to = n
		}
		if len(c.Range) != 2 || from < 1 || from > n || to > n || to < from {
			return "", complain("Invalid `view_range`")
		}
		text = strings.Join(lines[from-1:to], "\n")
	}
	return t.numbered(c, text, c.Path, from), nil
}

// numbered shows lines as `cat -n` does.
func (t *Tools) numbered(c *Call, text, of string, from int) string {
	const most = 16000
	if r := []rune(text); !c.Aci && len(r) > most {
		text = string(r[:most]) + clipped
	}
	if !c.Aci {
		text = expandTabs(text)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "Here's the result of running `cat -n` on %s:\n", of)
	for i, line := range strings.Split(text, "\n") {
		fmt.Fprintf(&b, "%6d\t%s\n", i+from, line)
	}
	return b.String()
}

// clipped begins the note below an output that a tool cut.
const clipped = "<response clipped>"

func (t *Tools) create(ctx context.Context, c *Call) (string, error) {
	folder := path.Dir(c.Path)
	kind, err := t.on.Kind(ctx, folder)
	if err != nil {
		return "", err
	}
	if kind != Folder {
		if !c.Aci {
			return "", complain("The parent directory %s does not exist. Please create it first.", folder)
		}
		if _, err := t.on.Run(ctx, "mkdir", "-p", "--", folder); err != nil {
			return "", err
		}
	}
	if err := t.on.Write(ctx, c.Path, *c.Text); err != nil {
		return "", err
	}
	t.remember(c.Path, *c.Text)
	return fmt.Sprintf("File created successfully at: %s", c.Path), nil
}

// maxHistory is what can be undone in all; past it the oldest can't.
const maxHistory = 64 << 20

func (t *Tools) remember(file, text string) {
	if t.held += len(text); t.held > maxHistory {
		t.history, t.held, t.at.Forgot = map[string][]string{}, len(text), true
	}
	t.history[file] = append(t.history[file], text)
}

func (t *Tools) replace(ctx context.Context, c *Call) (string, error) {
	text, err := t.read(ctx, c.Path)
	if err != nil {
		return "", err
	}
	old, instead, stop := *c.Old, "", ""
	if c.New != nil {
		instead = *c.New
	}
	if c.Aci {
		stop = "."
	} else {
		text, old, instead = expandTabs(text), expandTabs(old), expandTabs(instead)
	}
	n := strings.Count(text, old)
	if old == "" {
		return "", Unable("an edit that replaces nothing")
	}
	if n == 0 {
		return "", complain("No replacement was performed, old_str `%s` did not appear verbatim in %s.", old, c.Path)
	}
	if n > 1 {
		return "", complain("No replacement was performed. Multiple occurrences of old_str `%s` in lines %s. Please ensure it is unique%s", old, linesOf(text, old, c.Aci), stop)
	}
	if old == instead {
		return "", complain("No replacement was performed, old_str `%s` is the same as new_str `%s`.", old, instead)
	}
	at := strings.Index(text, old)
	after := text[:at] + instead + text[at+len(old):]
	if err := t.on.Write(ctx, c.Path, after); err != nil {
		return "", err
	}
	t.remember(c.Path, text)
	// Four lines around it; one editor counts lines from 0, the other from 1.
	line := strings.Count(text[:at], "\n")
	from, to := max(1, line-4), line+4+strings.Count(instead, "\n")
	if c.Aci {
		from, to = max(0, line-3)+1, to+1
	}
	return fmt.Sprintf("The file %s has been edited. ", c.Path) + t.numbered(c, between(after, from, to, c.Aci), "a snippet of "+c.Path, from) +
		"Review the changes and make sure they are as expected. Edit the file again if necessary.", nil
}

// between gives lines from and to, both counted from 1. What follows the last
// line's end is a line to one editor and none to the other.
func between(text string, from, to int, aci bool) string {
	lines := strings.Split(text, "\n")
	n := len(lines)
	if strings.HasSuffix(text, "\n") {
		n--
	}
	to = min(to, n)
	if from > to {
		return ""
	}
	s := strings.Join(lines[from-1:to], "\n")
	if aci && to < len(lines) {
		s += "\n"
	}
	return s
}

// linesOf lists where a text is, as Python prints a list: each place, or each
// line that has it whole.
func linesOf(text, part string, places bool) string {
	var found []string
	add := func(line int) {
		if s := fmt.Sprint(line); len(found) == 0 || found[len(found)-1] != s {
			found = append(found, s)
		}
	}
	if places {
		for at := 0; ; {
			i := strings.Index(text[at:], part)
			if i < 0 {
				break
			}
			add(strings.Count(text[:at+i], "\n") + 1)
			at += i + len(part)
		}
	} else {
		for i, line := range strings.Split(text, "\n") {
			if strings.Contains(line, part) {
				add(i + 1)
			}
		}
	}
	return "[" + strings.Join(found, ", ") + "]"
}

func (t *Tools) insert(ctx context.Context, c *Call) (string, error) {
	text, err := t.read(ctx, c.Path)
	if err != nil {
		return "", err
	}
	added := *c.New
	if !c.Aci {
		text, added = expandTabs(text), expandTabs(added)
	}
	lines := strings.Split(text, "\n")
	n, at := len(lines), *c.Line
	if c.Aci && strings.HasSuffix(text, "\n") {
		n--
	}
	if at < 0 || at > n {
		return "", complain("Invalid `insert_line` parameter: %d. It should be within the range of", at)
	}
	inserted := strings.Split(added, "\n")
	after := strings.Join(lines[:at:at], "\n")
	if at > 0 {
		after += "\n"
	}
	after += added
	if at < len(lines) {
		after += "\n" + strings.Join(lines[at:], "\n")
	}
	if err := t.on.Write(ctx, c.Path, after); err != nil {
		return "", err
	}
	t.remember(c.Path, text)
	shown := append(append(append([]string{}, lines[max(0, at-4):at]...), inserted...), lines[at:min(len(lines), at+4)]...)
	return fmt.Sprintf("The file %s has been edited. ", c.Path) +
		t.numbered(c, strings.Join(shown, "\n"), "a snippet of the edited file", max(1, at-4+1)) +
		"Review the changes and make sure they are as expected (correct indentation, no duplicate lines, etc). Edit the file again if necessary.", nil
}

func (t *Tools) undo(ctx context.Context, c *Call) (string, error) {
	before := t.history[c.Path]
	if len(before) == 0 && t.at.Forgot {
		return "", Unable("an undo of an edit that is forgotten")
	}
	if len(before) == 0 {
		return "", complain("No edit history found for %s.", c.Path)
	}
	text := before[len(before)-1]
	if err := t.on.Write(ctx, c.Path, text); err != nil {
		return "", err
	}
	t.held -= len(text)
	t.history[c.Path] = before[:len(before)-1]
	return fmt.Sprintf("Last edit to %s undone successfully. ", c.Path) + t.numbered(c, text, c.Path, 1), nil
}

// expandTabs is Python's str.expandtabs.
func expandTabs(s string) string {
	if !strings.Contains(s, "\t") {
		return s
	}
	var b strings.Builder
	column := 0
	for _, r := range s {
		switch r {
		case '\t':
			n := 8 - column%8
			b.WriteString(strings.Repeat(" ", n))
			column += n
		case '\n', '\r':
			b.WriteRune(r)
			column = 0
		default:
			b.WriteRune(r)
			column++
		}
	}
	return b.String()
}
