package service

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (d *daemon) open(t testing.TB, sandbox, name string, change ...func(*boxwoodv1.OpenSessionRequest)) *boxwoodv1.OpenSessionResponse {
	t.Helper()
	req := &boxwoodv1.OpenSessionRequest{SandboxId: sandbox, Name: name}
	for _, f := range change {
		f(req)
	}
	r, err := d.client.OpenSession(ctx(t), req)
	if err != nil {
		t.Fatalf("opening session %s: %v", name, err)
	}
	return r
}

func withTTY(r *boxwoodv1.OpenSessionRequest) { r.Tty = true }

// say runs text in a session as a turn.
func (d *daemon) say(t testing.TB, sandbox, session, text string) *boxwoodv1.TurnResult {
	t.Helper()
	r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sandbox, Command: &boxwoodv1.Command{Session: session, Shell: []byte(text)}})
	if err != nil {
		t.Fatalf("running %q in session %s: %v", text, session, err)
	}
	return r
}

// hear is say of what must succeed; it gives the output.
func (d *daemon) hear(t testing.TB, sandbox, session, text string) string {
	t.Helper()
	o := d.say(t, sandbox, session, text).GetNode().GetObservation()
	if o.GetExitCode() != 0 {
		t.Fatalf("%q ended with %d: %s%s", text, o.GetExitCode(), o.GetStdout(), o.GetStderr())
	}
	return strings.ReplaceAll(string(o.GetStdout()), "\r", "")
}

// kept waits for a node's capture, which must be of a kind.
func (d *daemon) kept(t testing.TB, n *boxwoodv1.Node, kind boxwoodv1.ProcessKind) *boxwoodv1.Node {
	t.Helper()
	n = d.captured(t, n.GetId())[0]
	if c := n.GetCapture(); c != boxwoodv1.CaptureStatus_CAPTURE_STATUS_CAPTURED && c != boxwoodv1.CaptureStatus_CAPTURE_STATUS_PROVEN || n.GetProcessKind() != kind {
		t.Fatalf("node is %v with process state %v: %s", c, n.GetProcessKind(), n.GetWithheldReason())
	}
	return n
}

const (
	shellsKind = boxwoodv1.ProcessKind_PROCESS_KIND_SHELLS
	emptyKind  = boxwoodv1.ProcessKind_PROCESS_KIND_EMPTY
)

// Each half is judged by what changed in it.
func TestSessionVerdicts(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	for _, c := range []struct {
		name, text, session string
		verdict             boxwoodv1.Verdict
		names               string // in the detail of an effect
	}{
		{"a command that changes nothing", "echo hi; ls / | wc -l; cat /etc/passwd >/dev/null", "main", boxwoodv1.Verdict_VERDICT_NONE, ""},
		{"status, line numbers and random numbers", "false; echo $RANDOM $SECONDS; (exit 3)", "main", boxwoodv1.Verdict_VERDICT_NONE, ""},
		{"a variable", "x=1", "main", boxwoodv1.Verdict_VERDICT_PROCESS, "variable x"},
		{"the same value again", "x=1", "main", boxwoodv1.Verdict_VERDICT_NONE, ""},
		{"a variable there and back", "x=2; x=1", "main", boxwoodv1.Verdict_VERDICT_NONE, ""},
		{"a folder", "cd /usr", "main", boxwoodv1.Verdict_VERDICT_PROCESS, "process cwd"},
		{"a function", "f() { echo 1; }", "main", boxwoodv1.Verdict_VERDICT_PROCESS, "function f"},
		{"a program that is new to it", "sort /etc/passwd >/dev/null", "main", boxwoodv1.Verdict_VERDICT_PROCESS, "hashed command sort"},
		{"a program that a signal ends", "bash -c 'kill -TERM $$'", "main", boxwoodv1.Verdict_VERDICT_PROCESS, "hashed command bash"},
		{"the same again", "bash -c 'kill -TERM $$'", "main", boxwoodv1.Verdict_VERDICT_NONE, ""},
		{"a file", "echo 1 > /root/a", "main", boxwoodv1.Verdict_VERDICT_FILES, ""},
		{"a file and a variable", "echo 2 > /root/a; y=1", "main", boxwoodv1.Verdict_VERDICT_BOTH, "variable y"},
		{"an option", "set -o pipefail", "main", boxwoodv1.Verdict_VERDICT_PROCESS, "option pipefail"},
		{"a umask", "umask 077", "main", boxwoodv1.Verdict_VERDICT_PROCESS, "umask"},
		{"a limit", "ulimit -n 64", "main", boxwoodv1.Verdict_VERDICT_PROCESS, "limit Max open files"},
		{"a trap", "trap 'echo x' USR1", "main", boxwoodv1.Verdict_VERDICT_PROCESS, "trap SIGUSR1"},
		{"a command beside it", "cat /etc/group", "", boxwoodv1.Verdict_VERDICT_NONE, ""},
		{"a file beside it", "echo 1 > /root/b", "", boxwoodv1.Verdict_VERDICT_FILES, ""},
		{"a signal from beside it", "kill -USR1 $(cat /run/pid)", "", boxwoodv1.Verdict_VERDICT_NONE, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.name == "a command that changes nothing" {
				r := d.open(t, sb.GetId(), "main")
				if r.GetSession().GetPid() <= 1 || r.GetResult().GetNode().GetVerdict() != boxwoodv1.Verdict_VERDICT_PROCESS {
					t.Fatalf("opening is a turn that changes processes: %v", r)
				}
				d.kept(t, r.GetResult().GetNode(), shellsKind)
				d.kept(t, d.say(t, sb.GetId(), "main", "echo $$ > /run/pid; hash ls wc cat").GetNode(), shellsKind)
			}
			r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Session: c.session, Shell: []byte(c.text)}})
			if err != nil {
				t.Fatal(err)
			}
			n := r.GetNode()
			if n.GetVerdict() != c.verdict {
				t.Errorf("judged %v: %q", n.GetVerdict(), n.GetReasons())
			}
			found := c.names == ""
			for _, e := range n.GetEffects() {
				found = found || e.GetKind() == boxwoodv1.Effect_PROCESS_CHANGED && strings.Contains(e.GetDetail(), c.names)
			}
			if !found {
				t.Errorf("no effect names %q: %v", c.names, n.GetEffects())
			}
			d.kept(t, n, shellsKind)
		})
	}
}

// shellPayload is a state of a shell that says itself whether it is right.
type shellPayload struct{ name, make, right, spoil string }

var shellPayloads = []shellPayload{
	{"variables", `a=1 b="x y"; export c=$'n\nl'; declare -r d=$'\xff\xfe'; declare -i e=3`,
		`[[ $a = 1 && $b = "x y" && $(bash -c 'echo "$c"') = $'n\nl' && $d = $'\xff\xfe' ]] && e+=4 && [[ $e = 7 ]] && e=3 && ! (d=2) 2>/dev/null`, `a=2; unset b`},
	{"arrays", `l=(1 "2 3" $'4\n'); l[9]=z; declare -A m; for i in {1..50}; do m[k$i]=$i; done; order="${!m[*]}"; declare -n r=l`,
		`[[ ${#l[@]} = 4 && ${l[1]} = "2 3" && ${m[k7]} = 7 && "${!m[*]}" = "$order" && ${r[9]} = z ]]`, `l=(); m[k7]=8`},
	{"functions", "f() { echo \"f $1 $(echo 'a \"b\"')\"; }; function odd:name.x { f 2; }; declare() { echo mine; }",
		`[[ $(f 1) = 'f 1 a "b"' && $(odd:name.x) = 'f 2 a "b"' && $(declare) = mine ]]`, `unset -f f declare`},
	{"a function called builtin", `builtin() { echo mine; }`, `[[ $(builtin) = mine ]]`, `unset -f builtin`},
	{"options", `set -o noclobber -o pipefail; shopt -s extglob nullglob; alias hi='echo hello'`,
		`[[ $- = *C* && -o pipefail && $(eval hi) = hello ]] && shopt -q extglob nullglob`, `set +C; unalias hi`},
	{"a folder", `mkdir -p "/srv/a b"; cd "/srv/a b"; pushd /tmp >/dev/null`, `[[ $PWD = /tmp && $(readlink /proc/self/cwd) = /tmp && ${DIRSTACK[1]} = "/srv/a b" && $OLDPWD = "/srv/a b" ]]`, `cd /; dirs -c`},
	{"traps", `trap 'got=usr1' USR1; trap '' HUP; n=0; trap 'n=$((n+1))' DEBUG`,
		`kill -HUP $$; kill -USR1 $$; [[ $got = usr1 && $n -gt 0 && $n -lt 1000 ]] && unset got`, `trap - USR1 HUP DEBUG`},
	{"limits", `umask 027; ulimit -n 77; ulimit -Sc 0`, `[[ $(umask) = 0027 && $(ulimit -n) = 77 && $(bash -c 'ulimit -Hn') = 77 ]]`, `umask 022`},
	{"parameters", `set -- a "b c" ""; getopts ab o -a -b; hash -p /bin/true mine; complete -W "x y" z`,
		`[[ $# = 3 && $2 = "b c" && $OPTIND = 2 && $(complete -p z) = "complete -W 'x y' z" ]] && mine`, `set --; hash -r`},
	{"the shell itself", `me=$$`, `[[ $me = $$ && $PPID = 1 && $(readlink /proc/$$/exe) = */bash ]]`, `me=0`},
	{"a traced shell", `set -x; PS4='> '`, `[[ $- = *x* ]]`, `set +x`},
	{"errexit", `set -e; e=1`, `[[ $- = *e* && $e = 1 ]]`, `set +e`},
	{"a large variable", `big=$(head -c 300000 /dev/zero | tr '\0' x)y`, `[[ ${#big} = 300001 && ${big:300000} = y ]]`, `big=`},
}

func (d *daemon) right(t testing.TB, what, sandbox string, p shellPayload) {
	t.Helper()
	o := d.say(t, sandbox, "main", p.right).GetNode().GetObservation()
	if o.GetExitCode() != 0 {
		t.Errorf("%s: the state isn't right (%d): %s%s", what, o.GetExitCode(), o.GetStdout(), o.GetStderr())
	}
}

// If it fails, a session is restored as something else than it was. (Also what turns red when
// descriptions aren't compared, and when a sibling's text is restored.)
func TestShellPayloads(t *testing.T) {
	d := running(t)
	for _, tty := range []bool{false, true} {
		for _, p := range shellPayloads {
			if tty && testing.Short() {
				continue
			}
			t.Run(fmt.Sprintf("%s/tty=%t", p.name, tty), func(t *testing.T) {
				_, sb := d.newTree(t)
				d.open(t, sb.GetId(), "main", func(r *boxwoodv1.OpenSessionRequest) { r.Tty = tty })
				made := d.say(t, sb.GetId(), "main", p.make).GetNode()
				d.right(t, "without waiting for a capture", sb.GetId(), p)
				made = d.kept(t, made, shellsKind)
				d.right(t, "captured and continued", sb.GetId(), p)
				for i, c := range d.fork(t, made.GetId(), 4) {
					d.right(t, fmt.Sprintf("fork %d", i), c.GetId(), p)
				}
				at := made
				for level := 1; level <= 5; level++ {
					c := d.fork(t, at.GetId(), 1)[0]
					n := d.say(t, c.GetId(), "main", fmt.Sprintf("level=$((level+1)); [[ $level = %d ]]", level)).GetNode()
					if n.GetObservation().GetExitCode() != 0 {
						t.Fatalf("level %d: %s", level, n.GetObservation().GetStderr())
					}
					at = d.kept(t, n, shellsKind)
				}
				deep := d.fork(t, at.GetId(), 1)[0]
				d.right(t, "forked from a fork, five levels deep", deep.GetId(), p)
				d.say(t, sb.GetId(), "main", p.spoil)
				if _, err := d.client.Rollback(ctx(t), &boxwoodv1.RollbackRequest{SandboxId: sb.GetId(), NodeId: made.GetId()}); err != nil {
					t.Fatal(err)
				}
				d.right(t, "rolled back", sb.GetId(), p)
			})
		}
	}
}

// A shell may hold more than a few KiB.
func TestShellWithTenMegabytes(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	d.open(t, sb.GetId(), "main")
	n := d.kept(t, d.say(t, sb.GetId(), "main", "big=$(head -c 10000000 /dev/zero | tr '\\0' x)y").GetNode(), shellsKind)
	for _, c := range d.fork(t, n.GetId(), 2) {
		if got := d.hear(t, c.GetId(), "main", "echo ${#big} ${big:10000000}"); got != "10000001 y\n" {
			t.Errorf("%q", got)
		}
	}
}

// A change that leads to no other name, and one that a comparison alone can find: two shells of
// one tree have the same names with other values.
func TestSiblingsHaveTheirOwnShells(t *testing.T) {
	d := running(t)
	root, sb := d.newTree(t)
	_ = root
	d.open(t, sb.GetId(), "main")
	var nodes []*boxwoodv1.Node
	for i := range 3 {
		nodes = append(nodes, d.kept(t, d.say(t, sb.GetId(), "main", fmt.Sprintf("x=%d", i)).GetNode(), shellsKind))
	}
	for range 2 {
		for i, n := range nodes {
			for _, c := range d.fork(t, n.GetId(), 2) {
				if got := d.hear(t, c.GetId(), "main", "echo $x"); got != fmt.Sprintf("%d\n", i) {
					t.Errorf("a child of node %d has x=%s", i, got)
				}
			}
		}
	}
}

func TestSeveralSessions(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	d.open(t, sb.GetId(), "a")
	d.open(t, sb.GetId(), "b", withTTY)
	d.open(t, sb.GetId(), "c", func(r *boxwoodv1.OpenSessionRequest) {
		r.User = "agent"
		r.Cwd = "/home/agent"
		r.Env = map[string]string{"E": "1"}
	})
	for _, name := range []string{"a", "b"} {
		d.hear(t, sb.GetId(), name, "x="+name)
	}
	n := d.kept(t, d.say(t, sb.GetId(), "c", "x=c; cd /tmp").GetNode(), shellsKind)
	list := func(id string) (all []string) {
		r, err := d.client.ListSessions(ctx(t), &boxwoodv1.ListSessionsRequest{SandboxId: id})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range r.GetSessions() {
			all = append(all, fmt.Sprintf("%s %d %t", s.GetName(), s.GetPid(), s.GetTty()))
		}
		slices.Sort(all)
		return all
	}
	for _, c := range d.fork(t, n.GetId(), 2) {
		if got, want := list(c.GetId()), list(sb.GetId()); !slices.Equal(got, want) {
			t.Errorf("the child has %q, its parent %q", got, want)
		}
		for _, s := range []struct{ name, out string }{{"a", "a 0 /\n"}, {"b", "b 0 /\n"}, {"c", "c 1000 /tmp\n"}} {
			if got := d.hear(t, c.GetId(), s.name, `echo $x $UID $PWD`); got != s.out {
				t.Errorf("session %s says %q", s.name, got)
			}
		}
	}
	r, err := d.client.CloseSession(ctx(t), &boxwoodv1.CloseSessionRequest{SandboxId: sb.GetId(), Name: "b"})
	if err != nil || r.GetResult().GetNode().GetVerdict() != boxwoodv1.Verdict_VERDICT_PROCESS {
		t.Fatalf("%v, %v", r, err)
	}
	for _, name := range []string{"a", "c"} {
		d.kept(t, r.GetResult().GetNode(), shellsKind)
		if r, err = d.client.CloseSession(ctx(t), &boxwoodv1.CloseSessionRequest{SandboxId: sb.GetId(), Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	last := d.kept(t, r.GetResult().GetNode(), emptyKind)
	if got := list(d.fork(t, last.GetId(), 1)[0].GetId()); len(got) > 0 {
		t.Errorf("no session was left, and a child has %q", got)
	}
}

// What no description can tell is dumped or withheld, with its reason, and the session goes on.
func TestShellsThatTextCannotTell(t *testing.T) {
	d := running(t)
	for _, c := range []struct{ name, text, why, undo, right string }{
		{"a background job", "sleep 1000 & x=1", "children", "", "[[ $x = 1 && $(jobs -r) = *sleep* ]]"},
		{"an open file", "exec 7</etc/passwd", "descriptor 7", "exec 7<&-", "read -r l <&7 && [[ $l = root:* ]]"},
		{"output to a file", "exec >/root/log", "descriptor 1", "", ""},
		{"a coprocess", "coproc cat", "children", "", ""},
		{"how nice it is", "renice -n 5 $$ >/dev/null", "can't be reproduced", "", "[[ $(ps -o ni= -p $$) = *5 ]]"},
		{"where it may run", "taskset -p -c 0 $$ >/dev/null", "can't be reproduced", "", ""},
		{"its chance to be killed", "echo 500 > /proc/$$/oom_score_adj", "", "", ""},
		{"an expired job", "true & wait; x=1", "can't be reproduced", "", ""},
		{"getopts in the middle of a word", "getopts abc o -abc", "can't be reproduced", "OPTIND=1", ""},
		{"a folder that is gone", "mkdir /root/gone; cd /root/gone; rmdir /root/gone", "was removed", "cd /", ""},
		{"a builtin's other meaning", "unset RANDOM", "can't be reproduced", "", ""},
		{"key bindings", "enable bind", "can't be reproduced", "enable -n bind", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, sb := d.newTree(t)
			d.open(t, sb.GetId(), "main")
			r := d.say(t, sb.GetId(), "main", c.text)
			n := d.captured(t, r.GetNode().GetId())[0]
			// It is dumped where that can be done, and never kept as text.
			withheld := n.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD
			if n.GetProcessKind() == shellsKind || withheld && !strings.Contains(n.GetWithheldReason(), c.why) {
				t.Fatalf("%v of kind %v: %q (verdict %v %q)", n.GetCapture(), n.GetProcessKind(), n.GetWithheldReason(), n.GetVerdict(), n.GetReasons())
			}
			t.Log(n.GetProcessKind(), n.GetWithheldReason())
			if !withheld && c.right != "" {
				child := d.fork(t, n.GetId(), 1)[0]
				o := d.say(t, child.GetId(), "main", c.right).GetNode().GetObservation()
				if o.GetExitCode() != 0 {
					t.Errorf("in a fork: %d, %s%s", o.GetExitCode(), o.GetStdout(), o.GetStderr())
				}
			}
			if c.undo == "" {
				return
			}
			u := d.say(t, sb.GetId(), "main", c.undo)
			if n := d.captured(t, u.GetNode().GetId())[0]; n.GetProcessKind() != shellsKind && withheld {
				t.Errorf("%v", n)
			}
		})
	}
}

func TestSessionCalls(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	call := func(req *boxwoodv1.OpenSessionRequest) error {
		req.SandboxId = sb.GetId()
		_, err := d.client.OpenSession(ctx(t), req)
		return err
	}
	for want, req := range map[string]*boxwoodv1.OpenSessionRequest{
		"bad_session_name": {Name: "a b"},
		"bad_session":      {Name: "a", Rows: -1},
		"no_shell":         {Name: "a", User: "nobody-here"},
	} {
		if err := call(req); reason(err) != want {
			t.Errorf("%v: %v, want %s", req, err, want)
		}
	}
	d.open(t, sb.GetId(), "a")
	if err := call(&boxwoodv1.OpenSessionRequest{Name: "a"}); reason(err) != "session_exists" {
		t.Errorf("opened twice: %v", err)
	}
	for want, c := range map[string]*boxwoodv1.Command{
		"no_session":  {Session: "b", Shell: []byte("x=1")},
		"bad_command": {Session: "a", Argv: [][]byte{[]byte("ls")}},
		"no_terminal": {Session: "a", Shell: []byte("cat"), Stdin: []byte("x")},
	} {
		if _, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: c}); reason(err) != want {
			t.Errorf("%v: %v, want %s", c, err, want)
		}
	}
	// A deadline stops the command, not the session; a session that can't be stopped says so.
	testenv.Reach(t, 300*time.Millisecond, func(within time.Duration) bool {
		r, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Session: "a", Shell: []byte("x=1; echo begun; sleep 100"), DeadlineNs: int64(within)}})
		if err != nil || r.GetNode().GetTurnStatus() != boxwoodv1.TurnStatus_TURN_STATUS_TIMED_OUT || r.GetSessionEnded() {
			t.Fatalf("%v, %v", r, err)
		}
		return len(r.GetNode().GetObservation().GetStdout()) > 0
	})
	if got := d.hear(t, sb.GetId(), "a", "echo $x"); got != "1\n" {
		t.Errorf("after a deadline: %q", got)
	}
	var r *boxwoodv1.TurnResult
	testenv.Reach(t, 300*time.Millisecond, func(within time.Duration) bool {
		var err error
		r, err = d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Session: "a", Shell: []byte("trap '' INT; echo begun; while :; do :; done"), DeadlineNs: int64(within)}})
		begun := len(r.GetNode().GetObservation().GetStdout()) > 0
		if err != nil || begun && !r.GetSessionEnded() {
			t.Fatalf("%v, %v", r, err)
		}
		if !begun && r.GetSessionEnded() {
			d.open(t, sb.GetId(), "a")
		}
		return begun
	})
	d.kept(t, r.GetNode(), emptyKind)
	d.open(t, sb.GetId(), "a") // the name is free again
	if r := d.say(t, sb.GetId(), "a", "exit 4"); !r.GetSessionEnded() || r.GetNode().GetObservation().GetExitCode() != 4 {
		t.Errorf("%v", r)
	}
	was, err := d.client.Interrupt(ctx(t), &boxwoodv1.InterruptRequest{SandboxId: sb.GetId(), Session: "a"})
	if reason(err) != "no_session" {
		t.Errorf("%v, %v", was, err)
	}
}

// Keys reach what runs in a terminal while it runs, and so does the terminal's size; nothing reaches a terminal in which nothing runs.
func TestKeysWhileACommandRuns(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	d.open(t, sb.GetId(), "tty", func(r *boxwoodv1.OpenSessionRequest) { r.Tty = true })
	d.open(t, sb.GetId(), "pipe")
	press := func(session, keys string, rows, cols int32) (bool, error) {
		was, err := d.client.Type(ctx(t), &boxwoodv1.TypeRequest{SandboxId: sb.GetId(), Session: session, Keys: []byte(keys), Rows: rows, Cols: cols})
		return was.GetWasRunning(), err
	}
	if was, err := press("tty", "lost\n", 0, 0); was || err != nil {
		t.Errorf("keys that nobody reads: %v, %v", was, err)
	}
	for session, want := range map[string]string{"pipe": "no_terminal", "none": "no_session"} {
		if _, err := press(session, "x", 0, 0); reason(err) != want {
			t.Errorf("%s: %v", session, err)
		}
	}
	for _, bad := range [][2]int32{{-1, 5}, {5, 0}, {1 << 16, 1}} {
		if _, err := press("tty", "", bad[0], bad[1]); reason(err) != "bad_size" {
			t.Errorf("%v: %v", bad, err)
		}
	}
	if _, err := press("tty", strings.Repeat("x", 4097), 0, 0); reason(err) != "keys_too_many" {
		t.Errorf("%v", err)
	}
	stream, err := d.client.RunTurn(ctx(t), &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Session: "tty",
		Shell: []byte(`shopt -s checkwinsize; trap 'echo resized; ls /dev/null; echo $LINES $COLUMNS' WINCH; echo ready; until read -r line; do :; done; echo "<$line>"; read -r line; echo "<$line>"`)}})
	if err != nil {
		t.Fatal(err)
	}
	said := ""
	heard := func(want string) *boxwoodv1.TurnResult {
		for !strings.Contains(said, want) {
			m, err := stream.Recv()
			if err != nil {
				t.Fatalf("%v after %q", err, said)
			}
			if said += string(m.GetStdout()); m.GetResult() != nil {
				return m.GetResult()
			}
		}
		return nil
	}
	heard("ready")
	if was, err := press("tty", "one\n", 33, 77); !was || err != nil {
		t.Errorf("%v, %v", was, err)
	}
	heard("<one>")
	if was, err := press("tty", "two\n", 0, 0); !was || err != nil {
		t.Errorf("%v, %v", was, err)
	}
	if heard("<two>"); !strings.Contains(said, "resized\r\n/dev/null\r\n33 77") {
		t.Errorf("heard %q", said)
	}
	if r := heard("\x00"); r.GetNode().GetTurnStatus() != boxwoodv1.TurnStatus_TURN_STATUS_COMPLETED {
		t.Errorf("%v", r)
	}
	if out := d.hear(t, sb.GetId(), "tty", "ls /dev/null; echo $LINES $COLUMNS"); out != "/dev/null\n33 77\n" {
		t.Errorf("afterwards the size is %q", out)
	}
}

// A child is a new authority: its shells know their own generation.
func TestShellsKnowTheirGeneration(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	d.open(t, sb.GetId(), "main")
	n := d.kept(t, d.say(t, sb.GetId(), "main", "x=1").GetNode(), shellsKind)
	for _, c := range append(d.fork(t, n.GetId(), 2), sb) {
		if got := d.hear(t, c.GetId(), "main", "echo $BOXWOOD_GENERATION $HOSTNAME"); got != c.GetGeneration()+" "+c.GetHostname()+"\n" {
			t.Errorf("%s of %s says %q", c.GetId(), c.GetGeneration(), got)
		}
	}
	seeds := map[string]bool{}
	for _, r := range d.tryFork(t, &boxwoodv1.ForkRequest{Seed: 7, Wants: []*boxwoodv1.ForkRequest_Want{
		{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: n.GetId()}, Count: 3}}}) {
		if r.GetError() != nil {
			t.Fatal(r.GetMessage())
		}
		seeds[d.hear(t, r.GetSandbox().GetId(), "main", "echo $BOXWOOD_SEED")] = true
	}
	if len(seeds) != 3 || seeds["\n"] {
		t.Errorf("seeds %v", seeds)
	}
}

// A daemon that is killed while a sandbox with sessions is captured: the next one has
// the node, captured or withheld, and what it restores is right.
func TestShellsSurviveAKilledDaemon(t *testing.T) {
	for _, step := range []string{"capture frozen", "snapshot finished", "capture recorded"} {
		t.Run(step, func(t *testing.T) {
			dir := stateDir(t)
			d := startDaemon(t, dir)
			d.importRoot(t)
			_, sb := d.newTree(t)
			d.open(t, sb.GetId(), "main")
			before := d.kept(t, d.say(t, sb.GetId(), "main", "x=1").GetNode(), shellsKind)
			if out, ok := d.tell("kill 1 " + step); !ok || out != "armed <nil>" {
				t.Fatal(out)
			}
			// The kill may come before the reply is out; the node is there all the same.
			said, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: sb.GetId(), Command: &boxwoodv1.Command{Session: "main", Shell: []byte("x=2")}})
			if err != nil && status.Code(err) != codes.Unavailable {
				t.Fatal(err)
			}
			_, _ = d.client.WaitCaptured(ctx(t), &boxwoodv1.WaitCapturedRequest{NodeIds: []string{said.GetNode().GetId()}})
			_ = d.cmd.Wait()
			d.kill()
			d = startDaemon(t, dir)
			all := d.nodesOf(t, sb.GetTreeId())
			n := all[len(all)-1]
			if n.GetParentId() != before.GetId() || (err == nil && n.GetId() != said.GetNode().GetId()) {
				t.Fatalf("the last node is %s, a child of %s", n.GetId(), n.GetParentId())
			}
			got := d.captured(t, n.GetId())[0]
			t.Log(got.GetCapture(), got.GetWithheldReason())
			for id, x := range map[string]string{before.GetId(): "1\n", n.GetId(): "2\n"} {
				if id == n.GetId() && got.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
					continue
				}
				c := d.fork(t, id, 1)[0]
				if out := d.hear(t, c.GetId(), "main", "echo $x"); out != x {
					t.Errorf("x=%q, want %q", out, x)
				}
			}
			entries, err := os.ReadDir(dir + "/processes")
			if err != nil || len(entries) > 3 {
				t.Errorf("%d process states lie there, %v", len(entries), err)
			}
		})
	}
}
