package service

import (
	"bytes"
	"context"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/engine/archive"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// altered changes the nth message of a kind of frame; n below 0 counts from the last.
func altered[T proto.Message](t testing.TB, list []frame, kind archive.Kind, n int, m T, change func(T)) {
	t.Helper()
	var of []int
	for i, f := range list {
		if f.kind == kind {
			of = append(of, i)
		}
	}
	if n < 0 {
		n += len(of)
	}
	err := proto.Unmarshal(list[of[n]].body, m)
	change(m)
	if err == nil {
		list[of[n]].body, err = proto.Marshal(m)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Archives whose sums are right and that say what can't be: each is refused as damaged, leaves nothing, and reaches nothing of the
// host.
func TestHostileArchivesAreRefused(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	d := startDaemon(t, "")
	d.importRoot(t)
	host := t.TempDir()
	kept := filepath.Join(host, "kept")
	if err := os.WriteFile(kept, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	root, sb := d.newTree(t)
	for _, turn := range []string{"mkdir -p /w/d; touch /w/d/kept; echo content > /w/file", "rm -r /w/d && ln -s " + host + " /w/d", "cp /w/file /w/same"} {
		d.captured(t, d.run(t, sb.GetId(), turn).GetNode().GetId())
	}
	good := d.export(t, &boxwoodv1.ExportTreeRequest{TreeId: root.GetTreeId()})
	before, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
	if err != nil {
		t.Fatal(err)
	}

	type header = func(*boxwoodv1.ArchiveHeader)
	type frames = func([]frame)
	checkpoint := func(n int, change func(*boxwoodv1.ArchiveCheckpoint)) frames {
		return func(l []frame) { altered(t, l, archive.Checkpoint, n, &boxwoodv1.ArchiveCheckpoint{}, change) }
	}
	entry := func(n int, change func(*boxwoodv1.ArchiveEntry)) frames {
		return func(l []frame) { altered(t, l, archive.Entry, n, &boxwoodv1.ArchiveEntry{}, change) }
	}
	data := func(change func(*boxwoodv1.ArchiveData)) frames {
		return func(l []frame) { altered(t, l, archive.Data, 0, &boxwoodv1.ArchiveData{}, change) }
	}
	node := func(n int, change func(*boxwoodv1.Node)) frames {
		return func(l []frame) {
			altered(t, l, archive.Node, n, &boxwoodv1.ArchiveNode{}, func(m *boxwoodv1.ArchiveNode) { change(m.GetNode()) })
		}
	}
	swapped := func(l []frame) {
		at := slices.IndexFunc(l, func(f frame) bool { return f.kind == archive.Node })
		l[at+1], l[at+2] = l[at+2], l[at+1]
	}
	for _, c := range []struct {
		name   string
		head   header
		frames frames
	}{
		{"more nodes than it says", func(h *boxwoodv1.ArchiveHeader) { h.Nodes-- }, nil},
		{"fewer checkpoints than it says", func(h *boxwoodv1.ArchiveHeader) { h.Checkpoints = math.MaxInt64 }, nil},
		{"a tree without an id", func(h *boxwoodv1.ArchiveHeader) { h.Tree.Id = "../x" }, nil},
		{"another root", func(h *boxwoodv1.ArchiveHeader) { h.Tree.RootId = string(ids.NewNode()) }, nil},
		{"a process state of no size", func(h *boxwoodv1.ArchiveHeader) {
			h.Processes = []*boxwoodv1.ArchiveProcess{{Id: "ps_1", Kind: boxwoodv1.ProcessKind_PROCESS_KIND_SHELLS, Bytes: -1}}
		}, nil},
		{"a process state that never comes", func(h *boxwoodv1.ArchiveHeader) {
			h.Processes = []*boxwoodv1.ArchiveProcess{{Id: "ps_1", Kind: boxwoodv1.ProcessKind_PROCESS_KIND_SHELLS, Digest: "x"}}
		}, nil},
		{"a path above the folder", nil, entry(2, func(e *boxwoodv1.ArchiveEntry) { e.Path = []byte("../../../etc") })},
		{"an absolute path", nil, entry(2, func(e *boxwoodv1.ArchiveEntry) { e.Path = []byte("/etc") })},
		{"a path through a link", nil, entry(-1, func(e *boxwoodv1.ArchiveEntry) { e.Path = []byte("w/d/new") })},
		{"a path twice", nil, entry(3, func(e *boxwoodv1.ArchiveEntry) { e.Path = []byte("w") })},
		{"an owner of the host", nil, entry(2, func(e *boxwoodv1.ArchiveEntry) { e.Uid = 1 << 20 })},
		{"a disk", nil, entry(-1, func(e *boxwoodv1.ArchiveEntry) { e.Mode = 0o060666 })},
		{"a checkpoint twice", nil, func(l []frame) {
			id := ""
			checkpoint(0, func(k *boxwoodv1.ArchiveCheckpoint) { id = k.Id })(l)
			checkpoint(1, func(k *boxwoodv1.ArchiveCheckpoint) { k.Id = id })(l)
		}},
		{"a checkpoint over itself", nil, checkpoint(1, func(k *boxwoodv1.ArchiveCheckpoint) { k.ParentId = k.Id })},
		{"a checkpoint without files", nil, checkpoint(1, func(k *boxwoodv1.ArchiveCheckpoint) { k.Entries = -1 })},
		{"a checkpoint with more files than come", nil, checkpoint(1, func(k *boxwoodv1.ArchiveCheckpoint) { k.Entries = math.MaxInt64 })},
		{"a checkpoint with processes that aren't there", nil, checkpoint(1, func(k *boxwoodv1.ArchiveCheckpoint) { k.ProcessId = "ps_1" })},
		{"a piece behind the end of its file", nil, data(func(p *boxwoodv1.ArchiveData) { p.Offset = math.MaxInt64 - 1 })},
		{"a piece before its file", nil, data(func(p *boxwoodv1.ArchiveData) { p.Offset = -1 })},
		{"another content", nil, data(func(p *boxwoodv1.ArchiveData) { p.Data[0]++ })},
		{"the content of a folder", nil, entry(-1, func(e *boxwoodv1.ArchiveEntry) { e.SamePath = []byte("w") })},
		{"the content of a checkpoint that isn't there", nil, entry(-1, func(e *boxwoodv1.ArchiveEntry) { e.SameCheckpoint = string(ids.NewCheckpoint()) })},
		{"a node before its parent", nil, swapped},
		{"a node that is its own parent", nil, node(2, func(n *boxwoodv1.Node) { n.ParentId = n.Id })},
		{"a node below another tree's", nil, node(2, func(n *boxwoodv1.Node) { n.ParentId = string(ids.NewNode()) })},
		{"two roots", nil, node(2, func(n *boxwoodv1.Node) { n.ParentId = "" })},
		{"a node twice", nil, func(l []frame) {
			id := ""
			node(1, func(n *boxwoodv1.Node) { id = n.Id })(l)
			node(2, func(n *boxwoodv1.Node) { n.Id = id })(l)
		}},
		{"a captured node without a checkpoint", nil, node(2, func(n *boxwoodv1.Node) { n.CheckpointId = "" })},
		{"a node with another checkpoint", nil, node(2, func(n *boxwoodv1.Node) { n.CheckpointId = string(ids.NewCheckpoint()) })},
		{"a node of no status", nil, node(2, func(n *boxwoodv1.Node) { n.Capture = 99 })},
		{"a payload that isn't there", nil, node(2, func(n *boxwoodv1.Node) { n.PayloadDigest = string(bytes.Repeat([]byte("0"), 64)) })},
	} {
		t.Run(c.name, func(t *testing.T) {
			bad := rewritten(t, good, c.head, c.frames)
			if r, err := d.imports(t, bad, &boxwoodv1.ImportTreeStart{NewIds: true, Dumps: trust}); reason(err) != "archive_damaged" {
				t.Fatalf("%v, %v", r, err)
			}
		})
	}

	// A few bytes say that a file is as large as files can be: the call ends it.
	bomb := rewritten(t, good, nil, entry(-1, func(e *boxwoodv1.ArchiveEntry) { e.Size, e.SameCheckpoint, e.SamePath = 1<<62, "", nil }))
	short, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if _, err := d.importsWithin(short, bomb, &boxwoodv1.ImportTreeStart{NewIds: true}); status.Code(err) != codes.DeadlineExceeded {
		t.Fatalf("a file of 4 EiB: %v", err)
	}
	until(t, "what came of it is gone", func() bool {
		now, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
		return err == nil && now.GetPendingRemovals() == 0 && now.GetNodes() == before.GetNodes()
	})
	// By its name the image may be another one.
	named := rewritten(t, good, func(h *boxwoodv1.ArchiveHeader) { h.Tree.Image = "mini" }, nil)
	if _, err := d.imports(t, named, &boxwoodv1.ImportTreeStart{NewIds: true}); reason(err) != "no_image" {
		t.Fatalf("an image by name: %v", err)
	}
	if _, err := d.imports(t, good, &boxwoodv1.ImportTreeStart{NewIds: true}); err != nil {
		t.Fatalf("the archive itself: %v", err)
	}
	if _, err := os.Stat(kept); err != nil {
		t.Fatalf("an import has reached the host: %v", err)
	}
}

// If it fails, an archive with the ids of nodes that lie on the disk overwrites what they did.
func TestImportTakesNoIDOfAClosedTree(t *testing.T) {
	d := running(t)
	root, sb := d.newTree(t)
	d.captured(t, d.run(t, sb.GetId(), "echo one > /root/one").GetNode().GetId())
	good := d.export(t, &boxwoodv1.ExportTreeRequest{TreeId: root.GetTreeId()})
	if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: root.GetTreeId()}); err != nil {
		t.Fatal(err)
	}
	until(t, "the closed tree is archived", func() bool { return d.archived(t, root.GetTreeId()) })
	was := d.listNodes(t, root.GetTreeId())
	// Its checkpoints, which stay in memory, have other ids.
	other := map[string]string{}
	bad := rewritten(t, good, func(h *boxwoodv1.ArchiveHeader) { h.Tree.Id = string(ids.NewTree()) }, func(l []frame) {
		for i, f := range l {
			switch f.kind {
			case archive.Checkpoint:
				altered(t, l[i:i+1], f.kind, 0, &boxwoodv1.ArchiveCheckpoint{}, func(k *boxwoodv1.ArchiveCheckpoint) {
					other[k.Id] = string(ids.NewCheckpoint())
					k.Id, k.ParentId = other[k.Id], other[k.ParentId]
				})
			case archive.Node:
				altered(t, l[i:i+1], f.kind, 0, &boxwoodv1.ArchiveNode{}, func(m *boxwoodv1.ArchiveNode) {
					m.Node.CheckpointId, m.Node.Action.Text = other[m.Node.CheckpointId], []byte("another's")
				})
			}
		}
	})
	if _, err := d.imports(t, bad, &boxwoodv1.ImportTreeStart{}); reason(err) != "node_exists" {
		t.Fatalf("ids of a closed tree: %v", err)
	}
	if is := d.listNodes(t, root.GetTreeId()); is != was {
		t.Fatalf("the closed tree was\n%s\nand is\n%s", was, is)
	}
}

// If it fails, a client that is slow to send an archive keeps images and other archives from coming in.
func TestASlowImportHoldsUpNoOther(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	node := d.captured(t, d.run(t, sb.GetId(), "head -c 300000 /dev/urandom > /root/random").GetNode().GetId())[0]
	part := d.export(t, &boxwoodv1.ExportTreeRequest{NodeId: node.GetId()})
	image := d.imported(t, "slow:1")
	own, err := d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{Start: &boxwoodv1.CreateTreeRequest_Image{Image: image}})
	if err != nil {
		t.Fatal(err)
	}
	whole := d.export(t, &boxwoodv1.ExportTreeRequest{TreeId: own.GetTree().GetId()})
	if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: own.GetTree().GetId()}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: own.GetRoot().GetId()}); err != nil {
		t.Fatal(err)
	}
	c, cancel := context.WithCancel(ctx(t))
	defer cancel()
	for _, begun := range [][]byte{part[:len(part)/2], whole[:len(whole)-40]} {
		slow, err := d.client.ImportTree(c)
		if err == nil {
			err = slow.Send(&boxwoodv1.ImportTreeRequest{Part: &boxwoodv1.ImportTreeRequest_Start{Start: &boxwoodv1.ImportTreeStart{NewIds: true}}})
		}
		if err == nil {
			err = slow.Send(&boxwoodv1.ImportTreeRequest{Part: &boxwoodv1.ImportTreeRequest_Chunk{Chunk: begun}})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := d.client.RemoveImage(ctx(t), &boxwoodv1.RemoveImageRequest{Image: image}); err != nil && reason(err) != "image_in_use" {
		t.Fatalf("removing an image on which a tree stands that is coming: %v", err)
	}
	if _, err := d.imports(t, part, &boxwoodv1.ImportTreeStart{NewIds: true}); err != nil {
		t.Fatalf("another archive: %v", err)
	}
	other := d.imported(t, "slow:2")
	cancel()
	for _, image := range []string{image, other} {
		until(t, "the image can be removed", func() bool {
			_, err := d.client.RemoveImage(ctx(t), &boxwoodv1.RemoveImageRequest{Image: image})
			return err == nil || reason(err) == "image_not_found"
		})
	}
}

// imported is an image with one file.
func (d *daemon) imported(t testing.TB, name string) (digest string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte(name), 0o644); err != nil {
		t.Fatal(err)
	}
	stream, err := d.client.ImportImage(ctx(t), &boxwoodv1.ImportImageRequest{Path: dir, Name: name})
	for err == nil {
		var m *boxwoodv1.ImportImageEvent
		if m, err = stream.Recv(); m.GetImage() != nil {
			digest = m.GetImage().GetDigest()
		}
	}
	if err != io.EOF {
		t.Fatal("importing an image: ", err)
	}
	return digest
}
