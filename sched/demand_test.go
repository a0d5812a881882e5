package sched

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

const madeIn = 50 * time.Millisecond

// Whatever is asked for and when, there are never more ahead than may be, nor for longer, nor fewer than none, and the same calls give the same answers.
func TestDemandsStayWithinTheirBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := Demands[int]{Most: rapid.IntRange(1, 16).Draw(t, "most"), Life: time.Duration(rapid.IntRange(1, 60).Draw(t, "life")) * time.Second}
		b, now := a, epoch
		for range rapid.IntRange(1, 200).Draw(t, "n") {
			now = now.Add(time.Duration(rapid.IntRange(0, 100_000).Draw(t, "gap")) * time.Millisecond)
			k, n := rapid.IntRange(0, 2).Draw(t, "of"), rapid.IntRange(1, 64).Draw(t, "asked")
			ahead, keep := a.Asked(now, k, n, madeIn)
			if ahead < 0 || ahead > a.Most || keep < 0 || keep > a.Life || (ahead == 0) != (keep == 0) {
				t.Fatalf("%d for %s, within %d and %s", ahead, keep, a.Most, a.Life)
			}
			if other, kept := b.Asked(now, k, n, madeIn); other != ahead || kept != keep {
				t.Fatalf("the same calls gave %d for %s and %d for %s", ahead, keep, other, kept)
			}
		}
	})
}

// What is asked for at an even pace is ready each time from the second on, as far as may be, whether one call asks for all or several that come together do;
// and nothing is made ahead of calls that come when it would have ended.
func TestDemandsFollowThePace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := Demands[string]{Most: rapid.IntRange(2, 16).Draw(t, "most"), Life: 30 * time.Second}
		gap := time.Duration(rapid.IntRange(100, 60_000).Draw(t, "gap")) * time.Millisecond
		calls, each := rapid.IntRange(1, 4).Draw(t, "calls"), rapid.IntRange(1, 8).Draw(t, "each")
		now := epoch
		for round := range 80 {
			var ahead int
			var keep time.Duration
			for range calls {
				ahead, keep = d.Asked(now, "a", each, madeIn)
				now = now.Add(madeIn / 4)
			}
			now = now.Add(gap)
			switch want := min(calls*each, d.Most); {
			case round == 0 && ahead != min(calls*each, max(1, d.Most/2)):
				t.Fatalf("%d of %d are ahead when nothing is known", ahead, d.Most)
			case round > 0 && gap > d.Life && ahead > 0:
				t.Fatalf("%d are ahead of a call in %s", ahead, gap)
			case round > 0 && gap < d.Life-madeIn && (ahead != want || keep < gap):
				t.Fatalf("round %d: %d are ahead for %s, want %d for %s", round, ahead, keep, want, gap)
			}
		}
		// Another pace, and other bursts, are known after half of what is remembered.
		for range windowSize {
			d.Asked(now, "a", 1, madeIn)
			now = now.Add(time.Second)
		}
		if ahead, keep := d.Asked(now, "a", 1, madeIn); ahead != 1 || keep < time.Second {
			t.Fatalf("one each second was asked for, and %d are ahead for %s", ahead, keep)
		}
	})
}

// As many things are remembered as are bounded, those that were asked for last among them.
func TestDemandsAreForgotten(t *testing.T) {
	d := Demands[int]{Most: 8, Life: time.Minute}
	now := epoch
	for k := range 3 * maxDemands {
		now = now.Add(time.Second)
		d.Asked(now, k, 4, madeIn)
		if len(d.of) > maxDemands {
			t.Fatalf("%d things are remembered", len(d.of))
		}
	}
	for k := 3*maxDemands - maxDemands/2; k < 3*maxDemands; k++ {
		if d.of[k] == nil {
			t.Fatalf("thing %d was forgotten before others that were asked for earlier", k)
		}
	}
	d.Gone(func(k int) bool { return true })
	if len(d.of) != 0 {
		t.Fatalf("%d things are remembered that are gone", len(d.of))
	}
}
