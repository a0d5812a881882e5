package report

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// trajectory is what a replay says of one.
type trajectory struct {
	file, tree, cause        string
	turns, compared, matched int64
	first                    int64 // step of the first difference; 0: none
	matchedPct               *float64
	evidence                 bool
}

// replayed is a node of a turn that a replay ran.
type replayed struct {
	trajectory int
	tool       string // of the agent, if it was no command
	counts     bool   // it is of a trajectory that is evidence, and before its first difference
}

// addReplay reads what `boxwood replay --json` printed: the turns of a trajectory,
// each an object, then an object that says what came of it.
func (d *Data) addReplay(r io.Reader) error {
	if d.replayed == nil {
		d.replayed, d.endless = map[string]replayed{}, map[string]bool{}
	}
	type line struct {
		Step      *int64 `json:"step"`
		Node      string `json:"node"`
		Tool      string `json:"tool"`
		Skipped   any    `json:"skipped"` // why a turn was; of a trajectory an object
		Different string `json:"different"`

		File       *string  `json:"file"`
		Tree       string   `json:"tree"`
		Turns      int64    `json:"turns"`
		Compared   int64    `json:"compared"`
		Matched    int64    `json:"matched"`
		MatchedPct *float64 `json:"matched_pct"`
		Evidence   bool     `json:"evidence"`
		First      int64    `json:"first_divergence"`
		Cause      string   `json:"cause"`
	}
	turns := map[string][]line{} // by tree
	for in := json.NewDecoder(r); ; {
		var l line
		if err := in.Decode(&l); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return fmt.Errorf("reading what a replay printed: %w", err)
		}
		switch {
		case l.Step != nil:
			turns[l.Tree] = append(turns[l.Tree], l)
		case l.File != nil && l.Tree != "":
			at := slices.IndexFunc(d.replays, func(r trajectory) bool { return r.tree == l.Tree })
			if at < 0 { // else it went on, and this is what came of it in the end
				at = len(d.replays)
				d.replays = append(d.replays, trajectory{})
			}
			d.replays[at] = trajectory{*l.File, l.Tree, l.Cause, l.Turns, l.Compared, l.Matched, l.First, l.MatchedPct, l.Evidence}
			counts := l.Evidence
			for _, t := range turns[l.Tree] {
				counts = counts && t.Different == "" || sabotage.On("report")
				if t.Node != "" && t.Skipped == nil {
					d.replayed[t.Node] = replayed{at, t.Tool, counts}
				}
			}
			delete(turns, l.Tree)
		}
	}
	for tree := range turns {
		d.endless[tree] = true
	}
	return nil
}

// program is what a line for a shell runs first, past changes of folder and
// variables: a label, for which shell isn't parsed.
func program(line string) string {
	first := ""
	for _, part := range strings.FieldsFunc(line, func(r rune) bool { return strings.ContainsRune("&|;\n(){}", r) }) {
	words:
		for _, word := range strings.Fields(part) {
			switch word {
			case "!", "command", "do", "env", "exec", "if", "nice", "nohup", "sudo", "then", "time", "while":
				continue
			case "#", ".", "cd", "export", "for", "set", "source":
				if first == "" {
					first = word
				}
				break words
			}
			if name, _, ok := strings.Cut(word, "="); ok && name != "" {
				continue // a variable
			}
			return path.Base(strings.Trim(word, `"'`))
		}
	}
	return first
}
