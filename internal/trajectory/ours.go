package trajectory

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// formatName stands in the first line of our files, which are JSON lines:
//
//	{"format": "boxwood-trajectory-1", "start": "start.json"}
//	{"command": "ls", "cwd": "/work", "expect_exit": 0, "expect_stdout": "a\nb\n"}
//	...
//
// Only "command" is required of the others. An unknown member is an error: a
// mistyped expectation would expect nothing.
const formatName = "boxwood-trajectory-1"

type header struct {
	Format string `json:"format"`
	Start  string `json:"start,omitempty"`
}

// Line is one turn of our format.
type Line struct {
	Command      string  `json:"command"`
	Cwd          string  `json:"cwd,omitempty"`
	ExpectExit   *int    `json:"expect_exit,omitempty"`
	ExpectStdout *string `json:"expect_stdout,omitempty"`
}

func isOurs(first []byte) bool {
	var h header
	return json.Unmarshal(first, &h) == nil && strings.HasPrefix(h.Format, "boxwood-trajectory-")
}

func readOurs(f io.ReadSeeker, at int64, t *Trajectory) error {
	t.Format = formatName
	return eachLine(f, at, func(i int, line []byte) error {
		if i == 1 {
			var h header
			if err := strict(line, &h); err != nil {
				return err
			}
			if h.Format != formatName {
				return errorf("format %q is newer than this program, which knows %q", h.Format, formatName)
			}
			t.Start = h.Start
			return nil
		}
		var l Line
		if err := strict(line, &l); err != nil {
			return err
		}
		if l.Command == "" {
			return errorf("field command is missing")
		}
		return t.add(Event{
			Step: len(t.Events) + 1, Tool: "bash", Command: l.Command, Cwd: l.Cwd, ExitCode: l.ExpectExit, Output: l.ExpectStdout,
		})
	})
}

// eachLine walks the lines of a file that aren't blank; i counts all, from 1.
// An error names the line.
func eachLine(f io.ReadSeeker, at int64, each func(i int, line []byte) error) error {
	if _, err := f.Seek(at, io.SeekStart); err != nil {
		return err
	}
	src := &source{r: f, limit: math.MaxInt64}
	in := bufio.NewScanner(src)
	in.Buffer(nil, maxValue)
	i := 0
	for in.Scan() {
		i++
		line := bytes.TrimSpace(in.Bytes())
		if len(line) == 0 {
			continue
		}
		if err := each(i, line); err != nil {
			if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
				err = errorf("the line ends in the middle of a value")
			}
			return fmt.Errorf("line %d: %w", i, err)
		}
	}
	err := in.Err()
	if errors.Is(err, bufio.ErrTooLong) {
		err = errTooLarge
	}
	if err != nil {
		return fmt.Errorf("line %d: %w", i+1, err)
	}
	return nil
}

func strict(data []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	err := d.Decode(into)
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		return errorf("field %s must not be a %s", wrong.Field, wrong.Value)
	}
	return err
}

// Write writes our format.
func Write(w io.Writer, start string, lines []Line) error {
	out := bufio.NewWriter(w)
	enc := json.NewEncoder(out)
	enc.SetEscapeHTML(false)
	err := enc.Encode(header{formatName, start})
	for _, l := range lines {
		err = errors.Join(err, enc.Encode(l))
	}
	return errors.Join(err, out.Flush())
}

// Start is the state that a trajectory begins in, on top of an image.
type Start struct {
	// Image to use where the caller names none.
	Image string `json:"image,omitempty"`
	// Cwd of turns that name none; Commands run in the image's.
	Cwd   string            `json:"cwd,omitempty"`
	User  string            `json:"user,omitempty"`
	Env   map[string]string `json:"env,omitempty"`
	Files []StartFile       `json:"files,omitempty"`
	// Commands run with bash after the files are there.
	Commands []string `json:"commands,omitempty"`
}

// StartFile is a file of the start state; its content stands in Content, or in
// the file From in or below the manifest's folder.
type StartFile struct {
	Path    string `json:"path"`
	Content string `json:"content,omitempty"`
	From    string `json:"from,omitempty"`
	// Mode in octal; empty: "644".
	Mode string `json:"mode,omitempty"`
}

// StartBeside is the manifest that comes with a file or folder by its name,
// FILE.start.json; empty: there is none.
func StartBeside(path string) string {
	beside := filepath.Clean(path) + ".start.json"
	if _, err := os.Stat(beside); err != nil {
		return ""
	}
	return beside
}

// OpenStart reads a manifest and the files that it names.
func OpenStart(path string) (*Start, error) {
	bad := func(err error) (*Start, error) {
		return nil, fault.New(fault.Invalid, "bad_start_state", "reading the start state %s: %w", filepath.Base(path), err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return bad(err)
	}
	var s Start
	if err := strict(data, &s); err != nil {
		return bad(err)
	}
	root, err := os.OpenRoot(filepath.Dir(path))
	if err != nil {
		return bad(err)
	}
	defer root.Close()
	for i, f := range s.Files {
		if !filepath.IsAbs(f.Path) {
			return bad(fmt.Errorf("files[%d]: path %q must begin with /", i, f.Path))
		}
		if f.From == "" {
			continue
		}
		if f.Content != "" {
			return bad(fmt.Errorf("files[%d]: has both content and from", i))
		}
		text, err := root.ReadFile(f.From)
		if err != nil {
			return bad(fmt.Errorf("files[%d]: %w", i, err))
		}
		s.Files[i].Content = string(text)
	}
	return &s, nil
}
