// Package sched decides what work of the host runs next.
//
// Core is the decision alone: no clock, no goroutine, no I/O, and chance comes
// from a seed; the same calls give the same plans. Runner carries plans out.
// Neither knows what a sandbox, a capture or a fork is: work is a class, a
// tenant (whose it is: the engine names trees) and a function.
//
// What Core promises, each held by a property test:
//
//   - No more than Slots pieces of work run at once, and no slot is empty while
//     work waits.
//   - Work of a more urgent class starts before waiting work of a lesser one,
//     but a class that was overtaken Patience times in a row goes first. So none
//     waits for more than Patience + classes starts of others.
//   - Within a class, two tenants that both have work waiting all along are served in
//     proportion to their weights: in time divided by weight, neither is ahead of the
//     other by more than Quantum + Slots * longest * (1/weight + 1/other's weight),
//     where longest is the longest piece of work of either.
//   - Within that bound, captures in the shadow start in the order of their slack, the
//     least first; children of gangs by the time at which each would have started if
//     its gang had come to an idle host, so that a gang's first children
//     come early and a later gang's first come before an earlier one's
//     hundredth; all else in the order of arrival. These are fixed when the work comes, so
//     that nothing is overtaken for ever.
//   - Everything that was added is started once, cancelled once or dropped once;
//     it is dropped only past its own deadline, before it has cost anything.
package sched

import (
	"container/heap"
	"math/rand/v2"
	"time"
)

// Class orders work by who waits for it; lower is more urgent.
type Class int

const (
	// Fork is the making of a child that somebody waits for.
	Fork Class = iota
	// Urgent is a capture that a turn or a fork is waiting for.
	Urgent
	// Shadow is a capture hidden behind the wait for the model.
	Shadow
	// Persist brings what was saved from memory to the disk.
	Persist
	// Refill makes zygotes and spares for forks that may come.
	Refill
	// Prune removes what nobody needs any more.
	Prune
	// Audit looks whether a verdict was right.
	Audit
	classes
)

// Work is one piece of work as the decision sees it.
type Work struct {
	Class Class
	// Tenant is whose it is.
	Tenant string
	// Weight of the tenant from now on; 0 means 1.
	Weight float64
	// Rank is the number of a child in its gang, from 0.
	Rank int
	// Deadline after which nobody wants it any more, if it hasn't started; zero: never.
	// What was acknowledged has none.
	Deadline time.Time
}

// Config of a Core. Zero values mean what is said of each.
type Config struct {
	// Slots is how many pieces of work run at once: 1.
	Slots int
	// Patience is how many starts of more urgent work in a row may overtake a class
	// that waits: 16.
	Patience int
	// Quantum is how far one tenant may get ahead of another for the sake of a
	// better order: 50 ms.
	Quantum time.Duration
	// Bound of what is admitted at once (see Admit); 0: none.
	Bound int
	// Seed of what is left to chance: the spread of retry delays.
	Seed uint64
}

const (
	// forgetAfter is how long a tenant without work is remembered at least, so that it can't come back as a new one.
	forgetAfter = time.Minute
	// unmeasured is how long a piece of work is taken to last before one was measured.
	unmeasured = 5 * time.Millisecond
)

// Ticket names one piece of work in a Core; none is 0.
type Ticket uint64

// Plan is what to do now, in this order.
type Plan struct {
	// Start holds what starts now. Each takes a slot until Done.
	Start []Ticket
	// Drop holds what is past its deadline. Core has forgotten it.
	Drop []Ticket
}

// Core holds waiting and running work. It isn't safe for concurrent use; Runner
// guards it. now never goes back from call to call.
type Core struct {
	cfg       Config
	chance    *rand.Rand
	next      Ticket
	jobs      map[Ticket]*job
	lines     [classes]line
	running   int
	overtaken [classes]int // starts of other classes since one of this could have started
	waits     waits
	admitted  int
	admits    map[string]int
}

type job struct {
	Work
	ticket  Ticket
	came    time.Time
	key     time.Time // its place among what waits with it
	place   int       // in the tenant's heap; -1: it runs
	started time.Time
	awaited time.Time // since when somebody waits for it; zero: nobody does
	charged float64
	of      *tenant
}

// line is what is known of one class.
type line struct {
	tenants map[string]*tenant
	backlog []*tenant // those with work waiting, in no order
	waiting int
	running int
	floor   float64 // what a tenant that comes anew is taken to have used
	took    window  // seconds
	sweepAt int
	stood   Standing // its counters
}

// tenant is one tenant's standing in one class.
type tenant struct {
	name    string
	weight  float64
	used    float64 // seconds divided by weight
	waiting jobHeap
	at      int // in backlog; -1: not there
	running int
	seen    time.Time
}

// New makes a Core.
func New(cfg Config) *Core {
	if cfg.Slots <= 0 {
		cfg.Slots = 1
	}
	if cfg.Patience <= 0 {
		cfg.Patience = 16
	}
	cfg.Patience = max(cfg.Patience, int(classes)) // or two impatient classes could keep a third out
	if cfg.Quantum <= 0 {
		cfg.Quantum = 50 * time.Millisecond
	}
	c := &Core{cfg: cfg, chance: rand.New(rand.NewPCG(cfg.Seed, 0)), jobs: map[Ticket]*job{}, admits: map[string]int{}}
	for i := range c.lines {
		c.lines[i].tenants = map[string]*tenant{}
	}
	return c
}

// Add puts work in line. Plan says when it starts.
func (c *Core) Add(now time.Time, w Work) Ticket {
	if w.Weight <= 0 {
		w.Weight = 1
	}
	c.next++
	j := &job{Work: w, ticket: c.next, came: now}
	c.jobs[j.ticket] = j
	c.lines[w.Class].stood.Added++
	c.enter(now, j)
	return j.ticket
}

// enter puts a job in the line of its class.
func (c *Core) enter(now time.Time, j *job) {
	l := &c.lines[j.Class]
	switch j.Class {
	case Fork:
		j.key = j.came.Add(time.Duration(float64(j.Rank) * l.expected() * float64(time.Second) / float64(c.cfg.Slots)))
	case Shadow:
		j.key = j.came.Add(c.waits.expect(j.Tenant) - time.Duration(l.expected()*float64(time.Second)))
	default:
		j.key = j.came
	}
	t := l.tenants[j.Tenant]
	if t == nil {
		l.sweep(now)
		t = &tenant{name: j.Tenant, used: l.floor, at: -1}
		l.tenants[j.Tenant] = t
	}
	t.weight, t.seen, j.of = j.Weight, now, t
	if t.at < 0 {
		t.used = max(t.used, l.floor) // what it left unused meanwhile isn't saved up
		t.at = len(l.backlog)
		l.backlog = append(l.backlog, t)
	}
	heap.Push(&t.waiting, j)
	l.waiting++
}

// leave takes a waiting job out of its line.
func (c *Core) leave(j *job) {
	l, t := &c.lines[j.Class], j.of
	heap.Remove(&t.waiting, j.place)
	l.waiting--
	if len(t.waiting) == 0 {
		last := l.backlog[len(l.backlog)-1]
		l.backlog[t.at], last.at = last, t.at
		l.backlog = l.backlog[:len(l.backlog)-1]
		t.at = -1
	}
	if l.waiting == 0 {
		c.overtaken[j.Class] = 0
	}
}

// Promote says that somebody waits for a capture or an audit now: it takes the place that it
// would have had if it had been urgent from the start. It reports false if there is nothing to change.
func (c *Core) Promote(now time.Time, t Ticket) bool {
	j := c.jobs[t]
	if j == nil {
		return false
	}
	if j.awaited.IsZero() {
		j.awaited = now
	}
	if j.place < 0 || j.Class != Shadow && j.Class != Audit {
		return false
	}
	c.leave(j)
	c.lines[j.Class].stood.Promoted++
	j.Class = Urgent
	c.lines[j.Class].stood.Added++
	c.enter(now, j)
	return true
}

// Cancel takes waiting work out of the line; false if it has started or is unknown.
func (c *Core) Cancel(t Ticket) bool {
	j := c.jobs[t]
	if j == nil || j.place < 0 {
		return false
	}
	c.leave(j)
	c.lines[j.Class].stood.Cancelled++
	delete(c.jobs, t)
	return true
}

// Plan says what starts now and what is dropped, and takes it to be done.
func (c *Core) Plan(now time.Time) (p Plan) {
	for c.running < c.cfg.Slots {
		class, ok := c.pick()
		if !ok {
			break
		}
		l := &c.lines[class]
		j, least := l.first(c.cfg.Quantum.Seconds())
		c.leave(j)
		if !j.Deadline.IsZero() && now.After(j.Deadline) {
			l.stood.Dropped++
			delete(c.jobs, j.ticket)
			p.Drop = append(p.Drop, j.ticket)
			continue
		}
		for other := range c.lines {
			if c.lines[other].waiting > 0 {
				c.overtaken[other]++
			}
		}
		c.overtaken[class] = 0
		l.floor = max(l.floor, least)
		l.starts(now, j)
		j.started, j.place = now, -1
		j.charged = l.expected() / j.of.weight
		j.of.used += j.charged
		j.of.running++
		l.running++
		c.running++
		p.Start = append(p.Start, j.ticket)
	}
	return p
}

// pick chooses the class whose turn it is.
func (c *Core) pick() (Class, bool) {
	best := classes
	for k := range classes {
		if c.lines[k].waiting == 0 {
			continue
		}
		if best == classes || c.overtaken[k] >= c.cfg.Patience && c.overtaken[k] > c.overtaken[best] {
			best = k
		}
	}
	return best, best < classes
}

// first is the job to start next among those of tenants that aren't too far ahead of the one that
// is furthest behind, and how much that one has used.
func (l *line) first(quantum float64) (best *job, least float64) {
	least = l.backlog[0].used
	for _, t := range l.backlog[1:] {
		least = min(least, t.used)
	}
	for _, t := range l.backlog {
		if t.used > least+quantum {
			continue
		}
		if j := t.waiting[0]; best == nil || j.before(best) {
			best = j
		}
	}
	return best, least
}

// starts counts what starts.
func (l *line) starts(now time.Time, j *job) {
	l.stood.Started++
	l.stood.Wait.add(now.Sub(j.came))
	if j.Class != Shadow {
		return
	}
	if slack := j.key.Sub(now); slack > 0 {
		l.stood.Slack.add(slack)
	} else {
		l.stood.Late++
	}
}

// Done says that started work has ended.
func (c *Core) Done(now time.Time, t Ticket) { c.end(now, t, true) }

// Fail says that started work has ended, and that nothing came of it.
func (c *Core) Fail(now time.Time, t Ticket) { c.end(now, t, false) }

func (c *Core) end(now time.Time, t Ticket, well bool) {
	j := c.jobs[t]
	if j == nil || j.place >= 0 {
		return
	}
	delete(c.jobs, t)
	l := &c.lines[j.Class]
	took := max(0, now.Sub(j.started).Seconds())
	l.took.push(took)
	l.stood.Done++
	l.stood.Took.add(max(0, now.Sub(j.started)))
	if !well {
		l.stood.Failed++
		l.stood.Wasted += max(0, now.Sub(j.started))
	}
	if !j.awaited.IsZero() {
		l.stood.Exposed.add(now.Sub(j.awaited))
	}
	j.of.used += took/j.Weight - j.charged
	j.of.running--
	j.of.seen = now
	l.running--
	c.running--
}

// sweep forgets tenants that have had nothing to do for a while. It costs no more than what made them.
func (l *line) sweep(now time.Time) {
	if len(l.tenants) < l.sweepAt {
		return
	}
	for name, t := range l.tenants {
		if t.at < 0 && t.running == 0 && now.Sub(t.seen) >= forgetAfter {
			delete(l.tenants, name)
		}
	}
	l.sweepAt = 2*len(l.tenants) + 64
}

// expected is how many seconds a piece of this class takes: the median of the last ones.
func (l *line) expected() float64 {
	if l.took.len() == 0 {
		return unmeasured.Seconds()
	}
	return l.took.quantile(0.5)
}

// Admit takes n pieces of a tenant's work in at once, or none of them and says when a
// retry makes sense: when the excess will have ended, at the pace of what ended last, and
// up to a quarter later by chance, so that those who were refused together don't come back together. Leave gives places back.
//
// A tenant that has some already is refused when it would have more than half of the
// places. What is larger than the bound is taken when nothing else is there.
func (c *Core) Admit(class Class, tenant string, n int) (retry time.Duration, ok bool) {
	have := c.admits[tenant]
	excess := 0
	if c.cfg.Bound > 0 {
		if c.admitted > 0 {
			excess = c.admitted + n - c.cfg.Bound
		}
		if have > 0 {
			excess = max(excess, have+n-c.cfg.Bound/2)
		}
	}
	if excess <= 0 {
		c.admitted += n
		c.admits[tenant] = have + n
		return 0, true
	}
	c.lines[class].stood.Refused += uint64(n)
	each := unmeasured.Seconds()
	if l := &c.lines[class]; l.took.len() > 0 {
		each = l.took.mean()
	}
	seconds := each * max(1, float64(min(excess, c.admitted))/float64(c.cfg.Slots))
	return max(time.Millisecond, time.Duration(seconds*(1+c.chance.Float64()/4)*float64(time.Second))), false
}

// Leave gives back places that Admit gave.
func (c *Core) Leave(tenant string, n int) {
	c.admitted -= n
	if c.admits[tenant] -= n; c.admits[tenant] <= 0 {
		delete(c.admits, tenant)
	}
}

// Waited tells how long a sandbox of a tenant waited for its model, from the end of a turn
// to the next. What is expected of the next waits comes from these.
func (c *Core) Waited(tenant string, d time.Duration) { c.waits.observe(tenant, d) }

// Waiting counts the work of a class that hasn't started.
func (c *Core) Waiting(k Class) int { return c.lines[k].waiting }

// Running counts what has started and not ended.
func (c *Core) Running() int { return c.running }

// Pending counts what has been added and not ended.
func (c *Core) Pending() int { return len(c.jobs) }

// before orders jobs; no two are equal.
func (j *job) before(k *job) bool {
	if d := j.key.Compare(k.key); d != 0 {
		return d < 0
	}
	return j.ticket < k.ticket
}

// jobHeap has the job that starts first at its top.
type jobHeap []*job

func (h jobHeap) Len() int           { return len(h) }
func (h jobHeap) Less(i, k int) bool { return h[i].before(h[k]) }
func (h jobHeap) Swap(i, k int) {
	h[i], h[k] = h[k], h[i]
	h[i].place, h[k].place = i, k
}
func (h *jobHeap) Push(x any) {
	j := x.(*job)
	j.place = len(*h)
	*h = append(*h, j)
}
func (h *jobHeap) Pop() any {
	old := *h
	j := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	j.place = -1
	return j
}
