package service

import (
	"fmt"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/treewalk"
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

// forksAlike demands that a fork of the node at which a sandbox stands shows the
// same tree as that sandbox.
func (d *daemon) forksAlike(t testing.TB, sb *boxwoodv1.Sandbox, node string) {
	t.Helper()
	want, sum := digest(t, d.rootOf(t, sb.GetGeneration()))
	child := d.fork(t, node, 1)[0]
	if got, s := digest(t, d.rootOf(t, child.GetGeneration())); s != sum {
		t.Errorf("the child differs:\n%s", strings.Join(treewalk.Diff(want, got, 20), "\n"))
	}
}

// A turn may move the folders away that a box's mounts lie in. Such a root can't
// be made again, and its node says so (law 6); any other forks.
func TestMovedMountPointsWithholdTheNode(t *testing.T) {
	d := running(t)
	for _, attack := range []struct {
		shell    string
		withheld bool
	}{
		{"mv /run /gone", true},
		{"mv /run /gone && mkdir -p /run/box", true}, // or the child's /gone/box would differ
		{"mv /run /gone && mkdir /run && touch /run/box", true},
		{"mv /run /gone && mkdir /run && ln -s /proc /run/box", true},
		{"mv /etc /gone", true},
		{"mv /etc /gone && mkdir -p /etc/machine-id", true},
		{"mv /etc /gone && cp -a /gone /etc", true},
		{"mv /etc /gone && mkdir /etc && ln -s machine-id /etc/machine-id", true},
		{"mv /etc /gone && mkdir /etc && ln -s /dev/null /etc/machine-id", true},
		{"mv /etc /gone && mkdir /etc && ln -s /run/box/machine-id /etc/machine-id", true},
		{"mv /etc /gone && ln -s gone /etc", false},
		{"mv /etc /gone && mv /gone /etc", false},
		{"rm -rf /dev /proc /sys /etc /run 2>/dev/null; mv /dev /gone 2>/dev/null; rm -rf /bin /usr", false},
		{"chmod 0 / /etc /run", false},
	} {
		t.Run(attack.shell, func(t *testing.T) {
			_, sb := d.newTree(t)
			n := d.captured(t, d.run(t, sb.GetId(), attack.shell).GetNode().GetId())[0]
			if withheld := n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD; withheld != attack.withheld {
				t.Fatalf("%v: %s", n.GetCapture(), n.GetWithheldReason())
			} else if !withheld {
				d.forksAlike(t, sb, n.GetId())
			} else if !strings.Contains(n.GetWithheldReason(), "mount point") {
				t.Errorf("the reason is %q", n.GetWithheldReason())
			}
		})
	}
}
