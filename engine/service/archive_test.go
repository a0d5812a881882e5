package service

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (d *daemon) export(t testing.TB, req *boxwoodv1.ExportTreeRequest) []byte {
	t.Helper()
	stream, err := d.client.ExportTree(ctx(t), req)
	if err != nil {
		t.Fatal(err)
	}
	var out []byte
	for {
		m, err := stream.Recv()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatal("exporting: ", err)
		}
		out = append(out, m.GetData()...)
	}
}

func (d *daemon) imports(t testing.TB, archive []byte, start *boxwoodv1.ImportTreeStart) (*boxwoodv1.ImportTreeResponse, error) {
	t.Helper()
	return d.importsWithin(ctx(t), archive, start)
}

func (d *daemon) importsWithin(ctx context.Context, archive []byte, start *boxwoodv1.ImportTreeStart) (*boxwoodv1.ImportTreeResponse, error) {
	stream, err := d.client.ImportTree(ctx)
	if err != nil {
		return nil, err
	}
	err = stream.Send(&boxwoodv1.ImportTreeRequest{Part: &boxwoodv1.ImportTreeRequest_Start{Start: start}})
	for len(archive) > 0 && err == nil {
		n := min(len(archive), 100_000)
		err = stream.Send(&boxwoodv1.ImportTreeRequest{Part: &boxwoodv1.ImportTreeRequest_Chunk{Chunk: archive[:n]}})
		archive = archive[n:]
	}
	return stream.CloseAndRecv()
}

func (d *daemon) nodesOf(t testing.TB, tree string) []*boxwoodv1.Node {
	t.Helper()
	return d.nodesWhere(t, &boxwoodv1.ListNodesRequest{TreeId: tree})
}

func (d *daemon) nodesWhere(t testing.TB, req *boxwoodv1.ListNodesRequest) (list []*boxwoodv1.Node) {
	t.Helper()
	stream, err := d.client.ListNodes(ctx(t), req)
	for err == nil {
		var n *boxwoodv1.Node
		if n, err = stream.Recv(); err == nil {
			list = append(list, n)
		}
	}
	if err != io.EOF {
		t.Fatal(err)
	}
	return list
}

// walkOf is what a fork of a node shows to a walker that shares no code with the engine.
func (d *daemon) walkOf(t testing.TB, node string) ([]string, string) {
	t.Helper()
	r := d.tryFork(t, &boxwoodv1.ForkRequest{Scratch: true, Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: node}, Count: 1}}})
	if len(r) != 1 || r[0].GetSandbox() == nil {
		t.Fatalf("forking node %s: %v", node, r)
	}
	defer free(t, d, r[0].GetSandbox())
	return digest(t, d.rootOf(t, r[0].GetSandbox().GetGeneration()))
}

// turns that leave all that a folder of changes can hold.
var everyKind = []string{
	"mkdir -p /w/a/b/c && for i in $(seq 40); do echo $i > /w/a/f$i; done; ln /w/a/f1 /w/hard; ln -s a /w/soft; chmod 4755 /w/a/f2; mkfifo /w/pipe; head -c 300000 /dev/urandom > /w/random",
	"rm /etc/passwd; rm -rf /w/a/b; mkdir /w/a/b; echo new > /w/a/b/new; mv /w/a /w/moved; truncate -s 30M /w/sparse; printf x | dd of=/w/sparse bs=1 seek=20000000 conv=notrunc 2>/dev/null",
	"rm -rf /home; mkdir /home; echo mine > /home/mine; mv /usr/bin /usr/programs && ln -s programs /usr/bin; chown 1000:1000 /w/hard; touch -d '2001-02-03 04:05:06.123456789' /w/random",
	"cp /w/random /w/again; echo more >> /w/hard; setfattr -n user.mine -v yes /w/random || true; rm -f /w/pipe; mkdir /w/pipe; echo >/w/pipe/in",
	"true",
	"rm -rf /w/moved/b && ln -s /nowhere /w/moved/b; rm /w/hard; mv /w/random /w/moved/random",
}

// grownTree is a tree with all kinds of nodes.
func (d *daemon) grownTree(t testing.TB) (tree string, withheld string) {
	t.Helper()
	root, sb := d.newTree(t)
	var line []*boxwoodv1.Node
	for _, turn := range everyKind {
		line = append(line, d.run(t, sb.GetId(), turn).GetNode())
		d.captured(t, line[len(line)-1].GetId())
	}
	for _, from := range []int{1, 3} {
		child := d.fork(t, line[from].GetId(), 1)[0]
		n := d.run(t, child.GetId(), fmt.Sprintf("echo branch %d > /w/branch; rm -rf /w/soft", from)).GetNode()
		d.captured(t, n.GetId())
	}
	stays := d.run(t, sb.GetId(), "setsid sleep 1000 </dev/null >/dev/null 2>&1 &").GetNode()
	if stays = d.captured(t, stays.GetId())[0]; stays.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
		withheld = stays.GetId()
	}
	if _, err := d.client.Annotate(ctx(t), &boxwoodv1.AnnotateRequest{Annotations: []*boxwoodv1.NodeAnnotation{
		{NodeId: line[0].GetId(), Rewards: map[string]float64{"tests": 0.1}, Labels: map[string]string{"é": "ü"}, Payload: []byte("payload \xff"), PolicyVersion: proto.String("p1")},
		{NodeId: line[2].GetId(), Payload: []byte("payload \xff")},
		{NodeId: line[3].GetId(), Value: proto.Float64(0.25), Visits: proto.Int64(7), Payload: bytes.Repeat([]byte("x"), 500_000)},
	}}); err != nil {
		t.Fatal(err)
	}
	return root.GetTreeId(), withheld
}

// A tree that goes to another host is the same there: each node says the same, and forks
// to the same files.
func TestTreeTravels(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	here, there := startDaemon(t, ""), startDaemon(t, "")
	here.importRoot(t)
	tree, _ := here.grownTree(t)
	archive := here.export(t, &boxwoodv1.ExportTreeRequest{TreeId: tree})

	if _, err := there.imports(t, archive, &boxwoodv1.ImportTreeStart{}); reason(err) != "no_image" {
		t.Fatalf("without its image: %v", err)
	}
	there.importRoot(t)
	start := &boxwoodv1.ImportTreeStart{IdempotencyKey: "import-1", Dumps: trust}
	r, err := there.imports(t, archive, start)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := there.imports(t, archive, start); err != nil || !proto.Equal(r, again) {
		t.Fatalf("the same key again: %v, %v", again, err)
	}
	if _, err := there.imports(t, archive, &boxwoodv1.ImportTreeStart{}); reason(err) != "tree_exists" {
		t.Fatalf("the same tree again: %v", err)
	}
	sameNodes(t, here.nodesOf(t, tree), there.nodesOf(t, r.GetTree().GetId()))
	for _, n := range here.nodesOf(t, tree) {
		sameState(t, here, n.GetId(), there, n.GetId())
		a, err := here.client.GetPayload(ctx(t), &boxwoodv1.GetPayloadRequest{NodeId: n.GetId()})
		if err != nil {
			t.Fatal(err)
		}
		if b, err := there.client.GetPayload(ctx(t), &boxwoodv1.GetPayloadRequest{NodeId: n.GetId()}); err != nil || !proto.Equal(a, b) {
			t.Fatalf("the payload of %s: %v, %v", n.GetId(), b, err)
		}
	}
	// It is grown on there as here, and what is shared is stored once: the random file of 300 kB
	// is in six checkpoints.
	leaf := there.nodesOf(t, tree)[3]
	sb := there.fork(t, leaf.GetId(), 1)[0]
	there.ok(t, sb.GetId(), "echo grown > /w/grown; cat /w/random > /dev/null")
	if r.GetBytes() > 2_000_000 {
		t.Errorf("the import wrote %d bytes of content", r.GetBytes())
	}
	if len(archive) > 2_000_000 {
		t.Errorf("the archive has %d bytes", len(archive))
	}
}

// sameNodes compares all that nodes say, but the index of their last change.
func sameNodes(t testing.TB, a, b []*boxwoodv1.Node) {
	t.Helper()
	if len(a) != len(b) {
		t.Fatalf("%d nodes became %d", len(a), len(b))
	}
	for i := range a {
		x, y := proto.Clone(a[i]).(*boxwoodv1.Node), proto.Clone(b[i]).(*boxwoodv1.Node)
		x.ModifyIndex, y.ModifyIndex = 0, 0
		if x.Capture == boxwoodv1.CaptureStatus_CAPTURE_STATUS_PROVEN && y.Capture == boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED {
			y.Capture = x.Capture // not proven there
		}
		if !proto.Equal(x, y) {
			t.Fatalf("node %d was\n%v\nand is\n%v", i, x, y)
		}
	}
}

func sameState(t testing.TB, here *daemon, a string, there *daemon, b string) {
	t.Helper()
	n, err := here.client.GetNode(ctx(t), &boxwoodv1.GetNodeRequest{NodeId: a})
	if err != nil {
		t.Fatal(err)
	}
	if n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
		return
	}
	want, sum := here.walkOf(t, a)
	got, other := there.walkOf(t, b)
	if sum != other {
		t.Fatalf("node %s (%s) forks to something else there:\n%s", a, n.GetAction().GetText(), strings.Join(treewalk.Diff(want, got, 20), "\n"))
	}
}

// A part of a tree is a tree of its own, also beside the one that it comes from.
func TestPartOfATreeTravels(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	d := startDaemon(t, "")
	d.importRoot(t)
	tree, _ := d.grownTree(t)
	nodes := d.nodesOf(t, tree)
	top := nodes[2]
	archive := d.export(t, &boxwoodv1.ExportTreeRequest{NodeId: top.GetId()})
	if _, err := d.imports(t, archive, &boxwoodv1.ImportTreeStart{Dumps: trust}); reason(err) != "checkpoint_exists" && reason(err) != "node_exists" {
		t.Fatalf("a part under ids that are here: %v", err)
	}
	r, err := d.imports(t, archive, &boxwoodv1.ImportTreeStart{NewIds: true, Dumps: trust})
	if err != nil {
		t.Fatal(err)
	}
	part := d.nodesOf(t, r.GetTree().GetId())
	under, err := d.client.ListNodes(ctx(t), &boxwoodv1.ListNodesRequest{TreeId: tree, Under: top.GetId()})
	if err != nil {
		t.Fatal(err)
	}
	i := 0
	for ; ; i++ {
		n, err := under.Recv()
		if err == io.EOF {
			break
		}
		if err != nil || i >= len(part) {
			t.Fatalf("%d nodes, %v", len(part), err)
		}
		at := -1
		for k, p := range part {
			if string(p.GetAction().GetText()) == string(n.GetAction().GetText()) {
				at = k
			}
		}
		if at < 0 {
			t.Fatalf("%s isn't in the part", n.GetAction().GetText())
		}
		sameState(t, d, n.GetId(), d, part[at].GetId())
	}
	if i != len(part) {
		t.Fatalf("%d nodes became %d", i, len(part))
	}
	// The original can go: nothing is shared but content.
	if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: tree}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: nodes[0].GetId()}); err != nil {
		t.Fatal(err)
	}
	d.walkOf(t, part[0].GetId())
}

// An archive that was cut off or changed anywhere is refused, and leaves nothing.
func TestDamagedArchivesAreRefused(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	d := startDaemon(t, "")
	d.importRoot(t)
	_, sb := d.newTree(t)
	d.captured(t, d.run(t, sb.GetId(), "mkdir /w; for i in $(seq 20); do echo $i > /w/$i; done; ln -s 1 /w/link").GetNode().GetId())
	n := d.open(t, sb.GetId(), "main").GetResult().GetNode()
	d.kept(t, n, shellsKind)
	if testenv.CRIUPath() != "" {
		n = d.run(t, sb.GetId(), countStart).GetNode()
		d.saved(t, n.GetId())
	}
	archive := d.export(t, &boxwoodv1.ExportTreeRequest{TreeId: n.GetTreeId()})
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d, %d bytes", seed, len(archive))
	rnd := rand.New(rand.NewPCG(seed, 0))
	contents := d.contents(t)
	before, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	refused := func(what string, bad []byte) {
		t.Helper()
		r, err := d.imports(t, bad, &boxwoodv1.ImportTreeStart{NewIds: true, Dumps: trust})
		if err == nil {
			t.Fatalf("%s was taken: %v", what, r)
		}
		if why := reason(err); why != "archive_damaged" && why != "archive_format" {
			t.Fatalf("%s: %v (%s)", what, err, why)
		}
	}
	for range 40 {
		cut := rnd.IntN(len(archive))
		refused(fmt.Sprintf("cut at %d", cut), archive[:cut])
		bad := bytes.Clone(archive)
		at := rnd.IntN(len(bad))
		bad[at] ^= 1 << rnd.IntN(8)
		refused(fmt.Sprintf("changed at %d", at), bad)
	}
	refused("something behind its end", append(bytes.Clone(archive), 'x'))
	after, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
	if err != nil || after.GetNodes() != before.GetNodes() {
		t.Fatalf("%d nodes before, %d after: %v", before.GetNodes(), after.GetNodes(), err)
	}
	if left := d.contents(t); left != contents {
		t.Fatalf("refused archives left\n%s\nbeside\n%s", left, contents)
	}
	if _, err := d.imports(t, archive, &boxwoodv1.ImportTreeStart{NewIds: true, Dumps: trust}); err != nil {
		t.Fatalf("the archive itself: %v", err)
	}
}
