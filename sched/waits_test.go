package sched

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Outliers, however far off, don't take the estimate out of the range of all the rest.
func TestOutliersAreBorne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var w waits
		low := time.Duration(rapid.IntRange(100, 5000).Draw(t, "low")) * time.Millisecond
		high := low * time.Duration(rapid.IntRange(1, 5).Draw(t, "spread"))
		since := 0
		for range rapid.IntRange(enough, 200).Draw(t, "n") {
			d := time.Duration(rapid.Int64Range(int64(low), int64(high)).Draw(t, "wait"))
			if since++; since > 24 && rapid.Bool().Draw(t, "outlier") {
				d, since = rapid.SampledFrom([]time.Duration{0, -time.Second, time.Hour}).Draw(t, "far"), 0
			}
			w.observe("t", d)
			if got := w.expect("t"); len(w.trees["t"].values) >= enough && (got < low-time.Microsecond || got > high+time.Microsecond) {
				t.Fatalf("%s is expected, all but outliers are between %s and %s", got, low, high)
			}
		}
	})
}

// When a model gets faster or slower, the estimate follows within a few turns, not after a window's length.
func TestDriftIsFollowed(t *testing.T) {
	for name, to := range map[string]time.Duration{"faster": time.Second, "slower": 60 * time.Second} {
		t.Run(name, func(t *testing.T) {
			var w waits
			for i := range 100 {
				w.observe("t", 10*time.Second+time.Duration(i%7)*time.Second)
			}
			n := 0
			for ; w.expect("t") < to*9/10 || w.expect("t") > to*11/10; n++ {
				if n > 2*enough {
					t.Fatalf("after %d waits of %s, %s is expected", n, to, w.expect("t"))
				}
				w.observe("t", to)
			}
			if n == 0 {
				t.Fatal("the estimate was there before anything changed")
			}
		})
	}
}

// A tree of which little is known is like the others; nothing known at all is a second.
func TestUnknownTrees(t *testing.T) {
	var w waits
	if got := w.expect("new"); got != unknownWait {
		t.Errorf("%s is expected of nothing", got)
	}
	for range 10 {
		w.observe("old", 7*time.Second)
	}
	w.observe("new", time.Hour)
	if got := w.expect("new"); got != 7*time.Second {
		t.Errorf("%s is expected of a tree with one wait beside one with 7 s", got)
	}
}
