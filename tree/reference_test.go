package tree

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// keeper is what the suite asks of a store: Store has it, and reference, which is plain
// enough to be right by reading it.
type keeper interface {
	// change makes all steps, or none: then it gives the reason. gone are the nodes that prunes removed, in order.
	change(steps ...step) (gone []ids.Node, reason string)
	// seen is all that can be read, as text by what it is of.
	seen() map[string]string
	// since are the nodes of a tree that were changed or removed after a mark, each once, in the order of the
	// last changes. 0 is the start, of which no removals are told.
	since(tree ids.Tree, mark uint64) []string
	mark() uint64
	// again ends the store and opens it; crash: without a goodbye.
	again(crash bool)
}

// step is one thing that a change does; op says which of the fields it has.
type step struct {
	op         string
	tree       ids.Tree
	node       ids.Node // what is changed; tree: the root
	from       ids.Node // add: the parent; tree: whose checkpoint the root shares, or none
	checkpoint ids.Checkpoint
	snapshot   ids.Snapshot
	sandbox    ids.Sandbox
	keep       bool // prune: the node itself stays
	label      string
	payload    string
	value      float64
	rule       BackupRule
}

// planting is a step that makes a tree with a captured root.
func planting() step {
	return step{op: "tree", tree: ids.NewTree(), node: ids.NewNode(), checkpoint: ids.NewCheckpoint(), snapshot: ids.NewSnapshot()}
}

func adding(from ids.Node) step { return step{op: "add", from: from, node: ids.NewNode()} }

func captured(n ids.Node) step {
	return step{op: "capture", node: n, checkpoint: ids.NewCheckpoint(), snapshot: ids.NewSnapshot()}
}

// seenNode is one node of seen.
type seenNode struct {
	tree                   ids.Tree
	parent                 ids.Node
	depth, ordinal         int32
	capture                Capture
	checkpoint             ids.Checkpoint
	withheld               string
	value, reward          float64
	visits                 int64
	label, policy, payload string
	pinned                 bool
}

var payloads = []string{"a", "b", "c"} // all that a step may have

// ---- the reference ---------------------------------------------------------

type reference struct {
	now *plainStore
}

// plainStore is copied for each change.
type plainStore struct {
	seq       uint64
	trees     map[ids.Tree]plainRoot
	nodes     map[ids.Node]seenNode
	order     []ids.Node // of creation
	changed   map[ids.Node]uint64
	removed   []plainRemoval
	boxes     map[ids.Sandbox]ids.Node
	saved     map[ids.Checkpoint]plainCheckpoint
	condemned map[ids.Snapshot]bool
}

type plainRoot struct {
	root   ids.Node
	closed bool
}

type plainCheckpoint struct {
	node     ids.Node
	snapshot ids.Snapshot
	proven   bool
}

type plainRemoval struct {
	tree ids.Tree
	node ids.Node
	seq  uint64
}

func newReference() *reference {
	return &reference{&plainStore{
		trees: map[ids.Tree]plainRoot{}, nodes: map[ids.Node]seenNode{}, changed: map[ids.Node]uint64{},
		boxes: map[ids.Sandbox]ids.Node{}, saved: map[ids.Checkpoint]plainCheckpoint{}, condemned: map[ids.Snapshot]bool{},
	}}
}

func (r *reference) again(bool)   {}
func (r *reference) mark() uint64 { return r.now.seq }

func (r *reference) change(steps ...step) (gone []ids.Node, reason string) {
	old := r.now
	p := &plainStore{old.seq, maps.Clone(old.trees), maps.Clone(old.nodes), slices.Clone(old.order), maps.Clone(old.changed), slices.Clone(old.removed),
		maps.Clone(old.boxes), maps.Clone(old.saved), maps.Clone(old.condemned)}
	for _, st := range steps {
		more, reason := p.step(st)
		if reason != "" {
			return nil, reason
		}
		gone = append(gone, more...)
	}
	p.settle()
	r.now = p
	return gone, ""
}

func (p *plainStore) put(id ids.Node, n seenNode) {
	p.seq++
	p.nodes[id], p.changed[id] = n, p.seq
}

func (p *plainStore) step(st step) (gone []ids.Node, reason string) {
	n, there := p.nodes[st.node]
	switch st.op {
	case "tree", "add", "close", "open", "unbox", "finish":
	default:
		if !there {
			return nil, "node_not_found"
		}
	}
	switch st.op {
	case "tree":
		n := seenNode{tree: st.tree, capture: Captured, checkpoint: st.checkpoint}
		if st.from != "" {
			from, there := p.nodes[st.from]
			if !there {
				return nil, "node_not_found"
			}
			n.capture, n.checkpoint, n.withheld = from.capture, from.checkpoint, from.withheld
		} else {
			p.saved[st.checkpoint] = plainCheckpoint{node: st.node, snapshot: st.snapshot}
		}
		p.trees[st.tree] = plainRoot{root: st.node}
		p.order = append(p.order, st.node)
		p.put(st.node, n)
	case "add":
		from, known := p.nodes[st.from]
		if !known {
			return nil, "node_not_found"
		}
		if there {
			return nil, "node_exists"
		}
		c := seenNode{tree: from.tree, parent: st.from, depth: from.depth + 1, capture: from.capture, checkpoint: from.checkpoint, withheld: from.withheld}
		for _, other := range p.children(st.from) {
			c.ordinal = p.nodes[other].ordinal + 1
		}
		p.order = append(p.order, st.node)
		p.put(st.node, c)
	case "capture":
		p.saved[st.checkpoint] = plainCheckpoint{node: st.node, snapshot: st.snapshot}
		n.capture, n.checkpoint, n.withheld = Captured, st.checkpoint, ""
		p.put(st.node, n)
	case "withhold":
		n.capture, n.checkpoint, n.withheld = Withheld, "", "why"
		p.put(st.node, n)
	case "prove":
		k, ok := p.saved[n.checkpoint]
		if !ok || k.proven {
			return nil, ""
		}
		k.proven = true
		p.saved[n.checkpoint] = k
		for _, id := range slices.Sorted(maps.Keys(p.nodes)) {
			if u := p.nodes[id]; u.checkpoint == n.checkpoint && u.capture == Captured {
				u.capture = Proven
				p.put(id, u)
			}
		}
	case "annotate":
		n.label, n.payload, n.value, n.reward, n.visits, n.policy = st.label, st.payload, st.value, st.value+1, 7, "p"+st.label
		p.put(st.node, n)
	case "backup":
		v := st.value
		for id := st.node; id != ""; id = n.parent {
			n = p.nodes[id]
			n.visits++
			switch {
			case st.rule == Mean:
				n.value += (v - n.value) / float64(n.visits)
			case st.rule == Max && n.visits == 1:
				n.value = v
			case st.rule == Max:
				n.value = math.Max(n.value, v)
			default:
				n.value += v
			}
			p.put(id, n)
			if st.rule == Discounted {
				v *= 0.5
			}
		}
	case "pin", "unpin":
		if n.pinned != (st.op == "pin") {
			n.pinned = !n.pinned
			p.put(st.node, n)
		}
	case "box":
		p.boxes[st.sandbox] = st.node
	case "unbox":
		delete(p.boxes, st.sandbox)
	case "close", "open":
		t, ok := p.trees[st.tree]
		if !ok {
			return nil, "tree_not_found"
		}
		t.closed = st.op == "close"
		p.trees[st.tree] = t
	case "finish":
		delete(p.condemned, st.snapshot)
	case "prune":
		return p.prune(st.node, st.keep)
	default:
		panic(st.op)
	}
	return nil, ""
}

func (p *plainStore) prune(top ids.Node, keep bool) (gone []ids.Node, reason string) {
	tree := p.nodes[top].tree
	whole := !keep && p.nodes[top].parent == ""
	if whole && !p.trees[tree].closed {
		return nil, "root"
	}
	if gone = p.subtree(top); keep {
		gone = gone[1:]
	}
	for _, id := range gone {
		n := p.nodes[id]
		if n.pinned {
			return nil, "pinned"
		}
		for _, at := range p.boxes {
			if at == id {
				return nil, "sandbox_there"
			}
		}
		if n.checkpoint == "" || p.saved[n.checkpoint].node != id {
			continue
		}
		for _, other := range p.nodes {
			if other.checkpoint == n.checkpoint && other.tree != tree {
				return nil, "checkpoint_shared"
			}
		}
	}
	for _, id := range gone {
		p.seq++
		p.removed = append(p.removed, plainRemoval{tree, id, p.seq})
		delete(p.nodes, id)
	}
	p.order = slices.DeleteFunc(p.order, func(id ids.Node) bool { _, there := p.nodes[id]; return !there })
	if whole {
		delete(p.trees, tree)
	}
	return gone, ""
}

// settle condemns what no node has any more.
func (p *plainStore) settle() {
	for k, c := range p.saved {
		if !slices.ContainsFunc(p.order, func(id ids.Node) bool { return p.nodes[id].checkpoint == k }) {
			p.condemned[c.snapshot] = true
			delete(p.saved, k)
		}
	}
}

func (p *plainStore) children(of ids.Node) (out []ids.Node) {
	for _, id := range p.order {
		if p.nodes[id].parent == of {
			out = append(out, id)
		}
	}
	return out
}

func (p *plainStore) subtree(top ids.Node) []ids.Node {
	out := []ids.Node{top}
	for _, c := range p.children(top) {
		out = append(out, p.subtree(c)...)
	}
	return out
}

func (r *reference) since(tree ids.Tree, mark uint64) []string {
	p := r.now
	type change struct {
		what string
		seq  uint64
	}
	var all []change
	for id, n := range p.nodes {
		if n.tree == tree && p.changed[id] > mark {
			all = append(all, change{"changed " + string(id), p.changed[id]})
		}
	}
	for _, x := range p.removed {
		if mark > 0 && x.tree == tree && x.seq > mark {
			all = append(all, change{"removed " + string(x.node), x.seq})
		}
	}
	slices.SortFunc(all, func(a, b change) int { return cmp.Compare(a.seq, b.seq) })
	out := []string{}
	for _, c := range all {
		out = append(out, c.what)
	}
	return out
}

func (r *reference) seen() map[string]string {
	p, m := r.now, map[string]string{}
	m["counts"] = fmt.Sprint(len(p.trees), len(p.nodes), len(p.boxes), len(p.saved))
	for id, t := range p.trees {
		m[string(id)] = fmt.Sprint(t)
		var of []ids.Node
		for _, n := range p.order {
			if p.nodes[n].tree == id {
				of = append(of, n)
			}
		}
		m["of "+string(id)] = fmt.Sprint(of)
		labels := map[string]bool{}
		for _, n := range of {
			labels[p.nodes[n].label] = true
		}
		for name, w := range asked(labels) {
			var fit []ids.Node
			for _, id := range of {
				n := p.nodes[id]
				l, named := w.Labels["l"]
				if (len(w.Capture) == 0 || slices.Contains(w.Capture, n.capture)) && (!named || n.label == l) && (w.Depth == nil || n.depth == *w.Depth) {
					fit = append(fit, id)
				}
			}
			m[string(id)+" "+name] = fmt.Sprint(fit)
		}
	}
	used := map[string]bool{}
	for id, n := range p.nodes {
		m[string(id)] = fmt.Sprintf("%+v", n)
		m["below "+string(id)] = fmt.Sprint(p.children(id), p.subtree(id))
		used[n.payload] = true
	}
	for _, b := range payloads {
		m["payload "+b] = fmt.Sprint(used[b])
	}
	for id, at := range p.boxes {
		m[string(id)] = string(at)
	}
	for id, k := range p.saved {
		var users []ids.Node
		for n, x := range p.nodes {
			if x.checkpoint == id {
				users = append(users, n)
			}
		}
		m[string(id)] = fmt.Sprint(k, slices.Sorted(slices.Values(users)))
	}
	m["condemned"] = fmt.Sprint(slices.Sorted(maps.Keys(p.condemned)))
	return m
}

// ---- the store -------------------------------------------------------------

type realKeeper struct {
	t    failer
	s    *Store
	disk *vfs.MemFS
}

// failer is a *testing.T or a *rapid.T.
type failer interface {
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

func newRealKeeper(t failer) *realKeeper {
	k := &realKeeper{t: t, disk: vfs.NewCrashableMem()}
	k.open()
	return k
}

func (k *realKeeper) open() {
	s, err := Open("state", Options{FS: k.disk, archiveStep: 2})
	if err != nil {
		k.t.Fatal(err)
	}
	k.s = s
}

func (k *realKeeper) again(crash bool) {
	after := k.disk
	if crash {
		after = k.disk.CrashClone(vfs.CrashCloneCfg{})
	}
	if err := k.s.Close(); err != nil {
		k.t.Fatal(err)
	}
	k.disk = after
	k.open()
}

func (k *realKeeper) mark() uint64 { return k.s.View().Index() }

func (k *realKeeper) change(steps ...step) (gone []ids.Node, reason string) {
	if _, err := k.s.Update(context.Background(), func(tx *Tx) error {
		gone = nil
		for _, st := range steps {
			more, err := st.apply(tx)
			if err != nil {
				return err
			}
			gone = append(gone, more...)
		}
		return nil
	}); err != nil {
		return nil, fault.As(err).Reason
	}
	return gone, ""
}

func (st step) apply(tx *Tx) (gone []ids.Node, err error) {
	save := func(tree ids.Tree) error {
		c := checkpointOf(tree, st.node)
		c.ID, c.Snapshot = st.checkpoint, st.snapshot
		return tx.SetCaptured(c, c.CreatedAt, false, 0)
	}
	switch st.op {
	case "tree":
		root := Node{ID: st.node, Tree: st.tree, Capture: Recorded}
		if st.from != "" {
			from, err := tx.Node(st.from)
			if err != nil {
				return nil, err
			}
			root.Capture, root.Checkpoint, root.WithheldReason = from.Capture, from.Checkpoint, from.WithheldReason
		}
		if err := tx.PutTree(Tree{ID: st.tree, Root: st.node}); err != nil {
			return nil, err
		}
		if _, err := tx.AddNode(root); err != nil || st.from != "" {
			return nil, err
		}
		return nil, save(st.tree)
	case "add":
		p, err := tx.Node(st.from)
		if err != nil {
			return nil, err
		}
		_, err = tx.AddNode(Node{ID: st.node, Tree: p.Tree, Parent: st.from, Capture: p.Capture, Checkpoint: p.Checkpoint, WithheldReason: p.WithheldReason})
		return nil, err
	case "capture":
		n, err := tx.Node(st.node)
		if err != nil {
			return nil, err
		}
		return nil, save(n.Tree)
	case "withhold":
		return nil, tx.SetWithheld(st.node, "why")
	case "prove":
		n, err := tx.Node(st.node)
		if err != nil || n.Checkpoint == "" {
			return nil, err
		}
		return nil, tx.SetProven(n.Checkpoint)
	case "annotate":
		b, visits, policy := []byte(st.payload), int64(7), "p"+st.label
		return nil, tx.Annotate([]Annotation{{Node: st.node, Value: &st.value, Visits: &visits, PolicyVersion: &policy, Payload: &b,
			Rewards: map[string]float64{"r": st.value + 1}, Labels: map[string]string{"l": st.label}}})
	case "backup":
		_, err := tx.Backup([]BackupItem{{st.node, st.value}}, st.rule, 0.5)
		return nil, err
	case "pin":
		return nil, tx.Pin(st.node)
	case "unpin":
		return nil, tx.Unpin(st.node)
	case "box":
		n, err := tx.Node(st.node)
		if err != nil {
			return nil, err
		}
		return nil, tx.PutSandbox(Sandbox{ID: st.sandbox, Tree: n.Tree, Head: st.node})
	case "unbox":
		return nil, tx.DeleteSandbox(st.sandbox)
	case "close", "open":
		t, err := tx.Tree(st.tree)
		if err != nil {
			return nil, err
		}
		c := *t
		c.Closed = st.op == "close"
		return nil, tx.PutTree(c)
	case "finish":
		return nil, tx.FinishRemoval([]ids.Snapshot{st.snapshot})
	case "prune":
		p, err := tx.Prune(st.node, st.keep)
		if err != nil {
			return nil, err
		}
		return p.Nodes, nil
	}
	panic(st.op)
}

func (k *realKeeper) since(tree ids.Tree, mark uint64) []string {
	last := k.s.View().Index()
	w, err := k.s.Watch(context.Background(), tree, mark)
	if err != nil {
		k.t.Fatal(err)
	}
	defer w.Close()
	out := []string{}
	for len(w.past) > 0 {
		e, err := w.Next(context.Background())
		if err != nil || e.Index > last {
			k.t.Fatalf("event %+v, %v: the last one is %d", e, err, last)
		}
		switch {
		case e.Node != nil:
			out = append(out, "changed "+string(e.Node.ID))
		case e.Removed != "":
			out = append(out, "removed "+string(e.Removed))
		}
	}
	return out
}

func (k *realKeeper) seen() map[string]string {
	wrong, err := k.s.Check(context.Background())
	if err != nil || len(wrong) > 0 {
		k.t.Fatalf("check: %v, %v", wrong, err)
	}
	v, m := k.s.View(), map[string]string{}
	m["counts"] = fmt.Sprint(v.TreeCount(), v.NodeCount(""), v.SandboxCount(""), v.CheckpointCount(""))
	for t := range v.Trees() {
		m[string(t.ID)] = fmt.Sprint(plainRoot{t.Root, t.Closed})
		m["of "+string(t.ID)] = fmt.Sprint(idsOf(v.NodesOf(t.ID)))
		labels := map[string]bool{}
		for n := range v.NodesOf(t.ID) {
			labels[n.Labels["l"]] = true
		}
		for name, w := range asked(labels) {
			m[string(t.ID)+" "+name] = fmt.Sprint(idsOf(v.NodesWhere(t.ID, w)))
		}
		for n := range v.NodesOf(t.ID) {
			if full, err := v.FullNode(n.ID); err != nil || full.ModifyIndex != n.ModifyIndex {
				k.t.Fatalf("node %s: %v, %v", n.ID, full, err)
			}
			payload := ""
			if n.PayloadDigest != "" {
				b, err := k.s.Payload(n.PayloadDigest)
				if err != nil {
					k.t.Fatal(err)
				}
				payload = string(b)
			}
			m[string(n.ID)] = fmt.Sprintf("%+v", seenNode{n.Tree, n.Parent, n.Depth, n.Ordinal, n.Capture, n.Checkpoint, n.WithheldReason,
				n.Value, n.Rewards["r"], n.Visits, n.Labels["l"], n.PolicyVersion, payload, n.Pinned})
			m["below "+string(n.ID)] = fmt.Sprint(idsOf(v.Children(n.ID)), idsOf(v.Subtree(n.ID)))
		}
	}
	for _, b := range payloads {
		_, err := k.s.Payload(digestOf(b))
		m["payload "+b] = fmt.Sprint(err == nil)
	}
	for b := range v.Sandboxes() {
		m[string(b.ID)] = string(b.Head)
	}
	for c := range v.Checkpoints() {
		users := slices.Sorted(slices.Values(idsOf(v.CheckpointUsers(c.ID))))
		m[string(c.ID)] = fmt.Sprint(plainCheckpoint{c.Node, c.Snapshot, c.Proven}, users)
	}
	m["condemned"] = fmt.Sprint(slices.Sorted(v.Condemned()))
	return m
}

// asked are questions of the nodes of a tree in which there are some labels.
func asked(labels map[string]bool) map[string]Where {
	all := map[string]Where{"all": {}}
	ask := func(w Where) {
		depth := any("any")
		if w.Depth != nil {
			depth = *w.Depth
		}
		all[fmt.Sprint(w.Capture, w.Labels, depth)] = w
	}
	labels["never"] = true
	for c := Recorded; c <= Withheld; c++ {
		ask(Where{Capture: []Capture{c, 77}})
	}
	for depth := range int32(4) {
		ask(Where{Depth: &depth})
		ask(Where{Depth: &depth, Capture: []Capture{Withheld, Captured, Captured}})
		for l := range labels {
			is := map[string]string{"l": l}
			ask(Where{Labels: is})
			ask(Where{Labels: is, Capture: []Capture{Proven, Captured}})
			ask(Where{Labels: is, Depth: &depth, Capture: []Capture{Captured}})
		}
	}
	return all
}

func sprint(a ...any) string { return fmt.Sprint(a...) }

func sprintNode(n seenNode) string { return fmt.Sprintf("%+v", n) }
