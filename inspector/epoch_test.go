package inspector

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/tree"
)

// mustHold compares what a watch holds its new base to be, without having looked, with what
// is there. It says whether the watch held anything.
func mustHold(t *testing.T, w Watch) bool {
	t.Helper()
	b := w.(*watch).base
	held := b.listed().tree
	if held == nil {
		return false
	}
	l := lister{ctx: context.Background(), left: 1e6}
	there, err := l.list(b.path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if d := compare(held, there); !reflect.DeepEqual(d, difference{}) {
		t.Fatalf("a base was taken for what it isn't: %+v", d)
	}
	return true
}

// A base that is known without a look, because flags tell that nothing was made or
// removed since the last listing, is what the snapshot holds.
func TestHeldBaseIsTheSnapshot(t *testing.T) {
	k := mustKernel(t, Options{})
	for _, c := range []struct {
		what   string
		before string // a turn
		after  string // a turn without a barrier, before the capture
		tainted,
		held bool
	}{
		{"names", "create", "", false, true},
		{"names and an old file", "create", "write_", false, true},
		{"names after the barrier", "write_", "create", false, false},
		{"names, and names after the barrier", "create", "unlink_", false, false},
		{"a copy after the barrier", "create", "lower_write", false, false},
		{"a rename after the barrier", "create", "rename_", false, false},
		{"a link of an unnamed file after the barrier", "unlink_", "tmpfile_link", false, false},
		{"an exchange after the barrier", "create", "exchange", false, false},
		{"a write by the engine", "create", "", true, false},
		{"a call of another table", "int80", "", false, false},
	} {
		t.Run(c.what, func(t *testing.T) {
			b := mustBox(t, nil)
			w := mustWatch(t, k, b)
			w.BeginTurn()
			b.turn("/ways", c.before)
			barrier(w)
			if c.after != "" {
				w.BeginTurn()
				b.turn("/ways", c.after)
			}
			if c.tainted {
				b.must(os.WriteFile(filepath.Join(b.subject.Upper, "w/engine"), nil, 0o644))
				w.Tainted(false, "the engine wrote")
			}
			b.freeze()
			w.NewEpoch(b.snapshot())
			b.thaw()
			if held := mustHold(t, w); held != c.held {
				t.Errorf("held: %v, want %v", held, c.held)
			}
			w.BeginTurn()
			b.turn("/ways", "quiet")
			expect(t, "quiet", barrier(w), tree.None, tree.None)
			w.BeginTurn()
			b.turn("/bin/sh", "-c", "rm -rf /w/*")
			if r := barrier(w); r.Verdict != tree.Files {
				t.Errorf("all deleted: verdict %d: %q", r.Verdict, r.Reasons)
			}
		})
	}
}

// A process that is there at a barrier may be in the middle of making a name: flagged,
// and not yet to be seen. The names are looked at again.
func TestSurvivorInTheMiddleOfAChange(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	b.subject.Survivors = func() ([]Survivor, error) { return []Survivor{{PID: 2, Cmdline: []byte("maker")}}, nil }
	w := mustWatch(t, k, b)
	w.BeginTurn()
	b.turn("/ways", "create_unlink")
	expect(t, "before", barrier(w), tree.Process, tree.Process)
	// The survivor's name shows only now; its flag was taken by the barrier before.
	b.must(os.WriteFile(filepath.Join(b.subject.Upper, "w/late"), nil, 0o644))
	w.BeginTurn()
	r := barrier(w)
	if r.Verdict != tree.Both || !slices.Contains(effectsOf(r), "1 /w/late ") {
		t.Errorf("verdict %d: %q %q", r.Verdict, r.Reasons, effectsOf(r))
	}
}

// Times of change are older than the epoch if the host's clock is set back in it. They
// count for nothing then.
func TestClockSetBack(t *testing.T) {
	k := mustKernel(t, Options{})
	for _, way := range []string{"chmod_", "chown_", "setxattr_", "create", "unlink_", "chmod_dir", "utimensat_"} {
		t.Run(way, func(t *testing.T) {
			b := mustBox(t, nil)
			w := mustWatch(t, k, b)
			// The epoch began an hour from now.
			w.(*watch).began += int64(time.Hour)
			w.(*watch).mark.distance += time.Hour
			w.BeginTurn()
			b.turn("/ways", way)
			if r := barrier(w); r.Verdict != tree.Files {
				t.Errorf("verdict %d: %q", r.Verdict, r.Reasons)
			}
		})
	}
}

func TestClockKnowsWhenItWasSet(t *testing.T) {
	c, err := openClock()
	if err != nil {
		t.Fatal(err)
	}
	m := c.mark()
	if c.setSince(m) {
		t.Error("set, although nobody did")
	}
	for what, other := range map[string]clockMark{
		"no mark":                   {},
		"set, and set back":         {m.sets - 1, m.distance, true},
		"set back":                  {m.sets, m.distance + time.Second, true},
		"set forward":               {m.sets, m.distance - time.Second, true},
		"not known when it was set": {m.sets, m.distance, false},
	} {
		if !c.setSince(other) {
			t.Errorf("%s: isn't noticed", what)
		}
	}
	if err := c.close(); err != nil {
		t.Fatal(err)
	}
	if !c.setSince(m) {
		t.Error("a closed clock says that nothing happened")
	}
}

// The kernel's own word for a clock that is set, which needs no privilege to wait for and
// isn't tried on the host's clock: the timer is armed so that it would be cancelled.
func TestClockTimerIsCancelledOnSet(t *testing.T) {
	c, err := openClock()
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	var left unix.ItimerSpec
	if err := unix.TimerfdGettime(c.timer, &left); err != nil {
		t.Fatal(err)
	}
	if left.Value.Sec < 1<<32 {
		t.Errorf("the timer ends in %d s: it would look like a clock that was set", left.Value.Sec)
	}
}

// mustTellTimes skips a test of what only kernels do that tell whose times of change move.
func mustTellTimes(t *testing.T, k *Kernel) {
	t.Helper()
	if !k.tellsDirs {
		testenv.Require(t, func() string { return "this kernel hasn't got " + strings.Join(k.absent, ", ") })
	}
}

func epochOf(w Watch) signs { return signs(atomic.LoadUint64(&w.(*watch).box.Epoch)) }

// mustSeeAll compares what the last barrier saw of upper, without looking at all of it, with
// what is there.
func mustSeeAll(t *testing.T, w Watch) {
	t.Helper()
	seen := w.(*watch).seen.tree
	if seen == nil {
		return
	}
	l := lister{ctx: context.Background(), left: 1e6}
	there, err := l.list(w.(*watch).subject.Upper, nil)
	if err != nil {
		t.Fatal(err)
	}
	if d := compare(seen, there); !reflect.DeepEqual(d, difference{}) {
		t.Errorf("upper isn't what the barrier saw: %+v", d)
	}
	if size := 1e6 - l.left; seen.size != size {
		t.Errorf("upper has %d names, the barrier counted %d", size, seen.size)
	}
}

// Where the kernel tells whose times move, no inode needs to be compared but those that it
// tells: neither files that come and go within the turn, nor those that calls by path didn't change.
func TestNewInodesNeedNoComparison(t *testing.T) {
	k := mustKernel(t, Options{})
	mustTellTimes(t, k)
	for way, want := range map[string]signs{
		"mkdtemp_": 0, "lower_temp_chmod": 0, "chmod_": sawMoved, "chmod_new_and_old": sawMoved, "chmod_by_new_link": sawMoved,
		"utimensat_": sawMoved, "chown_": sawMoved, "touch": sawMoved,
	} {
		b := mustBox(t, nil)
		w := mustWatch(t, k, b)
		w.BeginTurn()
		b.turn("/ways", way)
		if got := epochOf(w); got&(sawMeta|sawMoved)&^want != 0 || got&want != want {
			t.Errorf("%s: flags %#x", way, got)
		}
	}
}

// Directories are listed again only if the kernel says that their entries came or went, over
// epochs, barriers and directories that were moved; beyond what it can keep, all are.
func TestOnlyChangedDirectoriesAreListed(t *testing.T) {
	k := mustKernel(t, Options{})
	mustTellTimes(t, k)
	many := "for i in $(seq 200); do echo >many/$i/new; done"
	for _, c := range []struct {
		name  string
		turns []string // the last is judged
		want  tree.Verdict
		wide  signs
	}{
		{"create", []string{"echo >d/new"}, tree.Files, 0},
		{"delete", []string{"rm many/7/f"}, tree.Files, 0},
		{"rename across", []string{"mv many/7/f many/9/g"}, tree.Files, 0},
		{"a folder and what is in it", []string{"mv many e; echo >e/many/3/new", "rm e/many/3/new"}, tree.Files, 0},
		{"moved and back, changed between", []string{"mv many e; rm e/many/3/f; mv e/many ."}, tree.Files, 0},
		{"moved and back", []string{"mv many e; mv e/many ."}, tree.None, 0},
		{"new folders", []string{"mkdir -p n/n/n; echo >n/n/n/f", "rm n/n/n/f; echo >n/n/g"}, tree.Files, 0},
		{"gone again", []string{"mkdir -p n/n; echo >n/n/f; rm -r n"}, tree.None, 0},
		{"in the image", []string{"echo >/lw/tmp/n; rm /lw/tmp/n; echo >/lw/tmp/m"}, tree.Files, 0},
		{"more than are kept", []string{many}, tree.Files, sawWide},
		{"more, and gone again", []string{many, "rm many/*/new"}, tree.None, sawWide},
		{"more modes than are kept", []string{"chmod 600 many/*/f"}, tree.Files, 0},
		{"more modes, and back", []string{"chmod 600 many/*/f; chmod 644 many/*/f"}, tree.None, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := mustBox(t, func(upper string) {
				for i := range 200 {
					dir := fmt.Sprintf("%s/w/many/%d", upper, i+1)
					if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(dir+"/f", nil, 0o644)); err != nil {
						panic(err)
					}
				}
			})
			w := mustWatch(t, k, b)
			for range 2 { // as a sandbox that was just made, and after a capture
				var r Report
				for _, turn := range c.turns {
					w.BeginTurn()
					b.turn("/bin/sh", "-c", turn)
					r = barrier(w)
					mustSeeAll(t, w)
				}
				if r.Verdict != c.want || epochOf(w)&sawWide != c.wide {
					t.Errorf("verdict %d, want %d, flags %#x: %q", r.Verdict, c.want, epochOf(w), r.Reasons)
				}
				b.turn("/bin/sh", "-c", "rm -rf /w/* /lw/tmp/*; mkdir /w/d /w/e; for i in $(seq 200); do mkdir -p many/$i; echo >many/$i/f; done")
				b.freeze()
				w.NewEpoch(b.snapshot())
				b.thaw()
			}
		})
	}
}
