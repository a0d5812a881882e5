package inspector

import (
	"flag"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/tree"
)

// A minute is the long form: go test ./inspector -run TestLoad -load.for 1m -v
var loadFor = flag.Duration("load.for", 3*time.Second, "how long TestLoad lasts")

// resident is this process's memory in bytes.
func resident(t *testing.T) int64 {
	t.Helper()
	data, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.ParseInt(strings.Fields(string(data))[1], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}

// Four sandboxes make all the events they can (200,000 a second and more, both
// processors permitting), two of them with one real change in between. Each of them
// is judged right, and so are the turns of a fifth; memory doesn't grow with events.
func TestLoad(t *testing.T) {
	k := mustKernel(t, Options{})
	victim := mustBox(t, nil)
	wv := mustWatch(t, k, victim)
	var boxes []*box
	var watches []Watch
	for range 4 {
		b := mustBox(t, nil)
		boxes, watches = append(boxes, b), append(watches, mustWatch(t, k, b))
	}
	before, began := resident(t), time.Now()
	var wg sync.WaitGroup
	var running atomic.Int32
	for i, b := range boxes {
		watches[i].BeginTurn()
		script := "/ways storm"
		if i%2 == 1 {
			script = "/ways storm & /ways write_; wait"
		}
		running.Add(1)
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer running.Add(-1)
			if out, err := b.try("/bin/sh", "-c", script); err != nil {
				t.Errorf("the storm of %s: %v: %s", b.name, err, out)
			}
		}()
	}
	turns := 0
	for ; running.Load() > 0; turns++ {
		wv.BeginTurn()
		victim.turn("/ways", "write_")
		expect(t, "a write beside the storms", barrier(wv), tree.Files, tree.Files)
		wv.NewEpoch(victim.snapshot())
		wv.BeginTurn()
		victim.turn("/ways", "create_unlink")
		expect(t, "a quiet turn beside the storms", barrier(wv), tree.None, tree.None)
	}
	wg.Wait()
	took := time.Since(began)
	events := uint64(0)
	for i, w := range watches {
		events += atomic.LoadUint64(&w.(*watch).box.Events)
		want := tree.None
		if i%2 == 1 {
			want = tree.Files
		}
		expect(t, "a storm", barrier(w), want, want)
	}
	grown := resident(t) - before
	t.Logf("%.0f events a second for %v, %d turns beside them, %d lost, %d KiB more memory", float64(events)/took.Seconds(), took, 2*turns, k.LostEvents(), grown>>10)
	if grown > 64<<20 {
		t.Errorf("memory grew by %d MiB", grown>>20)
	}
}

// A sandbox that tries to blind the inspector is judged by what it changed.
func TestBlinding(t *testing.T) {
	k := mustKernel(t, Options{})
	for _, c := range []struct {
		name string
		ways []string
		want tree.Verdict
	}{
		{"a tree of processes", []string{"bomb"}, tree.None},
		{"and a write within", []string{"bomb", "write_"}, tree.Files},
		{"thousands of short lives", []string{"short_lives"}, tree.None},
		{"and a mode", []string{"short_lives", "chmod_"}, tree.Files},
		{"writers that end at once", []string{"instant"}, tree.Files},
		{"a flood of files", []string{"flood"}, tree.None},
		{"and a link", []string{"flood", "link_"}, tree.Files},
		{"paths of 5 KiB, not UTF-8, with newlines", []string{"deep_names"}, tree.Files},
		{"the same, deleted again", []string{"deep_names_gone"}, tree.None},
		{"a writer that goes on after the turn", []string{"late_writer"}, tree.Both},
	} {
		t.Run(c.name, func(t *testing.T) {
			b, other := mustBox(t, nil), mustBox(t, nil)
			w, wo := mustWatch(t, k, b), mustWatch(t, k, other)
			w.BeginTurn()
			wo.BeginTurn()
			b.turn(append([]string{"/ways"}, c.ways...)...)
			expect(t, c.name, barrier(w), c.want, c.want)
			expect(t, "its neighbour", barrier(wo), tree.None, tree.None)
			if c.want == tree.Both { // whether it has written again or not by now
				w.BeginTurn()
				if r := barrier(w); r.Verdict != tree.Both {
					t.Errorf("a turn later: verdict %d: %q", r.Verdict, r.Reasons)
				}
			}
		})
	}
}
