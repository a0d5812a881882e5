package tree

import (
	"context"
	"maps"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"pgregory.net/rapid"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// model is the store as plain maps: what TestModel compares it with.
type model struct {
	trees     map[ids.Tree]ids.Node
	closed    map[ids.Tree]bool
	nodes     map[ids.Node]*modelNode
	order     []ids.Node
	sandboxes map[ids.Sandbox]ids.Node
	condemned map[ids.Snapshot]bool
	snapshot  map[ids.Checkpoint]ids.Snapshot
}

type modelNode struct {
	tree       ids.Tree
	parent     ids.Node
	value      float64
	visits     int64
	label      string
	pinned     bool
	checkpoint ids.Checkpoint
	payload    string
}

func (m *model) below(id ids.Node) (out []ids.Node) {
	for _, n := range m.order {
		for at := n; at != ""; at = m.nodes[at].parent {
			if at == id {
				out = append(out, n)
				break
			}
		}
	}
	return out
}

func (m *model) used(k ids.Checkpoint) bool {
	for _, n := range m.nodes {
		if n.checkpoint == k {
			return true
		}
	}
	return false
}

func (m *model) release(k ids.Checkpoint) {
	if sn, ok := m.snapshot[k]; ok && !m.used(k) {
		m.condemned[sn] = true
		delete(m.snapshot, k)
	}
}

// TestModel runs random operations on the store and on plain maps, with
// restarts and power losses between them, and compares all that can be read.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ctx := context.Background()
		fs := vfs.NewCrashableMem()
		open := func() *Store {
			s, err := Open("state", Options{FS: fs, archiveStep: 2})
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
		s := open()
		defer func() { s.Close() }()
		m := &model{map[ids.Tree]ids.Node{}, map[ids.Tree]bool{}, map[ids.Node]*modelNode{}, nil, map[ids.Sandbox]ids.Node{}, map[ids.Snapshot]bool{}, map[ids.Checkpoint]ids.Snapshot{}}
		do := func(f func(tx *Tx) error) {
			if _, err := s.Update(ctx, f); err != nil {
				t.Fatal(err)
			}
		}
		anyNode := func() ids.Node {
			if len(m.order) == 0 {
				t.Skip("no node yet")
			}
			return rapid.SampledFrom(m.order).Draw(t, "node")
		}
		drop := func(gone []ids.Node) {
			var loose []ids.Checkpoint
			for _, n := range gone {
				loose = append(loose, m.nodes[n].checkpoint)
				delete(m.nodes, n)
			}
			m.order = slices.DeleteFunc(m.order, func(n ids.Node) bool { return m.nodes[n] == nil })
			for _, k := range loose {
				m.release(k)
			}
		}
		setClosed := func(id ids.Tree, closed bool) {
			do(func(tx *Tx) error {
				tr, err := tx.Tree(id)
				if err != nil {
					return err
				}
				c := *tr
				c.Closed = closed
				return tx.PutTree(c)
			})
			m.closed[id] = closed
		}
		t.Repeat(map[string]func(*rapid.T){
			"tree": func(t *rapid.T) {
				tr := Tree{ID: ids.NewTree(), Root: ids.NewNode()}
				k := checkpointOf(tr.ID, tr.Root)
				do(func(tx *Tx) error {
					if err := tx.PutTree(tr); err != nil {
						return err
					}
					if _, err := tx.AddNode(Node{ID: tr.Root, Tree: tr.ID, Capture: Recorded}); err != nil {
						return err
					}
					return tx.SetCaptured(k, k.CreatedAt, false, 0)
				})
				m.trees[tr.ID] = tr.Root
				m.nodes[tr.Root] = &modelNode{tree: tr.ID, checkpoint: k.ID}
				m.snapshot[k.ID] = k.Snapshot
				m.order = append(m.order, tr.Root)
			},
			"add": func(t *rapid.T) {
				parent := anyNode()
				p := m.nodes[parent]
				n := Node{ID: ids.NewNode(), Tree: p.tree, Parent: parent, Capture: Captured, Checkpoint: p.checkpoint}
				do(func(tx *Tx) error { _, err := tx.AddNode(n); return err })
				m.nodes[n.ID] = &modelNode{tree: p.tree, parent: parent, checkpoint: p.checkpoint}
				m.order = append(m.order, n.ID)
			},
			"capture": func(t *rapid.T) {
				id := anyNode()
				old := m.nodes[id].checkpoint
				k := checkpointOf(m.nodes[id].tree, id)
				do(func(tx *Tx) error { return tx.SetCaptured(k, k.CreatedAt, false, 0) })
				m.nodes[id].checkpoint, m.snapshot[k.ID] = k.ID, k.Snapshot
				m.release(old)
			},
			"withhold": func(t *rapid.T) {
				id := anyNode()
				old := m.nodes[id].checkpoint
				do(func(tx *Tx) error { return tx.SetWithheld(id, "why") })
				m.nodes[id].checkpoint = ""
				m.release(old)
			},
			"annotate": func(t *rapid.T) {
				id := anyNode()
				label, payload := rapid.StringN(0, 3, -1).Draw(t, "label"), rapid.SampledFrom([]string{"", "a", "b"}).Draw(t, "payload")
				b := []byte(payload)
				do(func(tx *Tx) error {
					return tx.Annotate([]Annotation{{Node: id, Labels: map[string]string{"l": label}, Payload: &b}})
				})
				m.nodes[id].label, m.nodes[id].payload = label, payload
			},
			"backup": func(t *rapid.T) {
				id := anyNode()
				do(func(tx *Tx) error { _, err := tx.Backup([]BackupItem{{id, 2}}, Sum, 0); return err })
				for at := id; at != ""; at = m.nodes[at].parent {
					m.nodes[at].value += 2
					m.nodes[at].visits++
				}
			},
			"pin": func(t *rapid.T) {
				id, pin := anyNode(), rapid.Bool().Draw(t, "pin")
				do(func(tx *Tx) error { return tx.setPinned(id, pin) })
				m.nodes[id].pinned = pin
			},
			"sandbox": func(t *rapid.T) {
				id := anyNode()
				sb := Sandbox{ID: ids.NewSandbox(), Tree: m.nodes[id].tree, Head: id}
				do(func(tx *Tx) error { return tx.PutSandbox(sb) })
				m.sandboxes[sb.ID] = id
			},
			"release": func(t *rapid.T) {
				for _, sb := range slices.Sorted(maps.Keys(m.sandboxes)) {
					do(func(tx *Tx) error { return tx.DeleteSandbox(sb) })
					delete(m.sandboxes, sb)
					break
				}
			},
			"prune": func(t *rapid.T) {
				id, keep := anyNode(), rapid.Bool().Draw(t, "keep")
				gone := m.below(id)
				if keep {
					gone = slices.DeleteFunc(gone, func(n ids.Node) bool { return n == id })
				}
				of := m.nodes[id].tree
				whole := !keep && m.nodes[id].parent == ""
				refused := whole && !m.closed[of]
				for _, n := range gone {
					refused = refused || m.nodes[n].pinned || slices.Contains(slices.Collect(maps.Values(m.sandboxes)), n)
				}
				_, err := s.Update(ctx, func(tx *Tx) error { _, err := tx.Prune(id, keep); return err })
				if refused != fault.Is(err, fault.Precondition) || !refused && err != nil {
					t.Fatalf("prune of %s: %v, want refused: %v", id, err, refused)
				}
				if !refused {
					drop(gone)
					if whole {
						delete(m.trees, of)
					}
				}
			},
			// A closed tree leaves memory, whole or in part, and whatever comes next finds it.
			"archive": func(t *rapid.T) {
				id := m.nodes[anyNode()].tree
				setClosed(id, true)
				if rapid.Bool().Draw(t, "part") {
					k, _ := keyOf(id, "tr_")
					do(func(tx *Tx) error {
						tr, err := tx.Tree(id)
						if err != nil || tx.idle(tr) != nil || tr.Archive != InMemory {
							return err
						}
						_, err = tx.archive(tr, k)
						return err
					})
					return
				}
				stood := slices.ContainsFunc(slices.Collect(maps.Values(m.sandboxes)), func(n ids.Node) bool { return m.nodes[n].tree == id })
				if err := s.Archive(ctx, id); stood != fault.Is(err, fault.Precondition) || !stood && err != nil {
					t.Fatalf("archiving %s: %v, want refused: %v", id, err, stood)
				}
			},
			"open": func(t *rapid.T) { setClosed(m.nodes[anyNode()].tree, false) },
			"recall": func(t *rapid.T) {
				if err := s.Recall(ctx, m.nodes[anyNode()].tree); err != nil {
					t.Fatal(err)
				}
			},
			"finish": func(t *rapid.T) {
				gone := slices.Sorted(maps.Keys(m.condemned))
				do(func(tx *Tx) error { return tx.FinishRemoval(gone) })
				clear(m.condemned)
			},
			"fail": func(t *rapid.T) {
				id := anyNode()
				if _, err := s.Update(ctx, func(tx *Tx) error {
					_ = tx.SetWithheld(id, "never")
					return errOops
				}); err != errOops {
					t.Fatal(err)
				}
			},
			"restart": func(t *rapid.T) {
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				s = open()
			},
			"power loss": func(t *rapid.T) {
				after := fs.CrashClone(vfs.CrashCloneCfg{})
				_ = s.Close()
				fs = after
				s = open()
			},
			"": func(t *rapid.T) { m.compare(t, s) },
		})
	})
}

func (m *model) compare(t *rapid.T, s *Store) {
	v := s.View()
	wrong, err := s.Check(context.Background())
	if err != nil || len(wrong) > 0 {
		t.Fatalf("check: %v, %v", wrong, err)
	}
	if v.TreeCount() != len(m.trees) || v.NodeCount("") != len(m.nodes) || v.SandboxCount("") != len(m.sandboxes) || v.CheckpointCount("") != len(m.snapshot) {
		t.Fatalf("%d trees, %d nodes, %d sandboxes, %d checkpoints; want %d, %d, %d, %d", v.TreeCount(), v.NodeCount(""), v.SandboxCount(""),
			v.CheckpointCount(""), len(m.trees), len(m.nodes), len(m.sandboxes), len(m.snapshot))
	}
	for id, want := range m.nodes {
		n, err := v.FullNode(id)
		if err != nil {
			t.Fatal(err)
		}
		payload := ""
		if n.PayloadDigest != "" {
			b, err := s.Payload(n.PayloadDigest)
			if err != nil {
				t.Fatal(err)
			}
			payload = string(b)
		}
		got := modelNode{n.Tree, n.Parent, n.Value, n.Visits, n.Labels["l"], n.Pinned, n.Checkpoint, payload}
		if got != *want {
			t.Fatalf("node %s is %+v, want %+v", id, got, *want)
		}
		var kids []ids.Node
		for _, c := range m.order {
			if m.nodes[c].parent == id {
				kids = append(kids, c)
			}
		}
		if got := idsOf(v.Children(id)); !slices.Equal(got, kids) {
			t.Fatalf("children of %s are %v, want %v", id, got, kids)
		}
		below := idsOf(v.Subtree(id))
		slices.Sort(below)
		want := m.below(id)
		slices.Sort(want)
		if !slices.Equal(below, want) {
			t.Fatalf("below %s are %v, want %v", id, below, want)
		}
	}
	condemned := slices.Sorted(v.Condemned())
	if want := slices.Sorted(maps.Keys(m.condemned)); !slices.Equal(condemned, want) {
		t.Fatalf("condemned are %v, want %v", condemned, want)
	}
	for k := range m.snapshot {
		users := idsOf(v.CheckpointUsers(k))
		slices.Sort(users)
		var want []ids.Node
		for id, n := range m.nodes {
			if n.checkpoint == k {
				want = append(want, id)
			}
		}
		slices.Sort(want)
		if !slices.Equal(users, want) {
			t.Fatalf("users of %s are %v, want %v", k, users, want)
		}
	}
	for sb, at := range m.sandboxes {
		if x, err := v.Sandbox(sb); err != nil || x.Head != at {
			t.Fatalf("sandbox %s: %+v, %v; want it at %s", sb, x, err, at)
		}
		if !slices.ContainsFunc(slices.Collect(v.SandboxesAt(at)), func(x *Sandbox) bool { return x.ID == sb }) {
			t.Fatalf("sandbox %s isn't found at %s", sb, at)
		}
	}
}
