package service

import (
	"testing"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// What a turn leaves running is there in every child, as it was, and goes on apart
// from its siblings and its parent.
func TestAServerIsForked(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	_, sb := d.newTree(t)
	n := d.run(t, sb.GetId(), `mkfifo /in /out; (n=0; while :; do read -r line </in; n=$((n+1)); echo "$n $line" >/out; done) >/dev/null 2>&1 & echo started`).GetNode()
	got := d.captured(t, n.GetId())[0]
	if got.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED {
		t.Fatalf("%v: %s", got.GetCapture(), got.GetWithheldReason())
	}
	ask := func(sb *boxwoodv1.Sandbox, want string) {
		t.Helper()
		if got := d.ok(t, sb.GetId(), `echo hello >/in; cat /out`); got != want {
			t.Errorf("it says %q, not %q", got, want)
		}
	}
	ask(sb, "1 hello\n")
	ask(sb, "2 hello\n")
	children := d.fork(t, n.GetId(), 8)
	for range 2 {
		for _, c := range children {
			d.ok(t, c.GetId(), "true")
		}
	}
	for _, c := range children {
		ask(c, "1 hello\n")
		ask(c, "2 hello\n")
	}
	ask(sb, "3 hello\n")
	if got := d.captured(t, n.GetId())[0]; got.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_PROVEN {
		t.Errorf("after its forks the node is %v", got.GetCapture())
	}
	free(t, d, children...)
}
