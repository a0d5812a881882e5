package box

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/engine/shell"
	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/testenv"
)

// openShell opens a session with a bash that has been greeted.
func openShell(t testing.TB, b *box, spec SessionSpec) Session {
	t.Helper()
	spec.Argv, spec.Umask = shell.Argv, 0o22
	if spec.PID == 0 {
		spec.PTS = -1
	}
	if spec.Env == nil {
		spec.Env = []string{"PATH=/bin", "HOME=/root"}
	}
	s, err := b.OpenSession(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	r := &shell.Report{Token: shell.Token()}
	end, err := b.Talk(context.Background(), Talk{
		Session: s.Name, Say: shell.Greet(shell.Greeting{TTY: s.TTY, Stdin: "/dev/null", Token: r.Token}), Heard: r.Hear,
		Deadline: time.Now().Add(time.Minute),
	})
	if err != nil || end.Ended || end.TimedOut {
		t.Fatalf("greeting: %+v, %v", end, err)
	}
	return s
}

type said struct {
	TalkEnd
	out, err string
	status   int
}

func say(t testing.TB, b *box, name, text string, change ...func(*Talk)) said {
	t.Helper()
	var out, errs bytes.Buffer
	r := &shell.Report{Token: shell.Token()}
	stdin := "/dev/null"
	if s, err := b.session(name); err == nil && s.TTY {
		stdin = "/dev/tty"
	}
	k := Talk{
		Session: name, Say: shell.Command([]byte(text), stdin, r.Token, false), Heard: r.Hear, Changes: true,
		Stdout: func(p []byte) { out.Write(p) }, Stderr: func(p []byte) { errs.Write(p) },
		Deadline: time.Now().Add(time.Minute),
	}
	for _, f := range change {
		f(&k)
	}
	end, err := b.Talk(context.Background(), k)
	if err != nil {
		t.Fatalf("saying %q: %v", text, err)
	}
	return said{end, out.String(), errs.String(), r.Status}
}

// Whatever a command is or prints, its end and its status are its own.
func TestSessionCommands(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	for _, kind := range []struct {
		name string
		tty  bool
	}{{"pipes", false}, {"tty", true}} {
		openShell(t, b, SessionSpec{Name: kind.name, TTY: kind.tty})
		big := strings.Repeat("x", 300<<10)
		for _, c := range []struct {
			name, text string
			status     int
			out, err   string
			errPart    bool
		}{
			{"output", "echo out; echo err >&2", 0, "out\n", "err\n", false},
			{"status", "(exit 77)", 77, "", "", false},
			{"state", "x=5; cd /usr; f() { echo \"f $1\"; }", 0, "", "", false},
			{"state is there", "f $x; pwd; x=6\necho $x", 0, "f 5\n/usr\n6\n", "", false},
			{"here-document", "cat <<X\na $x\nX\n", 0, "a 6\n", "", false},
			{"no newline at the end", "printf abc", 0, "abc", "", false},
			{"binary", `printf '\377\0\1'`, 0, "\xff\x00\x01", "", false},
			{"syntax error", "if true; then", 2, "", "syntax error", true},
			{"unterminated quote", "echo 'a", 2, "", "unexpected EOF", true},
			{"unterminated condition", "if [[ $x == ", 2, "", "conditional", true},
			{"a condition after it", "[[ a == a ]] && echo yes", 0, "yes\n", "", false},
			{"goes on after them", "echo fine", 0, "fine\n", "", false},
			{"not found", "no-such-program", 127, "", "not found", true},
			{"what looks like a report", `printf '0123456789abcdef01234567 0 0\n'; false`, 1, "0123456789abcdef01234567 0 0\n", "", false},
			{"an error in an expansion", "echo ${no:?such}\necho on", 0, "on\n", "such", true},
			{"exclamation marks", `echo "a!b" '!!' !`, 0, "a!b !! !\n", "", false},
			{"the status of the one before", "echo $?", 0, "0\n", "", false},
			{"a long command", "v='" + big + "'; echo ${#v}", 0, "307200\n", "", false},
			{"much output", "for i in {1..20000}; do echo line $i; done | tail -n 1", 0, "line 20000\n", "", false},
			{"nothing on stdin", "read x; echo \"$x-\"", 0, "-\n", "", false},
		} {
			if kind.tty && c.name == "nothing on stdin" {
				continue
			}
			t.Run(kind.name+"/"+c.name, func(t *testing.T) {
				r := say(t, b, kind.name, c.text)
				out, errs := r.out, r.err
				if kind.tty {
					out = strings.ReplaceAll(out, "\r\n", "\n")
					if c.errPart {
						out, errs = strings.TrimPrefix(c.out, ""), out
					} else {
						errs, out = c.err, strings.TrimSuffix(out, c.err)
					}
				}
				if r.status != c.status || out != c.out || c.errPart && !strings.Contains(errs, c.err) || !c.errPart && errs != c.err {
					t.Errorf("status %d, out %q, err %q", r.status, r.out, r.err)
				}
				if r.Ended || r.TimedOut {
					t.Errorf("%+v", r.TalkEnd)
				}
			})
		}
		f, err := b.Idle(kind.name)
		if err != nil || f.Busy != "" {
			t.Errorf("%s: an idle shell is busy: %q, %v", kind.name, f.Busy, err)
		}
	}
}

// What doesn't end is stopped, by no more than it takes.
func TestSessionDeadlines(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	for _, kind := range []struct {
		name string
		tty  bool
	}{{"pipes", false}, {"tty", true}} {
		for _, c := range []struct {
			name, text           string
			killed, ended, after bool
		}{
			{"sleep", "echo begun; sleep 100; echo after", false, false, false},
			{"shell that stops itself", "echo begun; kill -STOP $$; echo after", false, false, false},
			{"loop of builtins", "echo begun; while :; do :; done; echo after", false, false, false},
			{"child that ignores interrupts", "bash -c 'trap \"\" INT; echo begun; while :; do sleep 1; done'; echo after", true, false, true},
			{"shell that ignores them, too", "trap '' INT; echo begun; while :; do :; done", true, true, false},
			{"trap that goes on", "trap 'echo no' INT; echo begun; while :; do :; done", true, true, false},
		} {
			t.Run(kind.name+"/"+c.name, func(t *testing.T) {
				var r said
				testenv.Reach(t, 200*time.Millisecond, func(within time.Duration) bool {
					openShell(t, b, SessionSpec{Name: "s", TTY: kind.tty})
					say(t, b, "s", "y=1")
					r = say(t, b, "s", c.text, func(k *Talk) { k.Deadline = time.Now().Add(within) })
					if strings.HasPrefix(r.out, "begun") {
						return true
					}
					if !r.Ended {
						if err := b.CloseSession(context.Background(), "s"); err != nil {
							t.Fatal(err)
						}
					}
					return false
				})
				if !r.TimedOut || !r.Interrupted || r.Killed != c.killed || r.Ended != c.ended {
					t.Errorf("%+v", r.TalkEnd)
				}
				if strings.Contains(r.out, "after") && !c.after {
					t.Errorf("it went on: %q", r.out)
				}
				if r.Ended {
					if _, err := b.Talk(context.Background(), Talk{Session: "s"}); !fault.Is(err, fault.NotFound) {
						t.Errorf("talking to what has ended: %v", err)
					}
					return
				}
				if r := say(t, b, "s", "echo $y"); strings.TrimSpace(r.out) != "1" || r.status != 0 {
					t.Errorf("the session lost its state: %+v", r)
				}
				if f, err := b.Idle("s"); err != nil || f.Busy != "" {
					t.Errorf("it is busy: %+v, %v", f, err)
				}
				if pids, err := cgroup.Pids(b.sessionLeaf(b.Sessions()[0].Number)); err != nil || len(pids) != 1 {
					t.Errorf("processes %v are left, %v", pids, err)
				}
				if err := b.CloseSession(context.Background(), "s"); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// An interrupt reaches what is in the foreground, whatever it has done to itself: it ends the command, and nothing else.
func TestInterruptsReachTheForeground(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	for _, c := range []struct {
		name, text string
		runs       string // what has to run beside the shell first: the last words of the command lines
		waits      bool   // and the shell to wait for
		left       string // what goes on
		pipes      bool   // without a terminal only: with one, it is between the shell and the program, as at any
	}{
		{"a shell that stops itself", "echo begun; kill -STOP $$; echo after", "", false, "", false},
		{"a program that stops itself", "echo begun; bash -c 'kill -STOP $$; :' 1001; echo after", "1001", true, "", true},
		{"a job", "set -m; sleep 1001 & sleep 1002 & echo begun; sleep 1003; echo after", "1001 1002 1003", true, "1001 1002", false},
		{"a job of several", "set -m; echo begun; sleep 1001 | sleep 1002; echo after", "1001 1002", true, "", false},
		{"a program with a group of its own", "echo begun; timeout 1001 sleep 1002; echo after", "1002 1002", true, "", true},
		{"a program that has left the session", "echo begun; setsid sleep 1001; echo after", "1001", true, "", true},
		{"a wait for jobs", "set -m; sleep 1001 & echo begun; wait; echo after", "1001", true, "1001", false},
		{"a loop beside a job", "set -m; sleep 1001 & echo begun; while :; do :; done; echo after", "1001", false, "1001", false},
		{"a program beside what has left the session", "setsid sleep 1001 & echo begun; sleep 1002; echo after", "1001 1002", true, "1001", false},
	} {
		for _, tty := range []bool{false, true} {
			if tty && c.pipes {
				continue
			}
			right := t.Run(fmt.Sprintf("%s/tty=%t", c.name, tty), func(t *testing.T) {
				s := openShell(t, b, SessionSpec{Name: "s", TTY: tty})
				say(t, b, "s", "y=1")
				begun, done := make(chan struct{}), make(chan said)
				go func() {
					done <- say(t, b, "s", c.text, func(k *Talk) {
						write := k.Stdout
						first := sync.OnceFunc(func() { close(begun) })
						k.Stdout = func(p []byte) { write(p); first() }
					})
				}()
				select {
				case <-begun:
				case r := <-done:
					t.Fatalf("it ended without a word: %+v", r)
				}
				await(t, "the command has got so far", func() bool {
					stopped := slices.ContainsFunc(b.members(s), func(m member) bool { return m.stopped })
					return beside(t, b, s) == c.runs && waiting(s.HostPID) == c.waits && stopped == strings.Contains(c.text, "STOP")
				})
				if was, err := b.Interrupt("s"); !was || err != nil {
					t.Errorf("nothing to interrupt: %t, %v", was, err)
				}
				if r := <-done; !r.Interrupted || r.TimedOut || r.Ended || r.status != 130 || strings.Contains(r.out, "after") {
					t.Fatalf("%+v", r)
				}
				await(t, "what was interrupted is gone, and nothing else", func() bool { return beside(t, b, s) == c.left })
				if r := say(t, b, "s", "echo $y"); strings.TrimSpace(r.out) != "1" {
					t.Errorf("the session lost its state: %+v", r)
				}
				if err := b.CloseSession(context.Background(), "s"); err != nil {
					t.Error(err)
				}
			})
			if !right {
				return // each would wait for its deadline
			}
		}
	}
}

// beside are the last words of the command lines of what runs beside a shell.
func beside(t testing.TB, b *box, s Session) string {
	t.Helper()
	procs, err := b.Survivors()
	if err != nil {
		t.Fatal(err)
	}
	var last []string
	for _, p := range procs {
		if words := strings.Fields(strings.ReplaceAll(string(p.Cmdline), "\x00", " ")); p.HostPID != s.HostPID && len(words) > 0 {
			last = append(last, words[len(words)-1])
		}
	}
	slices.Sort(last)
	return strings.Join(last, " ")
}

// A shell that does something of its own before each prompt, without end, is never told anything again: no interrupt could reach it
// without the risk of cutting what it is told. A deadline kills what it waits for, or ends the session, and says so.
func TestAPromptWithoutEndEndsTheSession(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	for _, c := range []struct {
		name, text string
		commands   int // until one isn't answered
		ended      bool
	}{
		{"that loops", "PROMPT_COMMAND='echo begun; while :; do :; done'", 1, true},
		{"that loops the next time", "PROMPT_COMMAND='[[ $((n++)) -eq 0 ]] || while :; do :; done'", 2, true},
		{"that waits", "PROMPT_COMMAND='echo begun; sleep 1000'", 1, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			var r said
			testenv.Reach(t, 200*time.Millisecond, func(within time.Duration) bool {
				openShell(t, b, SessionSpec{Name: "s"})
				if c.commands > 1 {
					say(t, b, "s", c.text)
					if f, err := b.Idle("s"); err != nil || f.Busy == "" {
						t.Errorf("it is idle: %+v, %v", f, err)
					}
				}
				r = say(t, b, "s", c.text, func(k *Talk) { k.Deadline = time.Now().Add(within) })
				if c.commands > 1 || strings.Contains(r.out, "begun") {
					return true
				}
				if r.Ended {
					return false
				}
				if err := b.CloseSession(context.Background(), "s"); err != nil {
					t.Fatal(err)
				}
				return false
			})
			if !r.TimedOut || !r.Killed || r.Ended != c.ended {
				t.Errorf("%+v", r)
			}
			if got := len(b.Sessions()); c.ended && (got > 0 || cgroup.Populated(b.group.Run)) || !c.ended && got != 1 {
				t.Errorf("%d sessions are left", got)
			}
		})
	}
}

// A shell at the limit of its open files can run next to nothing, and says so itself, at once.
func TestAShellWithoutDescriptorsAnswers(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	for _, tty := range []bool{false, true} {
		for _, limit := range []string{"3", "4", "5", "11"} {
			t.Run(fmt.Sprintf("tty=%t/%s", tty, limit), func(t *testing.T) {
				openShell(t, b, SessionSpec{Name: "s", TTY: tty})
				if r := say(t, b, "s", "ulimit -n "+limit); r.TimedOut || r.Ended || r.status != 0 {
					t.Errorf("%+v", r)
				}
				if r := say(t, b, "s", "echo on"); r.TimedOut || r.Ended || strings.HasPrefix(r.out, "on") != (r.status == 0) || r.out+r.err == "" {
					t.Errorf("%+v", r)
				}
				l := &shell.Listener{Token: shell.Token()}
				end, err := b.Talk(context.Background(), Talk{Session: "s", Say: shell.Describe(l.Token), Heard: l.Hear, Deadline: time.Now().Add(time.Minute)})
				if err != nil || end.Ended || end.TimedOut {
					t.Errorf("describing itself: %+v, %v", end, err)
				}
				if err := b.CloseSession(context.Background(), "s"); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func TestSessionsEnd(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	for _, c := range []struct {
		name, text   string
		code, signal int
		out          string
	}{
		{"exit", "echo last; exit 7", 7, 0, "last\n"},
		{"set -e", "set -e; false; echo no", 1, 0, ""},
		{"exec", "exec cat /etc/group", 0, 0, "root:x:0:\n"},
		{"a signal", "kill -KILL $$", -1, 9, ""},
		{"with children", "sleep 1000 & exit 3", 3, 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			openShell(t, b, SessionSpec{Name: "s"})
			r := say(t, b, "s", c.text)
			if !r.Ended || r.Code != c.code || r.Signal != c.signal || !strings.HasPrefix(r.out, c.out) {
				t.Errorf("%+v", r)
			}
			if len(b.Sessions()) > 0 || cgroup.Populated(b.group.Run) {
				t.Error("something of it is left")
			}
		})
	}
}

// A session has the pid and the terminal that it is to have, and others have others.
func TestSessionsHaveTheirNumbers(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	s := openShell(t, b, SessionSpec{Name: "a", TTY: true, PID: 777, PTS: 3, Terminal: Terminal{Rows: 33, Cols: 99}})
	if s.PID != 777 || s.PTS != 3 {
		t.Errorf("%+v", s)
	}
	if r := say(t, b, "a", "echo $$; readlink /proc/self/fd/1; stty size < /dev/tty 2>/dev/null || echo 33 99"); r.out != "777\r\n/dev/pts/3\r\n33 99\r\n" {
		t.Errorf("%q", r.out)
	}
	term, unread, err := b.TerminalOf(context.Background(), "a")
	if err != nil || term.Rows != 33 || term.Cols != 99 || len(term.Termios) != termiosSize || unread != 0 {
		t.Errorf("%+v, %d, %v", term, unread, err)
	}
	if _, err := b.OpenSession(context.Background(), SessionSpec{Name: "b", Argv: shell.Argv, PID: 777, PTS: -1}); err == nil {
		t.Error("two sessions have one pid")
	}
	if _, err := b.OpenSession(context.Background(), SessionSpec{Name: "a", Argv: shell.Argv, PTS: -1}); !fault.Is(err, fault.Exists) {
		t.Errorf("two sessions have one name: %v", err)
	}
}

func TestTerminalSessions(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	openShell(t, b, SessionSpec{Name: "a", TTY: true, Terminal: Terminal{Rows: 24, Cols: 80}})
	type_ := func(keys string) func(*Talk) { return func(k *Talk) { k.Keys = []byte(keys) } }
	if r := say(t, b, "a", "read -r -p 'name? ' x; echo \"got $x\"", type_("bob\n")); !strings.Contains(r.out, "got bob\r\n") {
		t.Errorf("%q", r.out)
	}
	if r := say(t, b, "a", "cat", type_("one\n\x04")); !strings.HasSuffix(r.out, "one\r\n") || r.status != 0 {
		t.Errorf("%+v", r)
	}
	// All that was written is there before the end of the command is, again and again.
	for range 50 {
		if r := say(t, b, "a", "for i in {1..300}; do echo $i; done"); !strings.HasSuffix(r.out, "299\r\n300\r\n") || strings.ContainsRune(r.out, 0) {
			t.Fatalf("output ends with %q", r.out[max(0, len(r.out)-40):])
		}
	}
	if r := say(t, b, "a", "sleep 100 & jobs -r"); !strings.Contains(r.out, "Running") {
		t.Errorf("%q", r.out)
	}
	if f, err := b.Idle("a"); err != nil || f.Busy == "" {
		t.Errorf("a shell with a job is idle: %+v, %v", f, err)
	}
}

// KillTurn ends what a turn started in sessions, and neither them nor what was there before.
func TestKillTurnSparesSessions(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	ctx := context.Background()
	openShell(t, b, SessionSpec{Name: "a"})
	say(t, b, "a", "sleep 1001 & x=1")
	await(t, "it sleeps", func() bool { return sleeps(b) })
	if err := b.BeginTurn(); err != nil {
		t.Fatal(err)
	}
	say(t, b, "a", "sleep 1002 &")
	bash(t, b, "sleep 1003 >/dev/null 2>&1 &")
	if err := b.KillTurn(ctx); err != nil {
		t.Fatal(err)
	}
	// The shell reaps what was killed, in its own time.
	say(t, b, "a", "wait -n %2; :")
	if _, err := b.Idle("a"); err != nil {
		t.Fatal(err)
	}
	procs, err := b.Survivors()
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, p := range procs {
		lines = append(lines, strings.ReplaceAll(string(p.Cmdline), "\x00", " "))
	}
	slices.Sort(lines)
	if len(lines) != 2 || !strings.HasPrefix(lines[0], "bash") || !strings.HasPrefix(lines[1], "sleep 1001") {
		t.Errorf("%q are left", lines)
	}
	if r := say(t, b, "a", "echo $x"); r.out != "1\n" {
		t.Errorf("%+v", r)
	}
}

func TestInterruptFromOutside(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	openShell(t, b, SessionSpec{Name: "a"})
	if was, err := b.Interrupt("a"); was || err != nil {
		t.Errorf("nothing ran: %t, %v", was, err)
	}
	started := make(chan struct{})
	done := make(chan said)
	go func() {
		done <- say(t, b, "a", "echo on; sleep 100", func(k *Talk) {
			k.Stdout = func([]byte) { close(started) }
		})
	}()
	<-started
	// Earlier it could meet the shell's child before that is sleep: it has the shell's handlers then,
	// and forgets the signal.
	await(t, "it sleeps", func() bool { return sleeps(b) })
	if was, err := b.Interrupt("a"); !was || err != nil {
		t.Errorf("%t, %v", was, err)
	}
	if r := <-done; r.status != 130 || !r.Interrupted || r.TimedOut || r.Ended {
		t.Errorf("%+v", r)
	}
}

// sleeps: a process of the box has come as far as being sleep. Before, it is its parent's copy.
func sleeps(b *box) bool {
	procs, err := b.Survivors()
	return err == nil && slices.ContainsFunc(procs, func(p Proc) bool { return strings.HasPrefix(string(p.Cmdline), "sleep") })
}

// interrupting interrupts a session all the time, until what it returns is called.
func interrupting(b *box, name string) (end func()) {
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				_, _ = b.Interrupt(name)
			}
		}
	}()
	return func() { close(stop); <-stopped }
}

// However fast interrupts come, a deadline ends what it is to end, and what isn't a command isn't disturbed.
func TestInterruptsWithoutEnd(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	ignoring := func(name string) (end func()) {
		openShell(t, b, SessionSpec{Name: name})
		say(t, b, name, "trap '' INT")
		return interrupting(b, name)
	}
	end := sync.OnceFunc(ignoring("a"))
	defer end()
	testenv.Reach(t, 50*time.Millisecond, func(within time.Duration) bool {
		r := say(t, b, "a", "echo begun; sleep 1000; :", func(k *Talk) { k.Deadline = time.Now().Add(within) })
		begun := r.out != "" && r.Interrupted // a shell that still reads isn't interrupted
		if !r.TimedOut || r.Ended || begun && !r.Killed {
			t.Fatalf("a command that takes no interrupt: %+v", r)
		}
		return begun
	})
	for range 20 {
		if r := say(t, b, "a", ":", func(k *Talk) { k.Changes = false }); r.Interrupted || r.Ended || r.status != 0 {
			t.Fatalf("what is no command was interrupted: %+v", r)
		}
	}
	end()
	// Much output in both directions meanwhile.
	testenv.Reach(t, 200*time.Millisecond, func(within time.Duration) bool {
		defer ignoring("b")()
		r := say(t, b, "b", "while :; do echo x; echo y >&2; done", func(k *Talk) { k.Deadline = time.Now().Add(within) })
		if !r.TimedOut || r.out != "" && !r.Interrupted {
			t.Fatalf("a command that writes: %+v and %d bytes", r.TalkEnd, len(r.out))
		}
		if !r.Ended {
			if err := b.CloseSession(context.Background(), "b"); err != nil {
				t.Fatal(err)
			}
		}
		return len(r.out) >= 1000
	})
}

// An interrupt meets what runs, and not the shell while it reads the next line: what is left of a line that is cut would be
// run as another.
func TestInterruptsCutNoLine(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	for _, tty := range []bool{false, true} {
		name := map[bool]string{false: "pipes", true: "terminal"}[tty]
		openShell(t, b, SessionSpec{Name: name, TTY: tty})
		end := sync.OnceFunc(interrupting(b, name))
		defer end()
		met := 0
		for i := range 40 {
			text := "v=" + strings.Repeat("x", 100*i) + "; echo begun; sleep 0.00" + strconv.Itoa(i%10) + "; echo \"${#v}\""
			r := say(t, b, name, text, func(k *Talk) { k.Deadline = time.Now().Add(time.Minute) })
			out := strings.ReplaceAll(r.out, "\r\n", "\n")
			whole := fmt.Sprintf("begun\n%d\n", 100*i)
			if r.Ended || r.Killed || r.TimedOut || r.err != "" && strings.Trim(r.err, "\n") != "" {
				t.Fatalf("%s: %+v %q %.300q", name, r.TalkEnd, out, r.err)
			}
			switch {
			case r.Interrupted && r.status == 130 && strings.HasPrefix(whole, strings.TrimRight(strings.ReplaceAll(out, "^C", ""), "\n")):
				met++
			case r.status == 0 && strings.Trim(out, "\n") == strings.Trim(whole, "\n"):
			default:
				t.Fatalf("%s: %+v, status %d: %q %.300q", name, r.TalkEnd, r.status, out, r.err)
			}
		}
		if met == 0 {
			t.Errorf("%s: no command was interrupted", name)
		}
		end()
	}
}

// A command that has closed its shell's stdin is interrupted as any other.
func TestInterruptsMeetAClosedStdin(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	for _, tty := range []bool{false, true} {
		name := map[bool]string{false: "pipes", true: "terminal"}[tty]
		openShell(t, b, SessionSpec{Name: name, TTY: tty})
		end := sync.OnceFunc(interrupting(b, name))
		defer end()
		r := say(t, b, name, "exec 0<&-; while :; do :; done", func(k *Talk) { k.Deadline = time.Now().Add(time.Minute) })
		end()
		if r.status != 130 || !r.Interrupted || r.TimedOut || r.Ended {
			t.Errorf("%s: %+v", name, r)
		}
		if r := say(t, b, name, "echo alive"); strings.TrimSpace(r.out) != "alive" {
			t.Errorf("%s: afterwards %+v", name, r)
		}
	}
}

// Far more keys than a terminal holds, all of which it echoes.
func TestManyKeys(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	openShell(t, b, SessionSpec{Name: "a", TTY: true})
	line := strings.Repeat("k", 99) + "\n"
	keys := strings.Repeat(line, 20_000)
	r := say(t, b, "a", "n=0; while read -r x && [ \"$x\" != end ]; do n=$((n+1)); [ $n -lt 20 ] || break; done; echo \"lines $n\"", func(k *Talk) {
		k.Keys = []byte(keys)
		k.Deadline = time.Now().Add(time.Minute)
	})
	if r.TimedOut || r.Ended || !strings.Contains(r.out, "lines 20") {
		t.Errorf("%+v, %d bytes, at their end %q", r.TalkEnd, len(r.out), r.out[max(0, len(r.out)-100):])
	}
}

// A program that finds a terminal full waits, as on any: nothing of what it writes is lost, and none of it comes behind the end of
// its command, whoever writes beside it.
func TestMuchOutputToATerminal(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	openShell(t, b, SessionSpec{Name: "a", TTY: true})
	r := say(t, b, "a", "yes 0123456789 | head -c 2000000; echo end")
	if out := strings.ReplaceAll(r.out, "\r\n", "\n"); r.status != 0 || r.Ended || len(out) != 2_000_004 || !strings.HasSuffix(out, "end\n") {
		t.Fatalf("%+v, %d bytes, at their end %q", r.TalkEnd, len(r.out), r.out[max(0, len(r.out)-100):])
	}
	say(t, b, "a", "set +m; while :; do echo beside; done & :")
	for i := range 20 {
		mark := "mark" + strconv.Itoa(i)
		if r := say(t, b, "a", "echo "+mark); r.status != 0 || r.Ended || !strings.Contains(r.out, mark) || strings.Contains(r.out, "\x00") {
			t.Fatalf("%+v, %d bytes without %s", r.TalkEnd, len(r.out), mark)
		}
	}
}

// Output that ^S has stopped goes on at a deadline, and in the next command.
func TestStoppedTerminalGoesOn(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	openShell(t, b, SessionSpec{Name: "a", TTY: true})
	stops := func(k *Talk) { k.Keys = []byte{'s' - 'a' + 1, 'x', '\n'} } // what has read the line comes after the ^S
	r := say(t, b, "a", "read -r x; echo begun", stops, func(k *Talk) { k.Deadline = time.Now().Add(time.Second) })
	if !r.TimedOut || r.Killed || r.Ended {
		t.Errorf("a write to it: %+v, %q", r.TalkEnd, r.out)
	}
	if r := say(t, b, "a", "read -r x", stops); r.status != 0 || r.Ended {
		t.Errorf("no write to it: %+v", r)
	}
	if r := say(t, b, "a", "echo alive"); r.status != 0 || !strings.HasSuffix(strings.TrimSpace(r.out), "alive") { // after the echo of the keys
		t.Errorf("afterwards: %+v", r)
	}
}

// Sessions outlive the daemon with their box, and the next finds them.
func TestSessionsAreAdopted(t *testing.T) {
	h := openHost(t)
	b := startBox(t, h)
	openShell(t, b, SessionSpec{Name: "a"})
	openShell(t, b, SessionSpec{Name: "b", TTY: true})
	say(t, b, "a", "x=1")
	had := b.Sessions()
	b.wire.Close()
	h.mu.Lock()
	delete(h.owned, b.rec.Slot)
	h.mu.Unlock()
	again, err := h.Adopt(context.Background(), b.Record())
	if err != nil {
		t.Fatal(err)
	}
	defer mustKill(t, again)
	if got := again.Sessions(); !slices.Equal(got, had) {
		t.Errorf("found %+v, there were %+v", got, had)
	}
	if r := say(t, again.(*box), "a", "echo $x"); r.out != "1\n" {
		t.Errorf("%+v", r)
	}
	if again.Commands() != 2 {
		t.Errorf("%d commands counted", again.Commands())
	}
}
