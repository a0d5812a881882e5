package sched

import (
	"math"
	"time"
)

// String is the class as tables and metrics name it.
func (k Class) String() string {
	return [...]string{"fork", "urgent", "shadow", "persist", "refill", "prune", "audit"}[k]
}

// Snapshot is what a Core has done so far and how it stands.
type Snapshot struct {
	Slots, Running int // Slots: the largest of the limits
	Admitted       int // see Admit
	Classes        [classes]Standing
}

// Standing of one class. Counters grow from the Core's start on.
type Standing struct {
	Waiting, Running int
	Limit            int           // what of it may run at once
	Tenants          int           // that have work waiting
	Oldest           time.Duration // how long the first in line of any tenant has waited, at most

	// Added work is Started, Cancelled or Dropped, waits, or was Promoted to another class; what was started is
	// Done, of which some Failed, or runs. Refused was never taken in: see Admit.
	Added, Started, Done, Failed, Cancelled, Dropped, Promoted, Refused uint64

	// Raised and Lowered: how often Adapt moved the limit.
	Raised, Lowered uint64

	Wait Histogram // from its coming to its start
	Took Histogram // from its start to its end
	// Exposed is, of captures and audits that somebody came to wait for, the time that he waited.
	Exposed Histogram
	// Slack is, of captures in the shadow, what was left at their start of the time until the next turn was
	// expected, less what they were expected to take. Late are those that had none.
	Slack Histogram
	Late  uint64
	// Wasted is the time of what failed, and of what nobody had any use for: see Waste.
	Wasted time.Duration
}

// Since is what a class did after an earlier standing; how it stands is as it is.
func (s Standing) Since(e Standing) Standing {
	s.Added, s.Started, s.Done, s.Failed = s.Added-e.Added, s.Started-e.Started, s.Done-e.Done, s.Failed-e.Failed
	s.Cancelled, s.Dropped, s.Promoted, s.Refused = s.Cancelled-e.Cancelled, s.Dropped-e.Dropped, s.Promoted-e.Promoted, s.Refused-e.Refused
	s.Raised, s.Lowered = s.Raised-e.Raised, s.Lowered-e.Lowered
	s.Wait, s.Took, s.Exposed, s.Slack = s.Wait.since(e.Wait), s.Took.since(e.Took), s.Exposed.since(e.Exposed), s.Slack.since(e.Slack)
	s.Late, s.Wasted = s.Late-e.Late, s.Wasted-e.Wasted
	return s
}

// Idle: nothing was there to do, and nothing is.
func (s Standing) Idle() bool {
	return s.Waiting+s.Running == 0 && s.Added+s.Started+s.Done+s.Cancelled+s.Dropped+s.Refused+s.Raised+s.Lowered == 0 && s.Wasted == 0
}

const (
	// bounds of a Histogram: 125 us, and 19 doublings of it, the last 65.5 s.
	bounds     = 20
	firstBound = 125 * time.Microsecond
)

// Histogram counts durations by size. Its zero value is empty.
type Histogram struct {
	Count uint64
	Sum   time.Duration
	// Buckets[i] holds those of at most Bound(i) and more than the bound before; the last, all that are longer.
	Buckets [bounds + 1]uint64
}

// Bound of a bucket but the last.
func Bound(i int) time.Duration { return firstBound << i }

func (h *Histogram) add(d time.Duration) {
	i := 0
	for i < bounds && d > Bound(i) {
		i++
	}
	h.Count++
	h.Sum += d
	h.Buckets[i]++
}

func (h Histogram) since(e Histogram) Histogram {
	h.Count, h.Sum = h.Count-e.Count, h.Sum-e.Sum
	for i := range h.Buckets {
		h.Buckets[i] -= e.Buckets[i]
	}
	return h
}

// Quantile is a bound that the share q of the durations doesn't pass, at most twice the true one; of what is longer than
// all bounds, twice the last. 0 if there are none.
func (h Histogram) Quantile(q float64) time.Duration {
	if h.Count == 0 {
		return 0
	}
	rank, i := uint64(math.Ceil(q*float64(h.Count))), 0
	for seen := h.Buckets[0]; seen < rank && i < bounds; seen += h.Buckets[i] {
		i++
	}
	return Bound(i)
}

// Snapshot says how things stand. It costs no more than a plan.
func (c *Core) Snapshot(now time.Time) Snapshot {
	s := Snapshot{Slots: c.slots(), Running: c.running, Admitted: c.admitted}
	for k := range c.lines {
		l := &c.lines[k]
		to := &s.Classes[k]
		*to = l.stood
		to.Waiting, to.Running, to.Limit = l.waiting, l.running, l.limit.now
		for _, of := range l.clients.backlog {
			to.Tenants += len(of.tenants.backlog)
			for _, t := range of.tenants.backlog {
				to.Oldest = max(to.Oldest, now.Sub(t.waiting[0].came))
			}
		}
	}
	return s
}

// Waste tells that work of a class came to nothing although it went well.
func (c *Core) Waste(k Class, took time.Duration) { c.lines[k].stood.Wasted += max(0, took) }
