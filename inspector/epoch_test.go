package inspector

import (
	"context"
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

// Modes of files that come and go within the turn ask for no comparison of all others, where
// the kernel tells whose times move.
func TestNewInodesNeedNoComparison(t *testing.T) {
	k := mustKernel(t, Options{})
	if len(k.absent) > 0 {
		testenv.Require(t, func() string { return "this kernel hasn't got " + strings.Join(k.absent, ", ") })
	}
	for way, want := range map[string]signs{"mkdtemp_": 0, "lower_temp_chmod": 0, "chmod_": sawMeta, "chmod_new_and_old": sawMeta, "chmod_by_new_link": sawMeta} {
		b := mustBox(t, nil)
		w := mustWatch(t, k, b)
		w.BeginTurn()
		b.turn("/ways", way)
		if got := signs(atomic.LoadUint64(&w.(*watch).box.Epoch)); got&sawMeta != want {
			t.Errorf("%s: flags %#x", way, got)
		}
	}
}
