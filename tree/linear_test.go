package tree

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

var (
	linearSeed    = flag.Uint64("linear.seed", 0, "repeat the histories of this seed; 0: another each time")
	linearRounds  = flag.Int("linear.rounds", 20, "how many histories")
	linearClients = flag.Int("linear.clients", 6, "how many clients a history has")
)

// plainTree is what a history is held against: one tree of few nodes, done by hand.
// Node i hangs below (i-1)/2; node 0 is the root.
type plainTree struct {
	nodes [linearNodes]struct {
		there  bool
		value  float64
		visits int64
	}
	boxes [linearBoxes]int // at which node; -1: isn't
}

const linearNodes, linearBoxes = 7, 2

func above(i int) int { return (i - 1) / 2 }

type linearInput struct {
	op       string
	node     int
	other    int // annotate: the second node of the change; put, delete: the sandbox
	value    float64
	keepNode bool
}

type linearOutput struct {
	reason string    // why it was refused; empty: it wasn't
	count  int       // backup, prune: how many nodes
	seen   plainTree // read: the nodes, or the sandboxes
}

// step does one operation by hand, and says what the store must have answered.
func (p plainTree) step(in linearInput) (linearOutput, plainTree) {
	was := p
	no := func(reason string) (linearOutput, plainTree) { return linearOutput{reason: reason}, was }
	n := &p.nodes[in.node]
	switch in.op {
	case "add":
		switch {
		case !p.nodes[above(in.node)].there:
			return no("node_not_found")
		case n.there:
			return no("node_exists")
		}
		n.there = true
	case "annotate":
		for _, i := range []int{in.node, in.other} {
			if !p.nodes[i].there {
				return no("node_not_found")
			}
			p.nodes[i].value = in.value
		}
	case "backup":
		if !n.there {
			return no("node_not_found")
		}
		count := 0
		for i := in.node; ; i = above(i) {
			p.nodes[i].value += in.value
			p.nodes[i].visits++
			if count++; i == 0 {
				return linearOutput{count: count}, p
			}
		}
	case "prune":
		if !n.there {
			return no("node_not_found")
		}
		count := 0
		for i := range p.nodes {
			if !p.nodes[i].there || !isUnder(i, in.node) || in.keepNode && i == in.node {
				continue
			}
			for _, at := range p.boxes {
				if at == i {
					return no("sandbox_there")
				}
			}
			p.nodes[i] = plainTree{}.nodes[i]
			count++
		}
		return linearOutput{count: count}, p
	case "put":
		if !n.there {
			return no("node_not_found")
		}
		p.boxes[in.other] = in.node
	case "delete":
		p.boxes[in.other] = -1
	case "read nodes":
		return linearOutput{seen: plainTree{nodes: p.nodes}}, p
	case "read boxes":
		return linearOutput{seen: plainTree{boxes: p.boxes}}, p
	}
	return linearOutput{}, p
}

func isUnder(i, top int) bool {
	for ; i > top; i = above(i) {
	}
	return i == top
}

var linearModel = porcupine.Model{
	Init: func() any {
		p := plainTree{boxes: [linearBoxes]int{-1, -1}}
		p.nodes[0].there = true
		return p
	},
	Step: func(state, in, out any) (bool, any) {
		want, next := state.(plainTree).step(in.(linearInput))
		return want == out.(linearOutput), next
	},
	DescribeOperation: func(in, out any) string { return fmt.Sprintf("%+v -> %+v", in, out) },
}

// linearTree is the same tree in a store.
type linearTree struct {
	s     *Store
	tree  ids.Tree
	nodes [linearNodes]ids.Node
	slot  map[ids.Node]int
	boxes [linearBoxes]ids.Sandbox
}

func (l *linearTree) do(ctx context.Context, in linearInput) (out linearOutput) {
	id := l.nodes[in.node]
	var pruned *Pruned
	change := func(tx *Tx) (err error) {
		switch in.op {
		case "add":
			_, err = tx.AddNode(Node{ID: id, Tree: l.tree, Parent: l.nodes[above(in.node)], Capture: Withheld, WithheldReason: "none", TurnStatus: Completed})
		case "annotate":
			err = tx.Annotate([]Annotation{{Node: id, Value: &in.value}, {Node: l.nodes[in.other], Value: &in.value}})
		case "backup":
			out.count, err = tx.Backup([]BackupItem{{id, in.value}}, Sum, 0)
		case "prune":
			pruned, err = tx.Prune(id, in.keepNode)
		case "put":
			err = tx.PutSandbox(Sandbox{ID: l.boxes[in.other], Tree: l.tree, Head: id})
		case "delete":
			err = tx.DeleteSandbox(l.boxes[in.other])
		}
		return err
	}
	switch in.op {
	case "read nodes":
		for n := range l.s.View().NodesOf(l.tree) {
			at := &out.seen.nodes[l.slot[n.ID]]
			at.there, at.value, at.visits = true, n.Value, n.Visits
		}
	case "read boxes":
		v := l.s.View()
		for i, id := range l.boxes {
			out.seen.boxes[i] = -1
			if b, err := v.Sandbox(id); err == nil {
				out.seen.boxes[i] = l.slot[b.Head]
			}
		}
	default:
		if _, err := l.s.Update(ctx, change); err != nil {
			return linearOutput{reason: fault.As(err).Reason}
		}
		if pruned != nil {
			out.count = len(pruned.Nodes)
		}
	}
	return out
}

// If it fails, concurrent changes and reads give what no order of them would give: a lost reward, half a
// change, a sandbox at a node that was pruned.
//
// The tree is closed and is archived over and over beside it, so that changes are run again and
// reads meet a tree that moves.
func TestHistoriesAreLinearizable(t *testing.T) {
	seed := *linearSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-args -linear.seed %d", seed)
	rnd := newRand(seed)
	for round := range *linearRounds {
		linearHistory(t, round, newRand(rnd.Uint64()))
		if t.Failed() {
			return
		}
	}
}

func linearHistory(t *testing.T, round int, rnd *rand.Rand) {
	o := memory()
	o.archiveStep = 2
	s := mustOpen(t, "state", o)
	tr := mustTree(t, s)
	l := &linearTree{s: s, tree: tr.ID, slot: map[ids.Node]int{}}
	for i := range l.nodes {
		l.nodes[i] = ids.NewNode()
	}
	l.nodes[0] = tr.Root
	for i, id := range l.nodes {
		l.slot[id] = i
	}
	for i := range l.boxes {
		l.boxes[i] = ids.NewSandbox()
	}
	mustSetClosed(t, s, tr.ID, true)

	const each = 25
	began, ctx := time.Now(), testContext(t)
	life, stop := context.WithCancel(ctx)
	var clients, archiver sync.WaitGroup
	archiver.Go(func() {
		for life.Err() == nil {
			if _, err := s.ArchiveIdle(life, 0); err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
	})
	history := make([][]porcupine.Operation, *linearClients)
	ops := []string{"add", "add", "annotate", "backup", "backup", "prune", "put", "delete", "read nodes", "read nodes", "read boxes"}
	for c := range history {
		rnd := newRand(rnd.Uint64())
		clients.Go(func() {
			for range each {
				in := linearInput{op: ops[rnd.IntN(len(ops))]}
				switch in.op {
				case "put":
					in.node, in.other = rnd.IntN(linearNodes), rnd.IntN(linearBoxes)
				case "delete":
					in.other = rnd.IntN(linearBoxes)
				case "annotate":
					in.node, in.other, in.value = rnd.IntN(linearNodes), rnd.IntN(linearNodes), float64(rnd.IntN(100))
				case "backup":
					in.node, in.value = rnd.IntN(linearNodes), float64(1+rnd.IntN(9))
				case "add":
					in.node = 1 + rnd.IntN(linearNodes-1)
				case "prune":
					in.node = rnd.IntN(linearNodes)
					in.keepNode = in.node == 0 || rnd.IntN(2) == 0
				}
				call := time.Since(began).Nanoseconds()
				out := l.do(ctx, in)
				history[c] = append(history[c], porcupine.Operation{ClientId: c, Input: in, Call: call, Output: out, Return: time.Since(began).Nanoseconds()})
			}
		})
	}
	clients.Wait()
	stop()
	archiver.Wait()
	var all []porcupine.Operation
	refused := map[string]int{}
	for _, h := range history {
		for _, op := range h {
			refused[op.Output.(linearOutput).reason]++
		}
		all = append(all, h...)
	}
	switch result, info := porcupine.CheckOperationsVerbose(linearModel, all, 20*time.Second); result {
	case porcupine.Illegal:
		var longest []porcupine.Operation
		for _, part := range info.PartialLinearizationsOperations() {
			for _, p := range part {
				if len(p) > len(longest) {
					longest = p
				}
			}
		}
		t.Errorf("round %d: of %d operations at most %d fit an order, these:", round, len(all), len(longest))
		state, fits := linearModel.Init().(plainTree), map[[2]int64]bool{}
		show := func(op porcupine.Operation, and ...any) {
			t.Log(append([]any{fmt.Sprintf("client %d %9d..%9d %+v -> %+v", op.ClientId, op.Call, op.Return, op.Input, op.Output)}, and...)...)
		}
		for _, op := range longest {
			_, state = state.step(op.Input.(linearInput))
			fits[[2]int64{int64(op.ClientId), op.Call}] = true
			show(op)
		}
		t.Logf("which leads to %+v. Left are:", state)
		slices.SortFunc(all, func(a, b porcupine.Operation) int { return cmp.Compare(a.Call, b.Call) })
		for _, op := range all {
			if !fits[[2]int64{int64(op.ClientId), op.Call}] {
				show(op)
			}
		}
	case porcupine.Unknown:
		t.Logf("round %d: undecided within its time", round)
	}
	if refused[""] == 0 || len(refused) == 1 {
		t.Errorf("round %d: a history without both: answers were %v", round, maps.Collect(maps.All(refused)))
	}
}
