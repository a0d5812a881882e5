// Package sched decides what work of the host runs next.
//
// Core is the decision alone: no clock, no goroutine, no I/O, and chance comes
// from a seed; the same calls give the same plans. Runner carries plans out.
// Neither knows what a sandbox, a capture or a fork is: work is a class, a client and one of
// his tenants (whose it is: the engine names accounts, and trees) and a function.
//
// What Core promises, each held by a property test:
//
//   - No work starts where as many run as the limit of its class says, or the largest of the limits; below these
//     no slot is empty while work waits. A limit is Slots, unless Adapt moves it: by one at a time, never below 1
//     (of work that somebody waits for: Least) nor above Most.
//   - Work of a more urgent class starts before waiting work of a lesser one,
//     but a class that was overtaken Patience times in a row goes first. So none that is below its limit
//     waits for more than Patience + classes starts of others.
//   - Within a class, two clients that both have work waiting all along are served in
//     proportion to their weights: in time divided by weight, neither is ahead of the
//     other by more than Quantum + most * longest * (1/weight + 1/other's weight),
//     where most is the largest limit there may be, and longest is the longest piece of work of either. So are two tenants of one client.
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
	// Client and Tenant are whose it is: a tenant is one client's.
	Client, Tenant string
	// ClientWeight and Weight of these; 0 means 1.
	ClientWeight, Weight float64
	// Rank is the number of a child in its gang, from 0.
	Rank int
	// Deadline after which nobody wants it any more, if it hasn't started; zero: never.
	// What was acknowledged has none.
	Deadline time.Time
}

// Config of a Core. Zero values mean what is said of each.
type Config struct {
	// Slots is how many pieces of work run at once: 1. If they adapt, that is where they begin.
	Slots int
	// Least and Most bound what Adapt makes of the slots; without Most, they are as they are. Least, 1, is for work that
	// somebody waits for; all other may come down to 1.
	Least, Most int
	// Patience is how many starts of more urgent work in a row may overtake a class
	// that waits: 16.
	Patience int
	// Quantum is how far one client, or tenant, may get ahead of another for the sake of a
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
	admits    map[string]int // of tenants
	ofClients map[string]int
}

type job struct {
	Work
	ticket  Ticket
	came    time.Time
	key     time.Time // its place among what waits with it
	place   int       // in the tenant's heap; -1: it runs
	started time.Time
	awaited time.Time // since when somebody waits for it; zero: nobody does
	charged float64   // seconds
	of      *tenant
}

// line is what is known of one class.
type line struct {
	clients queue[*client]
	tenants int // of all clients
	waiting int
	running int
	took    window // seconds
	limit   limit
	judged  Standing // when Adapt was last called
	short   bool     // some waited since, as the limit was reached
	sweepAt int
	stood   Standing // its counters
}

// share is what a client, or a tenant of one, has had of a class.
type share struct {
	used    float64 // seconds divided by weight
	at      int     // in the backlog; -1: not there
	running int
	seen    time.Time
}

func (s *share) of() *share { return s }

// queue holds those who share something.
type queue[S interface{ of() *share }] struct {
	all     map[string]S
	backlog []S     // those with work waiting, in no order
	floor   float64 // what one that comes anew is taken to have used
}

// client is one client's standing in one class, tenant one tenant's of his.
type (
	client struct {
		share
		tenants queue[*tenant]
	}
	tenant struct {
		share
		client  *client
		waiting jobHeap
	}
)

// joins says that one has work waiting. What it left unused meanwhile isn't saved up.
func (q *queue[S]) joins(s S) {
	if o := s.of(); o.at < 0 {
		o.used = max(o.used, q.floor)
		o.at = len(q.backlog)
		q.backlog = append(q.backlog, s)
	}
}

func (q *queue[S]) leaves(s S) {
	at, end := s.of().at, len(q.backlog)-1
	last := q.backlog[end]
	q.backlog[at], last.of().at = last, at
	q.backlog = q.backlog[:end]
	s.of().at = -1
}

// least is what the one that is furthest behind has used, of those with work waiting.
func (q *queue[S]) least() float64 {
	least := q.backlog[0].of().used
	for _, s := range q.backlog[1:] {
		least = min(least, s.of().used)
	}
	return least
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
	c := &Core{cfg: cfg, chance: rand.New(rand.NewPCG(cfg.Seed, 0)), jobs: map[Ticket]*job{}, admits: map[string]int{}, ofClients: map[string]int{}}
	for i := range c.lines {
		c.lines[i].clients.all = map[string]*client{}
		c.lines[i].limit = newLimit(Class(i), cfg)
	}
	return c
}

// Add puts work in line. Plan says when it starts.
func (c *Core) Add(now time.Time, w Work) Ticket {
	if w.Weight <= 0 {
		w.Weight = 1
	}
	if w.ClientWeight <= 0 {
		w.ClientWeight = 1
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
		j.key = j.came.Add(time.Duration(float64(j.Rank) * l.expected() * float64(time.Second) / float64(l.limit.now)))
	case Shadow:
		j.key = j.came.Add(c.waits.expect(j.Tenant) - time.Duration(l.expected()*float64(time.Second)))
	default:
		j.key = j.came
	}
	t := l.tenant(now, j.Client, j.Tenant)
	l.clients.joins(t.client)
	t.client.tenants.joins(t)
	j.of, t.seen, t.client.seen = t, now, now
	heap.Push(&t.waiting, j)
	l.waiting++
}

// tenant finds a client's tenant, or takes him in.
func (l *line) tenant(now time.Time, ofClient, name string) *tenant {
	if c := l.clients.all[ofClient]; c != nil && c.tenants.all[name] != nil {
		return c.tenants.all[name]
	}
	l.sweep(now)
	c := l.clients.all[ofClient]
	if c == nil {
		c = &client{share: share{at: -1, seen: now}, tenants: queue[*tenant]{all: map[string]*tenant{}}}
		l.clients.all[ofClient] = c
	}
	t := &tenant{share: share{at: -1, seen: now}, client: c}
	c.tenants.all[name] = t
	l.tenants++
	return t
}

// leave takes a waiting job out of its line.
func (c *Core) leave(j *job) {
	l, t := &c.lines[j.Class], j.of
	heap.Remove(&t.waiting, j.place)
	l.waiting--
	if len(t.waiting) == 0 {
		t.client.tenants.leaves(t)
		if len(t.client.tenants.backlog) == 0 {
			l.clients.leaves(t.client)
		}
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
	for slots := c.slots(); c.running < slots; {
		class, ok := c.pick()
		if !ok {
			break
		}
		l := &c.lines[class]
		j := l.first(c.cfg.Quantum.Seconds())
		client := j.of.client
		ofClients, ofTenants := l.clients.least(), client.tenants.least()
		c.leave(j)
		if !j.Deadline.IsZero() && now.After(j.Deadline) {
			l.stood.Dropped++
			delete(c.jobs, j.ticket)
			p.Drop = append(p.Drop, j.ticket)
			continue
		}
		for other := range c.lines {
			if c.lines[other].ready() {
				c.overtaken[other]++
			}
		}
		c.overtaken[class] = 0
		l.clients.floor, client.tenants.floor = max(l.clients.floor, ofClients), max(client.tenants.floor, ofTenants)
		l.starts(now, j)
		j.started, j.place = now, -1
		j.charge(l.expected())
		j.of.running++
		client.running++
		l.running++
		c.running++
		p.Start = append(p.Start, j.ticket)
	}
	for k := range c.lines {
		l := &c.lines[k]
		l.short = l.short || l.waiting > 0
	}
	return p
}

// slots is what may run at once of all classes.
func (c *Core) slots() (n int) {
	for k := range c.lines {
		n = max(n, c.lines[k].limit.now)
	}
	return n
}

// ready: it has work that its limit lets start.
func (l *line) ready() bool { return l.waiting > 0 && l.running < l.limit.now }

// pick chooses the class whose turn it is.
func (c *Core) pick() (Class, bool) {
	best := classes
	for k := range classes {
		if !c.lines[k].ready() {
			continue
		}
		if best == classes || c.overtaken[k] >= c.cfg.Patience && c.overtaken[k] > c.overtaken[best] {
			best = k
		}
	}
	return best, best < classes
}

// first is the job to start next among those of clients, and of tenants of these, that aren't too far ahead of
// the one that is furthest behind.
func (l *line) first(quantum float64) (best *job) {
	least := l.clients.least()
	for _, c := range l.clients.backlog {
		if c.used > least+quantum {
			continue
		}
		ofTenants := c.tenants.least()
		for _, t := range c.tenants.backlog {
			if j := t.waiting[0]; t.used <= ofTenants+quantum && (best == nil || j.before(best)) {
				best = j
			}
		}
	}
	return best
}

// charge counts what a job takes, in place of what it was charged before.
func (j *job) charge(seconds float64) {
	j.of.used += (seconds - j.charged) / j.Weight
	j.of.client.used += (seconds - j.charged) / j.ClientWeight
	j.charged = seconds
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
	j.charge(took)
	j.of.running--
	j.of.client.running--
	j.of.seen, j.of.client.seen = now, now
	l.running--
	c.running--
}

// sweep forgets tenants that have had nothing to do for a while. It costs no more than what made them.
func (l *line) sweep(now time.Time) {
	if l.tenants < l.sweepAt {
		return
	}
	gone := func(s *share) bool { return s.at < 0 && s.running == 0 && now.Sub(s.seen) >= forgetAfter }
	for name, c := range l.clients.all {
		for name, t := range c.tenants.all {
			if gone(&t.share) {
				delete(c.tenants.all, name)
				l.tenants--
			}
		}
		if gone(&c.share) {
			delete(l.clients.all, name)
		}
	}
	l.sweepAt = 2*l.tenants + 64
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
// places, and so is a client, unless he has no name: all who aren't told apart are one. What is larger than the bound is taken when nothing else is there.
func (c *Core) Admit(class Class, client, tenant string, n int) (retry time.Duration, ok bool) {
	have := c.admits[tenant]
	if client != "" {
		have = max(have, c.ofClients[client])
	}
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
		c.admits[tenant] += n
		c.ofClients[client] += n
		return 0, true
	}
	c.lines[class].stood.Refused += uint64(n)
	each := unmeasured.Seconds()
	if l := &c.lines[class]; l.took.len() > 0 {
		each = l.took.mean()
	}
	seconds := each * max(1, float64(min(excess, c.admitted))/float64(c.slots()))
	return max(time.Millisecond, time.Duration(seconds*(1+c.chance.Float64()/4)*float64(time.Second))), false
}

// Leave gives back places that Admit gave.
func (c *Core) Leave(client, tenant string, n int) {
	c.admitted -= n
	if c.admits[tenant] -= n; c.admits[tenant] <= 0 {
		delete(c.admits, tenant)
	}
	if c.ofClients[client] -= n; c.ofClients[client] <= 0 {
		delete(c.ofClients, client)
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
