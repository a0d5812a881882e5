package service

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/metadata"

	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// as is a context whose calls are of an attempt of a run.
func as(t testing.TB, run string, attempt int64) context.Context {
	return metadata.AppendToOutgoingContext(ctx(t), runHeader, fmt.Sprintf("%s/%d", run, attempt))
}

func (d *daemon) openRun(t testing.TB, name string, adopt bool) *boxwoodv1.OpenRunResponse {
	t.Helper()
	r, err := d.client.OpenRun(ctx(t), &boxwoodv1.OpenRunRequest{Name: name, Adopt: adopt})
	if err != nil {
		t.Fatal("opening a run: ", err)
	}
	return r
}

func (d *daemon) treeOfRun(t testing.TB, run string, attempt int64) *boxwoodv1.CreateTreeResponse {
	t.Helper()
	made, err := d.client.CreateTree(as(t, run, attempt), &boxwoodv1.CreateTreeRequest{
		Start: &boxwoodv1.CreateTreeRequest_Image{Image: "mini"}, WithSandbox: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	if made.GetTree().GetRun() != run {
		t.Fatalf("the tree is of run %q", made.GetTree().GetRun())
	}
	return made
}

// If it fails, an attempt that was taken for crashed goes on beside the next one: its nodes and
// rewards mix with those of the new attempt.
func TestNewAttemptEndsTheOld(t *testing.T) {
	d := running(t)
	const run = "fenced"
	first := d.openRun(t, run, false)
	made := d.treeOfRun(t, run, first.GetAttempt())
	turn := func(attempt int64, sandbox, command string) error {
		stream, err := d.client.RunTurn(as(t, run, attempt), &boxwoodv1.RunTurnRequest{
			SandboxId: sandbox, Command: &boxwoodv1.Command{Shell: []byte(command)}})
		for err == nil {
			var m *boxwoodv1.TurnEvent
			if m, err = stream.Recv(); err == nil && m.GetResult() != nil {
				return nil
			}
		}
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- turn(first.GetAttempt(), made.GetSandbox().GetId(), "touch /root/began; sleep 600") }()
	until(t, "the turn runs", func() bool {
		for _, s := range d.sandboxes(t, made.GetTree().GetId()) {
			return s.GetBusy()
		}
		return false
	})
	second := d.openRun(t, run, false)
	if second.GetAttempt() != first.GetAttempt()+1 || second.GetReleased() != 1 || len(second.GetAdopted()) != 0 {
		t.Fatalf("the second attempt: %v", second)
	}
	if left := d.sandboxes(t, made.GetTree().GetId()); len(left) != 0 {
		t.Fatalf("%d sandboxes of the old attempt live", len(left))
	}
	// The call that ran has ended: with the node of a turn that was stopped, or refused.
	if err := <-ended; err != nil && reason(err) != "attempt_superseded" {
		t.Fatalf("the call that ran ended with %v", err)
	}
	before := d.listNodes(t, made.GetTree().GetId())
	if err := turn(first.GetAttempt(), made.GetSandbox().GetId(), "true"); reason(err) != "attempt_superseded" {
		t.Fatalf("a late turn: %v", err)
	}
	_, err := d.client.Annotate(as(t, run, first.GetAttempt()), &boxwoodv1.AnnotateRequest{Annotations: []*boxwoodv1.NodeAnnotation{
		{NodeId: made.GetRoot().GetId(), Rewards: map[string]float64{"late": 1}}}})
	if reason(err) != "attempt_superseded" {
		t.Fatalf("a late reward: %v", err)
	}
	if after := d.listNodes(t, made.GetTree().GetId()); after != before {
		t.Fatalf("late calls changed\n%s\nto\n%s", before, after)
	}
	for said, want := range map[string]string{run: "bad_run", run + "/x": "bad_run", fmt.Sprintf("%s/%d", run, second.GetAttempt()+1): "no_such_attempt", "nobody/1": "run_not_found"} {
		_, err := d.client.GetInfo(metadata.AppendToOutgoingContext(ctx(t), runHeader, said), &boxwoodv1.GetInfoRequest{})
		if reason(err) != want {
			t.Errorf("a call of run %q: %v, want %s", said, err, want)
		}
	}

	// What lives is adopted, and goes on where it was.
	kept := d.treeOfRun(t, run, second.GetAttempt())
	if err := turn(second.GetAttempt(), kept.GetSandbox().GetId(), "echo kept > /root/kept"); err != nil {
		t.Fatal(err)
	}
	third := d.openRun(t, run, true)
	if len(third.GetAdopted()) != 1 || third.GetAdopted()[0].GetId() != kept.GetSandbox().GetId() || third.GetReleased() != 0 {
		t.Fatalf("adopted: %v", third)
	}
	if err := turn(third.GetAttempt(), kept.GetSandbox().GetId(), "cat /root/kept"); err != nil {
		t.Fatal(err)
	}
	_, err = d.client.CloseRun(ctx(t), &boxwoodv1.CloseRunRequest{Name: run, Attempt: second.GetAttempt()})
	if reason(err) != "attempt_superseded" {
		t.Fatalf("closing as an old attempt: %v", err)
	}
	r, err := d.client.CloseRun(as(t, run, third.GetAttempt()), &boxwoodv1.CloseRunRequest{Name: run, Attempt: third.GetAttempt(), CloseTrees: true})
	if err != nil || r.GetReleased() != 1 || r.GetClosedTrees() != 2 {
		t.Fatalf("closed: %v, %v", r, err)
	}
	if err := turn(third.GetAttempt(), kept.GetSandbox().GetId(), "true"); reason(err) != "run_closed" {
		t.Fatalf("a turn in a closed run: %v", err)
	}
}

// If it fails, an attempt that hangs, and whose process lives, keeps the next one from beginning: its calls are in the middle of
// a stream that it neither reads nor writes.
func TestAHangingAttemptHoldsUpNoOther(t *testing.T) {
	d := running(t)
	const run = "hanging"
	first := d.openRun(t, run, false)
	made := d.treeOfRun(t, run, first.GetAttempt())
	hangs, cancel := context.WithCancel(context.Background()) // its calls have no deadline that would end them
	defer cancel()
	of := metadata.AppendToOutgoingContext(hangs, runHeader, fmt.Sprintf("%s/%d", run, first.GetAttempt()))
	if _, err := d.client.WatchTree(of, &boxwoodv1.WatchTreeRequest{TreeId: made.GetTree().GetId()}); err != nil {
		t.Fatal(err)
	}
	upload, err := d.client.Upload(of)
	if err == nil {
		err = upload.Send(&boxwoodv1.UploadRequest{Part: &boxwoodv1.UploadRequest_Start{Start: &boxwoodv1.UploadStart{SandboxId: made.GetSandbox().GetId(), Path: "/root"}}})
	}
	if err != nil {
		t.Fatal(err)
	}
	imports, err := d.client.ImportTree(of)
	if err == nil {
		err = imports.Send(&boxwoodv1.ImportTreeRequest{Part: &boxwoodv1.ImportTreeRequest_Start{Start: &boxwoodv1.ImportTreeStart{}}})
	}
	if err != nil {
		t.Fatal(err)
	}
	turn, err := d.client.RunTurn(of, &boxwoodv1.RunTurnRequest{SandboxId: d.treeOfRun(t, run, first.GetAttempt()).GetSandbox().GetId(),
		Command: &boxwoodv1.Command{Shell: []byte("head -c 30000000 /dev/zero")}})
	if err == nil {
		_, err = turn.Recv()
	}
	if err != nil {
		t.Fatal(err)
	}
	// More changes than windows and buffers on the way to the client hold.
	policy := strings.Repeat("x", 4000)
	for i := range 1000 {
		value := float64(i)
		if _, err := d.client.Annotate(of, &boxwoodv1.AnnotateRequest{Annotations: []*boxwoodv1.NodeAnnotation{
			{NodeId: made.GetRoot().GetId(), Value: &value, Labels: map[string]string{"long": policy}}}}); err != nil {
			t.Fatal(err)
		}
	}
	second, err := d.client.OpenRun(ctx(t), &boxwoodv1.OpenRunRequest{Name: run})
	if err != nil || second.GetReleased() != 2 {
		t.Fatalf("the next attempt: %v, %v", second, err)
	}
	if err := upload.RecvMsg(&boxwoodv1.UploadResponse{}); reason(err) != "attempt_superseded" {
		t.Errorf("the upload ended with %v", err)
	}
}

// If it fails, closed trees fill the memory, can't be read any more, or never work again.
func TestClosedTreeLeavesMemory(t *testing.T) {
	d := running(t)
	root, sb := d.newTree(t)
	d.ok(t, sb.GetId(), "echo one > /root/one")
	node := d.run(t, sb.GetId(), "echo two > /root/two").GetNode()
	d.captured(t, node.GetId())
	before := d.listNodes(t, root.GetTreeId())
	if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: root.GetTreeId()}); err != nil {
		t.Fatal(err)
	}
	until(t, "the closed tree is archived", func() bool { return d.archived(t, root.GetTreeId()) })
	if after := d.listNodes(t, root.GetTreeId()); after != before {
		t.Fatalf("archived, the tree is\n%s\nand was\n%s", after, before)
	}
	if n, err := d.client.GetNode(ctx(t), &boxwoodv1.GetNodeRequest{NodeId: node.GetId()}); err != nil || string(n.GetAction().GetText()) != "echo two > /root/two" {
		t.Fatalf("a node of it: %v, %v", n, err)
	}
	stream, err := d.client.Fork(ctx(t), &boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{
		{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: node.GetId()}, Count: 1}}})
	if err == nil {
		_, err = stream.Recv()
	}
	if reason(err) != "tree_closed" {
		t.Fatalf("forking a node of a closed tree: %v", err)
	}
	if r, err := d.client.OpenTree(ctx(t), &boxwoodv1.OpenTreeRequest{TreeId: root.GetTreeId()}); err != nil || r.GetTree().GetClosed() || r.GetTree().GetArchived() {
		t.Fatalf("opened: %v, %v", r, err)
	}
	if got := d.ok(t, d.fork(t, node.GetId(), 1)[0].GetId(), "cat /root/one /root/two"); got != "one\ntwo\n" {
		t.Fatalf("opened again, it forks to %q", got)
	}
}

// archived: a tree's nodes have left memory.
func (d *daemon) archived(t testing.TB, id string) bool {
	t.Helper()
	r, err := d.client.ListTrees(ctx(t), &boxwoodv1.ListTreesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, tr := range r.GetTrees() {
		if tr.GetId() == id {
			return tr.GetArchived()
		}
	}
	return false
}

// If it fails, analysts can't read a tree once it is closed: its nodes as Parquet, by pyarrow, Polars and DuckDB.
func TestClosedTreeAsParquet(t *testing.T) {
	python := testenv.Python("pyarrow", "polars", "duckdb")
	testenv.Require(t, python.Need)
	d := running(t)
	root, sb := d.newTree(t)
	node := d.run(t, sb.GetId(), "echo two > /root/two").GetNode()
	d.captured(t, node.GetId())
	reward := &boxwoodv1.NodeAnnotation{NodeId: node.GetId(), Rewards: map[string]float64{"tests": 0.5}}
	if _, err := d.client.Annotate(ctx(t), &boxwoodv1.AnnotateRequest{Annotations: []*boxwoodv1.NodeAnnotation{reward}}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: root.GetTreeId()}); err != nil {
		t.Fatal(err)
	}
	until(t, "the closed tree is archived", func() bool { return d.archived(t, root.GetTreeId()) })
	stream, err := d.client.ExportStats(ctx(t), &boxwoodv1.ExportStatsRequest{Table: stats.Nodes, TreeId: root.GetTreeId()})
	var table bytes.Buffer
	for err == nil {
		var c *boxwoodv1.ExportStatsChunk
		if c, err = stream.Recv(); err == nil {
			table.Write(c.GetData())
		}
	}
	if !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "nodes.parquet"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if rows, err := stats.WriteParquet(&table, f); err != nil || rows != 2 {
		t.Fatalf("%d rows, %v; want the root and a turn", rows, err)
	}
	out, err := exec.Command(python.Path, "testdata/closed_tree.py", f.Name(), root.GetId(), node.GetId()).CombinedOutput()
	if err != nil {
		t.Fatalf("reading %s: %v\n%s", f.Name(), err, out)
	}
	if !d.archived(t, root.GetTreeId()) {
		t.Error("reading it has brought the tree back into memory")
	}
}

// listNodes is a tree's nodes as text.
func (d *daemon) listNodes(t testing.TB, id string) (all string) {
	t.Helper()
	stream, err := d.client.ListNodes(ctx(t), &boxwoodv1.ListNodesRequest{TreeId: id})
	for err == nil {
		var n *boxwoodv1.Node
		if n, err = stream.Recv(); err == nil {
			all += fmt.Sprintln(n.GetId(), n.GetParentId(), n.GetModifyIndex(), string(n.GetAction().GetText()), n.GetCapture(), n.GetCheckpointId(), n.GetRewards())
		}
	}
	return all
}
