package service

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// aserver waits for commands on a fifo, in a folder of its own, with one file half read, one that has
// no name any more, and a count in memory.
const aserver = `mkdir /work /other; printf 'one\ntwo\nthree\n' >/data; echo gone >/dead; echo here >/work/f; mkfifo /in /out
	(cd /work; exec 5</data 6</dead 7<>/in; rm /dead; read -r line <&5; echo >/out
	while read -r command <&7; do n=$((n+1)); eval "$command"; done) >/dev/null 2>&1 &
	read -r line </out`

// tells is what the server says of itself: how often it was asked, the next lines of its files, a file of its folder.
const tells = `echo 'read -r a <&5; read -r b <&6; read -r c <f; echo "$n $a $b $c" >/out' >/in; cat /out`

// dumps are the names of all dumps that the daemon has.
func (d *daemon) dumps(t testing.TB) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	for _, place := range []string{engine.FindRunDir(d.dir) + "/dumps", d.dir + "/processes"} {
		found, err := filepath.Glob(place + "/ps_*/dump.json")
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range found {
			out[strings.TrimSuffix(filepath.Base(filepath.Dir(path)), ".new")] = true
		}
	}
	return out
}

// asleep waits until a turn that does nothing changes nothing: what survives waits, and has been captured so.
func (d *daemon) asleep(t testing.TB, sandbox string) string {
	t.Helper()
	for tries := 0; ; tries++ {
		n := d.run(t, sandbox, "true").GetNode()
		if n.GetVerdict() == boxwoodv1.Verdict_VERDICT_NONE {
			return n.GetId()
		}
		d.saved(t, n.GetId())
		if tries == 20 {
			t.Fatalf("it doesn't rest: %v %q", n.GetVerdict(), n.GetReasons())
		}
	}
}

// files runs a turn that changes files beside survivors and nothing else, and gives its node, captured.
func (d *daemon) files(t testing.TB, sandbox, shell string) string {
	t.Helper()
	n := d.run(t, sandbox, shell).GetNode()
	if n.GetVerdict() != boxwoodv1.Verdict_VERDICT_FILES {
		t.Fatalf("%s: %v %q", shell, n.GetVerdict(), n.GetReasons())
	}
	return d.saved(t, n.GetId())
}

// Turns that change files beside a server that sleeps are captured without another dump of it, and what is forked
// from their nodes has these files and that server. Whatever touches the server, or a file that it uses, is
// in the next dump.
func TestADumpIsKeptWhileFilesMoveOn(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	_, sb := d.newTree(t)
	d.run(t, sb.GetId(), aserver)
	d.asleep(t, sb.GetId())
	before := d.dumps(t)
	var node string
	for _, shell := range []string{"echo x >/other/a", "mv /other/a /other/b; seq 1000 >/many", "rm -r /other; mkdir /new; chmod 700 /new; ln -s /new /link", "echo y >>/many; touch /work/g"} {
		node = d.files(t, sb.GetId(), shell)
		if kind := d.captured1(t, node).GetProcessKind(); kind != boxwoodv1.ProcessKind_PROCESS_KIND_DUMP {
			t.Errorf("%s: kind %v", shell, kind)
		}
	}
	for name := range d.dumps(t) {
		if !before[name] {
			t.Errorf("the server was dumped again: %s", name)
		}
	}
	d.forksAlikeBut(t, sb, node, treewalk.Options{IgnoreDirTimes: true}) // of that in which /dead was
	check := func(sb *boxwoodv1.Sandbox, want string) {
		t.Helper()
		if got := strings.TrimSpace(d.ok(t, sb.GetId(), tells)); got != want {
			t.Errorf("it says %q, not %q", got, want)
		}
	}
	for _, c := range d.fork(t, node, 4) {
		check(c, "1 two gone here")
		if got := d.ok(t, c.GetId(), "ls -d /new /link /many /work/*; ls /other 2>/dev/null; tail -n 1 /many"); got != "/link\n/many\n/new\n/work/f\n/work/g\ny\n" {
			t.Errorf("its files: %q", got)
		}
		free(t, d, c)
	}

	for _, c := range []struct {
		name, shell, want string
	}{
		{"the server moved on", "echo : >/in; until [ ! -s /in ]; do :; done; echo x >/f", "2 two gone here"},
		{"it read on", tells + "; echo x >/f", "2 three here"},
		{"an open file's content moved on", `printf 'ONE\nTWO\nTHREE\n' >/data`, "1 TWO gone here"},
		{"an open file grew", `echo four >>/data`, "1 two gone here"},
		{"an open file was replaced", `echo new >/new/data; mv /new/data /data`, "1 two gone here"},
		{"an open file was deleted", `rm /data`, "1 two gone here"},
		{"an open file has another mode", `chmod 600 /data`, "1 two gone here"},
		{"a file without a name, by its descriptor", `for p in /proc/[0-9]*; do [ "$(readlink $p/fd/6)" = "/dead (deleted)" ] && echo else >$p/fd/6; done; true`, "1 two else here"},
		{"its folder was renamed", `mv /work /moved`, "1 two gone here"},
		{"its folder has another mode", `chmod 711 /work`, "1 two gone here"},
		{"a signal", `for p in /proc/[0-9]*; do [ "$(readlink $p/fd/6)" = "/dead (deleted)" ] && kill -CONT ${p#/proc/}; done; echo x >/f`, "1 two gone here"},
	} {
		t.Run(c.name, func(t *testing.T) {
			child := d.fork(t, node, 1)[0]
			d.asleep(t, child.GetId())
			before := d.dumps(t)
			n := d.run(t, child.GetId(), c.shell).GetNode()
			if n.GetVerdict() != boxwoodv1.Verdict_VERDICT_BOTH {
				t.Errorf("%v %q", n.GetVerdict(), n.GetReasons())
			}
			d.saved(t, n.GetId())
			again := d.dumps(t)
			for name := range before {
				delete(again, name)
			}
			if len(again) != 1 {
				t.Errorf("it was dumped %d times", len(again))
			}
			grandchild := d.fork(t, n.GetId(), 1)[0]
			if got := strings.Join(strings.Fields(d.ok(t, grandchild.GetId(), tells)), " "); got != c.want {
				t.Errorf("it says %q, not %q", got, c.want)
			}
			free(t, d, child, grandchild)
		})
	}
	check(sb, "1 two gone here")
}

// A session beside a server that sleeps: turns of it that change nothing are none, those that change files cost no dump, and one that
// changes the session, or the server, costs one. Children have the session and the server of their own node.
func TestADumpIsKeptBesideASession(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	_, sb := d.newTree(t)
	d.run(t, sb.GetId(), aserver)
	d.open(t, sb.GetId(), "main")
	rests := func(sandbox string) string {
		t.Helper()
		for tries := 0; ; tries++ {
			n := d.say(t, sandbox, "main", ":").GetNode()
			if n.GetVerdict() == boxwoodv1.Verdict_VERDICT_NONE {
				return n.GetId()
			}
			d.saved(t, n.GetId())
			if tries == 20 {
				t.Fatalf("it doesn't rest: %v %q", n.GetVerdict(), n.GetReasons())
			}
		}
	}
	// turn is one of the session; dumps are how many it costs.
	turn := func(sandbox, text string, want boxwoodv1.Verdict, dumps int) string {
		t.Helper()
		before := d.dumps(t)
		n := d.say(t, sandbox, "main", text).GetNode()
		if n.GetVerdict() != want {
			t.Errorf("%s: %v %q", text, n.GetVerdict(), n.GetReasons())
		}
		d.saved(t, n.GetId())
		made := 0
		for name := range d.dumps(t) {
			if !before[name] {
				made++
			}
		}
		if made != dumps {
			t.Errorf("%s: %d dumps were made", text, made)
		}
		return n.GetId()
	}
	has := func(node, variable, count string) {
		t.Helper()
		c := d.fork(t, node, 1)[0]
		if got := d.hear(t, c.GetId(), "main", "echo $x"); got != variable+"\n" {
			t.Errorf("the child's session says %q, not %q", got, variable)
		}
		if got := strings.TrimSpace(d.ok(t, c.GetId(), tells)); got != count {
			t.Errorf("the child's server says %q, not %q", got, count)
		}
		free(t, d, c)
	}
	const none, files, process, both = boxwoodv1.Verdict_VERDICT_NONE, boxwoodv1.Verdict_VERDICT_FILES, boxwoodv1.Verdict_VERDICT_PROCESS, boxwoodv1.Verdict_VERDICT_BOTH
	rests(sb.GetId())
	turn(sb.GetId(), "true; false; : $RANDOM", none, 0)
	has(turn(sb.GetId(), "echo a >/other/a", files, 0), "", "1 two gone here")
	five := turn(sb.GetId(), "x=5", process, 1)
	turn(sb.GetId(), ":", none, 0)
	after := turn(sb.GetId(), "echo b >/other/a", files, 0)
	has(five, "5", "1 two gone here")
	has(after, "5", "1 two gone here")
	has(turn(sb.GetId(), "x=6; echo c >/other/a", both, 1), "6", "1 two gone here")
	has(turn(sb.GetId(), "x=5", process, 1), "5", "1 two gone here")
	has(turn(sb.GetId(), "echo : >/in; until [ ! -s /in ]; do :; done; echo d >/other/a", both, 1), "5", "2 two gone here")

	child := d.fork(t, after, 1)[0]
	rests(child.GetId())
	turn(child.GetId(), "echo e >/other/a", files, 0)
	turn(child.GetId(), "x=7", process, 1)

	// What a shell knows of jobs it doesn't tell.
	turn(child.GetId(), "sleep 1000 >/dev/null 2>&1 & disown", process, 1)
	turn(child.GetId(), ":", process, 1)
	turn(child.GetId(), "kill $!; until [ ! -e /proc/$! ]; do :; done", process, 1)
	turn(child.GetId(), ":", process, 1)
	if _, err := d.client.CloseSession(ctx(t), &boxwoodv1.CloseSessionRequest{SandboxId: sb.GetId(), Name: "main"}); err != nil {
		t.Fatal(err)
	}
	c := d.fork(t, d.saved(t, d.run(t, sb.GetId(), "true").GetNode().GetId()), 1)[0]
	if _, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: c.GetId(), Command: &boxwoodv1.Command{Shell: []byte("true"), Session: "main"}}); reason(err) != "no_session" {
		t.Errorf("a session that was closed is there again: %v", err)
	}
	free(t, d, child, c)
}

// A file of the image that a process mapped before a turn changed it can't be saved as that process sees it: the node
// is withheld. One that only has a copy, with the same content, is kept.
func TestAFileMappedBeforeItChanged(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	const file = "/usr/lib/python3.11/this.py"
	p := payload{needs: "/usr/bin/python3", step: askStep, start: `cat >/p/m.py <<'END'
import mmap
from lib import serve
f = open("` + file + `", "rb")
m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
f.close()
serve(lambda: m[0:4].decode())
END
python3 -u /p/m.py >/tmp/log 2>&1 </dev/null & ` + waitReady}
	sb := d.newPayload(t, p)
	ask := func(sb *boxwoodv1.Sandbox, want string) {
		t.Helper()
		if got := strings.TrimSpace(d.ok(t, sb.GetId(), p.step)); got != want {
			t.Errorf("it sees %q, not %q", got, want)
		}
	}
	d.saved(t, d.run(t, sb.GetId(), p.start).GetNode().GetId())
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	was := strings.TrimSpace(string(text[:4]))
	d.asleep(t, sb.GetId())
	d.saved(t, d.run(t, sb.GetId(), "chmod 600 "+file).GetNode().GetId())
	ask(sb, was)
	kept := d.asleep(t, sb.GetId())
	n := d.run(t, sb.GetId(), `printf XXXX | dd of=`+file+` conv=notrunc 2>/dev/null`).GetNode()
	n = d.captured(t, n.GetId())[0]
	if n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD || !strings.Contains(n.GetWithheldReason(), file) {
		t.Fatalf("%v: %q", n.GetCapture(), n.GetWithheldReason())
	}
	ask(sb, was)
	c := d.fork(t, kept, 1)[0]
	ask(c, was)
	// One that was replaced is kept with its content.
	replaced := d.saved(t, d.run(t, c.GetId(), "sed -i s/./Y/ "+file).GetNode().GetId())
	g := d.fork(t, replaced, 1)[0]
	ask(g, was)
	free(t, d, c, g)
}
