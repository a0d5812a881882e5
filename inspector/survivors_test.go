package inspector

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/tree"
)

// stay leaves a process behind in a turn of its own and returns when it waits.
func (b *box) stay(way string, waits bool) []Survivor {
	b.t.Helper()
	b.turn("/sleepers", "stay", way)
	for deadline := time.Now().Add(time.Minute); ; {
		procs, err := b.survivors()
		b.must(err)
		if len(procs) > 0 && (!waits || !slices.ContainsFunc(procs, func(p Survivor) bool { return !waiting(p.HostPID) })) {
			return procs
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("%s doesn't wait: %v", way, procs)
		}
	}
}

// waiting says that every thread of a process waits in a call, but not for the turn
// to notice that it is there.
func waiting(pid int) bool {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return false
	}
	for _, t := range tasks {
		call, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/syscall", pid, t.Name()))
		if err != nil || strings.HasPrefix(string(call), "running") || strings.HasPrefix(string(call), "1 ") {
			stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/stat", pid, t.Name()))
			if !strings.Contains(string(stat), ") Z ") {
				return false
			}
		}
	}
	return true
}

// capture does what a capture that saves processes does.
func (b *box) capture(w Watch) {
	b.t.Helper()
	b.freeze()
	w.NewEpoch(b.snapshot())
	b.thaw()
}

// saved is a box in which a process stays behind and is captured.
func saved(t *testing.T, k *Kernel, way string, waits bool) (*box, Watch, Survivor) {
	t.Helper()
	b := mustBox(t, nil)
	w := mustWatch(t, k, b)
	w.BeginTurn()
	procs := b.stay(way, waits)
	if r := barrier(w); !shows(r.Verdict, tree.Process) || !shows(r.Turn, tree.Process) {
		t.Fatalf("the turn that leaves it: verdict %d, turn %d: %q", r.Verdict, r.Turn, r.Reasons)
	}
	b.capture(w)
	return b, w, procs[0]
}

// sleeping is every way of staying behind without doing anything.
var sleeping = strings.Fields(`sleep pause read accept accept_tcp listener_asleep epoll poll select wait futex threads leader_gone vfork
	sigwait ignores handles fifo pipe memfd terminal datagrams eventfd reader mapper in_folder of_the_image double_fork`)

// Who sleeps is unchanged over quiet turns, changes of files that it has nothing to
// do with, and captures, each of which interrupts its call.
func TestSleepersAreUnchanged(t *testing.T) {
	k := mustKernel(t, Options{})
	for _, way := range sleeping {
		t.Run(way, func(t *testing.T) {
			b, w, p := saved(t, k, way, true)
			for range 2 {
				w.BeginTurn()
				b.turn("/sleepers", "do", "nothing", "0")
				r := barrier(w)
				expect(t, "a quiet turn", r, tree.None, tree.None)
				if len(r.Survivors) == 0 || r.Survivors[0].Changed != "" {
					t.Errorf("fates: %+v", r.Survivors)
				}
				w.BeginTurn()
				for _, quiet := range []string{"temp", "children", "pipes", "socketpair", "own_terminal", "own_limits", "own_affinity", "refused", "probe"} {
					b.turn("/sleepers", "do", quiet, strconv.Itoa(p.HostPID))
				}
				expect(t, "another", barrier(w), tree.None, tree.None)
				w.BeginTurn()
				b.turn("/sleepers", "do", "write_other", "0")
				expect(t, "a change of files", barrier(w), tree.Files, tree.Files)
				b.freeze()
				if why := w.ProcessChanges(); why != nil {
					t.Errorf("while frozen: %q", why)
				}
				w.NewEpoch(b.snapshot())
				b.thaw()
			}
		})
	}
}

// Who doesn't sleep is changed, whatever it waits for in between.
func TestWhoRunsIsChanged(t *testing.T) {
	k := mustKernel(t, Options{})
	for _, way := range strings.Fields("timer alarm timerfd busy busy_thread ends forks stores stopped inotify") {
		t.Run(way, func(t *testing.T) {
			_, w, _ := saved(t, k, way, !slices.Contains([]string{"busy", "busy_thread", "stopped"}, way))
			want := tree.Process
			if way == "stores" {
				want = tree.Both
			}
			w.BeginTurn()
			r := barrier(w)
			for deadline := time.Now().Add(time.Minute); r.Verdict != want; r = barrier(w) {
				if time.Now().After(deadline) {
					t.Fatalf("verdict %d: %q, %+v", r.Verdict, r.Reasons, r.Survivors)
				}
			}
			if w.ProcessChanges() == nil {
				t.Error("a capture would take it for unchanged")
			}
			t.Log(r.Reasons)
		})
	}
}

// What a turn does to a survivor, or to something that it holds or uses. Those who
// wake by it show it themselves; the others sleep on, and must be called changed
// all the same.
func TestWhatReachesASurvivor(t *testing.T) {
	k := mustKernel(t, Options{})
	for _, c := range []struct {
		stays, does string
		want        tree.Verdict
	}{
		{"sleep", "kill", tree.Process},
		{"handles", "kill", tree.Process},
		{"handles", "tgkill", tree.Process},
		{"handles", "pidfd_signal", tree.Process},
		{"handles", "queue", tree.Process},
		{"sigwait", "kill", tree.Process},
		{"sleep", "cont", tree.Process},
		{"ignores", "kill", tree.None},
		{"sleep", "ptrace", tree.Process},
		{"sleep", "vm_write", tree.Process},
		{"sleep", "limits", tree.Process},
		{"sleep", "affinity", tree.Process},
		{"sleep", "batch", tree.Process},
		{"sleep", "nice", tree.Process},
		{"sleep", "ioprio", tree.Process},
		{"sleep", "madvise", tree.Process},
		{"sleep", "oom_score", tree.Process},
		{"sleep", "their_mem", tree.Process},
		{"pipe", "their_fd", tree.Process},
		{"memfd", "their_fd", tree.Process},
		{"memfd", "read_their_fd", tree.Process},
		{"terminal", "their_fd", tree.Process},
		{"eventfd", "take_fd", tree.Process},
		{"reader", "take_fd", tree.Process}, // shares the offset
		{"fifo", "fifo", tree.Process},
		{"listener_asleep", "tcp", tree.Process},
		{"accept_tcp", "tcp", tree.Process},
		{"epoll", "tcp", tree.Process},
		{"poll", "tcp", tree.Process},
		{"accept", "unix", tree.Process},
		{"datagrams", "datagram", tree.Process},
		{"reader", "write_old", tree.Both},
		{"reader", "by_link", tree.Both},
		{"reader", "replace", tree.Both},
		{"mapper", "map_old", tree.Both},
		{"in_folder", "move_folder", tree.Both},
		{"in_folder", "chmod_folder", tree.Both},
		{"in_folder", "file_in_folder", tree.Files},
		{"of_the_image", "write_image", tree.Both},
		{"accept", "drop_socket", tree.Both},
		{"datagrams", "chmod_socket", tree.Both},
		{"sleep", "write_old", tree.Files},
		{"sleep", "move_folder", tree.Files},
	} {
		t.Run(c.stays+"/"+c.does, func(t *testing.T) {
			b, w, p := saved(t, k, c.stays, true)
			w.BeginTurn()
			b.turn("/sleepers", "do", c.does, strconv.Itoa(p.HostPID))
			r := barrier(w)
			if !shows(r.Verdict, c.want) {
				t.Errorf("missed: verdict %d, want %d: %q, %+v", r.Verdict, c.want, r.Reasons, r.Survivors)
			} else if r.Verdict != c.want || r.Turn != c.want {
				t.Errorf("verdict %d, turn %d, want %d: %q", r.Verdict, r.Turn, c.want, r.Reasons)
			}
			if changed := w.ProcessChanges() != nil; changed != shows(c.want, tree.Process) {
				t.Errorf("a capture finds the processes changed: %v", changed)
			}
			t.Log(r.Reasons)
		})
	}
}

// A shell that is judged elsewhere may run; what it shares with others is theirs,
// too, but for its terminal.
func TestJudgedElsewhere(t *testing.T) {
	k := mustKernel(t, Options{})
	for _, c := range []struct {
		name, script, turn string
		want               tree.Verdict
	}{
		{"the shell alone", "mkfifo in; exec 3<>in; touch ready; while read -r line <&3; do eval \"$line\"; done", "echo 'x=1; touch done' >in; until test -e done; do :; done; echo 'rm done' >in; while test -e done; do :; done", tree.None},
		{"its child", "/sleepers stay sleep; mkfifo in; exec 3<>in; touch ready; while read -r line <&3; do eval \"$line\"; done", "echo 'x=1' >in", tree.None},
		{"a pipe between them", "mkfifo in; exec 3<>in; sleep 1000 <&3 & touch ready; while read -r line <&3; do eval \"$line\"; done", "echo 'x=1' >in", tree.Process},
		{"a file of both", "mkfifo in; exec 3<>in 4<old; sleep 1000 3<&- & touch ready; while read -r line <&3; do eval \"$line\"; done", "echo 'read -n 1 <&4' >in", tree.Process},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := mustBox(t, nil)
			procs := b.subject.Survivors
			b.subject.Survivors = func() ([]Survivor, error) {
				all, err := procs()
				for i, p := range all {
					all[i].Elsewhere = strings.HasPrefix(string(p.Cmdline), "/bin/bash")
				}
				return all, err
			}
			w := mustWatch(t, k, b)
			w.BeginTurn()
			b.turn("/bin/bash", "-c", "/usr/bin/setsid /bin/bash -c '"+strings.ReplaceAll(c.script, "'", `'\''`)+"' >/dev/null 2>&1 </dev/null & until test -e ready; do :; done")
			waits := func() bool {
				all, err := procs()
				b.must(err)
				return !slices.ContainsFunc(all, func(p Survivor) bool { return !waiting(p.HostPID) })
			}
			await(t, "all wait", waits)
			barrier(w)
			b.capture(w)
			w.BeginTurn()
			b.turn("/bin/sh", "-c", c.turn)
			await(t, "all wait again", waits)
			r := barrier(w)
			if r.Verdict != c.want {
				t.Errorf("verdict %d, want %d: %q, %+v", r.Verdict, c.want, r.Reasons, r.Survivors)
			}
		})
	}
}

func await(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !is(); {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}
