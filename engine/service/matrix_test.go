package service

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/engine/check"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

var (
	crashFull = flag.Bool("crash.full", false, "each step by error, panic and kill, not only one of them")
	crashFor  = flag.Duration("crash.for", 6*time.Second, "how long TestKilledUnderLoad goes on")
	crashSeed = flag.Uint64("crash.seed", 0, "repeats a run; 0: another each time")
	crashMany = flag.Int("crash.clients", 4, "clients at once of TestKilledUnderLoad")
	crashFrom = flag.String("crash.from", "", "steps from this one on")
)

// world is what a client knows of a state folder over the lives of its daemons.
//
// A turn appends one line to /root/log and is called by it, so that what a node must
// show follows from the actions on its path, whether or not its turn was acknowledged.
type world struct {
	t       *testing.T
	running *daemon
	dir     string
	rnd     *rand.Rand
	name    string
	busy    bool // each work leaves processes, too
	foreign bool // its archives come from another kernel

	mu      sync.Mutex
	next    int
	acked   map[string]bool // nodes that a client has heard of; false: was captured, too
	pruned  map[string]bool // prunes that were asked for, acknowledged or not
	evicted map[string]bool // the same, of states alone
	digests map[string]walked
	calls   []keyed
	trees   []string
}

type walked struct {
	sum   string
	lines []string
}

// keyed is a call with an idempotency key, and the answer if there was one.
type keyed struct {
	what   string
	again  func(*daemon) (proto.Message, error)
	answer proto.Message
}

func newWorld(t *testing.T) *world {
	seed := *crashSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", seed)
	w := &world{t: t, dir: stateDir(t), rnd: rand.New(rand.NewPCG(seed, 0)), name: fmt.Sprintf("%x", seed),
		acked: map[string]bool{}, pruned: map[string]bool{}, evicted: map[string]bool{}, digests: map[string]walked{}}
	t.Cleanup(func() {
		if w.running != nil && t.Failed() {
			t.Logf("daemon's log:\n%s", w.running.log)
			w.running.stop()
		}
	})
	w.start()
	w.running.importRoot(t)
	return w
}

func (w *world) key() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next++
	return fmt.Sprintf("%s-%d", w.name, w.next)
}

// call makes a keyed call and remembers it.
func call[T proto.Message](w *world, d *daemon, what string, again func(*daemon) (T, error)) (T, bool) {
	got, err := again(d)
	k := keyed{what: what, again: func(d *daemon) (proto.Message, error) { return again(d) }}
	if err == nil {
		k.answer = proto.Clone(got)
	}
	w.mu.Lock()
	w.calls = append(w.calls, k)
	w.mu.Unlock()
	return got, err == nil
}

func (w *world) tree(d *daemon) (*boxwoodv1.CreateTreeResponse, bool) {
	req := &boxwoodv1.CreateTreeRequest{Start: &boxwoodv1.CreateTreeRequest_Image{Image: "mini"}, WithSandbox: true, IdempotencyKey: w.key()}
	r, ok := call(w, d, "create", func(d *daemon) (*boxwoodv1.CreateTreeResponse, error) { return d.client.CreateTree(ctx(w.t), req) })
	if ok {
		w.heard(r.GetRoot())
		w.mu.Lock()
		w.trees = append(w.trees, r.GetTree().GetId())
		w.mu.Unlock()
	}
	return r, ok
}

func (w *world) heard(n *boxwoodv1.Node) {
	w.mu.Lock()
	defer w.mu.Unlock()
	captured := n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED || n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_PROVEN
	w.acked[n.GetId()] = w.acked[n.GetId()] || captured
}

// turn runs one that appends its line, or one that changes nothing.
func (w *world) turn(d *daemon, sandbox string, quiet bool, ack boxwoodv1.Ack) (*boxwoodv1.Node, bool) {
	key := w.key()
	shell := "echo " + key + " >> /root/log"
	if quiet {
		shell = "true " + key
	}
	return w.act(d, sandbox, shell, ack)
}

func (w *world) act(d *daemon, sandbox, shell string, ack boxwoodv1.Ack) (*boxwoodv1.Node, bool) {
	key := w.key()
	req := &boxwoodv1.RunTurnRequest{SandboxId: sandbox, Ack: ack, IdempotencyKey: key, Command: &boxwoodv1.Command{Shell: []byte(shell)},
		Node: &boxwoodv1.NodeInput{Payload: []byte(key)}}
	r, ok := call(w, d, "turn", func(d *daemon) (*boxwoodv1.TurnResult, error) { return d.tryRun(w.t, req) })
	if ok {
		w.heard(r.GetNode())
	}
	return r.GetNode(), ok
}

func (w *world) fork(d *daemon, node string, n int32) []string {
	req := &boxwoodv1.ForkRequest{IdempotencyKey: w.key(), Replay: true, Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: node}, Count: n}}}
	r, ok := call(w, d, "fork", func(d *daemon) (*boxwoodv1.ForkResults, error) {
		stream, err := d.client.Fork(ctx(w.t), req)
		for err == nil {
			var all []*boxwoodv1.ForkResult
			for {
				m, err := stream.Recv()
				if err == io.EOF {
					slices.SortFunc(all, func(a, b *boxwoodv1.ForkResult) int { return int(a.GetChild() - b.GetChild()) })
					return &boxwoodv1.ForkResults{Results: all}, nil
				}
				if err != nil {
					return nil, err
				}
				all = append(all, m)
			}
		}
		return nil, err
	})
	if !ok {
		return nil
	}
	var out []string
	for _, c := range r.GetResults() {
		if c.GetSandbox() != nil {
			out = append(out, c.GetSandbox().GetId())
		}
	}
	return out
}

// work does one of everything, and goes on where something fails: what can't be
// done then is left out.
func (w *world) work(d *daemon) {
	c, ok := w.tree(d)
	if !ok {
		return
	}
	sb := c.GetSandbox().GetId()
	first, ok := w.turn(d, sb, false, boxwoodv1.Ack_ACK_CAPTURED)
	w.turn(d, sb, true, boxwoodv1.Ack_ACK_RECORDED)
	w.turn(d, sb, false, boxwoodv1.Ack_ACK_RECORDED)
	if ok {
		w.branch(d, first.GetId())
	}
	w.images(d)
	if ok && w.busy {
		w.processes(d, first.GetId())
	}
	if ok {
		w.replay(d, first.GetId())
		w.travel(d, first.GetId())
	}
	w.turn(d, sb, false, boxwoodv1.Ack_ACK_RECORDED)
}

// processes leaves a shell and a server in a child of a node, in three captures, and gives the
// last one up again.
func (w *world) processes(d *daemon, from string) {
	children := w.fork(d, from, 1)
	if len(children) == 0 {
		return
	}
	open := &boxwoodv1.OpenSessionRequest{SandboxId: children[0], Name: "main", IdempotencyKey: w.key()}
	r, ok := call(w, d, "session", func(d *daemon) (*boxwoodv1.OpenSessionResponse, error) { return d.client.OpenSession(ctx(w.t), open) })
	if !ok {
		return
	}
	w.heard(r.GetResult().GetNode())
	if testenv.CRIUPath() != "" {
		for range 2 {
			w.act(d, children[0], "sleep 1000 >/dev/null 2>&1 & echo "+w.key()+" >> /root/log", boxwoodv1.Ack_ACK_CAPTURED)
		}
	}
	last, ok := w.act(d, children[0], "echo "+w.key()+" >> /root/log", boxwoodv1.Ack_ACK_CAPTURED)
	release := &boxwoodv1.ReleaseRequest{SandboxIds: children, IdempotencyKey: w.key()}
	if _, released := call(w, d, "release", func(d *daemon) (*boxwoodv1.ReleaseResponse, error) { return d.client.Release(ctx(w.t), release) }); !released || !ok {
		return
	}
	w.mu.Lock()
	w.evicted[last.GetId()] = true
	w.mu.Unlock()
	prune := &boxwoodv1.PruneRequest{NodeId: last.GetId(), IdempotencyKey: w.key(), StatesOnly: true}
	call(w, d, "prune of states", func(d *daemon) (*boxwoodv1.PruneResponse, error) { return d.client.Prune(ctx(w.t), prune) })
}

// replay gives a branch's state up and makes it again.
func (w *world) replay(d *daemon, from string) {
	child := w.fork(d, from, 1)
	if len(child) == 0 {
		return
	}
	w.turn(d, child[0], false, boxwoodv1.Ack_ACK_CAPTURED)
	last, ok := w.turn(d, child[0], false, boxwoodv1.Ack_ACK_CAPTURED)
	if !ok {
		return
	}
	w.mu.Lock()
	w.evicted[last.GetParentId()], w.evicted[last.GetId()] = true, true
	w.mu.Unlock()
	prune := &boxwoodv1.PruneRequest{NodeId: last.GetParentId(), IdempotencyKey: w.key(), ReleaseSandboxes: true, StatesOnly: true}
	if _, ok := call(w, d, "prune", func(d *daemon) (*boxwoodv1.PruneResponse, error) { return d.client.Prune(ctx(w.t), prune) }); ok {
		w.fork(d, last.GetId(), 1)
	}
}

// travel makes another tree of an archive of a part of one.
func (w *world) travel(d *daemon, top string) {
	stream, err := d.client.ExportTree(ctx(w.t), &boxwoodv1.ExportTreeRequest{NodeId: top})
	var archive []byte
	for err == nil {
		var m *boxwoodv1.ExportTreeChunk
		if m, err = stream.Recv(); err == nil {
			archive = append(archive, m.GetData()...)
		}
	}
	if !errors.Is(err, io.EOF) {
		return
	}
	if w.foreign {
		archive = rewritten(w.t, archive, func(h *boxwoodv1.ArchiveHeader) {
			dumpsOf(h, func(p *boxwoodv1.ArchiveProcess) { p.Kernel = "6.1.0-other" })
		}, nil)
	}
	start := &boxwoodv1.ImportTreeStart{NewIds: true, Dumps: trust, IdempotencyKey: w.key()}
	r, ok := call(w, d, "import", func(d *daemon) (*boxwoodv1.ImportTreeResponse, error) { return d.imports(w.t, archive, start) })
	if ok {
		w.mu.Lock()
		w.trees = append(w.trees, r.GetTree().GetId())
		w.mu.Unlock()
		w.shelve(d, r.GetTree().GetId(), r.GetTree().GetRootId())
	}
}

// shelve closes a tree, which leaves memory, and then gives one of its nodes a value, for which it comes back.
func (w *world) shelve(d *daemon, id, node string) {
	if _, err := d.client.CloseTree(ctx(w.t), &boxwoodv1.CloseTreeRequest{TreeId: id, IdempotencyKey: w.key()}); err != nil {
		return
	}
	again, enough := time.NewTicker(5*time.Millisecond), time.After(60*time.Second)
	defer again.Stop()
	for {
		r, err := d.client.ListTrees(ctx(w.t), &boxwoodv1.ListTreesRequest{})
		if err != nil {
			return
		}
		if slices.ContainsFunc(r.GetTrees(), func(t *boxwoodv1.Tree) bool { return t.GetId() == id && t.GetArchived() }) {
			break
		}
		select {
		case <-again.C:
		case <-enough:
			w.t.Errorf("the closed tree %s stays in memory", id)
			return
		}
	}
	value := 1.0
	_, _ = d.client.Annotate(ctx(w.t), &boxwoodv1.AnnotateRequest{Annotations: []*boxwoodv1.NodeAnnotation{{NodeId: node, Value: &value}}})
}

// branch grows two branches from a node, rolls one back and prunes the other.
func (w *world) branch(d *daemon, from string) {
	children := w.fork(d, from, 2)
	if len(children) < 2 {
		return
	}
	lost, ok := w.turn(d, children[0], false, boxwoodv1.Ack_ACK_CAPTURED)
	w.turn(d, children[1], false, boxwoodv1.Ack_ACK_CAPTURED)
	back := &boxwoodv1.RollbackRequest{SandboxId: children[1], NodeId: from, IdempotencyKey: w.key()}
	if _, ok := call(w, d, "rollback", func(d *daemon) (*boxwoodv1.RollbackResponse, error) { return d.client.Rollback(ctx(w.t), back) }); ok {
		w.turn(d, children[1], false, boxwoodv1.Ack_ACK_RECORDED)
	}
	release := &boxwoodv1.ReleaseRequest{SandboxIds: children[:1], IdempotencyKey: w.key()}
	call(w, d, "release", func(d *daemon) (*boxwoodv1.ReleaseResponse, error) { return d.client.Release(ctx(w.t), release) })
	if !ok {
		return
	}
	w.mu.Lock()
	w.pruned[lost.GetId()] = true
	w.mu.Unlock()
	prune := &boxwoodv1.PruneRequest{NodeId: lost.GetId(), IdempotencyKey: w.key(), ReleaseSandboxes: true}
	call(w, d, "prune", func(d *daemon) (*boxwoodv1.PruneResponse, error) { return d.client.Prune(ctx(w.t), prune) })
}

// images brings an image of its own in and removes it.
func (w *world) images(d *daemon) {
	dir := filepath.Join(w.dir, "image-"+w.key())
	if err := os.MkdirAll(filepath.Join(dir, "bin"), 0o755); err != nil {
		w.t.Error(err)
		return
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "bin/own"), []byte(dir), 0o755); err != nil {
		w.t.Error(err)
		return
	}
	name := filepath.Base(dir) + ":1"
	stream, err := d.client.ImportImage(ctx(w.t), &boxwoodv1.ImportImageRequest{Path: dir, Name: name})
	for err == nil {
		_, err = stream.Recv()
	}
	if errors.Is(err, io.EOF) {
		_, _ = d.client.RemoveImage(ctx(w.t), &boxwoodv1.RemoveImageRequest{Image: name})
	}
}

// holds: what was acknowledged is there, forks as it was, and answers as before.
func (w *world) holds(d *daemon, everything bool) {
	w.t.Helper()
	nodes := map[string]*boxwoodv1.Node{}
	for _, id := range w.trees {
		stream, err := d.client.ListNodes(ctx(w.t), &boxwoodv1.ListNodesRequest{TreeId: id})
		for err == nil {
			var n *boxwoodv1.Node
			if n, err = stream.Recv(); err == nil {
				nodes[n.GetId()] = n
			}
		}
		if !errors.Is(err, io.EOF) {
			w.t.Fatalf("listing tree %s: %v", id, err)
		}
		// One that was closed, and may be on the disk, is forked like the others.
		if _, err := d.client.OpenTree(ctx(w.t), &boxwoodv1.OpenTreeRequest{TreeId: id}); err != nil {
			w.t.Fatalf("opening tree %s: %v", id, err)
		}
	}
	w.waitDecided(d, nodes)
	for id, captured := range w.acked {
		n := nodes[id]
		switch {
		case n == nil && w.pruned[id]:
			delete(w.acked, id)
		case n == nil:
			w.t.Fatalf("node %s was acknowledged and is gone", id)
		case w.evicted[id] && strings.HasPrefix(n.GetWithheldReason(), "evicted"):
		case n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD && captured:
			w.t.Fatalf("node %s was captured and is withheld now: %s", id, n.GetWithheldReason())
		case n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD && !strings.HasPrefix(n.GetWithheldReason(), "capture lost") &&
			!strings.HasPrefix(n.GetWithheldReason(), "capture failed"):
			w.t.Fatalf("node %s is withheld: %q", id, n.GetWithheldReason())
		}
	}
	w.sandboxes(d, nodes)
	w.states(d, nodes, everything)
	w.answers(d)
}

func (w *world) waitDecided(d *daemon, nodes map[string]*boxwoodv1.Node) {
	for id, n := range nodes {
		if n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_RECORDED {
			c, err := d.client.WaitCaptured(ctx(w.t), &boxwoodv1.WaitCapturedRequest{NodeIds: []string{id}})
			if err != nil {
				w.t.Fatalf("waiting for the capture of %s: %v", id, err)
			}
			n.Capture, n.WithheldReason = c.GetNodes()[0].GetCapture(), c.GetNodes()[0].GetWithheldReason()
		}
	}
}

// content is what a node's turns have written.
func content(nodes map[string]*boxwoodv1.Node, id string) string {
	out := ""
	for n := nodes[id]; n != nil; n = nodes[n.GetParentId()] {
		if _, line, ok := strings.Cut(strings.TrimSuffix(string(n.GetAction().GetText()), " >> /root/log"), "echo "); ok {
			out = line + "\n" + out
		}
	}
	return out
}

const show = "cat /root/log 2>/dev/null; true"

// sandboxes that live stand where they say.
func (w *world) sandboxes(d *daemon, nodes map[string]*boxwoodv1.Node) {
	for _, s := range d.sandboxes(w.t, "") {
		n := nodes[s.GetHeadId()]
		if n == nil {
			continue // of a tree that no client has heard of
		}
		var got string
		if r, err := d.tryRun(w.t, &boxwoodv1.RunTurnRequest{SandboxId: s.GetId(), Command: &boxwoodv1.Command{Shell: []byte(show)}, BusyWaitNs: int64(30 * time.Second)}); err != nil {
			w.t.Fatalf("sandbox %s, which lives: %v", s.GetId(), err)
		} else {
			got = string(r.GetNode().GetObservation().GetStdout())
		}
		if want := content(nodes, n.GetId()); got != want {
			w.t.Fatalf("sandbox %s at node %s shows %q, not %q", s.GetId(), n.GetId(), got, want)
		}
		if _, err := d.client.Release(ctx(w.t), &boxwoodv1.ReleaseRequest{SandboxIds: []string{s.GetId()}}); err != nil {
			w.t.Fatal(err)
		}
	}
}

// states: forks of captured nodes show what their turns left, and are the same
// tree whenever they are made, to a walker that shares no code with the engine.
func (w *world) states(d *daemon, nodes map[string]*boxwoodv1.Node, everything bool) {
	var ids []string
	for id, n := range nodes {
		if n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED && strings.Contains(string(n.GetAction().GetText()), w.name) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	if few := 10; !everything && len(ids) > few { // the newest, and some of all
		old := ids[:len(ids)-few/2]
		ids = ids[len(ids)-few/2:]
		for range few / 2 {
			ids = append(ids, old[w.rnd.IntN(len(old))])
		}
	}
	for _, id := range ids {
		r := d.tryFork(w.t, &boxwoodv1.ForkRequest{Scratch: true, Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: id}, Count: 1}}})
		if len(r) != 1 || r[0].GetSandbox() == nil {
			w.t.Fatalf("a fork of the captured node %s: %v", id, r)
		}
		s := r[0].GetSandbox()
		lines, sum := digest(w.t, d.rootOf(w.t, s.GetGeneration()))
		if known, ok := w.digests[id]; ok && known.sum != sum {
			w.t.Fatalf("node %s forks to another tree than before:\n%s", id, strings.Join(treewalk.Diff(known.lines, lines, 20), "\n"))
		}
		w.digests[id] = walked{sum, lines}
		if got, want := d.ok(w.t, s.GetId(), show), content(nodes, id); got != want {
			w.t.Fatalf("a fork of node %s shows %q, not %q", id, got, want)
		}
		if _, err := d.client.Release(ctx(w.t), &boxwoodv1.ReleaseRequest{SandboxIds: []string{s.GetId()}}); err != nil {
			w.t.Fatal(err)
		}
	}
}

// answers: a key that was answered is answered so again; one that wasn't may be
// now, and then what it says holds. Calls are asked again once.
func (w *world) answers(d *daemon) {
	calls := w.calls
	w.calls = nil
	for _, k := range calls {
		got, err := k.again(d)
		switch {
		case k.answer != nil && err != nil:
			w.t.Fatalf("the key of a %s that was answered is refused now: %v", k.what, err)
		case k.answer != nil:
			if a, b := identity(k.answer), identity(got); a != b {
				w.t.Fatalf("a %s was answered by %s, and now by %s", k.what, a, b)
			}
		case err == nil:
			if r, ok := got.(*boxwoodv1.TurnResult); ok {
				if _, err := d.client.GetNode(ctx(w.t), &boxwoodv1.GetNodeRequest{NodeId: r.GetNode().GetId()}); err != nil && !w.pruned[r.GetNode().GetId()] {
					w.t.Fatalf("a turn is answered by a node that isn't there: %v", err)
				}
			}
			if r, ok := got.(interface{ GetTree() *boxwoodv1.Tree }); ok {
				w.trees = append(w.trees, r.GetTree().GetId())
			}
		case status.Code(err) == codes.Internal:
			w.t.Fatalf("a %s asked for again: %v", k.what, err)
		}
	}
}

// identity is what an answer names; states may have changed since.
func identity(m proto.Message) string {
	switch r := m.(type) {
	case *boxwoodv1.CreateTreeResponse:
		return r.GetTree().GetId() + r.GetSandbox().GetId()
	case *boxwoodv1.TurnResult:
		return r.GetNode().GetId()
	case *boxwoodv1.OpenSessionResponse:
		return fmt.Sprint(r.GetSession().GetPid(), r.GetResult().GetNode().GetId())
	case *boxwoodv1.ForkResults:
		var all []string
		for _, c := range r.GetResults() {
			all = append(all, c.GetSandbox().GetId())
		}
		slices.Sort(all)
		return strings.Join(all, " ")
	case *boxwoodv1.RollbackResponse:
		return r.GetSandbox().GetGeneration()
	}
	return fmt.Sprint(m)
}

// residue are the findings that a killed daemon leaves, and that a start clears away.
var residue = map[string]bool{"orphan_snapshot": true, "orphan_upper": true, "orphan_layer": true, "orphan_state": true, "half_made": true, "leftover_box": true,
	"stray_birth": true, "dead_sandbox": true, "pending_capture": true, "condemned": true}

func (w *world) checkDead() {
	w.t.Helper()
	for _, f := range inspectedBut(w.dir, func(f check.Finding) bool { return residue[f.Kind] }) {
		w.t.Errorf("after the crash: %s", f)
	}
}

// end stops a daemon in order; nothing may be left.
func (w *world) end() {
	w.t.Helper()
	w.running.stop()
	for _, f := range inspected(w.dir) {
		w.t.Errorf("after an orderly end: %s", f)
	}
}

// doneAgain are the steps that a running daemon takes again if there was no space for them: nobody waits for
// them, and what they would leave fills the disk.
var doneAgain = map[string]bool{"tree archiving": true, "condemned removed": true, "state removed": true, "box killed": true}

// atStart are the steps of a start: they are armed before it.
func atStart(step string) bool {
	return strings.HasPrefix(step, "restart") || step == "log made" || strings.HasPrefix(step, "table")
}

// Each step of turns, captures, forks, rollbacks, prunes, imports and of the log is
// broken, by an error, a panic and kill -9. After each what was acknowledged is
// there, forks as it was and answers as before; what lies on the disk fits together,
// and after an orderly end nothing is left over.
func TestCrashMatrix(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	w := newWorld(t)
	for i, step := range failpoint.Steps[max(0, slices.Index(failpoint.Steps, *crashFrom)):] {
		hows := []failpoint.How{failpoint.Kill, failpoint.Error, failpoint.Panic}
		if doneAgain[step] {
			hows = append(hows, failpoint.Full)
		}
		if !*crashFull {
			hows = hows[:1]
			if other := w.rnd.IntN(4); i%4 == other { // and some otherwise
				hows = append(hows, []failpoint.How{failpoint.Error, failpoint.Panic}[w.rnd.IntN(2)])
			}
		}
		for _, how := range hows {
			if !t.Run(fmt.Sprintf("%s by %s", step, how), func(t *testing.T) {
				w.on(t)
				w.breakAt(step, how)
			}) {
				t.FailNow()
			}
		}
	}
	w.on(t)
	w.holds(w.running, true)
	w.end()
}

// ofProcesses are steps that only come where processes are saved, carried or given up.
func ofProcesses(step string) bool {
	for _, of := range []string{"shells", "dump", "state", "export state", "import"} {
		if strings.HasPrefix(step, of) {
			return true
		}
	}
	return false
}

// on goes on in another test.
func (w *world) on(t *testing.T) { w.t, w.running.t = t, t }

// breakAt breaks one step; another daemon runs afterwards.
func (w *world) breakAt(step string, how failpoint.How) {
	w.t.Helper()
	d := w.running
	w.foreign = step == "import trying" || step == "import tried"
	if w.busy = *crashFull || ofProcesses(step); (strings.HasPrefix(step, "dump") || w.foreign) && testenv.CRIUPath() == "" {
		w.t.Skip("nothing is dumped without CRIU")
	}
	line := fmt.Sprintf("%s 1 %s", how, step)
	if atStart(step) {
		w.work(d)
		d.kill()
		w.t.Setenv(breakAt, line)
		second, err := launch(w.dir)
		os.Unsetenv(breakAt)
		if err == nil {
			second.kill()
		} else if strings.Contains(err.Error(), "60 s") {
			w.t.Fatal(err)
		}
	} else {
		if answer, alive := d.tell(line); !alive || answer != "armed <nil>" {
			w.t.Fatalf("arming %q: %q", line, answer)
		}
		w.work(d)
		if !w.hit(d, step) {
			w.t.Fatalf("the work never came to %q", step)
		}
		if answer, alive := d.tell("?"); alive && answer == "true" && !strings.HasPrefix(step, "log") {
			w.holds(d, false) // it goes on without the step
			if how == failpoint.Full {
				until(w.t, "what had no space is done", func() bool {
					i, err := d.client.GetInfo(ctx(w.t), &boxwoodv1.GetInfoRequest{})
					return err == nil && i.GetPendingRemovals() == 0
				})
				w.end()
			} else if how == failpoint.Panic || step == "box killed" || step == "image removed" || step == "condemned removed" || step == "state removed" {
				// What a defect leaves half made waits for the next start, as does a removal
				// that couldn't be finished.
				d.stop()
				w.checkDead()
			} else {
				w.end()
			}
			w.start()
			return
		}
		d.kill()
	}
	w.checkDead()
	w.start()
	w.holds(w.running, false)
}

// hit waits until the armed step was come to, some of which lie behind replies.
func (w *world) hit(d *daemon, step string) bool {
	again, enough := time.NewTicker(5*time.Millisecond), time.After(time.Minute)
	defer again.Stop()
	for {
		if answer, alive := d.tell("?"); !alive || answer == "true" {
			return true
		}
		select {
		case <-again.C:
		case <-enough:
			return false
		}
	}
}

func (w *world) start() {
	w.t.Helper()
	d, err := launch(w.dir)
	if err != nil {
		w.t.Fatal(err)
	}
	d.t, w.running = w.t, d
}

// A daemon under load is killed at random instants, again and again.
func TestKilledUnderLoad(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	w := newWorld(t)
	w.busy = true
	until := time.Now().Add(*crashFor)
	rounds := 0
	for ; time.Now().Before(until) || rounds < 2; rounds++ {
		if !t.Run(fmt.Sprintf("round %d", rounds), func(t *testing.T) {
			w.on(t)
			w.killedAtRandom()
		}) {
			t.FailNow()
		}
	}
	w.on(t)
	t.Logf("%d kills, %d nodes acknowledged, %d walked", rounds, len(w.acked), len(w.digests))
	w.holds(w.running, true)
	w.end()
}

func (w *world) killedAtRandom() {
	d := w.running
	stop, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for range *crashMany {
		all.Go(func() {
			for stop.Err() == nil {
				w.work(d)
			}
		})
	}
	kill := time.NewTimer(time.Duration(50+w.rnd.IntN(1200)) * time.Millisecond * time.Duration(max(1, *crashMany/8))) // so that each of them gets somewhere
	<-kill.C
	cancel()
	_ = d.cmd.Process.Kill() // the connection stays until the calls have failed
	all.Wait()
	d.kill()
	w.checkDead()
	w.start()
	w.holds(w.running, false)
	w.forget(w.running)
}

// forget closes and prunes old trees, so that a long run keeps a bounded state.
func (w *world) forget(d *daemon) {
	const keep = 40
	for len(w.trees) > keep {
		id := w.trees[0]
		w.trees = w.trees[1:]
		stream, err := d.client.ListNodes(ctx(w.t), &boxwoodv1.ListNodesRequest{TreeId: id, Brief: true})
		root := ""
		for err == nil {
			var n *boxwoodv1.Node
			if n, err = stream.Recv(); err == nil {
				delete(w.acked, n.GetId())
				delete(w.digests, n.GetId())
				if n.GetParentId() == "" {
					root = n.GetId()
				}
			}
		}
		if _, err := d.client.CloseTree(ctx(w.t), &boxwoodv1.CloseTreeRequest{TreeId: id}); err != nil {
			w.t.Fatal(err)
		}
		if _, err := d.client.Prune(ctx(w.t), &boxwoodv1.PruneRequest{NodeId: root}); err != nil {
			w.t.Fatal(err)
		}
	}
}
