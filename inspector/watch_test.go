package inspector

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/tree"
)

func barrier(w Watch) Report { return w.Barrier(context.Background()) }

func expect(t *testing.T, what string, r Report, verdict, turn tree.Verdict) {
	t.Helper()
	if r.Verdict != verdict || r.Turn != turn {
		t.Fatalf("%s: verdict %d, turn %d, want %d, %d: %q %q", what, r.Verdict, r.Turn, verdict, turn, r.Reasons, effectsOf(r))
	}
}

// The verdict is over the epoch, the effects are the turn's: a change that wasn't
// captured keeps its sandbox from ever being judged none.
func TestVerdictLastsUntilTheNextEpoch(t *testing.T) {
	k := mustKernel(t, Options{})
	for _, way := range []struct{ first, again string }{
		{"write_", "write_"}, {"mmap_store", "mmap_store"}, {"create", "rename_"}, {"unlink_", "mkdir_"},
		{"chmod_", "chown_"}, {"lower_unlink", "lower_create"}, {"hostname", "domainname"},
	} {
		t.Run(way.first, func(t *testing.T) {
			b := mustBox(t, nil)
			w := mustWatch(t, k, b)
			want := tree.Files
			if way.first == "hostname" {
				want = tree.Process
			}
			w.BeginTurn()
			b.turn("/ways", way.first)
			expect(t, "the turn that changes", barrier(w), want, want)
			w.BeginTurn()
			b.turn("/ways", "quiet")
			expect(t, "a quiet turn after it", barrier(w), want, tree.None)
			w.NewEpoch(b.snapshot())
			w.BeginTurn()
			b.turn("/ways", "create_unlink")
			expect(t, "after the capture", barrier(w), tree.None, tree.None)
			w.BeginTurn()
			b.turn("/ways", way.again)
			expect(t, "a change in the new epoch", barrier(w), want, want)
		})
	}
}

// A file made in this epoch and deleted in a later turn of it leaves nothing.
func TestNetOfTheEpoch(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	w := mustWatch(t, k, b)
	w.BeginTurn()
	b.turn("/bin/sh", "-c", "mkdir n && echo x >n/y")
	r := barrier(w)
	expect(t, "made", r, tree.Files, tree.Files)
	if r.Count != 2 {
		t.Errorf("effects: %q", effectsOf(r))
	}
	w.BeginTurn()
	b.turn("/bin/sh", "-c", "echo z >>n/y")
	expect(t, "written again", barrier(w), tree.Files, tree.None) // its content isn't in the base anyway
	w.BeginTurn()
	b.turn("/bin/sh", "-c", "rm -r n")
	expect(t, "deleted", barrier(w), tree.None, tree.Files)
}

// Bytes and processes are those of the turn, whatever becomes of them.
func TestWrittenAndStarted(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	w := mustWatch(t, k, b)
	for _, c := range []struct {
		script           string
		written, started int64
	}{
		{"printf 12345 >n; printf 123 >>old; printf 12 >/dev/null; /bin/true; /bin/true & wait", 8, 2},
		{":", 0, 0},
		{"printf 123456 >n; rm n; :", 6, 1},
	} {
		w.BeginTurn()
		b.turn("/bin/sh", "-c", c.script)
		if r := barrier(w); r.Written != c.written || r.Started != c.started {
			t.Errorf("%s: %d bytes, %d processes", c.script, r.Written, r.Started)
		}
	}
}

// Stores of a process that mapped a file in an earlier turn raise no call at all,
// and the page was dirty before the capture.
func TestSurvivorStoresThroughItsMapping(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	w := mustWatch(t, k, b)
	w.BeginTurn()
	b.turn("/ways", "survivor_mapped")
	procs, err := b.survivors()
	b.must(err)
	if len(procs) != 1 {
		t.Fatalf("survivors: %v", procs)
	}
	old := filepath.Join(b.root, "w/old")
	stores := 0
	store := func() {
		t.Helper()
		stores++
		b.must(syscall.Kill(procs[0].PID, syscall.SIGUSR1))
		for deadline := time.Now().Add(time.Minute); ; {
			data, err := os.ReadFile(old)
			b.must(err)
			if data[9] == byte('a'+stores) {
				return
			}
			if time.Now().After(deadline) {
				t.Fatal("the survivor doesn't store")
			}
		}
	}
	store()
	expect(t, "first store", barrier(w), tree.Both, tree.Both)
	store() // to a page that is dirty
	b.freeze()
	w.NewEpoch(b.snapshot())
	b.thaw()
	w.BeginTurn()
	expect(t, "quiet survivor", barrier(w), tree.None, tree.None)
	store()
	expect(t, "store after the capture", barrier(w), tree.Both, tree.Both)
}

func (b *box) freeze() { b.freezer("1") }
func (b *box) thaw()   { b.freezer("0") }

func (b *box) freezer(state string) {
	b.t.Helper()
	b.must(os.WriteFile(filepath.Join(b.cgroup, "cgroup.freeze"), []byte(state), 0))
	for deadline := time.Now().Add(time.Minute); ; {
		data, err := os.ReadFile(filepath.Join(b.cgroup, "cgroup.events"))
		b.must(err)
		if strings.Contains(string(data), "frozen "+state) {
			return
		}
		if time.Now().After(deadline) {
			b.t.Fatal("the box doesn't freeze")
		}
	}
}

func TestSurvivorThatEndedIsAChange(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	w := mustWatch(t, k, b)
	w.BeginTurn()
	b.turn("/ways", "survivor")
	expect(t, "survives", barrier(w), tree.Process, tree.Process)
	b.freeze()
	w.NewEpoch(b.snapshot())
	b.thaw()
	w.BeginTurn()
	b.kill()
	r := barrier(w)
	expect(t, "ended", r, tree.Process, tree.Process)
	if r.Effects[0].Kind != tree.ProcessEnded {
		t.Errorf("effects: %q", effectsOf(r))
	}
	w.NewEpoch(b.snapshot())
	w.BeginTurn()
	expect(t, "after the next capture", barrier(w), tree.None, tree.None)
}

func TestTaintedLastsUntilTheNextEpoch(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	w := mustWatch(t, k, b)
	w.Tainted(false, "the engine wrote")
	w.BeginTurn()
	expect(t, "tainted", barrier(w), tree.Files, tree.None)
	w.Tainted(true, "a capture failed")
	w.BeginTurn()
	r := barrier(w)
	expect(t, "tainted more", r, tree.Both, tree.None)
	if strings.Join(r.Reasons, "; ") != "the engine wrote; a capture failed" {
		t.Errorf("reasons: %q", r.Reasons)
	}
	w.NewEpoch(b.snapshot())
	expect(t, "new epoch", barrier(w), tree.None, tree.None)
}

func TestSandboxesDontMix(t *testing.T) {
	k := mustKernel(t, Options{})
	one, two := mustBox(t, nil), mustBox(t, nil)
	w1, w2 := mustWatch(t, k, one), mustWatch(t, k, two)
	w1.BeginTurn()
	w2.BeginTurn()
	one.turn("/ways", "write_", "create", "shm", "connect_")
	expect(t, "the one that changed", barrier(w1), tree.Both, tree.Both)
	r := barrier(w2)
	expect(t, "the other", r, tree.None, tree.None)
	if r.External {
		t.Error("external from another sandbox")
	}
	// A slot that is used again starts clean.
	w1.Close()
	w1.Close()
	w3 := mustWatch(t, k, one)
	if one.subject.Base != "" {
		expect(t, "watched again", barrier(w3), tree.None, tree.None)
	}
}

func TestExternalIsAMarkOnly(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	for _, c := range []struct {
		way      string
		external bool
		verdict  tree.Verdict
	}{
		{"connect_", true, tree.None}, {"datagram", true, tree.None}, {"datagram6", true, tree.None}, {"datagram_mapped", true, tree.None},
		{"datagram_of_no_family", true, tree.None}, {"echo_request", true, tree.None}, {"second_of_two", true, tree.None},
		{"int80_connect", true, tree.Both}, // as any call of 32 bits
		{"loopback", false, tree.None}, {"two_here", false, tree.None},
	} {
		w := mustWatch(t, k, b)
		w.BeginTurn()
		b.turn("/ways", c.way)
		r := barrier(w)
		if expect(t, c.way, r, c.verdict, c.verdict); r.External != c.external {
			t.Errorf("%s: external %t", c.way, r.External)
		}
		w.BeginTurn()
		if barrier(w).External {
			t.Errorf("%s: the next turn is external, too", c.way)
		}
		// What survivors try behind a turn is the next one's, also if there was a capture.
		b.turn("/ways", c.way)
		w.NewEpoch(b.snapshot())
		w.BeginTurn()
		if got := barrier(w).External; got != c.external {
			t.Errorf("%s behind a turn: the next one is external: %t", c.way, got)
		}
		w.Close()
	}
}

// Whatever can't be read in the kernel is counted, and both halves are changed.
func TestLossIsSeen(t *testing.T) {
	k := mustKernel(t, Options{blind: blindReads})
	b := mustBox(t, nil)
	w := mustWatch(t, k, b)
	w.BeginTurn()
	b.turn("/ways", "write_")
	r := barrier(w)
	expect(t, "lost", r, tree.Both, tree.Both)
	if r.Lost == 0 || k.LostEvents() == 0 || !strings.Contains(strings.Join(r.Reasons, ";"), "lost") {
		t.Errorf("lost %d, in all %d, reasons %q", r.Lost, k.LostEvents(), r.Reasons)
	}
}

// More changed files than the kernel side can name: all counted, none missed.
func TestManyOldFiles(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, func(upper string) {
		for i := range 500 {
			if err := os.WriteFile(filepath.Join(upper, "w", "m"+string(rune('a'+i%26))+strings.Repeat("z", i/26)), []byte("1"), 0o644); err != nil {
				panic(err)
			}
		}
	})
	w := mustWatch(t, k, b)
	w.BeginTurn()
	b.turn("/bin/sh", "-c", "for f in m*; do echo 2 >>$f; done")
	r := barrier(w)
	expect(t, "500 files", r, tree.Files, tree.Files)
	if r.Count < 500 || len(r.Effects) != tree.MaxEffects {
		t.Errorf("count %d, effects %d", r.Count, len(r.Effects))
	}
}

// Past the budget or the deadline, the files count as changed.
func TestBarrierGivesUpSafely(t *testing.T) {
	k := mustKernel(t, Options{MaxEntries: 5})
	b := mustBox(t, nil)
	w := mustWatch(t, k, b)
	w.BeginTurn()
	b.turn("/ways", "create_unlink")
	expect(t, "over budget", barrier(w), tree.Files, tree.Files)

	k = mustKernel(t, Options{})
	b = mustBox(t, nil)
	w = mustWatch(t, k, b)
	w.BeginTurn()
	b.turn("/ways", "deep")
	expect(t, "3,000 directories deep", barrier(w), tree.Files, tree.Files)

	b = mustBox(t, nil)
	w = mustWatch(t, k, b)
	w.BeginTurn()
	b.turn("/ways", "create_unlink")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	expect(t, "past the deadline", w.Barrier(ctx), tree.Files, tree.Files)
	w.BeginTurn()
	expect(t, "tried again", barrier(w), tree.None, tree.None)
}

func TestSurvivorsThatCantBeListedAreAChange(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	var fail atomic.Bool
	b.subject.Survivors = func() ([]Survivor, error) {
		if fail.Load() {
			return nil, errors.New("no answer")
		}
		return nil, nil
	}
	w := mustWatch(t, k, b)
	expect(t, "listed", barrier(w), tree.None, tree.None)
	fail.Store(true)
	expect(t, "not listed", barrier(w), tree.Process, tree.Process)
}

func TestBaseThatIsGoneIsAChange(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	b.subject.Base += "-none"
	w := mustWatch(t, k, b)
	w.BeginTurn()
	b.turn("/ways", "create_unlink")
	expect(t, "no base", barrier(w), tree.Files, tree.Files)
}

func TestClosedInspectorJudgesChanged(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	w := mustWatch(t, k, b)
	b.must(k.Close())
	b.must(k.Close())
	expect(t, "closed", barrier(w), tree.Both, tree.Both)
	if _, err := k.Watch(b.subject); err == nil {
		t.Error("a closed inspector watches")
	}
}

// Processes in groups below run count, as a turn's own leaf does.
func TestDeeperGroupsAreWatched(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	leaf := filepath.Join(b.cgroup, "turn-2")
	b.must(os.Mkdir(leaf, 0o755))
	w := mustWatch(t, k, b)
	f := b.mustOpen(leaf)
	defer f.Close()
	run := b.fd
	b.fd = f
	w.BeginTurn()
	b.turn("/ways", "write_")
	b.fd = run
	expect(t, "in a leaf", barrier(w), tree.Files, tree.Files)
	b.must(unix.Rmdir(leaf))
}

// What a sandbox does on a file system it mounted in an earlier epoch is no change
// of its upper layer, so it counts as one of its processes.
func TestMountsAreRemembered(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	w := mustWatch(t, k, b)
	w.BeginTurn()
	b.turn("/ways", "mount_")
	expect(t, "mounts", barrier(w), tree.Process, tree.Process)
	w.NewEpoch(b.snapshot())
	w.BeginTurn()
	b.turn("/ways", "reads")
	expect(t, "only reads", barrier(w), tree.None, tree.None)
	w.BeginTurn()
	b.turn("/ways", "create_unlink")
	expect(t, "names change somewhere", barrier(w), tree.Process, tree.Process)
}

// A sandbox that makes all the events it can is judged right, and so is its
// neighbour, whose one write falls in the middle of it.
func TestFloodHidesNothing(t *testing.T) {
	k := mustKernel(t, Options{})
	one, two := mustBox(t, nil), mustBox(t, nil)
	w1, w2 := mustWatch(t, k, one), mustWatch(t, k, two)
	w1.BeginTurn()
	done := make(chan error, 1)
	go func() {
		_, err := one.try("/ways", "flood")
		done <- err
	}()
	turns := 0
	for flooding := true; flooding; turns++ {
		select {
		case err := <-done:
			one.must(err)
			flooding = false
		default:
		}
		w2.BeginTurn()
		two.turn("/ways", "write_")
		expect(t, "the neighbour's write", barrier(w2), tree.Files, tree.Files)
		w2.NewEpoch(two.snapshot())
		w2.BeginTurn()
		two.turn("/ways", "create_unlink")
		expect(t, "the neighbour's quiet turn", barrier(w2), tree.None, tree.None)
	}
	r := barrier(w1)
	expect(t, "the flood", r, tree.None, tree.None)
	t.Logf("%d turns beside the flood, %d events lost", turns, k.LostEvents())
}

// In a large sandbox a metadata change isn't looked for while a new file decides
// anyway; when that file goes again, it must be.
func TestMetadataIsLookedForOnceItDecides(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, func(upper string) {
		for i := range fewNames + 1 {
			if err := os.WriteFile(fmt.Sprintf("%s/w/d/%d", upper, i), nil, 0o644); err != nil {
				panic(err)
			}
		}
	})
	w := mustWatch(t, k, b)
	w.BeginTurn()
	b.turn("/ways", "create", "chmod_")
	expect(t, "a new file and a mode", barrier(w), tree.Files, tree.Files)
	w.BeginTurn()
	b.turn("/bin/rm", "new")
	expect(t, "the mode alone", barrier(w), tree.Files, tree.Files)
}

// A group on another level would never be seen, so it is refused; so is one that
// isn't there.
func TestGroupsThatCantBeSeenAreRefused(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	mustWatch(t, k, b)
	var st unix.Stat_t
	b.must(unix.Stat(filepath.Dir(b.cgroup), &st))
	other := b.subject
	other.Cgroup = st.Ino
	if _, err := k.Watch(other); !fault.Is(err, fault.Invalid) {
		t.Errorf("a group above: %v", err)
	}
	other.Cgroup = 1 << 60
	if _, err := k.Watch(other); !fault.Is(err, fault.Invalid) {
		t.Errorf("no such group: %v", err)
	}
	if _, err := k.Watch(b.subject); err == nil {
		t.Error("the same group twice")
	}
}

func TestThisHostIsSupported(t *testing.T) {
	mustHost(t)
	if err := Supported(); err != nil {
		t.Fatal(err)
	}
}

// A file of the image that was opened for writing is copied up, which is no change.
// What is written to the copy in a later turn is one, although the copy is as new as
// a temporary file.
func TestCopiesAreLookedAtAgain(t *testing.T) {
	k := mustKernel(t, Options{})
	for _, way := range []string{"lower_write", "lower_mmap", "lower_truncate", "lower_chmod", "lower_unlink"} {
		t.Run(way, func(t *testing.T) {
			b := mustBox(t, nil)
			w := mustWatch(t, k, b)
			w.BeginTurn()
			b.turn("/ways", "open_rdwr_lower")
			expect(t, "copied up", barrier(w), tree.None, tree.None)
			w.BeginTurn()
			b.turn("/ways", "quiet")
			expect(t, "left alone", barrier(w), tree.None, tree.None)
			w.BeginTurn()
			b.turn("/ways", way)
			expect(t, "changed", barrier(w), tree.Files, tree.Files)
			w.NewEpoch(b.snapshot())
			w.BeginTurn()
			expect(t, "captured", barrier(w), tree.None, tree.None)
		})
	}
}

// A survivor that mapped the copy can store without moving any time, and the page
// has been dirty since it was copied.
func TestSurvivorStoresToACopy(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	w := mustWatch(t, k, b)
	w.BeginTurn()
	b.turn("/ways", "lower_mapped_survivor")
	expect(t, "mapped, stored to and put back", barrier(w), tree.Process, tree.Process)
	procs, err := b.survivors()
	b.must(err)
	w.BeginTurn()
	b.must(syscall.Kill(procs[0].PID, syscall.SIGUSR1))
	path := filepath.Join(b.root, "lw/file")
	for deadline := time.Now().Add(time.Minute); ; {
		data, err := os.ReadFile(path)
		b.must(err)
		if data[0] != 'o' {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the survivor doesn't store")
		}
	}
	expect(t, "stored", barrier(w), tree.Both, tree.Both)
}

// A process of the turn that writes at the last instant and is gone when the
// survivors are counted: its write is in the verdict.
func TestWriteBeforeTheLastSurvivorEnds(t *testing.T) {
	k := mustKernel(t, Options{})
	for _, way := range []string{"create", "write_", "hostname"} {
		b := mustBox(t, nil)
		late := true
		b.subject.Survivors = func() ([]Survivor, error) {
			if late {
				late = false
				b.turn("/ways", way)
			}
			return nil, nil
		}
		w := mustWatch(t, k, b)
		w.BeginTurn()
		b.turn("/ways", "quiet")
		if r := barrier(w); r.Verdict == tree.None || r.Turn == tree.None {
			t.Errorf("%s: verdict %d, turn %d", way, r.Verdict, r.Turn)
		}
	}
}

// A box whose own place is taken stands elsewhere, and is found there.
func TestWatchedInAnotherSlot(t *testing.T) {
	k := mustKernel(t, Options{})
	b := mustBox(t, nil)
	own := uint32(b.subject.Cgroup % uint64(len(k.used)))
	k.used[own] = true
	w := mustWatch(t, k, b)
	if w.(*watch).slot == own {
		t.Fatal("two boxes in one slot")
	}
	w.BeginTurn()
	b.turn("/ways", "write_")
	if r := barrier(w); r.Verdict != tree.Files {
		t.Errorf("verdict %d: %q", r.Verdict, r.Reasons)
	}
}
