package sched

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Whoever comes back after the delay that he was told finds as many ended as he needs, if they go on ending at the pace of the last
// ones: and not much later than that.
func TestRetryByPace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := NewPace(rapid.Uint64().Draw(t, "seed"))
		gap := time.Duration(rapid.IntRange(20, 5000).Draw(t, "gap")) * time.Millisecond
		known := rapid.IntRange(1, 3*paceOf).Draw(t, "known")
		now := epoch
		for range known {
			p.Ended(now)
			now = now.Add(gap)
		}
		n := rapid.IntRange(1, 100).Draw(t, "n")
		got, want := p.Retry(now, n, time.Hour*1000), gap*time.Duration(n)
		if got < want-want/100 || got > want*5/4+want/100 {
			t.Fatalf("%d are needed, one ends each %s, and a retry makes sense after %s", n, gap, got)
		}
		if got := p.Retry(now, n, gap/2); got < gap/2 || got > gap*5/8+time.Millisecond {
			t.Fatalf("at most %s was to be waited for, and %s is told", gap/2, got)
		}
	})
}

// Nothing known: as long as it may take. An end long ago: no faster than that.
func TestRetryOfLittleKnown(t *testing.T) {
	p := NewPace(1)
	if got := p.Retry(epoch, 5, time.Minute); got < time.Minute || got > 75*time.Second {
		t.Errorf("%s", got)
	}
	p.Ended(epoch)
	if got := p.Retry(epoch, 5, time.Minute); got < 10*time.Millisecond || got > 13*time.Millisecond {
		t.Errorf("right after one has ended: %s", got)
	}
	if got := p.Retry(epoch.Add(time.Hour), 1, 100*time.Hour); got < time.Hour || got > 75*time.Minute {
		t.Errorf("an hour after one has ended: %s", got)
	}
}
