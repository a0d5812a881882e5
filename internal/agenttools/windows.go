package agenttools

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
)

// SWE-agent's windows: one file is open, of which a hundred lines are shown.
// Where the window stands is as in its versions from 1.0 on; before, it stood
// elsewhere, and only what is shown differs.

const (
	windowLines   = 100
	windowOverlap = 2
)

func (t *Tools) window(ctx context.Context, c *Call) (string, error) {
	w := c.Words
	switch c.Tool {
	case "find_file", "search_dir":
		return t.search(ctx, c)
	case "search_file":
		return t.searchFile(ctx, c)
	case "create":
		return t.createOpen(ctx, w[0])
	case "open":
		if len(w) > 0 {
			return t.openFile(ctx, w)
		}
	}
	if t.at.Open == "" {
		return "", complain("No file open. Use the open command first.")
	}
	text, err := t.read(ctx, t.at.Open)
	if err != nil {
		return "", err
	}
	t.setFirst(text, t.at.First) // it may have become shorter
	switch c.Tool {
	case "goto":
		n, err := strconv.Atoi(w[0])
		if err != nil {
			return "", complain("Error: Line number must be an integer")
		}
		if n > countLines(text) {
			return "", complain("Error: Line number must be less than or equal to %d", countLines(text))
		}
		t.goTo(text, n-1)
	case "scroll_up":
		t.setFirst(text, t.at.First-windowLines+windowOverlap)
	case "scroll_down":
		t.setFirst(text, t.at.First+windowLines-windowOverlap)
	case "edit":
		return t.editText(ctx, text, w)
	case "edit_range":
		return t.editRange(ctx, text, w)
	case "insert":
		return t.insertText(ctx, text, w)
	}
	return t.shown(t.at.Open, text), nil
}

// countLines is how many there are, with or without an end.
func countLines(text string) int {
	n := strings.Count(text, "\n")
	if text != "" && !strings.HasSuffix(text, "\n") {
		n++
	}
	return n
}

func (t *Tools) setFirst(text string, line int) {
	t.at.First = max(0, min(line, countLines(text)-windowLines))
}

// goTo puts a line, counted from 0, a sixth below the window's top.
func (t *Tools) goTo(text string, line int) {
	at := float64(line) - windowLines/6.0
	t.setFirst(text, int(at))
}

// shown is the window, under the file's name.
func (t *Tools) shown(name, text string) string {
	n := countLines(text)
	last := min(t.at.First+windowLines-1, n-1)
	lines := strings.Split(text, "\n")
	out := []string{fmt.Sprintf("[File: %s (%d lines total)]", name, n)}
	if t.at.First > 0 {
		out = append(out, fmt.Sprintf("(%d more lines above)", t.at.First))
	}
	for i := t.at.First; i <= last; i++ {
		out = append(out, fmt.Sprintf("%d:%s", i+1, lines[i]))
	}
	if last < n-1 {
		out = append(out, fmt.Sprintf("(%d more lines below)", n-last-1))
	}
	return strings.Join(out, "\n")
}

// absolute is a path as the agent's shell would find it.
func (t *Tools) absolute(ctx context.Context, name string) (string, error) {
	if path.IsAbs(name) {
		return path.Clean(name), nil
	}
	cwd, err := t.on.Cwd(ctx)
	return path.Join(cwd, name), err
}

func (t *Tools) openFile(ctx context.Context, w []string) (string, error) {
	file, err := t.absolute(ctx, w[0])
	if err != nil {
		return "", err
	}
	switch kind, err := t.on.Kind(ctx, file); {
	case err != nil:
		return "", err
	case kind == Folder:
		return "", complain("Error: %s is a directory. You can only open files. Use cd or ls to navigate directories.", w[0])
	case kind == Nothing:
		return "", complain("Error: File %s not found", w[0])
	}
	text, err := t.read(ctx, file)
	if err != nil {
		return "", err
	}
	line, warning := 1, ""
	if len(w) > 1 {
		if line, err = strconv.Atoi(w[1]); err != nil {
			return "", complain("Usage: open \"<file>\" [<line_number>]\nError: <line_number> must be a number")
		}
		switch n := countLines(text); {
		case line > n:
			warning = fmt.Sprintf("Warning: <line_number> (%d) is greater than the number of lines in the file (%d)\nWarning: Setting <line_number> to %d\n", line, n, n)
			line = n
		case line < 1:
			warning = fmt.Sprintf("Warning: <line_number> (%d) is less than 1\nWarning: Setting <line_number> to 1\n", line)
			line = 1
		}
	}
	t.at.Open = file
	t.goTo(text, line-1)
	return warning + t.shown(w[0], text), nil
}

func (t *Tools) createOpen(ctx context.Context, name string) (string, error) {
	file, err := t.absolute(ctx, name)
	if err != nil {
		return "", err
	}
	kind, err := t.on.Kind(ctx, file)
	if err != nil {
		return "", err
	}
	if kind != Nothing {
		return "", complain("Warning: File '%s' already exists.", name)
	}
	if kind, err = t.on.Kind(ctx, path.Dir(file)); err == nil && kind != Folder {
		_, err = t.on.Run(ctx, "mkdir", "-p", "--", path.Dir(file))
	}
	if err == nil {
		err = t.on.Write(ctx, file, "\n")
	}
	if err != nil {
		return "", err
	}
	t.at.Open, t.at.First = file, 0
	return t.shown(name, "\n"), nil
}

const replaced = "Text replaced. Please review the changes and make sure they are correct:\n\n1. The edited file is correctly indented\n" +
	"2. The edited file does not contain duplicate lines\n3. The edit does not break existing functionality\n\nEdit the file again if necessary.\n"

// editText replaces what is shown, once; or everywhere, with a third word.
func (t *Tools) editText(ctx context.Context, text string, w []string) (string, error) {
	if len(w) < 2 {
		return "", Unable("a call of a tool with the wrong number of words (edit)")
	}
	find, instead, everywhere := w[0], w[1], len(w) > 2 && w[2] != ""
	switch {
	case find == "":
		return "", complain("Search text must not be empty. Use insert to add new text.")
	case find == instead:
		return "", complain("Your search and replace strings are the same. No changes were made. Please modify your search or replace strings.")
	case everywhere:
		n := strings.Count(text, find)
		if n == 0 {
			return "", t.notFound(text, find)
		}
		line := strings.Count(text[:strings.Index(text, find)], "\n") + 1
		after := strings.ReplaceAll(text, find, instead)
		if err := t.on.Write(ctx, t.at.Open, after); err != nil {
			return "", err
		}
		t.goTo(after, line)
		return strings.Replace(replaced, "Text replaced", fmt.Sprintf("Replaced %d occurrences", n), 1) + t.shown(t.at.Open, after), nil
	}
	lines := strings.Split(text, "\n")
	last := min(t.at.First+windowLines, countLines(text))
	window := strings.Join(lines[t.at.First:last], "\n")
	switch strings.Count(window, find) {
	case 0:
		return "", t.notFound(text, find)
	case 1:
	default:
		return "", complain("Your edit was not applied (file not modified): Found more than one occurrence of %s in the currently displayed lines.\n"+
			"Please make your search string more specific (for example, by including more lines of context).\n", quoted(find))
	}
	line := t.at.First + strings.Count(window[:strings.Index(window, find)], "\n")
	after := strings.Join(slices.Concat(lines[:t.at.First], notEmpty(strings.Replace(window, find, instead, 1)), lines[last:]), "\n")
	if err := t.on.Write(ctx, t.at.Open, after); err != nil {
		return "", err
	}
	t.goTo(after, line)
	return replaced + t.shown(t.at.Open, after), nil
}

// notEmpty are the lines of a text, of which an empty one has none.
func notEmpty(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, "\n")
}

func (t *Tools) notFound(text, find string) error {
	if !strings.Contains(text, find) {
		return complain("Your edit was not applied (file not modified): Text %s not found in displayed lines (or anywhere in the file).\n"+
			"Please modify your search string. Did you forget to properly handle whitespace/indentation?\n"+
			"You can also call `open` again to re-display the file with the correct context.\n", quoted(find))
	}
	var where []string
	for at := 0; ; {
		i := strings.Index(text[at:], find)
		if i < 0 {
			break
		}
		where = append(where, fmt.Sprintf("- line %d", strings.Count(text[:at+i], "\n")+1))
		at += i + len(find)
	}
	return complain("Your edit was not applied (file not modified): Text %s not found in displayed lines.\n\n"+
		"However, we found the following occurrences of your search string in the file:\n\n%s\n\n"+
		"You can use the `goto` command to navigate to these locations before running the edit command again.\n", quoted(find), strings.Join(where, "\n"))
}

// quoted is about what Python's repr gives.
func quoted(s string) string {
	s = strings.NewReplacer(`\`, `\\`, "\n", `\n`, "\t", `\t`, "\r", `\r`).Replace(s)
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		return `"` + s + `"`
	}
	return "'" + strings.ReplaceAll(s, "'", `\'`) + "'"
}

func (t *Tools) editRange(ctx context.Context, text string, w []string) (string, error) {
	from, _ := strconv.Atoi(w[0])
	to, _ := strconv.Atoi(w[1])
	lines := strings.Split(text, "\n")
	if from < 1 || from > len(lines) || to < from-1 {
		return "", Unable("an edit of lines that the file doesn't have")
	}
	to = min(to, len(lines))
	after := strings.Join(slices.Concat(lines[:from-1], notEmpty(w[2]), lines[to:]), "\n")
	if err := t.on.Write(ctx, t.at.Open, after); err != nil {
		return "", err
	}
	t.goTo(after, from-1)
	return "File updated. Please review the changes and make sure they are correct\n" +
		"(correct indentation, no duplicate lines, etc). Edit the file again if necessary.\n" + t.shown(t.at.Open, after), nil
}

func (t *Tools) insertText(ctx context.Context, text string, w []string) (string, error) {
	added := strings.TrimSuffix(w[0], "\n")
	if w[0] == "" {
		return t.shown(t.at.Open, text), nil
	}
	var after string
	line := countLines(text)
	lines := strings.Split(text, "\n")
	switch {
	case len(w) == 1 && text == "":
		after = added
	case len(w) == 1:
		after = strings.TrimSuffix(text, "\n") + "\n" + added
	default:
		n, err := strconv.Atoi(w[1])
		if err != nil || n < 0 {
			return "", Unable("an insertion at a line that is none")
		}
		line = n
		n = min(n, len(lines))
		after = strings.Join(slices.Concat(lines[:n], []string{added}, lines[n:]), "\n")
	}
	if err := t.on.Write(ctx, t.at.Open, after); err != nil {
		return "", err
	}
	if len(w) == 1 {
		line = countLines(after)
	}
	t.goTo(after, line)
	return t.shown(t.at.Open, after), nil
}

// search does find_file and search_dir.
func (t *Tools) search(ctx context.Context, c *Call) (string, error) {
	what, dir := c.Words[0], "."
	if len(c.Words) > 1 {
		dir = c.Words[1]
	}
	folder, err := t.absolute(ctx, dir)
	if err != nil {
		return "", err
	}
	if kind, err := t.on.Kind(ctx, folder); err != nil {
		return "", err
	} else if kind != Folder {
		return "", complain("Directory %s not found", dir)
	}
	argv := []string{"find", folder, "-type", "f", "-name", what}
	if c.Tool == "search_dir" {
		argv = []string{"find", folder, "-type", "f", "!", "-path", "*/.*", "-exec", "grep", "-nIH", "--", what, "{}", "+"}
	}
	out, err := t.on.Run(ctx, argv...)
	if err != nil {
		return "", err
	}
	found := notEmpty(strings.TrimSuffix(out, "\n"))
	if len(found) == 0 {
		return "", said{fmt.Sprintf("No matches found for \"%s\" in %s", what, folder), false}
	}
	if c.Tool == "find_file" {
		slices.Sort(found)
		return fmt.Sprintf("Found %d matches for \"%s\" in %s:\n%s", len(found), what, folder, strings.Join(found, "\n")), nil
	}
	count := map[string]int{}
	var files []string
	for _, line := range found {
		file, _, _ := strings.Cut(line, ":")
		if count[file]++; count[file] == 1 {
			files = append(files, file)
		}
	}
	if len(files) > 100 {
		return "", complain("More than %d files matched for \"%s\" in %s. Please narrow your search.", len(files), what, folder)
	}
	slices.Sort(files)
	var b strings.Builder
	fmt.Fprintf(&b, "Found %d matches for \"%s\" in %s:\n", len(found), what, folder)
	for _, file := range files {
		fmt.Fprintf(&b, "%s (%d matches)\n", file, count[file])
	}
	fmt.Fprintf(&b, "End of matches for \"%s\" in %s", what, folder)
	return b.String(), nil
}

func (t *Tools) searchFile(ctx context.Context, c *Call) (string, error) {
	what, file := c.Words[0], t.at.Open
	if len(c.Words) > 1 {
		var err error
		if file, err = t.absolute(ctx, c.Words[1]); err != nil {
			return "", err
		}
		if kind, err := t.on.Kind(ctx, file); err != nil {
			return "", err
		} else if kind != File {
			return "", complain("Usage: search_file <search_term> [<file>]\nError: File name %s not found. Please provide a valid file name.", c.Words[1])
		}
	}
	if file == "" {
		return "", complain("No file open. Use the open command first.")
	}
	out, err := t.on.Run(ctx, "grep", "-n", "--", what, file)
	if err != nil {
		return "", err
	}
	found := notEmpty(strings.TrimSuffix(out, "\n"))
	switch {
	case len(found) == 0:
		return "", said{fmt.Sprintf("No matches found for \"%s\" in %s", what, file), false}
	case len(found) > 100:
		return "", complain("More than %d lines matched for \"%s\" in %s. Please narrow your search.", len(found), what, file)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "Found %d matches for \"%s\" in %s:\n", len(found), what, file)
	for _, line := range found {
		fmt.Fprintf(&b, "Line %s\n", line)
	}
	fmt.Fprintf(&b, "End of matches for \"%s\" in %s", what, file)
	return b.String(), nil
}
