package trajectory

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/parquetrows"
)

// format is one that is read. detect must say no to every other format's
// files; the first that says yes reads the file.
type format struct {
	name   string
	detect func(shape) bool
	// rows says that a file of it may be several trajectories, a value each.
	rows bool
	// read fills a trajectory from the next value, or from all values of
	// a file if it isn't one of rows.
	read func(*stream, shape, *Trajectory) error
}

var formats = []format{
	{"swe-agent", func(s shape) bool {
		return s.has("trajectory") && !s.has("trajectory[].role") || s.has("history[].role") && !s.has("trajectory", "messages")
	}, false, readSWEAgent},
	{"nebius", func(s shape) bool { return s.has("trajectory[].role") }, true, readRow},
	{"atif", func(s shape) bool { return s.has("schema_version") && s.has("steps") }, false, readATIF},
	{"mini-swe-agent", func(s shape) bool {
		return s.has("messages") && s.has("trajectory_format", "info") || s.list && s.has("role") && s.has("content", "extra")
	}, false, readMini},
	{"swe-smith", func(s shape) bool { return s.has("messages") }, true, readRow},
	{"openhands-sdk", func(s shape) bool { return s.has("kind") && s.has("id") && s.has("source") }, false, readOpenHandsSDK},
	{"openhands", func(s shape) bool { return s.has("id") && s.has("action", "observation", "source") }, false, readOpenHands},
}

const known = "known are " + formatName + ", SWE-agent, mini-swe-agent, ATIF, OpenHands (V0 and SDK), SWE-smith and nebius rows " +
	"(JSON lines, Parquet), asciicast v2 and v3, and folders of Harbor jobs or OpenHands events"

// shape is what formats are told apart by: the members of the file's first
// object, and "name[].member" of the first object in each list of it.
type shape struct {
	list    bool
	members map[string]bool
}

// has says whether one of the members is there.
func (s shape) has(members ...string) bool {
	for _, m := range members {
		if s.members[m] {
			return true
		}
	}
	return false
}

var errDecided = errors.New("decided")

// shapeOf walks a file's first value. It stops early where a member is only
// one format's: the rest may be a gigabyte.
func shapeOf(s *stream, first byte) (shape, error) {
	found := shape{list: first == '[', members: map[string]bool{}}
	var walk func(prefix string) error
	walk = func(prefix string) error {
		at, err := s.peek()
		if err != nil {
			return err
		}
		switch {
		case at == '{' && prefix != "":
			return s.object(func(name string) error {
				found.members[prefix+name] = true
				return s.skip()
			})
		case at == '{':
			return s.object(func(name string) error {
				found.members[name] = true
				if name == "steps" && found.members["schema_version"] || found.members["trajectory[].action"] {
					return errDecided
				}
				if at, err := s.peek(); err != nil || at != '[' {
					return errors.Join(err, s.skip())
				}
				return s.array(func(i int) error {
					if at, err := s.peek(); err != nil || at != '{' || i > 1 {
						return errors.Join(err, s.skip())
					}
					return walk(name + "[].")
				})
			})
		}
		return s.skip()
	}
	if first != '[' {
		return found, undecided(walk(""))
	}
	return found, undecided(s.array(func(int) error {
		if err := walk(""); err != nil {
			return err
		}
		return errDecided
	}))
}

func undecided(err error) error {
	if errors.Is(err, errDecided) {
		return nil
	}
	return err
}

// readOnly opens a pipe without waiting for its writer.
const readOnly = os.O_RDONLY | syscall.O_NONBLOCK

// regular refuses what is open but isn't a file, and closes it.
func regular(f *os.File, err error) (*os.File, error) {
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		f.Close()
		return nil, errorf("it is not a file")
	}
	return f, nil
}

// open gives the trajectories of a path to yield.
func open(path string, yield func(*Trajectory, error) bool) {
	name := filepath.Base(path)
	if info, err := os.Stat(path); err != nil {
		yield(nil, fault.New(fault.NotFound, "no_trajectory", "opening the trajectory: %w", err))
		return
	} else if info.IsDir() {
		readFolder(path, yield)
		return
	}
	f, err := regular(os.OpenFile(path, readOnly, 0))
	if err != nil {
		yield(nil, bad(name, "%w", err))
		return
	}
	defer f.Close()
	root, err := os.OpenRoot(filepath.Dir(path))
	if err != nil {
		yield(nil, bad(name, "%w", err))
		return
	}
	defer root.Close()
	read(name, f, root, yield)
}

// archives are told by how they begin.
var archives = []struct{ magic, kind string }{
	{"PK\x03\x04", "a zip archive"}, {"\x1f\x8b", "compressed with gzip"}, {"\x28\xb5\x2f\xfd", "compressed with zstd"},
	{"BZh", "compressed with bzip2"}, {"\xfd7zXZ", "compressed with xz"},
	{"\xff\xfe", "UTF-16 text"}, {"\xfe\xff", "UTF-16 text"},
}

// read gives the trajectories of a file to yield and says whether to go on.
// Further files that it names are opened in root; nil: there are none.
func read(name string, f io.ReadSeeker, root *os.Root, yield func(*Trajectory, error) bool) bool {
	start := make([]byte, 4096)
	n, err := io.ReadFull(f, start)
	if start = start[:n]; err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return yield(nil, bad(name, "%w", err))
	}
	for _, a := range archives {
		if bytes.HasPrefix(start, []byte(a.magic)) {
			return yield(nil, fault.New(fault.Unsupported, "unknown_trajectory", "%s is %s", name, a.kind).
				WithHint("unpack it, or convert it to UTF-8, first"))
		}
	}
	at := int64(0)
	if bytes.HasPrefix(start, []byte(parquetrows.Magic)) {
		return readParquet(name, f, yield)
	}
	if bytes.HasPrefix(start, []byte("\xef\xbb\xbf")) {
		at, start = 3, start[3:]
	}
	text := bytes.TrimLeft(start, " \t\r\n")
	if len(text) == 0 {
		if n < 4096 {
			return yield(nil, bad(name, "it is empty"))
		}
		return yield(nil, fault.New(fault.Unsupported, "unknown_trajectory", "%s begins with %d blanks", name, n))
	}
	t := &Trajectory{}
	switch first, _, _ := bytes.Cut(text, []byte("\n")); {
	case isOurs(first):
		err = readOurs(f, at, t)
	case isAsciicast(first):
		err = readAsciicast(f, at, t)
	default:
		return readJSON(name, f, at, text[0], root, yield)
	}
	if err != nil {
		return yield(nil, bad(name, "%w", err))
	}
	return yield(t, nil)
}

func readJSON(name string, f io.ReadSeeker, at int64, first byte, root *os.Root, yield func(*Trajectory, error) bool) bool {
	s, err := newStream(f, at)
	if err != nil {
		return yield(nil, bad(name, "%w", err))
	}
	found, broken := shapeOf(s, first)
	for _, known := range formats {
		if !known.detect(found) {
			continue // what was seen before a break may do
		}
		if s, err = newStream(f, at); err != nil {
			return yield(nil, bad(name, "%w", err))
		}
		if known.rows {
			return readRows(name, known, s, found, yield)
		}
		t := &Trajectory{Format: known.name}
		err := known.read(s, found, t)
		if err == nil {
			err = broken
		}
		if end, after := s.end(); err == nil && !end {
			if err = after; err == nil {
				err = errorf("line %d: more follows after the trajectory", s.line(s.dec.InputOffset()))
			}
		}
		if err == nil {
			err = t.goOn(name, root)
		}
		if err != nil {
			return yield(nil, bad(name, "as %s: %w", known.name, err))
		}
		return yield(t, nil)
	}
	if broken != nil {
		return yield(nil, bad(name, "%w", broken))
	}
	return yield(nil, fault.New(fault.Unsupported, "unknown_trajectory", "%s has no format that is known", name).WithHint("%s", known))
}

// goOn adds the files that a trajectory is continued in, which must be in or
// below the folder of the first.
func (t *Trajectory) goOn(first string, root *os.Root) error {
	seen := map[string]bool{first: true}
	chain := []string{first}
	for at := first; t.continued != ""; {
		next := filepath.Join(filepath.Dir(at), t.continued)
		chain = append(chain, next)
		switch {
		case strings.Contains(t.continued, "\x00") || !filepath.IsLocal(next) || root == nil:
			return errorf("field continued_trajectory_ref: %q leaves the folder", t.continued)
		case seen[next]:
			return errorf("field continued_trajectory_ref: a cycle: %s", strings.Join(chain, " -> "))
		}
		seen[next] = true
		t.continued, at = "", next
		err := t.continueIn(root, next)
		if errors.Is(err, fs.ErrNotExist) {
			e := Event{File: next}
			e.skip("goes on in a file that is not there")
			return t.add(e)
		}
		if err != nil {
			return errorf("continued in %s: %w", next, err)
		}
	}
	return nil
}

func (t *Trajectory) continueIn(root *os.Root, name string) error {
	f, err := regular(root.OpenFile(name, readOnly, 0))
	if err != nil {
		return err
	}
	defer f.Close()
	s, err := newStream(f, 0)
	if err != nil {
		return err
	}
	from := len(t.Events)
	err = readATIF(s, shape{}, t)
	for i := from; i < len(t.Events); i++ {
		t.Events[i].File = name
	}
	return err
}

// peek tells how the next value begins, which it leaves.
func (s *stream) peek() (byte, error) {
	if !s.more() {
		_, err := s.token()
		return 0, err
	}
	in := s.dec.Buffered()
	for buf := make([]byte, 1); ; {
		if _, err := in.Read(buf); err != nil {
			return 0, errTooLarge // of blanks
		}
		if !strings.ContainsRune(" \t\r\n,:", rune(buf[0])) {
			return buf[0], nil
		}
	}
}
