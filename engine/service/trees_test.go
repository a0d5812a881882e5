package service

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/ipc"

	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func TestSetupRunsOnce(t *testing.T) {
	d := running(t)
	req := &boxwoodv1.CreateTreeRequest{
		Start: &boxwoodv1.CreateTreeRequest_Image{Image: "mini"},
		Setup: []*boxwoodv1.SetupStep{
			{Step: &boxwoodv1.SetupStep_Command{Command: "mkdir -p /work && head -c 16 /dev/urandom | od -An -tx1 > /work/once"}},
			{Step: &boxwoodv1.SetupStep_File{File: &boxwoodv1.FileToWrite{Path: "/work/bin/deep/script", Content: []byte("#!/bin/sh\necho hi\n"), Mode: 0o755}}},
		},
		Defaults:    &boxwoodv1.Defaults{Cwd: "/work", Env: map[string]string{"WHO": "trainer"}},
		WithSandbox: true,
	}
	create := func() *boxwoodv1.CreateTreeResponse {
		t.Helper()
		r, err := d.client.CreateTree(ctx(t), req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_, _ = d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: r.GetTree().GetId()})
		})
		return r
	}
	first, second := create(), create()
	if first.GetSetupCached() || !second.GetSetupCached() {
		t.Fatalf("cached: first %v, second %v", first.GetSetupCached(), second.GetSetupCached())
	}
	if first.GetRoot().GetCheckpointId() != second.GetRoot().GetCheckpointId() {
		t.Fatal("two trees of one set-up must share its checkpoint")
	}
	read := func(r *boxwoodv1.CreateTreeResponse) string {
		return d.ok(t, r.GetSandbox().GetId(), "cat once; ./bin/deep/script; echo $WHO; pwd")
	}
	if a, b := read(first), read(second); a != b || !strings.HasSuffix(a, "hi\ntrainer\n/work\n") {
		t.Fatalf("two trees of one set-up see %q and %q", a, b)
	}

	req.Setup[0].Step.(*boxwoodv1.SetupStep_Command).Command = "echo broken >&2; exit 7"
	before, nodes := len(d.list(t)), d.nodes(t)
	_, err := d.client.CreateTree(ctx(t), req)
	if reason(err) != "setup_failed" || !strings.Contains(err.Error(), "broken") || !strings.Contains(err.Error(), "exit status 7") {
		t.Fatalf("a set-up that fails: %v", err)
	}
	if after := len(d.list(t)); after != before {
		t.Fatalf("a set-up that failed left %d sandboxes", after-before)
	}
	if after := d.nodes(t); after != nodes {
		t.Fatalf("a set-up that failed left %d nodes", after-nodes)
	}
}

func (d *daemon) nodes(t testing.TB) int64 {
	t.Helper()
	i, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return i.GetNodes()
}

func (d *daemon) list(t testing.TB) []*boxwoodv1.Sandbox {
	t.Helper()
	r, err := d.client.ListSandboxes(ctx(t), &boxwoodv1.ListSandboxesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return r.GetSandboxes()
}

func TestTreeFromANode(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	n := d.run(t, sb.GetId(), "echo base > /root/base").GetNode()
	r, err := d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{
		Start: &boxwoodv1.CreateTreeRequest_NodeId{NodeId: n.GetId()}, WithSandbox: true})
	if err != nil {
		t.Fatal(err)
	}
	if got := d.ok(t, r.GetSandbox().GetId(), "cat /root/base"); got != "base\n" {
		t.Fatalf("the new tree sees %q", got)
	}
	// What another tree stands on isn't pruned.
	_, err = d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: n.GetId(), ReleaseSandboxes: true})
	if reason(err) != "checkpoint_shared" {
		t.Fatalf("pruning what another tree stands on: %v", err)
	}
}

func TestPruneGivesTheStateBack(t *testing.T) {
	d := running(t)
	root, sb := d.newTree(t)
	keep := d.run(t, sb.GetId(), "echo keep > /root/keep").GetNode()
	used := func() int64 {
		i, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return i.GetPoolBytesUsed()
	}
	until(t, "nothing of earlier tests goes away meanwhile", func() bool {
		i, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
		return err == nil && i.GetPendingRemovals() == 0
	})
	before := used()
	lost := d.run(t, sb.GetId(), "head -c 100000000 /dev/urandom > /root/lost").GetNode()
	d.captured(t, lost.GetId())
	until(t, "it is written", func() bool { return used() > before+90_000_000 })
	if _, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: lost.GetId()}); reason(err) != "sandbox_there" {
		t.Fatalf("pruning where a sandbox stands: %v", err)
	}
	if _, err := d.client.Pin(ctx(t), &boxwoodv1.PinRequest{NodeIds: []string{lost.GetId()}}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: keep.GetId(), KeepNode: true, ReleaseSandboxes: true}); reason(err) != "pinned" {
		t.Fatalf("pruning above a pinned node: %v", err)
	}
	if _, err := d.client.Unpin(ctx(t), &boxwoodv1.UnpinRequest{NodeIds: []string{lost.GetId()}}); err != nil {
		t.Fatal(err)
	}
	ask := &boxwoodv1.PruneRequest{NodeId: lost.GetId(), ReleaseSandboxes: true, IdempotencyKey: "prune-lost"}
	r, err := d.client.Prune(ctx(t), ask)
	if err != nil || r.GetNodes() != 1 || r.GetCheckpoints() != 1 {
		t.Fatalf("pruned: %v, %v", r, err)
	}
	if again, err := d.client.Prune(ctx(t), ask); err != nil || !proto.Equal(again, r) {
		t.Fatalf("the same prune again: %v, %v; it was %v", again, err, r)
	}
	until(t, "it is pruned", func() bool { return used() < before+20_000_000 })
	if _, err := d.client.GetNode(ctx(t), &boxwoodv1.GetNodeRequest{NodeId: lost.GetId()}); reason(err) != "node_not_found" {
		t.Fatalf("a pruned node: %v", err)
	}
	if got := d.ok(t, d.fork(t, keep.GetId(), 1)[0].GetId(), "cat /root/keep"); got != "keep\n" {
		t.Fatalf("after the prune its parent forks to %q", got)
	}
	// The root shares the image's base, which a prune must leave alone.
	if got := d.ok(t, d.fork(t, root.GetId(), 1)[0].GetId(), "ls /root"); got != "" {
		t.Fatalf("the root forks to %q", got)
	}
}

func TestAnnotateBackupAndWatch(t *testing.T) {
	d := running(t)
	root, sb := d.newTree(t)
	watching, cancel := context.WithCancel(ctx(t))
	defer cancel()
	w, err := d.client.WatchTree(watching, &boxwoodv1.WatchTreeRequest{TreeId: root.GetTreeId()})
	if err != nil {
		t.Fatal(err)
	}
	leaf := d.run(t, sb.GetId(), "true").GetNode()
	payload := []byte{0, 1, 2, 255}
	value := 0.5
	_, err = d.client.Annotate(ctx(t), &boxwoodv1.AnnotateRequest{Annotations: []*boxwoodv1.NodeAnnotation{
		{NodeId: leaf.GetId(), Rewards: map[string]float64{"tests": 0.75}, Labels: map[string]string{"k": "v"}, Payload: payload},
		{NodeId: root.GetId(), Value: &value},
	}})
	if err != nil {
		t.Fatal(err)
	}
	for labels, want := range map[string]int{"v": 1, "w": 0} { // groups are labels: one call reads one
		n := len(d.nodesWhere(t, &boxwoodv1.ListNodesRequest{TreeId: root.GetTreeId(), Labels: map[string]string{"k": labels}}))
		if n != want {
			t.Fatalf("%d nodes have k=%s, want %d", n, labels, want)
		}
	}
	p, err := d.client.GetPayload(ctx(t), &boxwoodv1.GetPayloadRequest{NodeId: leaf.GetId()})
	if err != nil || !bytes.Equal(p.GetPayload(), payload) {
		t.Fatalf("payload %v, %v", p, err)
	}
	b, err := d.client.Backup(ctx(t), &boxwoodv1.BackupRequest{Rule: boxwoodv1.BackupRequest_SUM, Items: []*boxwoodv1.BackupRequest_Item{{NodeId: leaf.GetId(), Value: 2}}})
	if err != nil || b.GetNodesChanged() != 2 {
		t.Fatalf("backup: %v, %v", b, err)
	}
	n, err := d.client.GetNode(ctx(t), &boxwoodv1.GetNodeRequest{NodeId: root.GetId()})
	if err != nil || n.GetValue() != 2.5 || n.GetVisits() != 1 {
		t.Fatalf("the root after the backup: value %v, visits %d, %v", n.GetValue(), n.GetVisits(), err)
	}
	last := uint64(0)
	for {
		ev, err := w.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if ev.GetIndex() <= last {
			t.Fatalf("event %d after %d", ev.GetIndex(), last)
		}
		last = ev.GetIndex()
		if ev.GetNode().GetId() == leaf.GetId() && ev.GetNode().GetVisits() == 1 {
			if ev.GetNode().GetRewards()["tests"] != 0.75 {
				t.Fatalf("watched: %v", ev)
			}
			break
		}
	}
	_, err = d.client.Annotate(ctx(t), &boxwoodv1.AnnotateRequest{Annotations: []*boxwoodv1.NodeAnnotation{
		{NodeId: root.GetId(), Rewards: map[string]float64{"x": 1}}, {NodeId: "nd_01jd9m00000000000000000000"}}})
	if reason(err) != "node_not_found" {
		t.Fatalf("annotating a node that isn't there: %v", err)
	}
	if n, _ := d.client.GetNode(ctx(t), &boxwoodv1.GetNodeRequest{NodeId: root.GetId()}); len(n.GetRewards()) != 0 {
		t.Fatal("a refused annotation left half of it")
	}
}

func TestUploadAndDownload(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	var archive bytes.Buffer
	tw := tar.NewWriter(&archive)
	content := bytes.Repeat([]byte("0123456789"), 200_000)
	for _, h := range []*tar.Header{
		{Name: "dir/", Typeflag: tar.TypeDir, Mode: 0o750},
		{Name: "dir/big", Typeflag: tar.TypeReg, Mode: 0o640, Size: int64(len(content))},
		{Name: "dir/link", Typeflag: tar.TypeSymlink, Linkname: "big"},
	} {
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := tw.Write(content); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	up, err := d.client.Upload(ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := up.Send(&boxwoodv1.UploadRequest{Part: &boxwoodv1.UploadRequest_Start{Start: &boxwoodv1.UploadStart{SandboxId: sb.GetId(), Path: "/in"}}}); err != nil {
		t.Fatal(err)
	}
	for b := archive.Bytes(); len(b) > 0; {
		n := min(len(b), 100_000)
		if err := up.Send(&boxwoodv1.UploadRequest{Part: &boxwoodv1.UploadRequest_Chunk{Chunk: b[:n]}}); err != nil {
			t.Fatal(err)
		}
		b = b[n:]
	}
	r, err := up.CloseAndRecv()
	if err != nil || r.GetEntries() != 3 {
		t.Fatalf("uploaded %v, %v", r, err)
	}
	if n := r.GetResult().GetNode(); n.GetVerdict() != boxwoodv1.Verdict_VERDICT_FILES {
		t.Fatalf("an upload is a change of files: %v", n)
	}
	if got := d.ok(t, sb.GetId(), "stat -c '%a %s' /in/dir /in/dir/big | tr '\\n' ' '; readlink /in/dir/link"); !strings.HasPrefix(got, "750 ") || !strings.HasSuffix(got, "640 2000000 big\n") {
		t.Fatalf("unpacked as %q", got)
	}
	down, err := d.client.Download(ctx(t), &boxwoodv1.DownloadRequest{SandboxId: sb.GetId(), Path: "/in/dir"})
	if err != nil {
		t.Fatal(err)
	}
	var back bytes.Buffer
	for {
		m, err := down.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		back.Write(m.GetChunk())
	}
	found := false
	for tr := tar.NewReader(&back); ; {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if filepath.Base(h.Name) == "big" {
			got, err := io.ReadAll(tr)
			if err != nil || !bytes.Equal(got, content) {
				t.Fatalf("the file came back as %d bytes, %v", len(got), err)
			}
			found = true
		}
	}
	if !found {
		t.Fatal("the file didn't come back")
	}
	if n := d.run(t, sb.GetId(), "true").GetNode(); n.GetVerdict() != boxwoodv1.Verdict_VERDICT_NONE {
		t.Fatalf("a download is no change: %v", n.GetReasons())
	}
}

func TestLeasesEnd(t *testing.T) {
	d := running(t)
	root, _ := d.newTree(t)
	var short, renewed string
	testenv.Reach(t, 500*time.Millisecond, func(within time.Duration) bool {
		r := d.tryFork(t, &boxwoodv1.ForkRequest{LeaseNs: int64(within), Wants: []*boxwoodv1.ForkRequest_Want{
			{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: root.GetId()}, Count: 2}}})
		short, renewed = r[0].GetSandbox().GetId(), r[1].GetSandbox().GetId()
		_, err := d.client.Renew(ctx(t), &boxwoodv1.RenewRequest{SandboxIds: []string{renewed}, LeaseNs: int64(time.Hour)})
		if err != nil && reason(err) != "sandbox_gone" { // it has ended already
			t.Fatal(err)
		}
		return err == nil
	})
	until(t, "the lease ends", func() bool {
		there := map[string]bool{}
		for _, s := range d.list(t) {
			there[s.GetId()] = true
		}
		if !there[renewed] {
			t.Fatal("a renewed sandbox was ended")
		}
		return !there[short]
	})
	if _, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: short, Command: &boxwoodv1.Command{Shell: []byte("true")}}); reason(err) != "sandbox_gone" {
		t.Fatalf("a turn after the lease: %v", err)
	}
}

// A sandbox whose pid 1 is killed from outside in the middle of a turn: the
// turn's node says lost and is withheld, the sandbox is gone, others go on.
func TestLostSandbox(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	_, other := d.newTree(t)
	good := d.run(t, sb.GetId(), "echo good > /root/x").GetNode()
	stream, err := d.client.RunTurn(ctx(t), &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Shell: []byte("echo begun; exec sleep 1000")}})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := stream.Recv(); err != nil || string(m.GetStdout()) != "begun\n" {
		t.Fatal(m, err)
	}
	root := d.rootOf(t, sb.GetGeneration()) // of pid 1 or of the sleep: both in one pid namespace
	killPidOne(t, filepath.Dir(root))
	m, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if n := m.GetResult().GetNode(); !m.GetResult().GetSandboxLost() || n.GetTurnStatus() != boxwoodv1.TurnStatus_TURN_STATUS_LOST ||
		n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
		t.Fatalf("a lost sandbox: %v", m)
	}
	if _, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Shell: []byte("true")}}); reason(err) != "sandbox_gone" {
		t.Fatalf("a turn in a lost sandbox: %v", err)
	}
	d.ok(t, other.GetId(), "echo fine")
	if got := d.ok(t, d.fork(t, good.GetId(), 1)[0].GetId(), "cat /root/x"); got != "good\n" {
		t.Fatalf("the node before the loss forks to %q", got)
	}
}

// pidOne is the first process, as the host counts, of the pid namespace that the process with this folder of /proc is in; 0 if
// that is gone.
func pidOne(proc string) int {
	ns, err := os.Readlink(filepath.Join(proc, "ns/pid"))
	if err != nil {
		return 0
	}
	all, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range all {
		if other, err := os.Readlink(filepath.Join(p, "ns/pid")); err != nil || other != ns {
			continue
		}
		status, _ := os.ReadFile(filepath.Join(p, "status"))
		for line := range strings.Lines(string(status)) {
			if f := strings.Fields(line); len(f) == 3 && f[0] == "NSpid:" && f[2] == "1" {
				pid, _ := strconv.Atoi(filepath.Base(p))
				return pid
			}
		}
	}
	return 0
}

// killPidOne kills that.
func killPidOne(t testing.TB, proc string) {
	t.Helper()
	pid := pidOne(proc)
	if pid == 0 {
		t.Fatal("no pid 1 where " + proc + " is")
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

func TestExportedTables(t *testing.T) {
	d := running(t)
	root, sb := d.newTree(t)
	d.run(t, sb.GetId(), "true")
	n := d.run(t, sb.GetId(), "echo x > /root/x").GetNode()
	d.captured(t, n.GetId())
	d.fork(t, n.GetId(), 2)
	for table, want := range map[string]int64{"turns": 2, "nodes": 3, "forks": 3, "captures": 1} {
		stream, err := d.client.ExportStats(ctx(t), &boxwoodv1.ExportStatsRequest{Table: table, TreeId: root.GetTreeId()})
		if err != nil {
			t.Fatal(err)
		}
		var data bytes.Buffer
		for {
			m, err := stream.Recv()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("exporting %s: %v", table, err)
			}
			data.Write(m.GetData())
		}
		r, err := ipc.NewReader(&data)
		if err != nil {
			t.Fatalf("reading %s: %v", table, err)
		}
		rows := int64(0)
		for r.Next() {
			rows += r.Record().NumRows()
		}
		if r.Err() != nil || rows != want {
			t.Errorf("table %s has %d rows of this tree, want %d; %v", table, rows, want, r.Err())
		}
		r.Release()
	}
	if _, err := d.client.ListTables(ctx(t), &boxwoodv1.ListTablesRequest{}); err != nil {
		t.Fatal(err)
	}
	stream, err := d.client.ExportStats(ctx(t), &boxwoodv1.ExportStatsRequest{Table: "nonsense"})
	if err == nil {
		_, err = stream.Recv()
	}
	if err == nil || reason(err) == "internal" {
		t.Fatalf("a table that isn't there: %v", err)
	}
}
