package engine

import (
	"strings"

	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// OwnerLabel is the label of a tree that names the client whose tree it is. The service sets it; trees of clients that
// aren't held to anything have none.
const OwnerLabel = "boxwood.client"

// TreeOf finds the tree that an id of a tree, node, live sandbox or open turn belongs to; nil: there is no such thing.
func (e *Engine) TreeOf(id string) *tree.Tree {
	v := e.Store.View()
	of := ids.Tree(id)
	switch prefix, _, _ := strings.Cut(id, "_"); prefix {
	case "nd":
		n, err := v.Node(ids.Node(id))
		if err != nil {
			return nil
		}
		of = n.Tree
	case "sb":
		s, err := e.find(ids.Sandbox(id))
		if err != nil {
			return nil
		}
		of = s.tree
	case "tn":
		t, err := e.openTurn(ids.Turn(id))
		if err != nil {
			return nil
		}
		of = t.s.tree
	}
	t, err := v.Tree(of)
	if err != nil {
		return nil
	}
	return t
}

// LimitsFor are those of a sandbox of a tree (nil: of any) that is asked for with these.
func (e *Engine) LimitsFor(t *tree.Tree, asked tree.Limits) tree.Limits {
	var own tree.Limits
	if t != nil {
		own = t.Defaults.Limits
	}
	limits := mergeLimits(asked, own, e.cfg.Limits)
	limits.Calls = own.Calls
	return limits
}

// SavedBytes is what the states of each client's trees hold, by the client's name: files with what each added, saved processes
// with all that they had, once.
func (e *Engine) SavedBytes() map[string]int64 {
	v := e.Store.View()
	owner, bytes := map[ids.Tree]string{}, map[string]int64{}
	type state struct {
		of string
		id ids.Process
	}
	counted := map[state]bool{}
	for t := range v.Trees() {
		if name := t.Labels[OwnerLabel]; name != "" {
			owner[t.ID] = name
		}
	}
	for k := range v.Checkpoints() {
		name, ok := owner[k.Tree]
		if !ok {
			continue
		}
		bytes[name] += k.Bytes
		if s := (state{name, k.State}); k.State != "" && !counted[s] {
			counted[s] = true
			if p, err := v.Process(k.State); err == nil {
				bytes[name] += p.Bytes
			}
		}
	}
	return bytes
}

// SandboxOf is that of an open turn; empty: there is none.
func (e *Engine) SandboxOf(id ids.Turn) string {
	if id == "" {
		return ""
	}
	t, err := e.openTurn(id)
	if err != nil {
		return ""
	}
	return string(t.s.id)
}
