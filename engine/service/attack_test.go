package service

import (
	"fmt"
	"strings"
	"testing"

	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// A request that is refused costs the client nothing: its sandbox stands where
// it stood and goes on.
func TestRefusedTurnsLeaveTheSandboxAlone(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	many := map[string]string{}
	for i := range 65 {
		many[fmt.Sprint(i)] = "x"
	}
	ran := &boxwoodv1.Command{Shell: []byte("echo ran > /root/ran")}
	for name, req := range map[string]*boxwoodv1.RunTurnRequest{
		"long payload":        {Command: ran, Node: &boxwoodv1.NodeInput{Payload: make([]byte, 2<<20)}},
		"many labels":         {Command: ran, Node: &boxwoodv1.NodeInput{Labels: many}},
		"long label":          {Command: ran, Node: &boxwoodv1.NodeInput{Labels: map[string]string{"k": strings.Repeat("x", 5<<10)}}},
		"long policy version": {Command: ran, Node: &boxwoodv1.NodeInput{PolicyVersion: strings.Repeat("x", 5<<10)}},
		"NUL in cwd":          {Command: &boxwoodv1.Command{Shell: []byte("true"), Cwd: "/a\x00b"}},
		"NUL in user":         {Command: &boxwoodv1.Command{Shell: []byte("true"), User: "a\x00b"}},
		"long arguments":      {Command: &boxwoodv1.Command{Argv: [][]byte{[]byte("true"), []byte(strings.Repeat("x", 5<<20))}}},
		"many arguments":      {Command: &boxwoodv1.Command{Argv: append([][]byte{[]byte("true")}, make([][]byte, 1<<19)...)}},
	} {
		t.Run(name, func(t *testing.T) {
			req.SandboxId = sb.GetId()
			if r, err := d.tryRun(t, req); err == nil {
				t.Errorf("accepted: %v", r.GetNode().GetObservation())
			}
			n := d.run(t, sb.GetId(), "test ! -e /root/ran").GetNode()
			if n.GetObservation().GetExitCode() != 0 || n.GetVerdict() != boxwoodv1.Verdict_VERDICT_NONE {
				t.Errorf("the refused command ran: %v", n.GetVerdict())
			}
		})
	}
	turn, err := d.client.BeginTurn(ctx(t), &boxwoodv1.BeginTurnRequest{SandboxId: sb.GetId()})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.EndTurn(ctx(t), &boxwoodv1.EndTurnRequest{TurnId: turn.GetTurnId(), Node: &boxwoodv1.NodeInput{Labels: many}}); err == nil {
		t.Error("65 labels were taken")
	}
	if _, err := d.client.EndTurn(ctx(t), &boxwoodv1.EndTurnRequest{TurnId: turn.GetTurnId()}); err != nil {
		t.Errorf("the turn isn't open any more: %v", err)
	}
}
