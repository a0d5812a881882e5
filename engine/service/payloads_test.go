package service

import (
	"embed"
	"flag"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/miniroot"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

//go:embed testdata/payloads
var payloadFiles embed.FS

// payload is a program that verifies itself: each step says how many it has taken, or
// what is wrong with its state.
type payload struct {
	name string
	// needs a program of the host.
	needs string
	// calls that it may make beyond the usual.
	calls []string
	// start leaves it running. step prints the number.
	start, step string
	nightly     bool
	memory      int64 // that its sandbox may use; 0: as usual
	busy        bool  // it keeps processors busy as long as it lives
}

const (
	waitReady = `for i in $(seq 2500); do [ -e /tmp/ready ] && exit; sleep 0.02; done; cat /tmp/log; exit 1`
	askStep   = `PYTHONDONTWRITEBYTECODE=1 python3 /p/lib.py`
)

func python(name string) payload {
	return payload{name: name, needs: "/usr/bin/python3", step: askStep,
		start: `PYTHONDONTWRITEBYTECODE=1 python3 -u /p/` + name + `.py >/tmp/log 2>&1 </dev/null & ` + waitReady}
}

var payloads = []payload{
	{name: "shell", start: `mkfifo /in /out; declare -A a; (while :; do read -r line </in; a[n]=$((a[n]+1)); echo "${a[n]}" >/out; done) >/dev/null 2>&1 & true`,
		step: `echo step >/in; cat /out`},
	{name: "pipeline", start: `mkfifo /in /out; exec 7<>/in 8<>/out; (cat <&7 | while read -r x; do n=$((n+1)); echo $n; done | cat >&8) >/dev/null 2>&1 & true`,
		step: `echo step >/in; read -r n </out; echo $n`},
	python("threads"), python("mapped"), python("tcp"), python("pipes"), python("sysv"), python("repl"), python("web"), python("memory"), python("waits"),
	{name: "memory2g", needs: "/usr/bin/python3", nightly: true, memory: 3 << 30, step: askStep,
		start: `MIB=2048 python3 /p/memory.py >/tmp/log 2>&1 </dev/null & ` + waitReady},
	{name: "tmux", needs: "tmux", // two panes, each a bash with a count of its own
		start: `export TERM=screen; tmux -f /dev/null new-session -d -x 80 -y 24 'PS1= bash --norc' && tmux split-window 'PS1= bash --norc'`,
		step: `export TERM=screen; for p in 0 1; do tmux send-keys -t 0.$p "n=\$((n+1)); echo \$n >/tmp/$p.new; mv /tmp/$p.new /tmp/$p" Enter; done
			for p in 0 1; do until [ -e /tmp/$p ]; do sleep 0.02; done; done; [ "$(cat /tmp/0)" = "$(cat /tmp/1)" ] && cat /tmp/0; rm /tmp/0 /tmp/1`},
	{name: "make", needs: "make", busy: true, // in full run, five at once
		start: `printf 'all: $(addprefix done.,$(shell seq 60))\ndone.%%:\n\t@until [ -e go.$* ]; do sleep 0.02; done; [ ! -e $@ ] && touch $@\n' >/root/Makefile
			cd /root; make -j 5 all >/root/log 2>&1 </dev/null & sleep 0.2`,
		step: `cd /root; n=$(($(ls | grep -c ^go.)+1)); touch go.$n; for i in $(seq 1500); do [ -e done.$n ] && break; sleep 0.02; done
			[ "$(ls | grep -c ^done.)" = $n ] && ! grep -q Error log && echo $n || { ls; cat log /proc/[0-9]*/stat; exit 1; } >&2`},
	{name: "node", needs: "node",
		start: `mkfifo /in /out; exec 8<>/in; node -i <&8 >/tmp/log 2>&1 & sleep 0.5; echo 'let n = 0; const fs = require("fs"); const t = setInterval(() => {}, 1000); const step = () => fs.writeFileSync("/out", ++n + "\n")' >/in`,
		step:  `echo 'step()' >/in; cat /out`},
	{name: "redis", needs: "redis-server",
		start: `redis-server --port 0 --unixsocket /tmp/r.sock --save '' --dir /tmp >/tmp/log 2>&1 </dev/null & until redis-cli -s /tmp/r.sock ping >/dev/null 2>&1; do sleep 0.02; done`,
		step:  `redis-cli -s /tmp/r.sock incr n`},
	{name: "postgres", needs: "/usr/lib/postgresql/15/bin/postgres",
		start: `mkdir -p /var/pg /run/pg; chown agent /var/pg /run/pg; export PATH=/usr/lib/postgresql/15/bin:$PATH
			setpriv --reuid 1000 --regid 1000 --clear-groups initdb -D /var/pg -A trust --locale C -E UTF8 >/tmp/initdb 2>&1 || { cat /tmp/initdb; exit 1; }
			setpriv --reuid 1000 --regid 1000 --clear-groups pg_ctl -D /var/pg -o '-k /run/pg -h "" -c fsync=off' -l /var/pg/log -w start >/dev/null || { cat /var/pg/log; exit 1; }
			psql -h /run/pg -U agent postgres -qc 'create table t (n int); insert into t values (0)'`,
		step: `psql -h /run/pg -U agent postgres -Atqc 'update t set n = n + 1 returning n'`},
}

// payloadRoot is an image with what payloads need.
func payloadRoot(t testing.TB) string {
	return miniroot.Larger(t, strings.Fields("/usr/bin/python3 tmux make node redis-server redis-cli /usr/lib/postgresql/15/bin/psql setpriv gdb strace"), []string{
		"/usr/lib/python3.11", "/usr/lib/postgresql/15/bin", "/usr/lib/postgresql/15/lib", "/usr/share/postgresql/15", "/lib/terminfo", "/usr/lib/locale/C.utf8",
	})
}

var payloadsFull = flag.Bool("payloads.full", false, "every payload with every kill, and the large ones")

// payloadImages are imported once for each state folder.
var payloadImages sync.Map

// newPayload starts a payload in a tree of its own.
func (d *daemon) newPayload(t testing.TB, p payload) *boxwoodv1.Sandbox {
	t.Helper()
	if p.needs != "" {
		testenv.Require(t, testenv.Program(p.needs))
	}
	once, _ := payloadImages.LoadOrStore(d.dir, &sync.Once{})
	once.(*sync.Once).Do(func() {
		stream, err := d.client.ImportImage(ctx(t), &boxwoodv1.ImportImageRequest{Path: payloadRoot(t), Name: "payloads"})
		for err == nil {
			_, err = stream.Recv()
		}
		if err != io.EOF {
			t.Fatal("importing the root of the payloads: ", err)
		}
	})
	r, err := d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{
		Start: &boxwoodv1.CreateTreeRequest_Image{Image: "payloads"}, WithSandbox: true,
		Defaults: &boxwoodv1.Defaults{AllowCalls: p.calls, Limits: &boxwoodv1.Limits{MemoryBytes: p.memory}},
	})
	if err != nil {
		t.Fatal("creating a tree: ", err)
	}
	t.Cleanup(func() {
		if d.cmd != nil {
			_, _ = d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: r.GetTree().GetId()})
		}
	})
	sb := r.GetSandbox()
	var write strings.Builder
	write.WriteString("mkdir /p")
	entries, err := payloadFiles.ReadDir("testdata/payloads")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		text, err := payloadFiles.ReadFile("testdata/payloads/" + e.Name())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&write, "\ncat >/p/%s <<'END OF FILE'\n%sEND OF FILE", e.Name(), text)
	}
	d.ok(t, sb.GetId(), write.String())
	return sb
}

// stepTo has a payload take its nth step, and gives the node.
func (d *daemon) stepTo(t testing.TB, sb *boxwoodv1.Sandbox, p payload, n int) string {
	t.Helper()
	node := d.run(t, sb.GetId(), p.step).GetNode()
	o := node.GetObservation()
	if got := strings.TrimSpace(string(o.GetStdout())); got != strconv.Itoa(n) {
		log := d.run(t, sb.GetId(), "cat /tmp/log 2>/dev/null").GetNode().GetObservation().GetStdout()
		t.Fatalf("step %d in sandbox %s says %q (exit %d) %s\nits log: %s", n, sb.GetId(), got, o.GetExitCode(), o.GetStderr(), log)
	}
	return node.GetId()
}

// saved waits until a node is captured and fails if it is withheld.
func (d *daemon) saved(t testing.TB, node string) string {
	t.Helper()
	n := d.captured(t, node)[0]
	if c := n.GetCapture(); c != boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED && c != boxwoodv1.CaptureStatus_CAPTURE_STATUS_PROVEN {
		t.Fatalf("node %s is %v: %s", node, c, n.GetWithheldReason())
	}
	return node
}

// wanted skips what is for the long form alone, or can't be run here.
func (p payload) wanted(t testing.TB) {
	t.Helper()
	if p.nightly && !*payloadsFull {
		t.Skip("long: make payloads")
	}
	if p.needs != "" {
		testenv.Require(t, testenv.Program(p.needs))
	}
}

// killed are the payloads that are run with kills: in the long form all.
func killed() []payload {
	if *payloadsFull {
		return payloads
	}
	return []payload{python("memory")}
}

// uncaptured starts a payload and has it take two steps, with no capture in between: its
// control. It gives the turn's node.
func (d *daemon) uncaptured(t testing.TB, sb *boxwoodv1.Sandbox, p payload) string {
	t.Helper()
	turn, err := d.client.BeginTurn(ctx(t), &boxwoodv1.BeginTurnRequest{SandboxId: sb.GetId()})
	if err != nil {
		t.Fatal(err)
	}
	for n, shell := range []string{p.start, p.step, p.step} {
		stream, err := d.client.Exec(ctx(t), &boxwoodv1.ExecRequest{TurnId: turn.GetTurnId(), Command: &boxwoodv1.Command{Shell: []byte(shell)}, ResultOnly: true})
		if err != nil {
			t.Fatal(err)
		}
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		o := m.GetCommand().GetObservation()
		if got := strings.TrimSpace(string(o.GetStdout())); o.GetExitCode() != 0 || n > 0 && got != strconv.Itoa(n) {
			t.Fatalf("uncaptured, command %d says %q (exit %d) %s", n, got, o.GetExitCode(), o.GetStderr())
		}
	}
	r, err := d.client.EndTurn(ctx(t), &boxwoodv1.EndTurnRequest{TurnId: turn.GetTurnId()})
	if err != nil {
		t.Fatal(err)
	}
	return r.GetNode().GetId()
}

// Each payload runs without a capture, goes on undisturbed while it is captured after every
// step, is forked into eight children that go on from where it stood, forked again from its children five
// levels deep, and rolled back.
func TestPayloads(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	for _, p := range payloads {
		t.Run(p.name, func(t *testing.T) {
			p.wanted(t)
			wide, deep := int32(8), 5
			switch {
			case p.nightly:
				wide = 2 // of 2 GiB each
			case p.busy && !*payloadsFull:
				wide = 2
			}
			sb := d.newPayload(t, p)
			at2 := d.saved(t, d.uncaptured(t, sb, p))
			d.saved(t, d.stepTo(t, sb, p, 3))

			children := d.fork(t, at2, wide)
			for n := 3; n <= 4; n++ {
				for _, c := range children {
					d.stepTo(t, c, p, n)
				}
			}
			d.stepTo(t, sb, p, 4)

			c := children[0]
			var again []*boxwoodv1.Sandbox
			for level := range deep {
				c = d.fork(t, d.saved(t, d.stepTo(t, c, p, 5+level)), 1)[0]
				again = append(again, c)
			}
			d.stepTo(t, c, p, 5+deep)
			back, err := d.client.Rollback(ctx(t), &boxwoodv1.RollbackRequest{SandboxId: sb.GetId(), NodeId: at2})
			if err != nil {
				t.Fatal("rolling back: ", err)
			}
			d.stepTo(t, back.GetSandbox(), p, 3)
			free(t, d, append(children, again...)...)
		})
	}
}

// gdb on a process: CRIU can't save who is traced, so that its nodes are withheld. The sandbox goes on, and a replay gives each
// child a gdb of its own that stands there.
func TestADebuggerIsReplayed(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	p := payload{name: "gdb", needs: "gdb", step: `echo take >/in; cat /out`,
		start: `mkfifo /in /out; sleep 100000 >/dev/null 2>&1 </dev/null & target=$!
			printf 'set $n = 0\ndefine take\nset $n = $n + 1\neval "shell echo %%d >/out", $n\nend\n' >/g
			exec 8<>/in; gdb -q -nx -x /g -p $target <&8 >/tmp/log 2>&1 & until grep -q '^TracerPid:.*[1-9]' /proc/$target/status; do sleep 0.02; done`}
	p.wanted(t)
	sb := d.newPayload(t, p)
	d.captured(t, d.run(t, sb.GetId(), p.start).GetNode().GetId())
	d.stepTo(t, sb, p, 1)
	n := d.captured(t, d.stepTo(t, sb, p, 2))[0]
	if n.GetCapture() != withheld || !strings.Contains(n.GetWithheldReason(), "traced") {
		t.Errorf("%v: %q", n.GetCapture(), n.GetWithheldReason())
	}
	d.stepTo(t, sb, p, 3)
	got, err := d.replays(t, n.GetId(), ofTwo)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range got {
		for i, turn := range r.GetReplayed() {
			if !turn.GetSameOutput() || !turn.GetSameExit() {
				t.Errorf("turn %d: %v", i, turn)
			}
		}
		if r.GetSandbox() == nil || len(r.GetReplayed()) != 3 {
			t.Fatal("not replayed: ", r)
		}
		d.stepTo(t, r.GetSandbox(), p, 3)
		free(t, d, r.GetSandbox())
	}
}
