package merged

import (
	"context"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/treewalk"
)

// Side is one of two states: a folder of changes and the layers below it, lowest first.
type Side struct {
	Layers []string
	Upper  string
}

// Change is a name that two states show otherwise; nil: that one doesn't show it. Of a folder that only one of them has, the
// folder alone may be told, and not what lies in it.
type Change struct {
	Path    string // from the root
	Was, Is *File
}

// File is what a name is.
type File struct {
	Kind       string // as package treewalk has it
	Mode       uint32
	UID, GID   uint32
	Mtime      int64 // in ns; 0 for folders
	Size       int64
	SHA256     string
	Target     string
	Attributes map[string][]byte
}

// Changes gives the names that differ, in order. It looks where the folders of changes differ, or everywhere if they lie on
// other layers. As for Differ, both must stand still and the process be root in a mount namespace of its own.
func Changes(ctx context.Context, was, is Side) ([]Change, error) {
	places := map[string]bool{".": true}
	if slices.Equal(was.Layers, is.Layers) {
		var err error
		if places, err = differing(ctx, was.Upper, is.Upper); err != nil || len(places) == 0 {
			return nil, err
		}
	}
	var seen [2]map[string]string
	for i, side := range []Side{was, is} {
		root, err := mount(side.Layers, side.Upper)
		if err != nil {
			return nil, err
		}
		seen[i], err = look(ctx, root, places)
		root.Close()
		if err != nil {
			return nil, err
		}
	}
	var names []string
	for i, side := range seen {
		for name, line := range side {
			if other, ok := seen[1-i][name]; line != other && (i == 0 || !ok) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	var out []Change
	for _, name := range names {
		c := Change{Path: name}
		for i, at := range []**File{&c.Was, &c.Is} {
			if line, ok := seen[i][name]; ok {
				f, err := parse(line)
				if err != nil {
					return nil, fmt.Errorf("reading %q: %w", line, err)
				}
				*at = f
			}
		}
		out = append(out, c)
	}
	return out, nil
}

// look describes places of a root, by their names.
func look(ctx context.Context, root *os.File, places map[string]bool) (map[string]string, error) {
	seen := map[string]string{}
	for place, whole := range places {
		if whole && place == "." {
			lines, _, err := treewalk.DigestAt(root, treewalk.Options{IgnoreDirTimes: true, Err: ctx.Err})
			if err != nil {
				return nil, err
			}
			if err := add(seen, "", lines); err != nil {
				return nil, err
			}
			continue
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		parent, _ := path.Split(place)
		var lines []string
		for _, l := range describe(root, place, whole) {
			if rest, ok := strings.CutPrefix(l, strconv.Quote(place)+": "); ok && strings.HasPrefix(rest, `"`) {
				lines = append(lines, rest)
			} else if !strings.HasPrefix(l, strconv.Quote(place)+" holds ") {
				return nil, fmt.Errorf("looking at %s", l)
			}
		}
		if err := add(seen, parent, lines); err != nil {
			return nil, err
		}
	}
	return seen, nil
}

func add(seen map[string]string, parent string, lines []string) error {
	for _, l := range lines {
		quoted, err := strconv.QuotedPrefix(l)
		if err != nil {
			return fmt.Errorf("reading %q: %w", l, err)
		}
		name, err := strconv.Unquote(quoted)
		if err != nil {
			return fmt.Errorf("reading %q: %w", l, err)
		}
		seen[path.Join(parent, name)] = linksCut(l[len(quoted)+1:])
	}
	return nil
}

// parse reads a line of package treewalk behind its name.
func parse(line string) (*File, error) {
	f := &File{Attributes: map[string][]byte{}}
	n, err := fmt.Sscanf(line, "%s %o %d:%d", &f.Kind, &f.Mode, &f.UID, &f.GID)
	if f.Kind == "mount" {
		return f, nil
	}
	if n < 4 {
		return nil, err
	}
	rest := strings.SplitN(line, " ", 4)
	if len(rest) < 4 {
		return f, nil
	}
	for text := rest[3]; text != ""; text = strings.TrimPrefix(text, " ") {
		name, value, ok := strings.Cut(text, "=")
		if !ok {
			return nil, fmt.Errorf("%q is no attribute", text)
		}
		if quoted, err := strconv.QuotedPrefix(value); err == nil {
			text = value[len(quoted):]
			if value, err = strconv.Unquote(quoted); err != nil {
				return nil, err
			}
		} else {
			value, text, _ = strings.Cut(value, " ")
		}
		switch name {
		case "mtime":
			sec, ns, _ := strings.Cut(value, ".")
			var s, n int64
			if s, err = strconv.ParseInt(sec, 10, 64); err == nil {
				n, err = strconv.ParseInt(ns, 10, 64)
			}
			f.Mtime = s*1e9 + n
		case "size":
			f.Size, err = strconv.ParseInt(value, 10, 64)
		case "sha256":
			f.SHA256 = value
		case "to":
			f.Target = value
		default:
			f.Attributes[name] = []byte(value)
		}
		if err != nil {
			return nil, err
		}
	}
	return f, nil
}
