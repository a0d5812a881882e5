package service

import (
	"io"
	"testing"

	"google.golang.org/grpc/status"

	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// Short forms of calls that must work.

func (d *daemon) newTree(t testing.TB, calls ...string) (*boxwoodv1.Node, *boxwoodv1.Sandbox) {
	t.Helper()
	r, err := d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{
		Start: &boxwoodv1.CreateTreeRequest_Image{Image: "mini"}, WithSandbox: true,
		Defaults: &boxwoodv1.Defaults{AllowCalls: calls},
	})
	if err != nil {
		t.Fatal("creating a tree: ", err)
	}
	t.Cleanup(func() {
		if d.cmd != nil {
			_, _ = d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: r.GetTree().GetId()})
		}
	})
	return r.GetRoot(), r.GetSandbox()
}

func (d *daemon) run(t testing.TB, sandbox, shell string) *boxwoodv1.TurnResult {
	t.Helper()
	r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sandbox, Command: &boxwoodv1.Command{Shell: []byte(shell)}})
	if err != nil {
		t.Fatalf("running %q: %v", shell, err)
	}
	return r
}

// ok runs a command that must succeed and gives its output.
func (d *daemon) ok(t testing.TB, sandbox, shell string) string {
	t.Helper()
	o := d.run(t, sandbox, shell).GetNode().GetObservation()
	if o.GetExitCode() != 0 {
		t.Fatalf("%q ended with %d: %s%s", shell, o.GetExitCode(), o.GetStdout(), o.GetStderr())
	}
	return string(o.GetStdout())
}

func (d *daemon) tryRun(t testing.TB, req *boxwoodv1.RunTurnRequest) (*boxwoodv1.TurnResult, error) {
	t.Helper()
	stream, err := d.client.RunTurn(ctx(t), req)
	if err != nil {
		return nil, err
	}
	for {
		m, err := stream.Recv()
		if err != nil {
			return nil, err
		}
		if m.GetResult() != nil {
			return m.GetResult(), nil
		}
	}
}

func (d *daemon) fork(t testing.TB, node string, n int32) []*boxwoodv1.Sandbox {
	t.Helper()
	var out []*boxwoodv1.Sandbox
	for _, r := range d.tryFork(t, &boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{
		{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: node}, Count: n}}}) {
		if r.GetError() != nil {
			t.Fatalf("child %d failed: %s", r.GetChild(), r.GetMessage())
		}
		out = append(out, r.GetSandbox())
	}
	if len(out) != int(n) {
		t.Fatalf("%d children of %d", len(out), n)
	}
	return out
}

func (d *daemon) tryFork(t testing.TB, req *boxwoodv1.ForkRequest) []*boxwoodv1.ForkResult {
	t.Helper()
	stream, err := d.client.Fork(ctx(t), req)
	if err != nil {
		t.Fatal("forking: ", err)
	}
	var out []*boxwoodv1.ForkResult
	for {
		m, err := stream.Recv()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatal("forking: ", err)
		}
		out = append(out, m)
	}
}

func (d *daemon) captured(t testing.TB, nodes ...string) []*boxwoodv1.Node {
	t.Helper()
	r, err := d.client.WaitCaptured(ctx(t), &boxwoodv1.WaitCapturedRequest{NodeIds: nodes})
	if err != nil {
		t.Fatal("waiting for captures: ", err)
	}
	return r.GetNodes()
}

// reason is the short code of a failed call.
func reason(err error) string {
	for _, d := range status.Convert(err).Details() {
		if e, ok := d.(*boxwoodv1.Error); ok {
			return e.GetReason()
		}
	}
	return ""
}
