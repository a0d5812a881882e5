package service

import (
	"slices"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// Programs in a folder of the root run in every child before it is handed out, in the order of their names, with its generation and
// seed; by them processes that were restored learn who they are. One that fails or takes too long is a failed child.
func TestHooks(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := startDaemon(t, "")
	d.importRoot(t)
	_, sb := d.newTree(t)
	const hooks = `mkdir -p /etc/boxwood/on-fork.d; cd /etc/boxwood/on-fork.d
hook() { printf '#!/bin/bash\n%s\n' "$2" >"$1"; chmod +x "$1"; }
hook 20-second 'echo second >>/born'
hook 10-first 'echo "first $BOXWOOD_GENERATION $BOXWOOD_SEED $PATH" >>/born; sleep 1000 >/dev/null 2>&1 </dev/null &'
hook .hidden 'echo hidden >>/born'
hook plain 'echo plain >>/born'; chmod -x plain; ln -s 20-second 30-link; mkdir 40-folder`
	files := d.saved(t, d.run(t, sb.GetId(), hooks).GetNode().GetId())
	server := d.saved(t, d.run(t, sb.GetId(), `printf '#!/bin/bash\necho "$(cat /run/box/generation) $BOXWOOD_SEED" >/in\n' >/etc/boxwood/on-fork.d/50-tell; chmod +x /etc/boxwood/on-fork.d/50-tell
		mkfifo /in /out; (read -r gen seed </in; while :; do echo "$gen $seed" >/out; done) >/dev/null 2>&1 & true`).GetNode().GetId())
	born := func(c *boxwoodv1.Sandbox, seed string) {
		t.Helper()
		lines := strings.Split(strings.TrimSpace(d.ok(t, c.GetId(), "cat /born")), "\n")
		first := strings.Fields(lines[0])
		if len(lines) != 2 || lines[1] != "second" || len(first) < 3 || first[0] != "first" || first[1] != c.GetGeneration() {
			t.Errorf("in generation %s the hooks left %q", c.GetGeneration(), lines)
		} else if seed != "" && first[2] != seed {
			t.Errorf("the hooks had the seed %s, and commands have %s", first[2], seed)
		}
	}
	for _, node := range []string{files, server} {
		got, err := d.replays(t, node, ofTwo, seeded)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range got {
			c := r.GetSandbox()
			if c == nil {
				t.Fatalf("a child failed: %s", r.GetMessage())
			}
			seed := strings.TrimSpace(d.ok(t, c.GetId(), `echo "$BOXWOOD_SEED"`))
			born(c, seed)
			if node == server {
				if got := strings.TrimSpace(d.ok(t, c.GetId(), `read -r line </out; echo "$line"`)); got != c.GetGeneration()+" "+seed {
					t.Errorf("the server of generation %s with seed %s knows %q", c.GetGeneration(), seed, got)
				}
			}
			if got := d.ok(t, c.GetId(), "cat /proc/[0-9]*/comm | grep -c '^sleep$'; true"); got != "0\n" {
				t.Errorf("%s processes of hooks live on", got)
			}
			free(t, d, c)
		}
	}

	// What hooks change counts for the first turn's verdict, and is in its node.
	c := d.fork(t, files, 1)[0]
	n := d.run(t, c.GetId(), "true").GetNode()
	if v := n.GetVerdict(); v != boxwoodv1.Verdict_VERDICT_FILES && v != boxwoodv1.Verdict_VERDICT_BOTH {
		t.Errorf("after hooks that wrote, a turn that did nothing is %v", v)
	}
	grandchild := d.fork(t, d.saved(t, n.GetId()), 1)[0]
	if got := d.ok(t, grandchild.GetId(), "grep -c second /born"); got != "2\n" {
		t.Errorf("in a child of a child they ran %s times", got)
	}
	free(t, d, c, grandchild)
	back, err := d.client.Rollback(ctx(t), &boxwoodv1.RollbackRequest{SandboxId: sb.GetId(), NodeId: files})
	if err != nil {
		t.Fatal("rolling back: ", err)
	}
	born(back.GetSandbox(), "")

	fresh := d.fork(t, files, 1)[0] // has run nothing but its hooks
	d.kill()
	d = startDaemon(t, d.dir)
	if !slices.ContainsFunc(d.sandboxes(t, ""), func(s *boxwoodv1.Sandbox) bool { return s.GetId() == fresh.GetId() }) {
		t.Error("a child that had run its hooks didn't outlive its daemon")
	}
	born(fresh, "")

	_, other := d.newTree(t)
	fails := d.saved(t, d.run(t, other.GetId(), hooks+`; hook 15-fails 'echo it is broken >&2; exit 3'`).GetNode().GetId())
	live := len(d.sandboxes(t, ""))
	r := d.tryFork(t, &boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: fails}, Count: 2}}})
	for _, r := range r {
		if r.GetError().GetReason() != "hook_failed" || !strings.Contains(r.GetMessage(), "15-fails") || !strings.Contains(r.GetMessage(), "it is broken") {
			t.Errorf("a failing hook: %v", r)
		}
	}
	slow := d.saved(t, d.run(t, other.GetId(), `cd /etc/boxwood/on-fork.d; rm *-*; printf '#!/bin/bash\nsleep 1000\n' >slow; chmod +x slow`).GetNode().GetId())
	d.stop()
	t.Setenv(hookLimit, "200ms")
	d = startDaemon(t, d.dir)
	r = d.tryFork(t, &boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: slow}, Count: 1}}})
	if len(r) != 1 || r[0].GetError().GetReason() != "hook_slow" {
		t.Errorf("a slow hook: %v", r)
	}
	if list := d.sandboxes(t, ""); len(list) != 0 || live != 3 {
		t.Errorf("%d sandboxes live, before the end of a daemon %d", len(list), live)
	}
}
