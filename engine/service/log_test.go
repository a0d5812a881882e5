package service

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/grpc/metadata"

	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// Whoever looks in the daemon's log for a request, a run, a tree, a node or a sandbox finds every line about it: those of calls, of
// calls that fail, and of what goes on behind their answers.
func TestLogLinesSayWhatTheyAreAbout(t *testing.T) {
	d := startDaemon(t, "")
	d.importRoot(t)
	const run = "logged"
	attempt := d.openRun(t, run, false).GetAttempt()
	of := func(request string) context.Context {
		return metadata.AppendToOutgoingContext(as(t, run, attempt), requestHeader, request)
	}
	made, err := d.client.CreateTree(of("rq-create"), &boxwoodv1.CreateTreeRequest{Start: &boxwoodv1.CreateTreeRequest_Image{Image: "mini"}, WithSandbox: true})
	if err != nil {
		t.Fatal(err)
	}
	tree, sb := made.GetTree().GetId(), made.GetSandbox().GetId()
	turn := func(request, sandbox string) string {
		t.Helper()
		stream, err := d.client.RunTurn(of(request), &boxwoodv1.RunTurnRequest{SandboxId: sandbox, Command: &boxwoodv1.Command{Shell: []byte("echo x >/root/x")}, Ack: boxwoodv1.Ack_ACK_CAPTURED})
		if err != nil {
			t.Fatal(err)
		}
		for {
			m, err := stream.Recv()
			if err != nil {
				return ""
			}
			if r := m.GetResult(); r != nil {
				return r.GetNode().GetId()
			}
		}
	}
	node := turn("rq-turn", sb)
	begun, err := d.client.BeginTurn(of("rq-begin"), &boxwoodv1.BeginTurnRequest{SandboxId: sb})
	if err != nil {
		t.Fatal(err)
	}
	ended, err := d.client.EndTurn(of("rq-end"), &boxwoodv1.EndTurnRequest{TurnId: begun.GetTurnId()})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.ReadFile(of("rq-fails"), &boxwoodv1.ReadFileRequest{SandboxId: sb, Path: "/none"}); err == nil {
		t.Error("a file that isn't there was read")
	}
	forks, err := d.client.Fork(of("rq-fork"), &boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: node}, Count: 1}}})
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = forks.Recv()
	}
	if _, err := d.client.Release(of("rq-release"), &boxwoodv1.ReleaseRequest{SandboxIds: []string{sb}}); err != nil {
		t.Fatal(err)
	}
	turn("rq-none", "sb_01kb0000000000000000000009")
	for _, c := range []struct {
		request, line string
		says          []string
	}{
		{"rq-create", "/CreateTree", []string{"tree=" + tree, "node=" + made.GetRoot().GetId()}},
		{"rq-turn", "/RunTurn", []string{"tree=" + tree, "sandbox=" + sb, "node=" + node}},
		{"rq-begin", "/BeginTurn", []string{"tree=" + tree, "sandbox=" + sb}},
		{"rq-end", "/EndTurn", []string{"tree=" + tree, "sandbox=" + sb, "node=" + ended.GetNode().GetId()}},
		{"rq-fails", "call failed", []string{"tree=" + tree, "sandbox=" + sb}},
		{"rq-fork", "/Fork", []string{"tree=" + tree, "node=" + node}},
		{"rq-release", "sandbox ended", []string{"tree=" + tree, "sandbox=" + sb}},
		{"rq-none", "call failed", nil},
	} {
		find := func() (line string) {
			for l := range strings.Lines(d.log.String()) {
				if strings.Contains(l, "request="+c.request+" ") || strings.Contains(l, "request="+c.request+"\n") {
					if strings.Contains(l, c.line) {
						line = strings.TrimSpace(l) + " "
					}
				}
			}
			return line
		}
		until(t, c.request+" is in the log", func() bool { return find() != "" })
		for _, want := range append(c.says, "run="+run) {
			if !strings.Contains(find(), " "+want+" ") {
				t.Errorf("the line of %s lacks %s: %s", c.request, want, find())
			}
		}
	}
}
