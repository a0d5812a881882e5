package sched

import (
	"time"

	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// Pressure is the share of an interval, from 0 to 1, in which some task waited for a core or for a disk, and in which all that had something to
// do waited for memory (PSI).
type Pressure struct{ CPU, IO, Memory float64 }

const (
	// Above crowded, more at once would only take turns: a core or a disk that is waited for half of the time has no room. Where all stand
	// still for memory, more at once makes it worse.
	crowdedCPU, crowdedIO, crowdedMemory = 0.5, 0.5, 0.05
	// slower than this many times the usual, pieces get in each other's way.
	slower = 2
	// enoughDone in an interval to believe its mean.
	enoughDone = 3
	// usualQuantile of the means of intervals is what pieces take when they don't get in each other's way.
	usualQuantile = 0.25
)

// limit is how many pieces of a class run at once.
type limit struct {
	least, start, most int
	frees              bool // what is done of it gives memory back

	now   int
	usual window // what pieces took, in seconds, in the mean of intervals
}

// newLimit begins with the slots. Work that somebody waits for keeps Least of them.
func newLimit(k Class, cfg Config) limit {
	l := limit{least: 1, start: cfg.Slots, most: cfg.Most, frees: k == Persist || k == Prune, now: cfg.Slots}
	if k == Fork || k == Urgent {
		l.least = max(1, cfg.Least)
	}
	l.least, l.most = min(l.least, l.start), max(l.most, l.start)
	return l
}

// next takes in an interval: whether pieces waited as the limit was reached, how many ended, how long these took together, and
// how the host was; nil: nobody knows. The limit grows while work waits on a host that has room, goes down when pieces take longer on one
// that hasn't or memory is short, and back to where it began when nothing asks for another. Where it isn't known
// how the host is, it doesn't grow beyond that.
func (l *limit) next(short bool, done uint64, took time.Duration, p *Pressure) {
	slow := false
	if done >= enoughDone {
		mean := took.Seconds() / float64(done)
		slow = l.usual.len() >= enough && mean > slower*l.usual.quantile(usualQuantile)
		l.usual.push(mean)
	}
	crowded := p != nil && (p.CPU > crowdedCPU || p.IO > crowdedIO)
	starved := p != nil && p.Memory > crowdedMemory && !l.frees
	to := l.start
	if short && p != nil {
		to = l.most
	}
	switch {
	case starved, slow && (crowded || p == nil):
		l.now--
	case slow:
	case l.now < to && !crowded:
		l.now++
	case l.now > l.start && !short:
		l.now--
	}
	least := l.least // nothing may come to a stop because of a limit
	if sabotage.On("limit") {
		least = 0
	}
	l.now = min(max(l.now, least), l.most)
}

// Adapt takes in how the host was since it was last called, nil if nobody knows, and moves each class's limit by one at most, by that
// and by how long its work took meanwhile. Plan then says what starts.
func (c *Core) Adapt(p *Pressure) {
	if c.cfg.Most == 0 {
		return
	}
	for k := range c.lines {
		l := &c.lines[k]
		was := l.limit.now
		l.limit.next(l.short, l.stood.Done-l.judged.Done, l.stood.Took.Sum-l.judged.Took.Sum, p)
		l.judged, l.short = l.stood, l.waiting > 0
		switch {
		case l.limit.now > was:
			l.stood.Raised++
		case l.limit.now < was:
			l.stood.Lowered++
		}
	}
}
