package engine

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/engine/archive"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/processor"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

// Export says what: a tree, or a node of it and all below.
type Export struct {
	Tree ids.Tree
	Node ids.Node
	// WithSecrets carries dumps that may hold secrets, too.
	WithSecrets bool
	// WithoutProcesses leaves out what was saved of processes, whose memory may hold secrets.
	WithoutProcesses bool
	// Version of the program that writes the archive.
	Version string
}

// ExportTree writes an archive of a tree. It waits for captures that are pending. What
// it reads stays for as long (law 10), also if it is pruned meanwhile.
func (e *Engine) ExportTree(ctx context.Context, what Export, w io.Writer) error {
	x := &exporter{e: e, what: what, held: map[string]bool{}}
	defer x.letGo(ctx)
	if err := x.gather(ctx); err != nil {
		return err
	}
	head, err := x.header()
	if err != nil {
		return err
	}
	if x.w, err = archive.NewWriter(w, head); err != nil {
		return err
	}
	x.seen, x.manifests = map[string]place{}, map[ids.Checkpoint]bool{}
	for _, p := range x.processes {
		if err := x.process(ctx, p); err != nil {
			return fmt.Errorf("exporting process state %s: %w", p.ID, err)
		}
	}
	for _, k := range x.checkpoints {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := x.checkpoint(ctx, k); err != nil {
			return fmt.Errorf("exporting checkpoint %s: %w", k.ID, err)
		}
	}
	for _, n := range x.nodes {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := x.node(n); err != nil {
			return fmt.Errorf("exporting node %s: %w", n.ID, err)
		}
	}
	return x.w.Close()
}

type exporter struct {
	e    *Engine
	what Export
	w    *archive.Writer
	tree *tree.Tree
	top  *tree.Node
	held map[string]bool

	nodes       []*tree.Node
	left        map[ids.Node]string // whose state isn't carried, and why
	checkpoints []*tree.Checkpoint
	parents     map[ids.Checkpoint]ids.Checkpoint // the one that it came after
	processes   []*tree.ProcessState

	seen      map[string]place // contents that the archive has
	manifests map[ids.Checkpoint]bool
}

// place of a content in the archive.
type place struct {
	checkpoint ids.Checkpoint
	path       []byte
}

// gather decides what goes into the archive, and holds it.
func (x *exporter) gather(ctx context.Context) error {
	e, what := x.e, x.what
	top := what.Node
	if top == "" {
		t, err := e.Store.View().Tree(what.Tree)
		if err != nil {
			return err
		}
		top = t.Root
	}
	var pending []ids.Node
	v := e.Store.View()
	for n := range v.Subtree(top) {
		if !decided(n) {
			pending = append(pending, n.ID)
		}
	}
	if err := v.Err(); err != nil {
		return err
	}
	if _, err := e.WaitCaptured(ctx, pending); err != nil {
		return err
	}
	v = e.Store.View()
	var err error
	if x.top, err = v.Node(top); err != nil {
		return err
	}
	if what.Tree != "" && x.top.Tree != what.Tree {
		return fault.New(fault.Invalid, "other_tree", "node %s is of tree %s, not %s", top, x.top.Tree, what.Tree)
	}
	if x.tree, err = v.Tree(x.top.Tree); err != nil {
		return err
	}
	return x.collect(v)
}

func (x *exporter) collect(v *tree.View) error {
	x.parents, x.left = map[ids.Checkpoint]ids.Checkpoint{}, map[ids.Node]string{}
	own := map[ids.Node]ids.Checkpoint{} // the nearest on its path
	known, states := map[ids.Checkpoint]bool{}, map[ids.Process]bool{}
	for n := range v.Subtree(x.top.ID) {
		if !decided(n) {
			return fault.New(fault.Precondition, "still_growing", "node %s came while the tree was being exported", n.ID).
				WithHint("export it when nobody works on it, or export a node of it")
		}
		x.nodes = append(x.nodes, n)
		own[n.ID] = own[n.Parent]
		if n.Checkpoint == "" {
			continue
		}
		k, err := v.Checkpoint(n.Checkpoint)
		if err != nil {
			return err
		}
		if k.Process != tree.Empty && x.what.WithoutProcesses {
			x.left[n.ID] = "what was saved of its processes was left out of the archive"
			continue
		}
		if k.Secrets && !x.what.WithSecrets {
			x.left[n.ID] = "its processes were given secrets, which no archive has unless it is asked for"
			continue
		}
		own[n.ID] = n.Checkpoint
		if known[n.Checkpoint] {
			continue
		}
		known[n.Checkpoint] = true
		x.checkpoints, x.parents[k.ID] = append(x.checkpoints, k), own[n.Parent]
		x.hold(string(k.Snapshot))
		if k.State != "" && !states[k.State] {
			states[k.State] = true
			p, err := v.Process(k.State)
			if err != nil {
				return err
			}
			x.processes = append(x.processes, p)
			x.hold(string(p.ID))
		}
	}
	if err := v.Err(); err != nil {
		return err
	}
	// As they came to be: parents first, siblings in order, as the one who imports them lists them.
	slices.SortFunc(x.nodes, func(a, b *tree.Node) int { return cmp.Compare(a.CreateIndex, b.CreateIndex) })
	now := x.e.Store.View() // nothing was let go between the view and the hold
	for _, k := range x.checkpoints {
		if _, err := now.Checkpoint(k.ID); err != nil {
			return err
		}
	}
	return nil
}

func (x *exporter) hold(what string) {
	x.e.mu.Lock()
	defer x.e.mu.Unlock()
	x.held[what] = true
	x.e.held[what]++
}

func (x *exporter) letGo(ctx context.Context) {
	x.e.mu.Lock()
	for what := range x.held {
		if x.e.held[what]--; x.e.held[what] == 0 {
			delete(x.e.held, what)
		}
	}
	x.e.mu.Unlock()
	x.e.removeCondemned(context.WithoutCancel(ctx))
}

func (x *exporter) header() (*pb.ArchiveHeader, error) {
	t := *x.tree
	if x.top.ID != t.Root { // a part of a tree is another tree
		t.ID, t.Root = ids.NewTree(), x.top.ID
	}
	h := &pb.ArchiveHeader{
		Boxwood: x.what.Version, Kernel: KernelRelease(), Processor: processor.Features(), Tree: archive.TreeMessage(&t), Defaults: archive.DefaultsMessage(t.Defaults),
		Nodes: int64(len(x.nodes)), Checkpoints: int64(len(x.checkpoints)),
	}
	if image, err := x.e.Store.View().Image(string(t.Image)); err == nil {
		for _, l := range image.Layers {
			h.Layers = append(h.Layers, string(l))
		}
	}
	for _, p := range x.processes {
		a, err := x.describe(p)
		if err != nil {
			return nil, err
		}
		h.Processes = append(h.Processes, a)
	}
	return h, nil
}

// checkpoint writes a snapshot, which is compared with its seal first. Its entries
// are walked twice, so that its digest comes before them.
func (x *exporter) checkpoint(ctx context.Context, k *tree.Checkpoint) error {
	if err := failpoint.Hit("export checkpoint"); err != nil {
		return err
	}
	if err := x.e.Pool.Verify(k.Snapshot, k.Seal); err != nil {
		return err
	}
	m := archive.NewManifest()
	if err := x.walk(ctx, k, func(e *pb.ArchiveEntry, _ *os.File) error { return m.Add(e) }); err != nil {
		return err
	}
	head := &pb.ArchiveCheckpoint{
		Id: string(k.ID), NodeId: string(k.Node), ProcessId: string(k.State), CreatedAt: archive.Nanos(k.CreatedAt), FreezeNs: int64(k.FreezeFor),
		Bytes: k.Bytes, MayHoldSecrets: k.Secrets, Entries: int64(len(m.Entries)), Digest: m.Digest(),
	}
	if up := x.parents[k.ID]; x.manifests[up] {
		head.ParentId = string(up)
	}
	if err := x.w.Put(archive.Checkpoint, head); err != nil {
		return err
	}
	x.manifests[k.ID] = true
	dir, err := x.e.Pool.OpenSnapshot(k.Snapshot)
	if err != nil {
		return err
	}
	defer dir.Close()
	for _, e := range m.Entries {
		if err := x.entry(ctx, k, int(dir.Fd()), e); err != nil {
			return err
		}
	}
	return nil
}

func (x *exporter) walk(ctx context.Context, k *tree.Checkpoint, visit func(*pb.ArchiveEntry, *os.File) error) error {
	dir, err := x.e.Pool.OpenSnapshot(k.Snapshot)
	if err != nil {
		return err
	}
	defer dir.Close()
	return archive.Walk(ctx, dir, visit)
}

func (x *exporter) entry(ctx context.Context, k *tree.Checkpoint, dir int, e *pb.ArchiveEntry) error {
	content := e.Mode&unix.S_IFMT == unix.S_IFREG && len(e.Link) == 0 && e.Size > 0
	if !content {
		return x.w.Put(archive.Entry, e)
	}
	at, known := x.seen[archive.Key(e)]
	if known {
		e.SameCheckpoint, e.SamePath = string(at.checkpoint), at.path
	} else {
		x.seen[archive.Key(e)] = place{k.ID, e.Path}
	}
	if err := x.w.Put(archive.Entry, e); err != nil || known {
		return err
	}
	f, err := archive.Below(dir, string(e.Path), unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return err
	}
	defer f.Close()
	return x.w.Content(ctx, f, e.Size)
}

// node writes a node, and its payload before it.
func (x *exporter) node(n *tree.Node) error {
	full, err := x.e.Store.FullNode(n.ID)
	if err != nil {
		return err
	}
	if full.PayloadDigest != "" && x.seen["payload "+full.PayloadDigest].path == nil {
		p, err := x.e.Store.Payload(full.PayloadDigest)
		if err != nil {
			return err
		}
		if err := x.w.PutBytes(archive.Payload, p); err != nil {
			return err
		}
		x.seen["payload "+full.PayloadDigest] = place{path: []byte{1}}
	}
	m := archive.NodeMessage(full, nil)
	if full.ID == x.top.ID {
		m.ParentId = ""
	}
	if why := x.left[full.ID]; why != "" { // law 6
		m.Capture, m.CheckpointId, m.FrozenAt = pb.CaptureStatus_CAPTURE_STATUS_WITHHELD, "", 0
		m.WithheldReason = "not carried: " + why
	}
	return x.w.Put(archive.Node, &pb.ArchiveNode{Node: m, Timings: archive.TimingsMessage(full.Timings), Recipe: tree.EncodeRecipe(&full.Recipe)})
}
