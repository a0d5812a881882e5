package engine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/engine/archive"
	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/seccomp"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

// Imported is what an import made.
type Imported struct {
	Tree               *tree.Tree
	Root               *tree.Node
	Nodes, Checkpoints int
	// Withheld of the nodes, which could be forked where they come from.
	Withheld int
	Bytes    int64
}

// Import says how.
type Import struct {
	// NewIDs gives tree, nodes and checkpoints new ids.
	NewIDs bool
	Dumps  DumpsFrom
	// Calls are the groups of system calls that the archive's tree may go on allowing its sandboxes.
	Calls seccomp.Groups
	// Owner is the client whose tree it becomes; empty: nobody's.
	Owner string
	// Admits says whether the tree may stand on an image; nil: on any.
	Admits func(*tree.Image) error
	// Most that the contents of its files may have; 0: no bound.
	Most int64
}

// maxRecords bounds what an import keeps in memory to its end: nodes and payloads, which are made durable in one change, and
// what is known of the files of each checkpoint, since later ones may be laid over any.
const maxRecords = 1 << 30

// entryCost is what one more checkpoint costs for a file that is as in the one before it.
const entryCost = 64

// ImportTree makes a tree of an archive, all of it or nothing: file state and process
// states first, which no record names yet and which a crash leaves to the next start;
// and, when the whole archive has been read and is as it was written, all records in
// one change.
func (e *Engine) ImportTree(ctx context.Context, r io.Reader, how Import, commit func(*tree.Tx, Imported) error) (out Imported, err error) {
	a, err := archive.NewReader(r)
	if err != nil {
		return out, err
	}
	m := &importer{e: e, r: a, how: how, byID: map[string]*received{}, states: map[string]*incoming{},
		there: map[ids.Node]bool{}, payloads: map[string][]byte{}, names: map[string]string{}}
	image, done, err := e.standOn(ids.Image(a.Head.GetTree().GetImage()))
	if err != nil {
		return out, err
	}
	defer done()
	m.image = image
	if err := m.admit(); err != nil {
		return out, err
	}
	defer func() {
		if err != nil && !unsettled(err) {
			m.removeAll(ctx, nil, nil)
		}
	}()
	if err := m.read(ctx); err != nil {
		return out, err
	}
	return m.record(ctx, commit)
}

type importer struct {
	e   *Engine
	r   *archive.Reader
	how Import

	image  *tree.Image
	tree   tree.Tree
	layers []ids.Layer

	done     []*received
	byID     map[string]*received // by id in the archive
	states   map[string]*incoming // by id in the archive
	nodes    []tree.Node
	there    map[ids.Node]bool // by id in the archive
	payloads map[string][]byte
	records  int
	bytes    int64
	names    map[string]string // new ids
}

// received is a checkpoint that has been made.
type received struct {
	head     *pb.ArchiveCheckpoint
	ck       tree.Checkpoint
	manifest *archive.Manifest

	proven   bool   // restored here, and found equal
	withheld string // why it isn't kept; empty: it is
}

// admit refuses what this host can't restore, before anything is written.
func (m *importer) admit() error {
	h, v := m.r.Head, m.e.Store.View()
	var err error
	if m.tree, err = archive.TreeRecord(h); err != nil {
		return err
	}
	if err := errors.Join(ids.Check(string(m.tree.ID), "tr_", "tree"), ids.Check(string(m.tree.Root), "nd_", "node"), m.tree.Defaults.Limits.Check()); err != nil {
		return archive.Damaged("%w", err)
	}
	if _, err := v.Tree(m.tree.ID); err == nil && !m.how.NewIDs {
		return fault.New(fault.Exists, "tree_exists", "tree %s is here already", m.tree.ID).WithHint("import it under new ids to have it twice")
	}
	if m.how.Admits != nil {
		if err := m.how.Admits(m.image); err != nil {
			return err
		}
	}
	m.layers = m.image.Layers
	if want := strings.Join(h.Layers, " "); want != "" && want != strings.Trim(fmt.Sprint(m.layers), "[]") {
		return fault.New(fault.Precondition, "other_layers", "image %s has other layers here than where the tree comes from", m.image.Digest)
	}
	if calls := m.tree.Defaults.Limits.Calls; calls&^m.how.Calls != 0 {
		return fault.New(fault.Precondition, "calls_not_allowed", "the archive's tree allows its sandboxes %s", strings.Join((calls&^m.how.Calls).Names(), ", ")).
			WithHint("name these groups in the import (--allow-calls) if its sandboxes may make them here, too")
	}
	m.tree.Labels = maps.Clone(m.tree.Labels)
	delete(m.tree.Labels, OwnerLabel)
	if m.how.Owner != "" {
		if m.tree.Labels == nil {
			m.tree.Labels = map[string]string{}
		}
		m.tree.Labels[OwnerLabel] = m.how.Owner
	}
	if err := m.admitStates(); err != nil {
		return err
	}
	if m.how.NewIDs {
		m.tree.ID = ids.NewTree()
	}
	m.tree.Root = ids.Node(m.name(string(m.tree.Root)))
	return nil
}

// name is an id here; "" stays.
func (m *importer) name(id string) string {
	if !m.how.NewIDs || id == "" {
		return id
	}
	if m.names[id] == "" {
		switch {
		case strings.HasPrefix(id, "nd_"):
			m.names[id] = string(ids.NewNode())
		default:
			m.names[id] = string(ids.NewCheckpoint())
		}
	}
	return m.names[id]
}

// read takes the archive to its End.
func (m *importer) read(ctx context.Context) error {
	k, body, err := m.r.Next()
	for err == nil {
		if err := ctx.Err(); err != nil {
			return err
		}
		switch k {
		case archive.File:
			k, body, err = m.file(body)
		case archive.Checkpoint:
			k, body, err = m.checkpoint(ctx, body)
		case archive.Payload:
			if err = m.payload(body); err == nil {
				k, body, err = m.r.Next()
			}
		case archive.Node:
			if err = m.node(body); err == nil {
				k, body, err = m.r.Next()
			}
		case archive.End:
			return m.complete(ctx)
		default:
			return archive.Damaged("a frame %q is out of place", k)
		}
	}
	return err
}

func (m *importer) complete(ctx context.Context) error {
	h := m.r.Head
	if int64(len(m.nodes)) != h.Nodes || int64(len(m.done)) != h.Checkpoints || len(m.nodes) == 0 {
		return archive.Damaged("it has %d nodes and %d checkpoints, and says %d and %d", len(m.nodes), len(m.done), h.Nodes, h.Checkpoints)
	}
	if err := m.settleStates(ctx); err != nil {
		return err
	}
	return failpoint.Hit("import read")
}

// data writes the Data frames that follow into f, and gives the frame after them.
func (m *importer) data(f *os.File, size int64) (archive.Kind, []byte, error) {
	for {
		k, body, err := m.r.Next()
		if err != nil || k != archive.Data {
			return k, body, err
		}
		var d pb.ArchiveData
		if err := proto.Unmarshal(body, &d); err != nil || d.Offset < 0 || d.Offset > size-int64(len(d.Data)) {
			return 0, nil, archive.Damaged("a piece of a file lies outside it")
		}
		if err := m.count(int64(len(d.Data))); err != nil {
			return 0, nil, err
		}
		if _, err := f.WriteAt(d.Data, d.Offset); err != nil {
			return 0, nil, err
		}
	}
}

// checkpoint makes a snapshot of the entries that follow, and gives the frame after them.
func (m *importer) checkpoint(ctx context.Context, body []byte) (k archive.Kind, next []byte, err error) {
	head := &pb.ArchiveCheckpoint{}
	if err := proto.Unmarshal(body, head); err != nil {
		return 0, nil, archive.Damaged("%w", err)
	}
	if ids.Check(head.Id, "ck_", "checkpoint") != nil || m.byID[head.Id] != nil || head.Entries < 1 {
		return 0, nil, archive.Damaged("there is a checkpoint %.100q", head.Id)
	}
	over, old := pool.Made{Layers: m.layers}, archive.NewManifest()
	if head.ParentId != "" {
		up := m.byID[head.ParentId]
		if up == nil {
			return 0, nil, archive.Damaged("checkpoint %s comes before its parent", head.Id)
		}
		over, old = pool.Made{ID: up.ck.Snapshot, Seal: up.ck.Seal}, up.manifest
	}
	c := &received{head: head, ck: tree.Checkpoint{
		ID: ids.Checkpoint(m.name(head.Id)), Tree: m.tree.ID, Node: ids.Node(m.name(head.NodeId)), Snapshot: ids.NewSnapshot(), Process: tree.Empty,
		Secrets: head.MayHoldSecrets, CreatedAt: notAfter(time.Unix(0, head.CreatedAt), time.Now()), FreezeFor: time.Duration(head.FreezeNs),
	}}
	if head.ProcessId != "" {
		s := m.states[head.ProcessId]
		if s == nil {
			return 0, nil, archive.Damaged("checkpoint %s has process state %.100q, which isn't there", head.Id, head.ProcessId)
		}
		if c.ck.State, c.ck.Process = s.record.ID, s.record.Kind; s.left {
			c.withheld = "not carried: what was saved of its processes was left in the archive"
		}
	}
	before := m.bytes
	c.ck.Seal, err = m.e.Pool.AddSnapshot(ctx, c.ck.Snapshot, over, func(upper string) error {
		dir, err := os.Open(upper)
		if err != nil {
			return err
		}
		defer dir.Close()
		k, next, err = m.fill(ctx, c, archive.NewLayer(dir, old))
		return err
	})
	if err != nil {
		return 0, nil, fmt.Errorf("importing checkpoint %s: %w", head.Id, err)
	}
	c.ck.Bytes = m.bytes - before // what the archive says of it would let policies give others' states up
	m.byID[head.Id] = c
	m.done = append(m.done, c)
	return k, next, failpoint.Hit("import snapshot")
}

// notAfter keeps what an archive says of its age from making it the newest for ever: policies let the oldest go first.
func notAfter(said, now time.Time) time.Time {
	if said.After(now) {
		return now
	}
	return said
}

// fill makes the folder of changes of one checkpoint.
func (m *importer) fill(ctx context.Context, c *received, l *archive.Layer) (archive.Kind, []byte, error) {
	k, body, err := m.r.Next()
	for range c.head.Entries {
		if err != nil {
			return 0, nil, err
		}
		if err := ctx.Err(); err != nil {
			return 0, nil, err
		}
		e := &pb.ArchiveEntry{}
		if k != archive.Entry || proto.Unmarshal(body, e) != nil {
			return 0, nil, archive.Damaged("checkpoint %s lacks entries", c.head.Id)
		}
		cost := len(body)
		if old := l.Before(e); old != nil {
			e, cost = old, entryCost
		}
		if err := m.grow(cost); err != nil {
			return 0, nil, err
		}
		if k, body, err = m.entry(ctx, l, e); err != nil {
			return 0, nil, err
		}
	}
	if err != nil {
		return 0, nil, err
	}
	if !bytes.Equal(l.Now().Digest(), c.head.Digest) {
		return 0, nil, archive.Damaged("the entries of checkpoint %s aren't what its digest says", c.head.Id)
	}
	if err := l.Close(); err != nil {
		return 0, nil, err
	}
	c.manifest = l.Now()
	return k, body, l.Same(ctx)
}

// entry makes one file, and gives the frame after it.
func (m *importer) entry(ctx context.Context, l *archive.Layer, e *pb.ArchiveEntry) (archive.Kind, []byte, error) {
	f, err := l.Put(e)
	if err != nil {
		return 0, nil, err
	}
	if f == nil { // it is there already; its data, if they come, must be read over
		if f, err = os.CreateTemp(m.e.cfg.StateDir, ".import-*"); err != nil {
			return 0, nil, err
		}
		defer f.Close()
		if err := os.Remove(f.Name()); err != nil {
			return 0, nil, err
		}
		return m.data(f, e.Size)
	}
	if e.SameCheckpoint != "" {
		if err := m.share(ctx, f, e); err != nil {
			f.Close()
			return 0, nil, err
		}
	}
	k, body, err := m.data(f, e.Size)
	if err != nil {
		f.Close()
		return 0, nil, err
	}
	return k, body, l.Fill(ctx, f, e)
}

// share takes a content that is here already, without a copy where the pool can.
func (m *importer) share(ctx context.Context, f *os.File, e *pb.ArchiveEntry) error {
	from := m.byID[e.SameCheckpoint]
	if from == nil {
		return archive.Damaged("entry %.200q has the content of a checkpoint that isn't there", e.Path)
	}
	if was := from.manifest.At(e.SamePath); was == nil || !bytes.Equal(was.Digest, e.Digest) || was.Size != e.Size {
		return archive.Damaged("entry %.200q has the content of another that it isn't equal to", e.Path)
	}
	dir, err := m.e.Pool.OpenSnapshot(from.ck.Snapshot)
	if err != nil {
		return err
	}
	defer dir.Close()
	src, err := archive.Below(int(dir.Fd()), string(e.SamePath), unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return err
	}
	defer src.Close()
	if unix.IoctlFileClone(int(f.Fd()), int(src.Fd())) == nil {
		return nil
	}
	if err := m.count(e.Size); err != nil {
		return err
	}
	return archive.Copy(ctx, f, src)
}

// count takes note of content that is about to be written.
func (m *importer) count(n int64) error {
	if m.bytes += n; m.how.Most > 0 && m.bytes > m.how.Most {
		return fault.New(fault.Exhausted, "quota", "the archive has more than the %d bytes that may still be saved for client %s", m.how.Most, m.how.Owner).
			WithHint("prune trees, or import a part of it")
	}
	return nil
}

func (m *importer) payload(body []byte) error {
	if len(body) == 0 || len(body) > tree.MaxPayload {
		return archive.Damaged("a payload has %d bytes", len(body))
	}
	sum := sha256.Sum256(body)
	m.payloads[hex.EncodeToString(sum[:])] = body
	return m.grow(len(body))
}

func (m *importer) grow(n int) error {
	if m.records += n; m.records > maxRecords {
		return fault.New(fault.Invalid, "archive_too_large", "the nodes, payloads and lists of files of the archive take over %d bytes of memory", maxRecords).
			WithHint("export parts of the tree")
	}
	return nil
}

func (m *importer) node(body []byte) error {
	var msg pb.ArchiveNode
	if err := proto.Unmarshal(body, &msg); err != nil {
		return archive.Damaged("%w", err)
	}
	n := archive.NodeRecord(msg.GetNode(), msg.GetTimings())
	if err := ids.Check(string(n.ID), "nd_", "node"); err != nil {
		return archive.Damaged("%w", err)
	}
	switch {
	case m.there[n.ID]:
		return archive.Damaged("node %s comes twice", n.ID)
	case n.Parent == "" != (m.name(string(n.ID)) == string(m.tree.Root)) || n.Parent != "" && !m.there[n.Parent]:
		return archive.Damaged("node %s has parent %.100q, which doesn't come before it", n.ID, n.Parent)
	case n.PayloadDigest != "" && m.payloads[n.PayloadDigest] == nil:
		return archive.Damaged("node %s names a payload that isn't there", n.ID)
	}
	m.there[n.ID] = true
	switch c := m.byID[string(n.Checkpoint)]; {
	case n.Checkpoint == "" && n.Capture == tree.Withheld && n.WithheldReason != "":
	case c != nil && (n.Capture == tree.Captured || n.Capture == tree.Proven):
		n.Capture, n.Checkpoint = tree.Captured, c.ck.ID // proven elsewhere, not here
	default:
		return archive.Damaged("node %s is neither withheld nor has a checkpoint of the archive", n.ID)
	}
	recipe, err := tree.DecodeRecipe(msg.GetRecipe())
	if err != nil {
		return archive.Damaged("the steps of node %s: %w", n.ID, err)
	}
	n.Recipe, n.ReplayOf = *recipe, ids.Node(m.name(string(n.ReplayOf)))
	n.ID, n.Parent, n.Tree = ids.Node(m.name(string(n.ID))), ids.Node(m.name(string(n.Parent))), m.tree.ID
	m.nodes = append(m.nodes, n)
	return m.grow(len(body))
}

// record makes the tree durable.
func (m *importer) record(ctx context.Context, commit func(*tree.Tx, Imported) error) (Imported, error) {
	m.adopt()
	out := Imported{Nodes: len(m.nodes), Withheld: m.withhold(), Bytes: m.bytes}
	kept, states := m.kept()
	out.Checkpoints = len(kept)
	_, err := m.e.Store.Update(ctx, func(tx *tree.Tx) error {
		if _, err := tx.Image(string(m.image.Digest)); err != nil {
			return err // removed in the meantime
		}
		if _, err := tx.Tree(m.tree.ID); err == nil {
			return fault.New(fault.Exists, "tree_exists", "tree %s is here already", m.tree.ID)
		}
		if err := tx.PutTree(m.tree); err != nil {
			return err
		}
		for _, s := range states {
			if err := tx.PutProcess(*s.record); err != nil {
				return err
			}
		}
		for _, c := range kept {
			if _, err := tx.Checkpoint(c.ck.ID); err == nil {
				return fault.New(fault.Exists, "checkpoint_exists", "checkpoint %s is here already", c.ck.ID).WithHint("import the tree under new ids")
			}
			if err := tx.PutCheckpoint(c.ck); err != nil {
				return err
			}
		}
		for _, p := range m.payloads {
			if _, err := tx.PutPayload(p); err != nil {
				return err
			}
		}
		for _, n := range m.nodes {
			if !m.how.NewIDs {
				if err := tx.Free(n.ID); err != nil {
					return err
				}
			}
			added, err := tx.AddNode(n)
			if err != nil {
				return err
			}
			if n.ID == m.tree.Root {
				out.Root = added
			}
		}
		for _, c := range kept {
			if c.proven {
				if err := tx.SetProven(c.ck.ID); err != nil {
					return err
				}
			}
		}
		t, err := tx.Tree(m.tree.ID)
		if err != nil {
			return err
		}
		if out.Tree = t; commit == nil {
			return nil
		}
		return commit(tx, out)
	})
	if err != nil {
		return Imported{}, fmt.Errorf("recording an imported tree: %w", err)
	}
	m.removeAll(ctx, kept, states)
	return out, nil
}

// kept are the checkpoints that go on record, and their process states.
func (m *importer) kept() (list []*received, states map[string]*incoming) {
	states = map[string]*incoming{}
	for _, c := range m.done {
		if c.withheld != "" {
			continue
		}
		list = append(list, c)
		if id := c.head.ProcessId; id != "" {
			states[id] = m.states[id]
		}
	}
	return list, states
}

// withhold marks the nodes of checkpoints that aren't kept (law 6), and says how many.
func (m *importer) withhold() (n int) {
	why := map[ids.Checkpoint]string{}
	for _, c := range m.done {
		why[c.ck.ID] = c.withheld
	}
	for i := range m.nodes {
		if node := &m.nodes[i]; why[node.Checkpoint] != "" {
			node.Capture, node.WithheldReason, node.FrozenAt = tree.Withheld, why[node.Checkpoint], time.Time{}
			node.Checkpoint = ""
			n++
		}
	}
	return n
}

// adopt gives checkpoints whose own node isn't in the archive to the first that has them.
func (m *importer) adopt() {
	there, first := map[ids.Node]bool{}, map[ids.Checkpoint]ids.Node{}
	for _, n := range m.nodes {
		there[n.ID] = true
		if _, ok := first[n.Checkpoint]; !ok {
			first[n.Checkpoint] = n.ID
		}
	}
	for _, c := range m.done {
		if n, ok := first[c.ck.ID]; ok && !there[c.ck.Node] {
			c.ck.Node = n
		}
	}
}

// removeAll removes what was made, but for what is on record.
func (m *importer) removeAll(ctx context.Context, kept []*received, states map[string]*incoming) {
	stays := map[*received]bool{}
	for _, c := range kept {
		stays[c] = true
	}
	for _, c := range m.done {
		if !stays[c] {
			m.e.removeSnapshot(ctx, c.ck.Snapshot)
		}
	}
	for id, s := range m.states {
		if s.made && states[id] == nil {
			if err := m.e.vault.remove(s.record.ID); err != nil {
				m.e.log.ErrorContext(ctx, "removing a process state", "state", s.record.ID, "error", err)
			}
		}
	}
}
