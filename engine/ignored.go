package engine

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/inspector"
)

// ignores is the policy, off by default, by which processes with certain names count for no verdict: they may come,
// run and go. A capture that finds none but those beside what text can tell is as if they weren't there, and children
// don't have them; one that dumps others has them in the dump, as they are then. Files that they change
// count as ever.
//
// Whoever sets it takes the risk: a process can call itself as it likes.
type ignores struct {
	names []string
	turns atomic.Int64 // that ended beside one
}

func (i *ignores) has(p box.Proc) bool { return slices.Contains(i.names, p.Name) }

// others are the processes that count.
func (i *ignores) others(procs []box.Proc) []box.Proc {
	if len(i.names) == 0 {
		return procs
	}
	return slices.DeleteFunc(procs, i.has)
}

// survivors are those of a box that count.
func (e *Engine) survivors(bx box.Box) ([]box.Proc, error) {
	procs, err := bx.Survivors()
	return e.ignores.others(procs), err
}

// note counts a turn that ended beside some, and says so among the reasons of its verdict.
func (i *ignores) note(there []inspector.Fate) (reasons []string) {
	names := map[string]bool{}
	for _, f := range there {
		if f.Ignored != "" {
			names[f.Ignored] = true
		}
	}
	if len(names) == 0 {
		return nil
	}
	i.turns.Add(1)
	return []string{"ignored as asked for: " + strings.Join(slices.Sorted(maps.Keys(names)), ", ")}
}

// capability tells the policy in Info.
func (i *ignores) capability() Capability {
	return Capability{Name: "ignored processes", State: 1, Detail: fmt.Sprintf("%s; %d turns ended beside some", strings.Join(i.names, ", "), i.turns.Load())}
}
