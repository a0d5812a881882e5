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

// A turn beside a server that sleeps on is judged by what it changed itself, in the
// sandbox that started it and in those that are made from its dump.
func TestAnIdleServerIsNoChange(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	_, sb := d.newTree(t)
	n := d.run(t, sb.GetId(), `mkfifo /in; (while read -r line; do echo "$line" >>/out; done <>/in) >/dev/null 2>&1 & until test -p /in; do :; done`).GetNode()
	if got := d.captured(t, n.GetId())[0]; got.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED {
		t.Fatalf("%v: %s", got.GetCapture(), got.GetWithheldReason())
	}
	for _, s := range append(d.fork(t, n.GetId(), 2), sb) {
		for _, c := range []struct {
			shell string
			want  boxwoodv1.Verdict
		}{
			{"true", boxwoodv1.Verdict_VERDICT_NONE},
			{"t=$(mktemp); rm $t", boxwoodv1.Verdict_VERDICT_NONE},
			{"echo x >/file", boxwoodv1.Verdict_VERDICT_FILES},
			{"true", boxwoodv1.Verdict_VERDICT_NONE},
			{"echo hello >/in; until test -s /out; do :; done", boxwoodv1.Verdict_VERDICT_BOTH},
			{"true", boxwoodv1.Verdict_VERDICT_NONE},
		} {
			n := d.run(t, s.GetId(), c.shell).GetNode()
			// A capture may have met the server on its way back to its read.
			for tries := 0; tries < 10 && c.shell == "true" && n.GetVerdict() == boxwoodv1.Verdict_VERDICT_PROCESS; tries++ {
				d.captured(t, n.GetId())
				n = d.run(t, s.GetId(), c.shell).GetNode()
			}
			if n.GetVerdict() != c.want {
				t.Errorf("%s: %v, not %v: %q", c.shell, n.GetVerdict(), c.want, n.GetReasons())
			}
			if got := d.captured(t, n.GetId())[0]; got.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
				t.Errorf("%s: %s", c.shell, got.GetWithheldReason())
			}
		}
	}
}
