package shell

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/testenv"
)

// live is a bash of the host, driven as pid 1 of a box drives one, without a box.
type live struct {
	t       testing.TB
	cmd     *exec.Cmd
	channel *os.File
	out     *bytes.Buffer
	done    chan struct{}
	shadow  bool
}

var testOwn = Own{"BOXWOOD_GENERATION": "gn_test"}

func start(t testing.TB, env []string, dir string, g Greeting) *live {
	t.Helper()
	testenv.Require(t, testenv.Program("bash"))
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "stdin")
	defer theirs.Close()
	if err := unix.SetNonblock(pair[0], true); err != nil {
		t.Fatal(err)
	}
	l := &live{t: t, channel: os.NewFile(uintptr(pair[0]), "channel"), out: &bytes.Buffer{}, done: make(chan struct{})}
	null, err := os.OpenFile("/dev/null", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	l.cmd = exec.Command("bash")
	l.cmd.Args, l.cmd.Env, l.cmd.Dir = Argv, append([]string{"BOXWOOD_GENERATION=gn_test"}, env...), dir
	l.cmd.Stdin, l.cmd.Stdout, l.cmd.Stderr, l.cmd.ExtraFiles = theirs, w, null, []*os.File{w}
	l.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := l.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(l.done)
		buf := make([]byte, 64<<10)
		for {
			n, err := r.Read(buf)
			l.out.Write(buf[:n])
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		_ = syscall.Kill(-l.cmd.Process.Pid, syscall.SIGKILL)
		_ = l.cmd.Wait()
		l.channel.Close()
		r.Close()
		<-l.done
	})
	g.Token = Token()
	g.Stdin = "/dev/null"
	l.talk(Greet(g), (&Report{Token: g.Token}).Hear)
	return l
}

func (l *live) talk(say []byte, hear func([]byte) (bool, error)) {
	l.t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	_ = l.channel.SetDeadline(deadline)
	go l.channel.Write(say)
	buf := make([]byte, 128<<10)
	for {
		n, err := l.channel.Read(buf)
		if err != nil {
			l.t.Fatalf("the shell doesn't answer: %v", err)
		}
		if over, err := hear(buf[:n]); err != nil {
			l.t.Fatal(err)
		} else if over {
			return
		}
	}
}

func (l *live) run(text string) int {
	l.t.Helper()
	r := &Report{Token: Token()}
	l.talk(Command([]byte(text), "/dev/null", r.Token, l.shadow), r.Hear)
	l.shadow = r.Shadowed
	return r.Status
}

func (l *live) describe() *Description {
	l.t.Helper()
	h := &Listener{Token: Token()}
	l.talk(Describe(h.Token), h.Hear)
	d, err := h.Parse(testOwn)
	if err != nil {
		l.t.Fatal(err)
	}
	return d
}

// again starts another shell and makes it be like d.
func again(t testing.TB, d *Description, dir string) *live {
	t.Helper()
	l := start(t, Environment(d), dir, Greeting{})
	r := &Report{Token: Token()}
	l.talk(append(Restore(d), report(r.Token)...), r.Hear)
	l.shadow = Shadowed(d)
	return l
}

func (l *live) cwd() string {
	dir, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", l.cmd.Process.Pid))
	if err != nil {
		l.t.Fatal(err)
	}
	return dir
}

var states = []struct{ name, text string }{
	{"nothing", ``},
	{"variables", "a=1; b='x y'; export c=$'new\\nline'; declare -x d; e=; declare f"},
	{"bytes that are no UTF-8", `a=$'\xff\xfe\x80'; declare -A m=([$'\xff']=$'\x81')`},
	{"another locale", `LC_ALL=C; a=$'\xc3\xa9'`},
	{"attributes", `declare -i i=5; declare -u u=abc; declare -l l=ABC; declare -c k=abc; declare -r r=1; declare -rix q=7; declare -t z=1`},
	{"arrays", `a=(1 "2 3" $'4\n5' '6"7' "8'9" 'a]b'); a[100]=far; declare -a empty=(); declare -a unset`},
	{"associative arrays", `declare -A m; for i in {1..300}; do m[key$i]=v$i; done; m["a b"]='c"d'; m[$'\n']=']'; m['$x']='$(y)'; unset "m[key7]"`},
	{"namerefs", `x=5; declare -n r=x; declare -n loose=nowhere; declare -n el='arr[1]'; arr=(1 2 3)`},
	{"functions", "f() { echo \"$1\"; }; g () ( cd /; cat <<X\nhe$1\nX\n); function h:i.j+k { local x=$'\\t'; case $x in (a*) f;; *) g;; esac; }; export -f f; declare -ft g; readonly -f g"},
	{"nested quoting", `f() { echo "a $(echo 'b "c" '"d $(echo "e 'f'")")"; x=${1:-"$(g "y")"}; [[ $x =~ ^(a|b)+$ ]] && echo $((1<<3)) "${x//\"/\'}"; }`},
	{"extended globs in a function", "shopt -s extglob\nf() { ls !(a|b) +(c) @(d|e); }"},
	{"functions called like builtins", `printf() { echo no; }; declare() { echo no; }; trap() { echo no; }; set() { echo no; }; shopt() { echo no; }; eval() { echo no; }; unset() { :; }; alias() { :; }; enable() { :; }`},
	{"a function called builtin", `builtin() { echo no; }`},
	{"aliases", `alias ll='ls -l' g=git; alias 'x!y'=z; alias sudo='sudo ' q="it's"`},
	{"options", `set -f -C -k; set -o pipefail; set -b; shopt -s globstar nullglob dotglob lastpipe; shopt -u sourcepath`},
	{"set -u", `set -u`},
	{"set -x", `set -x`},
	{"set -v", `set -v`},
	{"errexit", `set -e`},
	{"posix", `set -o posix`},
	{"tracing functions", `set -T -E; trap 'x=$((x+1))' DEBUG; x=0`},
	{"traps", `trap 'echo bye' EXIT; trap "echo it's" USR1; trap '' HUP; trap $'a\nb "c" \'d\'' TERM; trap 'e=1' ERR; trap 'r=1' RETURN`},
	{"a debug trap", `trap 'n=$((n+1))' DEBUG`},
	{"a debug trap with xtrace", `trap 'echo $BASH_COMMAND' DEBUG; set -x`},
	{"umask", `umask 027`},
	{"limits", `ulimit -n 100; ulimit -Sc 0; ulimit -v 8000000`},
	{"a folder", `cd /usr/share`},
	{"a directory stack", `cd /usr; pushd /tmp >/dev/null; pushd -n '/a b'; pushd -n $'/c\nd'; pushd -n '~x'`},
	{"hashed commands", `hash ls cat; hash -p /bin/true mine; hash -p '/x y' z`},
	{"completions", `complete -W 'a b' foo; complete -F f bar baz; complete -D -o default; complete -C 'x "y"' -P '<' z`},
	{"positional parameters", `set -- a "b c" $'d\n' '' '*'`},
	{"getopts between words", `set -- -a -b -c; getopts abc o; getopts abc o`},
	{"builtins that are off", `enable -n test kill`},
	{"our own builtins off", `enable -n alias hash`},
	{"a prompt", `PS1='\u> '; PS2=more; PS4='+$LINENO '`},
	{"a command before each prompt", `PROMPT_COMMAND='last=ran'`},
	{"a counter before each trace", `PS4='$((n++)) '; set -x`},
	{"what is preset is unset", `unset TERM HISTSIZE PS4 OLDPWD HOSTNAME IFS PATH; unset BOXWOOD_GENERATION`},
	{"IFS and options of reading", `IFS=,; set -f`},
	{"the generation is another", `BOXWOOD_GENERATION=mine`},
	{"BASH_COMPAT", `BASH_COMPAT=4.2`},
	{"a match", `[[ abc =~ (b)(c) ]]`},
	{"RANDOM without its meaning", `unset RANDOM`},
	{"exported options", `export SHELLOPTS`},
}

// A shell that is restored describes itself as the first did, and works.
func TestRestoredShellsAreEqual(t *testing.T) {
	// States that a new shell can't take; they must be told, and aren't an equal description.
	refused := map[string]bool{"RANDOM without its meaning": true, "exported options": true, "a counter before each trace": true,
		"tracing functions": true, // the trap runs in the subshell, too, until that has told it
	}
	for _, s := range states {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			first := start(t, nil, "/", Greeting{})
			blank := first.describe()
			first.run(s.text)
			d := first.describe()
			if diff := Diff(d, first.describe()); len(diff) > 0 {
				t.Fatalf("described twice, it differs in %q", diff)
			}
			if s.text != "" && s.name != "limits" && len(Diff(blank, d)) == 0 { // limits are the kernel's to tell
				t.Fatal("the change isn't in the description")
			}
			if b, err := Read(d.Bytes()); err != nil || len(Diff(b, d)) > 0 {
				t.Fatalf("read back it is another: %v", err)
			}
			second := again(t, d, first.cwd())
			diff := Diff(d, second.describe())
			if refused[s.name] {
				if len(diff) == 0 {
					t.Error("it is equal: take it off the list of those that aren't")
				}
				return
			}
			if len(diff) > 0 {
				t.Errorf("it differs in %q\nfirst:\n%s\nsecond:\n%s", diff, d.dump(), second.describe().dump())
			}
			if s.name != "errexit" && second.run("[ 1 = 1 ]") > 1 {
				t.Error("it doesn't run commands")
			}
		})
	}
}

// Many a profile asks for line editing, with which nothing could be told over a channel, nor restored.
func TestProfilesAreRead(t *testing.T) {
	home := t.TempDir()
	if err := os.WriteFile(home+"/.bash_profile", []byte("set -o vi\nseen=1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	l := start(t, []string{"HOME=" + home}, "/", Greeting{Profiles: true})
	if l.run("[[ $seen = 1 ]]") != 0 {
		t.Error("its profile wasn't read")
	}
	if l.run("[[ ! -o vi && ! -o emacs ]]") != 0 {
		t.Error("it edits lines")
	}
}

// An error leaves a bash in the middle of a [[: the next command would be taken for a part of it, and the description, too.
func TestConditionsThatAreCutOff(t *testing.T) {
	for _, text := range []string{"[[", "[[ a", "if [[ $x == ", "[[ a =~ (", "[[ a && (", "f() { [[ a", "[[ a b c", "set -x; [[ a", "set -T; trap 'echo x' DEBUG; [[ a"} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			l := start(t, nil, "/", Greeting{})
			if status := l.run(text); status != 2 {
				t.Errorf("it ended with %d", status)
			}
			if status := l.run("[[ a = a ]] && exit_with() { return 5; } && exit_with || [[ $? = 5 ]] && (exit 7) || (exit 8)"); status != 8 {
				t.Errorf("the next command ended with %d", status)
			}
			l.describe()
		})
	}
}

func (d *Description) dump() string {
	var b strings.Builder
	for _, name := range []string{secDisabled, secBuiltin, secTraps, secOptions, secVars, secAttrs, secFuncs, secAliases, secDirs, secHash, secComplete, secArgs, secUmask, secJob, secGetopts} {
		fmt.Fprintf(&b, "-- %s\n%s\n", name, d.Sections[name])
	}
	return b.String()
}
