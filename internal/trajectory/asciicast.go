package trajectory

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
)

// asciicast, versions 2 and 3: recordings of a terminal, JSON lines:
//
//	{"version": 2, "width": 80, "height": 24}
//	[TIME, CODE, "data"]
//
// TIME is in seconds, from the start in version 2, from the event before in
// version 3. Only input ("i") is an action: keys and when they were typed. A
// line of them is taken for a command: whether the shell read it, or a program
// that ran, isn't recorded. What the terminal showed belongs to no one of them.

type castHeader struct {
	Version int             `json:"version"`
	Width   json.RawMessage `json:"width"`
	Term    json.RawMessage `json:"term"`
}

func isAsciicast(first []byte) bool {
	var h castHeader
	return json.Unmarshal(first, &h) == nil && h.Version != 0 && (h.Width != nil || h.Term != nil)
}

var castKinds = map[string]string{"o": "output of the terminal", "m": "marker", "r": "change of the terminal's size", "x": "end of the recorded program"}

// castRun is a recording being read. Keys are one event up to the end of
// a line.
type castRun struct {
	t     *Trajectory
	now   time.Duration
	keys  strings.Builder
	since time.Duration // when the first of keys was typed
	until time.Duration // when the last was
	step  int
}

func readAsciicast(f io.ReadSeeker, at int64, t *Trajectory) error {
	run := &castRun{t: t}
	version := 0
	err := eachLine(f, at, func(i int, line []byte) error {
		if i == 1 {
			var h castHeader
			if err := json.Unmarshal(line, &h); err != nil {
				return err
			}
			if version = h.Version; version != 2 && version != 3 {
				return errorf("field version: asciicast version %d is not known", version)
			}
			t.Format = fmt.Sprintf("asciicast-v%d", version)
			return nil
		}
		if line[0] == '#' && version == 3 {
			return nil
		}
		return run.event(line, version)
	})
	if err == nil {
		err = run.flush()
	}
	return err
}

func (r *castRun) event(line []byte, version int) error {
	var parts []json.RawMessage
	if err := json.Unmarshal(line, &parts); err != nil {
		return err
	}
	var at float64
	var code, data string
	if len(parts) != 3 {
		return errorf("an event has %d fields, not 3", len(parts))
	}
	for i, into := range []any{&at, &code, &data} {
		if json.Unmarshal(parts[i], into) != nil {
			return errorf("field %d of the event must not be %.20q", i+1, parts[i])
		}
	}
	if at < 0 || at > 1e9 {
		return errorf("field 1 of the event: no time: %v", at)
	}
	if version == 3 {
		r.now += seconds(at)
	} else {
		r.now = seconds(at)
	}
	r.step++
	if code != "i" {
		kind := castKinds[code]
		if kind == "" {
			kind = fmt.Sprintf("event of code %q", code)
		}
		r.t.other(kind)
		return nil
	}
	for data != "" {
		end := strings.IndexAny(data, "\r\n") + 1
		if end == 0 {
			end = len(data)
		}
		if r.keys.Len() == 0 {
			r.since = r.now
		}
		r.until = r.now
		r.keys.WriteString(data[:end])
		if strings.ContainsAny(data[end-1:end], "\r\n") {
			if err := r.flush(); err != nil {
				return err
			}
		}
		data = data[end:]
	}
	return nil
}

func (r *castRun) flush() error {
	if r.keys.Len() == 0 {
		return nil
	}
	e := Event{Step: r.step, Tool: "keystrokes", Keystrokes: r.keys.String(), At: r.since, Took: r.until - r.since}
	r.keys.Reset()
	if line, ok := typedLine(e.Keystrokes); ok {
		e.Command = line
	} else {
		e.skip("keystrokes that are not a command line")
	}
	return r.t.add(e)
}

// typedLine is what keys are as a line, once those that edit it are done. It is
// none without its end, or with a key whose effect a program decides.
func typedLine(keys string) (string, bool) {
	text, ended := strings.CutSuffix(keys, "\r")
	if !ended {
		text, ended = strings.CutSuffix(keys, "\n")
	}
	var line []rune
	for _, r := range text {
		switch {
		case r == 0x7f || r == '\b': // a character back
			line = line[:max(0, len(line)-1)]
		case r == 'U'-64:
			line = line[:0]
		case r == 'W'-64:
			words := strings.TrimRight(string(line), " ")
			line = []rune(words[:strings.LastIndexByte(words, ' ')+1])
		case r < ' ':
			return "", false
		default:
			line = append(line, r)
		}
	}
	return string(line), ended
}
