package service

import (
	"slices"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// Processes that a daemon is asked to ignore make no verdict and no dump, and children don't have them, unless they are
// dumped with others. What they do to files counts; nodes and figures tell of them.
func TestIgnoredProcesses(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	t.Setenv(ignoreName, "ticker")
	d := startDaemon(t, "")
	d.importRoot(t)
	_, sb := d.newTree(t)
	const there = `cat /proc/[0-9]*/comm | grep -c '^ticker$'; true`
	turn := func(shell string, verdict boxwoodv1.Verdict, kind boxwoodv1.ProcessKind) *boxwoodv1.Node {
		t.Helper()
		n := d.run(t, sb.GetId(), shell).GetNode()
		if n.GetVerdict() != verdict {
			t.Errorf("%s: %v %q", shell, n.GetVerdict(), n.GetReasons())
		}
		if !slices.ContainsFunc(n.GetReasons(), func(r string) bool { return strings.Contains(r, "ignored") && strings.Contains(r, "ticker") }) {
			t.Errorf("%s: its reasons don't tell of it: %q", shell, n.GetReasons())
		}
		n = d.captured1(t, d.saved(t, n.GetId()))
		if n.GetProcessKind() != kind {
			t.Errorf("%s: kind %v", shell, n.GetProcessKind())
		}
		return n
	}
	count := func(n *boxwoodv1.Node, want string) {
		t.Helper()
		c := d.fork(t, n.GetId(), 1)[0]
		if got := strings.TrimSpace(d.ok(t, c.GetId(), there)); got != want {
			t.Errorf("%s there, not %s", got, want)
		}
		free(t, d, c)
	}
	none, files := boxwoodv1.Verdict_VERDICT_NONE, boxwoodv1.Verdict_VERDICT_FILES
	empty, shells, dump := boxwoodv1.ProcessKind_PROCESS_KIND_EMPTY, boxwoodv1.ProcessKind_PROCESS_KIND_SHELLS, boxwoodv1.ProcessKind_PROCESS_KIND_DUMP
	n := turn(`mkfifo /in; printf '#!/bin/bash\nexec 9<>/in\nwhile :; do read -t 0.01 -u 9; [ -e /write ] && echo >>/written; done\n' >/ticker; chmod +x /ticker
		/ticker >/dev/null 2>&1 </dev/null & until grep -q ticker /proc/[0-9]*/comm; do :; done`, files, empty)
	count(n, "0")
	turn("true", none, empty)
	count(turn("touch /write; until [ -e /written ]; do :; done; rm /write", files, empty), "0")
	d.open(t, sb.GetId(), "shell")
	if s := d.say(t, sb.GetId(), "shell", "x=1").GetNode(); d.captured1(t, d.saved(t, s.GetId())).GetProcessKind() != shells {
		t.Errorf("beside a session: %v", s)
	}
	if _, err := d.client.CloseSession(ctx(t), &boxwoodv1.CloseSessionRequest{SandboxId: sb.GetId(), Name: "shell"}); err != nil {
		t.Fatal(err)
	}
	count(turn(sleeper, boxwoodv1.Verdict_VERDICT_PROCESS, dump), "1")
	if said := d.says(t, "ignored processes"); !strings.HasPrefix(said, "ticker; ") {
		t.Error(said)
	}
}
