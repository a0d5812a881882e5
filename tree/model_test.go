package tree

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

func digestOf(b string) string {
	sum := sha256.Sum256([]byte(b))
	return hex.EncodeToString(sum[:])
}

// TestSuite is what any store must do, case by case. If the reference fails, the case is wrong; if the
// store alone does, it is.
func TestSuite(t *testing.T) {
	for name, open := range map[string]func(t *testing.T) keeper{
		"reference": func(*testing.T) keeper { return newReference() },
		"store":     func(t *testing.T) keeper { return newRealKeeper(t) },
	} {
		for what, test := range suite {
			t.Run(name+"/"+what, func(t *testing.T) {
				k := open(t)
				test(&contract{t, k})
				for _, crash := range []bool{false, true} {
					before := k.seen()
					k.again(crash)
					wantEqual(t, "after a restart", k.seen(), before)
				}
			})
		}
	}
}

type contract struct {
	*testing.T
	k keeper
}

func (c *contract) do(steps ...step) []ids.Node {
	c.Helper()
	gone, reason := c.k.change(steps...)
	if reason != "" {
		c.Fatalf("%+v: refused, %s", steps, reason)
	}
	return gone
}

func (c *contract) refused(reason string, steps ...step) {
	c.Helper()
	before := c.k.seen()
	if _, got := c.k.change(steps...); got != reason {
		c.Fatalf("%+v: %q, want it refused as %q", steps, got, reason)
	}
	wantEqual(c, "after a refusal", c.k.seen(), before)
}

func (c *contract) want(id, text string) {
	c.Helper()
	if got := c.k.seen()[id]; got != text {
		c.Errorf("%s is %s, want %s", id, got, text)
	}
}

var suite = map[string]func(c *contract){
	"a change is whole or isn't": func(c *contract) {
		root := planting()
		a, b := adding(root.node), adding(root.node)
		c.do(root, a)
		c.refused("node_exists", b, a)
		c.refused("node_not_found", b, step{op: "annotate", node: a.node, label: "x"}, captured("nd_x"))
		c.refused("node_not_found", planting(), adding("nd_x"))
		c.refused("tree_not_found", step{op: "pin", node: a.node}, step{op: "close", tree: "tr_x"})
		c.do(b)
		c.want("below "+string(root.node), sprint([]ids.Node{a.node, b.node}, []ids.Node{root.node, a.node, b.node}))
	},
	"children are in order": func(c *contract) {
		root := planting()
		a, b, d := adding(root.node), adding(root.node), adding(root.node)
		below := adding(a.node)
		c.do(root, a, b, below)
		c.do(step{op: "prune", node: a.node}, d)
		c.want("below "+string(root.node), sprint([]ids.Node{b.node, d.node}, []ids.Node{root.node, b.node, d.node}))
		n := seenNode{tree: root.tree, parent: root.node, depth: 1, ordinal: 2, capture: Captured, checkpoint: root.checkpoint}
		c.want(string(d.node), sprintNode(n))
	},
	"a prune refuses what is used": func(c *contract) {
		root := planting()
		a, b := adding(root.node), captured("")
		leaf := adding(a.node)
		b.node = leaf.node
		box := step{op: "box", node: leaf.node, sandbox: ids.NewSandbox()}
		other := step{op: "tree", tree: ids.NewTree(), node: ids.NewNode(), from: leaf.node}
		prune := step{op: "prune", node: a.node}
		c.do(root, a, leaf, b, box, other, step{op: "pin", node: leaf.node})
		c.refused("pinned", prune)
		c.do(step{op: "unpin", node: leaf.node})
		c.refused("sandbox_there", prune)
		c.do(step{op: "unbox", sandbox: box.sandbox})
		c.refused("checkpoint_shared", prune)
		c.refused("root", step{op: "prune", node: other.node})
		c.do(step{op: "close", tree: other.tree}, step{op: "prune", node: other.node})
		if gone := c.do(prune); !slices.Equal(gone, []ids.Node{a.node, leaf.node}) {
			c.Errorf("removed are %v", gone)
		}
		c.want("condemned", sprint([]ids.Snapshot{b.snapshot}))
		c.do(step{op: "finish", snapshot: b.snapshot})
		c.want("condemned", "[]")
		c.want("counts", sprint(1, 1, 0, 1))
	},
	"a checkpoint lives as long as a node has it": func(c *contract) {
		root := planting()
		a, b := adding(root.node), adding(root.node)
		c.do(root, a, b)
		again := captured(root.node)
		c.do(again)
		c.want(string(root.checkpoint), sprint(plainCheckpoint{root.node, root.snapshot, false}, slices.Sorted(slices.Values([]ids.Node{a.node, b.node}))))
		c.do(step{op: "prove", node: a.node}, step{op: "withhold", node: b.node})
		n := seenNode{tree: root.tree, parent: root.node, depth: 1, capture: Proven, checkpoint: root.checkpoint}
		c.want(string(a.node), sprintNode(n))
		c.want("condemned", "[]")
		c.do(captured(a.node))
		c.want("condemned", sprint([]ids.Snapshot{root.snapshot}))
	},
	"values go up a path": func(c *contract) {
		root := planting()
		a := adding(root.node)
		leaf := adding(a.node)
		c.do(root, a, leaf)
		for _, rule := range []BackupRule{Sum, Mean, Max, Discounted} { // 2; (3-2)/2; max; half a step
			c.do(step{op: "backup", node: leaf.node, value: 3, rule: rule}, step{op: "backup", node: a.node, value: -1, rule: rule})
		}
		c.refused("node_not_found", step{op: "backup", node: a.node, value: 1, rule: Sum}, step{op: "backup", node: "nd_x", value: 1, rule: Sum})
		v := 0.0 // the root, by hand: visits 1 to 8
		v += 3
		v--
		v += (3 - v) / 3
		v += (-1 - v) / 4
		v = max(v, 3)
		v += 3 * 0.25
		v -= 0.5
		c.want(string(root.node), sprintNode(seenNode{tree: root.tree, capture: Captured, checkpoint: root.checkpoint, value: v, visits: 8}))
	},
	"a payload lives as long as a node has it": func(c *contract) {
		root := planting()
		a, b := adding(root.node), adding(root.node)
		c.do(root, a, b)
		has := func(n ids.Node, p string) step { return step{op: "annotate", node: n, payload: p} }
		c.do(has(a.node, "a"), has(b.node, "a"), has(b.node, "b"))
		c.want("payload a", "true")
		c.do(step{op: "prune", node: b.node})
		c.want("payload b", "false")
		c.refused("node_not_found", has(a.node, ""), has("nd_x", "c"))
		c.do(has(a.node, ""))
		c.want("payload a", "false")
		c.want("payload c", "false")
	},
	"a watcher is told each thing once": func(c *contract) {
		root := planting()
		a, b := adding(root.node), adding(root.node)
		below := adding(a.node)
		c.do(root, a, b)
		mark := c.k.mark()
		c.do(below, step{op: "pin", node: b.node})
		c.do(step{op: "backup", node: b.node, value: 1, rule: Sum})
		c.do(step{op: "prune", node: a.node}, planting())
		want := []string{"changed " + string(b.node), "changed " + string(root.node), "removed " + string(a.node), "removed " + string(below.node)}
		for _, crash := range []bool{false, true} {
			if got := c.k.since(root.tree, mark); !slices.Equal(got, want) {
				c.Errorf("after the mark: %v, want %v", got, want)
			}
			if got := c.k.since(root.tree, 0); !slices.Equal(got, want[:2]) {
				c.Errorf("from the start: %v, want %v", got, want[:2])
			}
			c.k.again(crash)
		}
	},
}

// TestModel makes random changes of several steps on the store and on the reference, with restarts, power losses and
// archived trees between them: answers, all that can be read and what a watcher is told are the same.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		real, ref := newRealKeeper(t), newReference()
		defer func() { real.s.Close() }()
		type marks struct{ real, ref uint64 }
		from := []marks{{}}
		known := []ids.Node{} // also what was removed
		node := func(t *rapid.T) ids.Node {
			here := slices.Sorted(maps.Keys(ref.now.nodes))
			if len(here) == 0 || rapid.IntRange(0, 19).Draw(t, "gone") == 0 && len(known) > 0 {
				here = known
			}
			if len(here) == 0 {
				t.Skip("no node yet")
			}
			return rapid.SampledFrom(here).Draw(t, "node")
		}
		tree := func(t *rapid.T) ids.Tree {
			all := slices.Sorted(maps.Keys(ref.now.trees))
			if len(all) == 0 {
				t.Skip("no tree yet")
			}
			return rapid.SampledFrom(all).Draw(t, "tree")
		}
		oneOf := func(t *rapid.T) step {
			st := step{op: rapid.SampledFrom([]string{"add", "add", "add", "add", "capture", "withhold", "prove", "annotate", "backup", "pin", "unpin", "prune", "box", "unbox",
				"close", "open", "finish", "tree"}).Draw(t, "op")}
			switch st.op {
			case "tree":
				st = planting()
				if rapid.Bool().Draw(t, "from") {
					st.from = node(t)
				}
			case "add":
				st = adding(node(t))
				if rapid.IntRange(0, 9).Draw(t, "taken") == 0 && ref.now.nodes[st.from].tree != "" {
					st.node = st.from
				}
			case "capture":
				st = captured(node(t))
			case "close", "open":
				st.tree = tree(t)
			case "finish":
				if all := slices.Sorted(maps.Keys(ref.now.condemned)); len(all) > 0 {
					st.snapshot = all[0]
				}
			case "unbox":
				if all := slices.Sorted(maps.Keys(ref.now.boxes)); len(all) > 0 {
					st.sandbox = all[0]
				}
			case "box":
				st.node, st.sandbox = node(t), ids.NewSandbox()
			default:
				st.node = node(t)
				st.keep = rapid.Bool().Draw(t, "keep")
				st.label = rapid.StringN(0, 3, -1).Draw(t, "label")
				st.payload = rapid.SampledFrom(append(payloads, "")).Draw(t, "payload")
				st.value = float64(rapid.IntRange(-4, 4).Draw(t, "value"))
				st.rule = rapid.SampledFrom([]BackupRule{Sum, Mean, Max, Discounted}).Draw(t, "rule")
			}
			return st
		}
		t.Repeat(map[string]func(*rapid.T){
			"change": func(t *rapid.T) {
				var steps []step
				for range rapid.IntRange(1, 4).Draw(t, "steps") {
					steps = append(steps, oneOf(t))
				}
				gone, reason := real.change(steps...)
				wantGone, want := ref.change(steps...)
				if reason != want || !slices.Equal(gone, wantGone) {
					t.Fatalf("%+v: removed %v, refused as %q; want %v and %q", steps, gone, reason, wantGone, want)
				}
				for _, st := range steps {
					if reason == "" && st.node != "" {
						known = append(known, st.node)
					}
				}
			},
			"mark": func(*rapid.T) { from = append(from, marks{real.mark(), ref.mark()}) },
			// A closed tree leaves memory, whole or in part, and whatever comes next finds it.
			"archive": func(t *rapid.T) {
				id := tree(t)
				for _, k := range []keeper{real, ref} {
					if _, reason := k.change(step{op: "close", tree: id}); reason != "" {
						t.Fatal(reason)
					}
				}
				if rapid.Bool().Draw(t, "part") {
					k, _ := keyOf(id, "tr_")
					if _, err := real.s.Update(context.Background(), func(tx *Tx) error {
						tr, err := tx.Tree(id)
						if err != nil || tx.idle(tr) != nil || tr.Archive != InMemory {
							return err
						}
						_, err = tx.archive(tr, k)
						return err
					}); err != nil {
						t.Fatal(err)
					}
					return
				}
				stood := slices.ContainsFunc(slices.Collect(maps.Values(ref.now.boxes)), func(n ids.Node) bool { return ref.now.nodes[n].tree == id })
				if err := real.s.Archive(context.Background(), id); stood != fault.Is(err, fault.Precondition) || !stood && err != nil {
					t.Fatalf("archiving %s: %v, want refused: %v", id, err, stood)
				}
			},
			"recall": func(t *rapid.T) {
				if err := real.s.Recall(context.Background(), tree(t)); err != nil {
					t.Fatal(err)
				}
			},
			"restart":    func(*rapid.T) { real.again(false) },
			"power loss": func(*rapid.T) { real.again(true) },
			"": func(t *rapid.T) {
				got, want := real.seen(), ref.seen()
				for k := range maps.Keys(want) {
					if got[k] != want[k] {
						t.Fatalf("%s is\n%s, want\n%s", k, got[k], want[k])
					}
				}
				if len(got) != len(want) {
					t.Fatalf("%d things are seen, want %d", len(got), len(want))
				}
				for id := range ref.now.trees {
					m := from[len(from)-1]
					if got, want := real.since(id, m.real), ref.since(id, m.ref); !slices.Equal(got, want) {
						t.Fatalf("since %+v: %v, want %v", m, got, want)
					}
				}
			},
		})
	})
}
