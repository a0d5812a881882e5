package service

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// sleepers prints the pid of each sleep that runs in the box.
const sleepers = `for c in /proc/[0-9]*/comm; do read -r n < $c; [ "$n" != sleep ] || echo "${c//[^0-9]/}"; done`

func TestTurnsGrowATree(t *testing.T) {
	d := running(t)
	root, sb := d.newTree(t)
	if root.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED || root.GetCheckpointId() == "" {
		t.Fatalf("a fresh root must be captured: %v", root)
	}

	none := d.run(t, sb.GetId(), "ls / >/dev/null; cat /etc/passwd | wc -l").GetNode()
	if none.GetVerdict() != boxwoodv1.Verdict_VERDICT_NONE {
		t.Fatalf("a reading turn was judged %v: %q", none.GetVerdict(), none.GetReasons())
	}
	if none.GetCheckpointId() != root.GetCheckpointId() || none.GetParentId() != root.GetId() {
		t.Fatal("a none turn must share its parent's checkpoint")
	}

	files := d.run(t, sb.GetId(), "echo one > /root/a").GetNode()
	if files.GetVerdict() != boxwoodv1.Verdict_VERDICT_FILES {
		t.Fatalf("a writing turn was judged %v", files.GetVerdict())
	}
	got := d.captured(t, files.GetId())[0]
	if got.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED || got.GetCheckpointId() == root.GetCheckpointId() {
		t.Fatalf("the writing turn's node: %v", got)
	}
	if effects := files.GetEffects(); len(effects) == 0 || string(effects[0].GetSubject()) != "/root/a" {
		t.Fatalf("effects %v must name /root/a", effects)
	}

	after := d.run(t, sb.GetId(), "cat /root/a").GetNode()
	if after.GetVerdict() != boxwoodv1.Verdict_VERDICT_NONE || after.GetCheckpointId() != got.GetCheckpointId() {
		t.Fatalf("after a capture a reading turn is none and shares it: %v", after)
	}
	if s := string(after.GetObservation().GetStdout()); s != "one\n" {
		t.Fatalf("observation %q", s)
	}
}

func TestForkFromAPastNode(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	d.ok(t, sb.GetId(), "mkdir /w && echo 1 > /w/f")
	past := d.run(t, sb.GetId(), "echo 2 > /w/f").GetNode()
	d.ok(t, sb.GetId(), "echo 3 > /w/f; rm -rf /root")
	child := d.fork(t, past.GetId(), 1)[0]
	if got := d.ok(t, child.GetId(), "cat /w/f; test -d /root && echo home"); got != "2\nhome\n" {
		t.Fatalf("the child sees %q", got)
	}
	if got := d.ok(t, sb.GetId(), "cat /w/f"); got != "3\n" {
		t.Fatalf("the parent sees %q", got)
	}
	if child.GetGeneration() == sb.GetGeneration() || child.GetHostname() == sb.GetHostname() {
		t.Fatal("a child must be a new authority")
	}
	ids := func(id string) string {
		return d.ok(t, id, "hostname 2>/dev/null || cat /proc/sys/kernel/hostname; cat /etc/machine-id")
	}
	if ids(child.GetId()) == ids(sb.GetId()) {
		t.Fatal("hostname and machine-id must differ between generations")
	}
}

func TestRollbackInPlace(t *testing.T) {
	d := running(t)
	root, sb := d.newTree(t)
	good := d.run(t, sb.GetId(), "echo good > /root/state").GetNode()
	d.ok(t, sb.GetId(), "rm -rf /root /etc/passwd; echo bad > /state")
	r, err := d.client.Rollback(ctx(t), &boxwoodv1.RollbackRequest{SandboxId: sb.GetId(), NodeId: good.GetId()})
	if err != nil {
		t.Fatal(err)
	}
	if r.GetSandbox().GetId() != sb.GetId() || r.GetSandbox().GetGeneration() == sb.GetGeneration() || r.GetSandbox().GetHeadId() != good.GetId() {
		t.Fatalf("after the rollback: %v", r.GetSandbox())
	}
	if got := d.ok(t, sb.GetId(), "cat /root/state; test -e /state || echo gone; test -s /etc/passwd && echo users"); got != "good\ngone\nusers\n" {
		t.Fatalf("the sandbox sees %q", got)
	}
	_, other := d.newTree(t)
	_, err = d.client.Rollback(ctx(t), &boxwoodv1.RollbackRequest{SandboxId: other.GetId(), NodeId: root.GetId()})
	if reason(err) != "other_tree" {
		t.Fatalf("rolling back to another tree's node: %v", err)
	}
}

func TestSurvivorsAreDumped(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	root, sb := d.newTree(t)
	n := d.run(t, sb.GetId(), "echo x > /root/x; sleep 1000 >/dev/null 2>&1 & while read -r n < /proc/$!/comm && [ \"$n\" != sleep ]; do :; done").GetNode()
	if n.GetVerdict() != boxwoodv1.Verdict_VERDICT_BOTH || n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_RECORDED {
		t.Fatalf("a surviving process and a new file: %v, %v", n.GetVerdict(), n.GetCapture())
	}
	child := d.fork(t, d.saved(t, n.GetId()), 1)[0]
	for _, s := range []*boxwoodv1.Sandbox{sb, child} {
		if got := d.ok(t, s.GetId(), sleepers); got == "" {
			t.Fatalf("the survivor isn't there any more in %s", s.GetId())
		}
	}
	// Once the survivor is gone, the files alone are captured.
	n = d.run(t, sb.GetId(), "p=$("+sleepers+"); kill -9 $p; while kill -0 $p 2>/dev/null; do :; done").GetNode()
	got := d.captured(t, n.GetId())[0]
	if got.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED || got.GetCheckpointId() == root.GetCheckpointId() {
		t.Fatalf("after the survivor's end: %v", got)
	}
	if got := d.ok(t, d.fork(t, n.GetId(), 1)[0].GetId(), "cat /root/x; "+sleepers); got != "x\n" {
		t.Fatalf("the child sees %q", got)
	}
}

func TestDeadlineCancelAndBusy(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	testenv.Reach(t, 300*time.Millisecond, func(within time.Duration) bool {
		r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{
			Shell: []byte("sleep 1000 & echo begun; sleep 1000"), DeadlineNs: int64(within)}})
		if err != nil {
			t.Fatal(err)
		}
		n := r.GetNode()
		begun := string(n.GetObservation().GetStdout()) == "begun\n"
		if n.GetTurnStatus() != boxwoodv1.TurnStatus_TURN_STATUS_TIMED_OUT || !begun && len(n.GetObservation().GetStdout()) > 0 {
			t.Fatalf("past its deadline: %v %q", n.GetTurnStatus(), n.GetObservation().GetStdout())
		}
		return begun
	})
	if got := d.ok(t, sb.GetId(), sleepers); got != "" {
		t.Fatalf("a deadline must kill everything the turn started: %q", got)
	}

	long, cancel := context.WithCancel(ctx(t))
	stream, err := d.client.RunTurn(long, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Shell: []byte("echo begun; exec sleep 1000")}})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := stream.Recv(); err != nil || string(m.GetStdout()) != "begun\n" {
		t.Fatal(m, err)
	}
	if _, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Shell: []byte("true")}}); reason(err) != "sandbox_busy" {
		t.Fatalf("a second turn at once: %v", err)
	}
	cancel() // the client goes away
	r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), BusyWaitNs: int64(10 * time.Second),
		Command: &boxwoodv1.Command{Shell: []byte(sleepers)}})
	if err != nil || len(r.GetNode().GetObservation().GetStdout()) != 0 {
		t.Fatalf("after a cancelled turn: %v %v", r, err)
	}
	left, err := d.client.GetNode(ctx(t), &boxwoodv1.GetNodeRequest{NodeId: r.GetNode().GetParentId()})
	if err != nil || left.GetTurnStatus() != boxwoodv1.TurnStatus_TURN_STATUS_CANCELLED {
		t.Fatalf("the cancelled turn's node: %v %v", left, err)
	}
}

func TestOpenTurn(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	b, err := d.client.BeginTurn(ctx(t), &boxwoodv1.BeginTurnRequest{SandboxId: sb.GetId()})
	if err != nil {
		t.Fatal(err)
	}
	step := func(shell string) *boxwoodv1.CommandResult {
		t.Helper()
		s, err := d.client.Exec(ctx(t), &boxwoodv1.ExecRequest{TurnId: b.GetTurnId(), Command: &boxwoodv1.Command{Shell: []byte(shell)}})
		if err != nil {
			t.Fatal(err)
		}
		for {
			m, err := s.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if m.GetCommand() != nil {
				return m.GetCommand()
			}
		}
	}
	step("echo a > /root/a")
	content := bytes.Repeat([]byte{0, 1, 255}, 1000)
	if _, err := d.client.WriteFile(ctx(t), &boxwoodv1.WriteFileRequest{SandboxId: sb.GetId(), TurnId: b.GetTurnId(), Path: "/root/b", Content: content, Mode: 0o600}); err != nil {
		t.Fatal(err)
	}
	got, err := d.client.ReadFile(ctx(t), &boxwoodv1.ReadFileRequest{SandboxId: sb.GetId(), TurnId: b.GetTurnId(), Path: "/root/b"})
	if err != nil || !bytes.Equal(got.GetContent(), content) || got.GetMode()&0o777 != 0o600 {
		t.Fatalf("read back %d bytes, mode %o, %v", len(got.GetContent()), got.GetMode(), err)
	}
	if _, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Shell: []byte("true")}}); reason(err) != "sandbox_busy" {
		t.Fatalf("a turn inside an open turn: %v", err)
	}
	if c := step("exit 3"); c.GetObservation().GetExitCode() != 3 {
		t.Fatalf("exit code %v", c)
	}
	r, err := d.client.EndTurn(ctx(t), &boxwoodv1.EndTurnRequest{TurnId: b.GetTurnId(), Ack: boxwoodv1.Ack_ACK_CAPTURED})
	if err != nil {
		t.Fatal(err)
	}
	if n := r.GetNode(); n.GetAction().GetSteps() != 3 || n.GetVerdict() != boxwoodv1.Verdict_VERDICT_FILES ||
		n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED || n.GetObservation().GetExitCode() != 3 {
		t.Fatalf("the turn's node: %v", n)
	}
	if _, err := d.client.EndTurn(ctx(t), &boxwoodv1.EndTurnRequest{TurnId: b.GetTurnId()}); reason(err) != "turn_over" {
		t.Fatalf("ending twice: %v", err)
	}
}

func TestIdempotencyKeys(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	req := &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), IdempotencyKey: "k-" + sb.GetId(), Command: &boxwoodv1.Command{Shell: []byte("echo x >> /root/log; wc -l < /root/log")}}
	first, err := d.tryRun(t, req)
	if err != nil {
		t.Fatal(err)
	}
	second, err := d.tryRun(t, req)
	if err != nil {
		t.Fatal(err)
	}
	if second.GetNode().GetId() != first.GetNode().GetId() {
		t.Fatal("a repeated key ran the turn again")
	}
	if got := strings.TrimSpace(d.ok(t, sb.GetId(), "wc -l < /root/log")); got != "1" {
		t.Fatalf("the command ran %s times", got)
	}
	req.Command.Shell = []byte("true")
	if _, err := d.tryRun(t, req); reason(err) != "key_reused" {
		t.Fatalf("a key with another request: %v", err)
	}
}

func TestBoundedOutput(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	o := d.run(t, sb.GetId(), "echo head; head -c 100000000 /dev/zero; echo; echo tail; printf '\\377\\n' >&2").GetNode().GetObservation()
	if int64(len(o.GetStdout()))+o.GetStdoutOmitted() != 100000000+11 {
		t.Fatalf("kept %d, omitted %d", len(o.GetStdout()), o.GetStdoutOmitted())
	}
	if !bytes.HasPrefix(o.GetStdout(), []byte("head\n")) || !bytes.HasSuffix(o.GetStdout(), []byte("\ntail\n")) {
		t.Fatal("head and tail must be kept")
	}
	if !bytes.Equal(o.GetStderr(), []byte{0xff, '\n'}) {
		t.Fatalf("stderr %q", o.GetStderr())
	}
}

// A client that asks for the result only gets one message, whatever was written.
func TestResultOnly(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	for _, command := range []string{"true", "echo out; echo err >&2", "head -c 1000000 /dev/zero"} {
		stream, err := d.client.RunTurn(ctx(t), &boxwoodv1.RunTurnRequest{
			SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Shell: []byte(command)}, ResultOnly: true})
		if err != nil {
			t.Fatal(err)
		}
		first, err := stream.Recv()
		if err != nil || first.GetResult() == nil {
			t.Fatalf("%s: the first message is %v, %v", command, first, err)
		}
		if m, err := stream.Recv(); !errors.Is(err, io.EOF) {
			t.Fatalf("%s: then came %v, %v", command, m, err)
		}
		if got := first.GetResult().GetNode().GetObservation(); command != "true" && len(got.GetStdout()) == 0 {
			t.Fatalf("%s: the observation is empty", command)
		}
	}
}

// A client that doesn't read what is streamed: the command isn't held up for
// long, the sandbox goes on, and what was left out is counted.
func TestSlowReaderHoldsUpNobody(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	stream, err := d.client.RunTurn(ctx(t), &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{
		Shell: []byte("echo begun; head -c 300000000 /dev/zero; echo done >&2")}})
	if err != nil {
		t.Fatal(err)
	}
	m, err := stream.Recv()
	if err != nil || !bytes.HasPrefix(m.GetStdout(), []byte("begun\n")) {
		t.Fatal(m, err)
	}
	first := int64(len(m.GetStdout()))
	// No more is read until another turn of the sandbox has run.
	r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), BusyWaitNs: int64(30 * time.Second), Command: &boxwoodv1.Command{Shell: []byte("echo next")}})
	if err != nil || string(r.GetNode().GetObservation().GetStdout()) != "next\n" {
		t.Fatal(r, err)
	}
	streamed := int64(0)
	for {
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		streamed += int64(len(m.GetStdout()) + len(m.GetStderr()))
		if res := m.GetResult(); res != nil {
			o := res.GetNode().GetObservation()
			if res.GetUnstreamed() == 0 || first+streamed+res.GetUnstreamed() != 300000011 {
				t.Fatalf("%d bytes streamed, %d left out", streamed, res.GetUnstreamed())
			}
			if int64(len(o.GetStdout()))+o.GetStdoutOmitted() != 300000006 || string(o.GetStderr()) != "done\n" {
				t.Fatal("the observation must have head and tail of everything")
			}
			return
		}
	}
}
