package tree

import (
	"context"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/ids"
)

// If it fails, something that a trainer does at every step costs more in a tree of 10,000 levels, or below a node of 10,000
// children, than in a small one. Allocations are counted, which are the same whatever else the machine does; whatever
// looks at each node of a tree makes one for each.
func TestDeepAndWideTreesCostNoMore(t *testing.T) {
	type place struct {
		s  *Store
		tr *Tree
		at ids.Node
	}
	const levels = 10_000
	places := map[string]place{}
	for _, shape := range []string{"small", "deep", "wide"} {
		s := mustOpen(t, "state", memory())
		tr := mustTree(t, s)
		places[shape] = place{s, tr, shapeTree(t, s, tr, shape)}
	}
	add := func(p place) ids.Node {
		var id ids.Node
		mustUpdate(t, p.s, func(tx *Tx) error {
			parent, err := tx.Node(p.at)
			if err != nil {
				return err
			}
			n, err := tx.AddNode(typicalNode(parent))
			id = n.ID
			return err
		})
		return id
	}
	value := 1.0
	for _, op := range []struct {
		name string
		do   func(p place)
	}{
		{"a node that comes and goes", func(p place) { mustPrune(t, p.s, add(p), false) }},
		{"a capture", func(p place) {
			id := add(p)
			mustUpdate(t, p.s, func(tx *Tx) error { return tx.SetCaptured(checkpointOf(p.tr.ID, id), time.Now(), false, 0) })
			mustPrune(t, p.s, id, false)
		}},
		{"an annotation", func(p place) {
			mustUpdate(t, p.s, func(tx *Tx) error { return tx.Annotate([]Annotation{{Node: p.at, Value: &value}}) })
		}},
		{"a pin", func(p place) {
			mustUpdate(t, p.s, func(tx *Tx) error { return tx.Pin(p.at) })
			mustUpdate(t, p.s, func(tx *Tx) error { return tx.Unpin(p.at) })
		}},
		{"a read", func(p place) {
			if _, err := p.s.FullNode(p.at); err != nil {
				t.Error(err)
			}
		}},
		{"the nodes with a label, of a level, with a status", func(p place) {
			mustUpdate(t, p.s, func(tx *Tx) error {
				return tx.Annotate([]Annotation{{Node: p.at, Labels: map[string]string{"only": "here"}}})
			})
			v := p.s.View()
			n, err := v.Node(p.at)
			if err != nil {
				t.Fatal(err)
			}
			for _, w := range []Where{
				{Labels: map[string]string{"only": "here"}}, {Depth: &n.Depth}, {Labels: map[string]string{"role": n.Labels["role"], "only": "here"}, Capture: []Capture{Captured, Proven}, Depth: &n.Depth},
			} {
				if got := idsOf(v.NodesWhere(n.Tree, w)); len(got) != 1 || got[0] != n.ID {
					t.Errorf("%+v: %v, want %s alone", w, got, n.ID)
				}
			}
			if got := idsOf(v.NodesWhere(n.Tree, Where{Capture: []Capture{Recorded, Withheld}})); len(got) != 0 {
				t.Errorf("%v are neither", got)
			}
		}},
		{"a sandbox that stands there", func(p place) {
			sb := Sandbox{ID: ids.NewSandbox(), Tree: p.tr.ID, Head: p.at, Generation: ids.NewGeneration()}
			mustUpdate(t, p.s, func(tx *Tx) error { return tx.PutSandbox(sb) })
			mustUpdate(t, p.s, func(tx *Tx) error { return tx.DeleteSandbox(sb.ID) })
		}},
		{"a watcher that comes back", func(p place) {
			id := add(p)
			index := p.s.View().Index()
			mustPrune(t, p.s, id, false)
			mustUpdate(t, p.s, func(tx *Tx) error { return tx.Annotate([]Annotation{{Node: p.at, Value: &value}}) })
			w, err := p.s.Watch(context.Background(), p.tr.ID, index)
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			if got := upTo(t, w, p.s.View().Index()); len(got) != 2 {
				t.Errorf("a watcher that was away for two changes gets %d", len(got))
			}
		}},
		{"a value carried up, for each node", func(p place) {
			mustUpdate(t, p.s, func(tx *Tx) error { _, err := tx.Backup([]BackupItem{{p.at, 1}}, Sum, 0); return err })
		}},
	} {
		cost := map[string]float64{}
		for shape, p := range places {
			cost[shape] = testing.AllocsPerRun(2, func() { op.do(p) })
			if n, _ := p.s.View().Node(p.at); n.Depth > 0 && op.name == "a value carried up, for each node" {
				cost[shape] /= levels
			}
		}
		t.Logf("%s: %v allocations", op.name, cost)
		for _, shape := range []string{"deep", "wide"} {
			if most := 2*cost["small"] + 200; cost[shape] > most {
				t.Errorf("%s: %.0f allocations in a %s tree, %.0f in a small one", op.name, cost[shape], shape, cost["small"])
			}
		}
	}
}

// If it fails, a watcher that saw a part of what one prune removed misses the rest, or is told of what it has seen again.
func TestWatchGoesOnWithinAPrune(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr, other := mustTree(t, s), mustTree(t, s)
	for _, r := range []ids.Node{other.Root, tr.Root, other.Root} { // removals of others before and after it
		top := mustNode(t, s, r)
		for range 9 {
			mustNode(t, s, top.ID)
		}
		start := s.View().Index()
		mustPrune(t, s, top.ID, false)
		end := s.View().Index()
		if r != tr.Root {
			continue
		}
		for after := start - 1; after < end; after++ {
			var removed int
			last := mustUpdate(t, s, func(tx *Tx) error { return tx.Pin(tr.Root) })
			for _, e := range upTo(t, mustWatch(t, s, tr.ID, after), last) {
				if e.Removed != "" {
					if removed++; e.Index <= after {
						t.Errorf("watching after %d tells of %d", after, e.Index)
					}
				}
			}
			mustUpdate(t, s, func(tx *Tx) error { return tx.Unpin(tr.Root) })
			if want := 10 - max(0, int(after)-int(start)); removed != want {
				t.Errorf("watching after %d, of removals from %d on: %d of them, not %d", after, start+1, removed, want)
			}
		}
	}
}
