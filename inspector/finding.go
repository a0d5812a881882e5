package inspector

import (
	"errors"
	"fmt"

	"github.com/boxwood-rl/boxwood/tree"
)

var (
	errNoSurvivors = errors.New("nothing lists them")
	errClosed      = errors.New("the inspector is closed")
)

// finding is what is known of one span: the epoch, or the turn.
type finding struct {
	files, process bool
	effects        []tree.Effect
	count          int64
	reasons        []string
	changed        map[string]bool // paths told as changed
	fates          []Fate
	beyond         bool // as in Report
}

func (f *finding) both(why string) {
	f.files, f.process = true, true
	f.reasons = append(f.reasons, why)
}

func (f *finding) file(why string) {
	f.files = true
	f.reasons = append(f.reasons, why)
}

func (f *finding) processes(why string) {
	f.process = true
	f.reasons = append(f.reasons, why)
}

// change tells that a file's content or metadata changed, once: it may have been
// noticed in two ways.
func (f *finding) change(kind tree.EffectKind, path string) {
	f.files = true
	if f.changed[path] {
		return
	}
	if f.changed == nil {
		f.changed = map[string]bool{}
	}
	f.changed[path] = true
	f.effect(kind, []byte(path), "")
}

func (f *finding) effect(kind tree.EffectKind, subject []byte, detail string) {
	f.count++
	if len(f.effects) < tree.MaxEffects {
		f.effects = append(f.effects, tree.Effect{Kind: kind, Subject: subject, Detail: detail})
	}
}

func (f *finding) verdict() tree.Verdict {
	switch {
	case f.files && f.process:
		return tree.Both
	case f.files:
		return tree.Files
	case f.process:
		return tree.Process
	}
	return tree.None
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
