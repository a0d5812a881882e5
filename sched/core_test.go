package sched

import (
	"fmt"
	"maps"
	"math"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var epoch = time.Unix(1_000_000_000, 0)

// host is the harness: it gives a Core work and time, carries out its plans, holds them against what Core promises, and
// records them.
type host struct {
	fail     func(string, ...any)
	core     *Core
	cfg      Config
	now      time.Time
	waiting  map[Ticket]Work
	running  map[Ticket]bool
	classOf  map[Ticket]Class // of what runs
	over     map[Ticket]bool
	overtook map[Class]int // starts of others since a class last started or had nothing waiting, while its limit let it start
	trace    []string
}

func newHost(fail func(string, ...any), cfg Config) *host {
	h := &host{fail: fail, core: New(cfg), now: epoch, waiting: map[Ticket]Work{}, running: map[Ticket]bool{}, classOf: map[Ticket]Class{}, over: map[Ticket]bool{}, overtook: map[Class]int{}}
	h.cfg = h.core.cfg
	return h
}

func (h *host) waits(k Class) (n int) {
	for _, w := range h.waiting {
		if w.Class == k {
			n++
		}
	}
	return n
}

// room is what may still start of a class by its limit.
func (h *host) room(k Class) int {
	n := h.core.lines[k].limit.now
	for t := range h.running {
		if h.classOf[t] == k {
			n--
		}
	}
	return n
}

func (h *host) ready(k Class) bool { return h.waits(k) > 0 && h.room(k) > 0 }

func (h *host) once(t Ticket) {
	if h.over[t] {
		h.fail("work %d was started, cancelled or dropped twice", t)
	}
	h.over[t] = true
}

func (h *host) plan() Plan {
	p := h.core.Plan(h.now)
	for _, t := range p.Drop {
		w, ok := h.waiting[t]
		if h.once(t); !ok || w.Deadline.IsZero() || !h.now.After(w.Deadline) {
			h.fail("work %d was dropped that wasn't late: %+v", t, w)
		}
		delete(h.waiting, t)
	}
	for _, t := range p.Start {
		w, ok := h.waiting[t]
		if h.once(t); !ok || !w.Deadline.IsZero() && h.now.After(w.Deadline) {
			h.fail("work %d was started that was late or didn't wait: %+v", t, w)
		}
		if h.room(w.Class) <= 0 || len(h.running) >= h.core.slots() {
			h.fail("work of class %d started, %d run, and the limit was reached", w.Class, len(h.running))
		}
		for k := range w.Class {
			if h.ready(k) && h.overtook[w.Class] < h.cfg.Patience {
				h.fail("work of class %d started although class %d waits, after %d starts of others", w.Class, k, h.overtook[w.Class])
			}
		}
		delete(h.waiting, t)
		for k := range classes {
			if h.ready(k) {
				h.overtook[k]++
			}
		}
		h.running[t], h.classOf[t] = true, w.Class
		h.overtook[w.Class] = 0
		for k, n := range h.overtook {
			if n > h.cfg.Patience+int(classes) {
				h.fail("class %d waits for %d starts of others", k, n)
			}
		}
	}
	for k := range classes {
		if h.waits(k) == 0 {
			h.overtook[k] = 0
		}
		if got := h.core.Waiting(k); got != h.waits(k) {
			h.fail("%d of class %d wait, Core says %d", h.waits(k), k, got)
		}
	}
	if h.core.Running() != len(h.running) {
		h.fail("%d run, Core says %d", len(h.running), h.core.Running())
	}
	for k := range classes {
		if len(h.running) < h.core.slots() && h.ready(k) {
			h.fail("%d slots are empty and work of class %d waits", h.core.slots()-len(h.running), k)
		}
	}
	if h.core.Pending() != len(h.running)+len(h.waiting) {
		h.fail("%d are pending, Core says %d", len(h.running)+len(h.waiting), h.core.Pending())
	}
	h.counts()
	h.trace = append(h.trace, fmt.Sprint(p))
	return p
}

// counts holds Core's counters against each other.
func (h *host) counts() {
	s := h.core.Snapshot(h.now)
	running := 0
	for k, c := range s.Classes {
		running += c.Running
		switch {
		case c.Added != c.Started+c.Cancelled+c.Dropped+c.Promoted+uint64(c.Waiting), c.Started != c.Done+uint64(c.Running),
			c.Wait.Count != c.Started, c.Took.Count != c.Done, c.Slack.Count+c.Late > c.Started, c.Exposed.Count > c.Done, c.Failed > c.Done,
			c.Waiting != h.waits(Class(k)), (c.Tenants > 0) != (c.Waiting > 0), c.Oldest > 0 && c.Waiting == 0,
			c.Limit < 1, c.Limit > max(h.cfg.Slots, h.cfg.Most), s.Slots < c.Limit, h.cfg.Slots+int(c.Raised)-int(c.Lowered) != c.Limit:
			h.fail("the counters of class %s don't add up: %+v", Class(k), c)
		}
	}
	if running != len(h.running) || s.Running != running {
		h.fail("%d run, the counters say %d", len(h.running), running)
	}
}

func (h *host) add(w Work) Ticket {
	t := h.core.Add(h.now, w)
	h.waiting[t] = w
	return t
}

func (h *host) done(t Ticket) {
	h.core.Done(h.now, t)
	delete(h.running, t)
}

type call struct {
	op     int
	ticket Ticket
	work   Work
	late   time.Duration // of the deadline; 0: none
	step   time.Duration
	load   *Pressure
}

func (h *host) do(c call) {
	h.now = h.now.Add(c.step)
	switch c.op {
	case 0, 1, 2:
		w := c.work
		if c.late > 0 {
			w.Deadline = h.now.Add(c.late)
		}
		h.add(w)
	case 3:
		w, ok := h.waiting[c.ticket]
		want := ok && (w.Class == Shadow || w.Class == Audit)
		if got := h.core.Promote(h.now, c.ticket); got != want {
			h.fail("Promote(%d) = %v, want %v", c.ticket, got, want)
		}
		if want {
			w.Class = Urgent
			h.waiting[c.ticket] = w
		}
	case 4:
		_, want := h.waiting[c.ticket]
		if got := h.core.Cancel(c.ticket); got != want {
			h.fail("Cancel(%d) = %v, want %v", c.ticket, got, want)
		}
		if want {
			h.once(c.ticket)
			delete(h.waiting, c.ticket)
		}
	case 5, 6:
		if h.running[c.ticket] {
			h.done(c.ticket)
			break
		}
		for t := range h.core.next { // the oldest that runs
			if h.running[t+1] {
				h.done(t + 1)
				break
			}
		}
	case 7:
		h.core.Waited(c.work.Tenant, c.step)
	case 9:
		h.core.Adapt(c.load)
	case 8:
		retry, ok := h.core.Admit(c.work.Class, c.work.Client, c.work.Tenant, c.work.Rank+1)
		h.trace = append(h.trace, fmt.Sprint(retry, ok))
		if c.late > 0 && ok {
			h.core.Leave(c.work.Client, c.work.Tenant, c.work.Rank+1)
		}
	}
	for k := range classes {
		if h.waits(k) == 0 {
			h.overtook[k] = 0
		}
	}
	h.plan()
}

// Random calls: bounds are kept, no slot is empty while work waits, the more urgent class goes first and none waits for
// ever, everything happens once, and the same calls give the same plans.
func TestPlansKeepTheirPromises(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := Config{
			Slots: rapid.IntRange(1, 4).Draw(t, "slots"), Patience: rapid.IntRange(1, 20).Draw(t, "patience"),
			Quantum: time.Duration(rapid.IntRange(0, 100).Draw(t, "quantum")) * time.Millisecond, Bound: 20, Seed: 7,
			Least: rapid.IntRange(0, 3).Draw(t, "least"), Most: rapid.SampledFrom([]int{0, 2, 8}).Draw(t, "most"),
		}
		calls := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) call {
			return call{
				op: rapid.IntRange(0, 9).Draw(t, "op"), ticket: Ticket(rapid.IntRange(1, 60).Draw(t, "ticket")),
				work: Work{
					Class: Class(rapid.IntRange(0, int(classes)-1).Draw(t, "class")), Tenant: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "tenant"),
					Client: rapid.SampledFrom([]string{"", "x", "y"}).Draw(t, "client"), ClientWeight: float64(rapid.IntRange(0, 3).Draw(t, "client's weight")),
					Weight: float64(rapid.IntRange(0, 3).Draw(t, "weight")), Rank: rapid.IntRange(0, 9).Draw(t, "rank"),
				},
				late: time.Duration(max(0, rapid.IntRange(-30, 30).Draw(t, "late"))) * time.Millisecond,
				step: time.Duration(rapid.IntRange(0, 20).Draw(t, "step")) * time.Millisecond,
				load: rapid.SampledFrom([]*Pressure{nil, {}, {}, {CPU: 1}, {IO: 1}, {Memory: 1}}).Draw(t, "load"),
			}
		}), 1, 150).Draw(t, "calls")
		var traces [2][]string
		for i := range traces {
			h := newHost(t.Fatalf, cfg)
			for _, c := range calls {
				h.do(c)
			}
			traces[i] = h.trace
			for len(h.running)+len(h.waiting) > 0 { // and all of it ends
				h.do(call{op: 5, step: time.Millisecond})
			}
		}
		if !reflect.DeepEqual(traces[0], traces[1]) {
			t.Fatalf("the same calls gave %v and then %v", traces[0], traces[1])
		}
	})
}

// Work starts although there is always other work of any class, tenant and rank: after no more starts of others than wait
// ahead of it or can come with less slack, and Patience for each.
func TestNothingStarves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := Config{
			Slots: rapid.IntRange(1, 3).Draw(t, "slots"), Patience: rapid.IntRange(1, 16).Draw(t, "patience"), Most: rapid.SampledFrom([]int{0, 4}).Draw(t, "most"),
		}
		h := newHost(t.Fatalf, cfg)
		other := func() Work {
			return Work{
				Class: Class(rapid.IntRange(0, int(classes)-1).Draw(t, "class")), Tenant: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "tenant"),
				Client: rapid.SampledFrom([]string{"", "x"}).Draw(t, "client"), Rank: rapid.IntRange(0, 3).Draw(t, "rank"),
			}
		}
		ahead := rapid.IntRange(0, 30).Draw(t, "ahead")
		for range ahead {
			h.add(other())
		}
		h.plan()
		victim := h.add(Work{Class: Class(rapid.IntRange(0, int(classes)-1).Draw(t, "victim")), Tenant: "v", Rank: rapid.IntRange(0, 3).Draw(t, "its rank")})
		const step = 20 * time.Millisecond
		overtakers := ahead + int(unknownWait/step)
		most := max(cfg.Slots, cfg.Most)
		bound := (overtakers + most) * (h.cfg.Patience + int(classes)) * most // each of them may start while its class is at its limit
		for n := 0; !h.running[victim]; n++ {
			if n > bound {
				t.Fatalf("after %d starts of others it still waits", n)
			}
			h.add(other())
			h.core.Adapt(rapid.SampledFrom([]*Pressure{nil, {}, {CPU: 1}, {Memory: 1}}).Draw(t, "load"))
			h.do(call{op: 5, step: step})
		}
	})
}

// party is a client, or a tenant of one.
type party struct {
	of      string
	weight  float64
	longest time.Duration
	given   float64
}

// ahead fails if one of the parties is further ahead of another than the package comment allows.
func ahead(t *rapid.T, cfg Config, parties map[string]*party) {
	for a, pa := range parties {
		for b, pb := range parties {
			if pa.of != pb.of {
				continue
			}
			longest := max(pa.longest, pb.longest).Seconds()
			bound := cfg.Quantum.Seconds() + float64(cfg.Slots)*longest*(1/pa.weight+1/pb.weight)
			if lead := pa.given/pa.weight - pb.given/pb.weight; lead > bound+1e-9 {
				t.Fatalf("%s is %.3f s ahead of %s, and at most %.3f s is fair", a, lead, b, bound)
			}
		}
	}
}

// Clients, and tenants of a client, that always have work waiting are served in proportion to their weights, whatever they ask for and
// however long it takes, and however many tenants a client has: within the factor that the package comment states, at every moment.
func TestFairness(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := Config{Slots: rapid.IntRange(1, 4).Draw(t, "slots"), Quantum: time.Duration(rapid.IntRange(1, 200).Draw(t, "quantum")) * time.Millisecond}
		class := rapid.SampledFrom([]Class{Fork, Urgent, Shadow, Prune}).Draw(t, "class")
		h := newHost(t.Fatalf, cfg)
		clients, tenants := map[string]*party{}, map[string]*party{}
		ends := map[Ticket]time.Time{}
		add := func(name string) {
			of := tenants[name]
			for range 2 + cfg.Slots { // so that it never runs dry
				h.add(Work{Class: class, Client: of.of, ClientWeight: clients[of.of].weight, Tenant: name, Weight: of.weight, Rank: rapid.IntRange(0, 50).Draw(t, "rank")})
			}
		}
		names := []string{"a", "b", "c", "d"}[:rapid.IntRange(1, 4).Draw(t, "clients")]
		for i, name := range names {
			clients[name] = &party{weight: float64(rapid.IntRange(1, 4).Draw(t, "weight"))}
			for k := range rapid.IntRange(1, 3).Draw(t, "tenants") {
				one := &party{
					of: name, weight: float64(rapid.IntRange(1, 4).Draw(t, "weight")),
					longest: time.Duration(rapid.IntRange(1, 100).Draw(t, "longest")) * time.Millisecond,
				}
				clients[name].longest = max(clients[name].longest, one.longest)
				tenant := fmt.Sprint(name, k)
				tenants[tenant] = one
				for range 8 {
					h.core.Waited(tenant, time.Duration(1+(i+k)*(i+k)*10)*time.Second) // one is always more urgent than the next
				}
				add(tenant)
			}
		}
		for range 120 {
			works := maps.Clone(h.waiting)
			for _, ticket := range h.plan().Start {
				w := works[ticket]
				took := time.Duration(rapid.Int64Range(1, int64(tenants[w.Tenant].longest)).Draw(t, "took"))
				tenants[w.Tenant].given += took.Seconds()
				clients[w.Client].given += took.Seconds()
				ends[ticket] = h.now.Add(took)
				add(w.Tenant)
			}
			ahead(t, h.cfg, clients)
			ahead(t, h.cfg, tenants)
			var next Ticket
			for k, end := range ends {
				if next == 0 || end.Before(ends[next]) || end.Equal(ends[next]) && k < next {
					next = k
				}
			}
			h.now = ends[next]
			delete(ends, next)
			h.done(next)
		}
	})
}

// A tenant that was idle has saved nothing up, and one that comes back in the middle has no debt forgiven.
func TestIdleTenantsSaveNothing(t *testing.T) {
	h := newHost(t.Fatalf, Config{Slots: 1, Quantum: time.Millisecond})
	run := func(n int, names ...string) map[string]int {
		got := map[string]int{}
		for range n {
			for _, name := range names {
				h.add(Work{Class: Fork, Tenant: name})
			}
			works := map[Ticket]Work{}
			for k, w := range h.waiting {
				works[k] = w
			}
			for _, ticket := range h.plan().Start {
				got[works[ticket].Tenant]++
				h.now = h.now.Add(10 * time.Millisecond)
				h.done(ticket)
			}
		}
		return got
	}
	run(100, "busy")
	got := run(40, "busy", "late")
	if d := math.Abs(float64(got["busy"] - got["late"])); d > 2 {
		t.Fatalf("%v, want shares alike from then on", got)
	}
}

// A gang's first children come early: a hundred children of one call don't stand before another call's first, of the same tree or of another,
// and the hundred go on meanwhile.
func TestGangsFirstChildrenComeEarly(t *testing.T) {
	for _, second := range []string{"a", "b"} {
		h := newHost(t.Fatalf, Config{Slots: 2})
		gang := func(tenant string, n int) (all []Ticket) {
			for rank := range n {
				all = append(all, h.add(Work{Class: Fork, Tenant: tenant, Rank: rank}))
			}
			return all
		}
		step := func() {
			h.now = h.now.Add(unmeasured)
			for k := range h.running {
				h.done(k)
			}
			h.plan()
		}
		first := gang("a", 100)
		h.plan()
		for range 5 {
			step()
		}
		late := gang(second, 50)
		for range 3 {
			step()
		}
		if !h.over[late[0]] {
			t.Errorf("the first child of the second call, of tree %s, still waits", second)
		}
		for range 40 {
			step()
		}
		started := func(all []Ticket) (n int) {
			for _, k := range all {
				if h.over[k] {
					n++
				}
			}
			return n
		}
		if a, b := started(first), started(late); a < 45 || b < 30 {
			t.Errorf("%d and %d children have started; neither call may hold the other up (tree %s)", a, b, second)
		}
	}
}

// The capture whose sandbox is expected back first goes first, as past waits of its tree say.
func TestLeastSlackFirst(t *testing.T) {
	h := newHost(t.Fatalf, Config{Slots: 1})
	for range 20 {
		h.core.Waited("slow", 20*time.Second)
		h.core.Waited("fast", 200*time.Millisecond)
	}
	h.add(Work{Class: Shadow, Tenant: "other"})
	h.plan()
	slow := h.add(Work{Class: Shadow, Tenant: "slow"})
	h.now = h.now.Add(time.Second)
	fast := h.add(Work{Class: Shadow, Tenant: "fast"})
	h.do(call{op: 5})
	if !h.running[fast] {
		t.Fatal("the capture of the tree that comes back after 20 s stood before that of one that comes back after 200 ms")
	}
	h.now = h.now.Add(30 * time.Second)
	h.add(Work{Class: Shadow, Tenant: "fast"})
	h.do(call{op: 5})
	if !h.running[slow] {
		t.Fatal("a capture that is overdue stood behind one that came 30 s later")
	}
}

// What is admitted stays within the bound, a tenant with some gets half of it at most, and after the retry delay there is
// place.
func TestAdmission(t *testing.T) {
	h := newHost(t.Fatalf, Config{Slots: 2, Bound: 10})
	const each = 100 * time.Millisecond
	admit := func(tenant string, n int) (time.Duration, bool) {
		retry, ok := h.core.Admit(Fork, "", tenant, n)
		if ok {
			for range n {
				h.add(Work{Class: Fork, Tenant: tenant})
			}
			h.plan()
		}
		return retry, ok
	}
	finish := func() {
		h.now = h.now.Add(each)
		for k := range h.running {
			h.done(k)
			h.core.Leave("", "a", 1)
		}
		h.plan()
	}
	if _, ok := admit("a", 40); !ok {
		t.Fatal("what is larger than the bound must get in when there is nothing else")
	}
	for len(h.running) > 0 {
		finish()
	}
	if _, ok := admit("a", 4); !ok {
		t.Fatal("refused although there is place")
	}
	if _, ok := admit("a", 2); ok {
		t.Fatal("a tenant got more than half of the places beside its own work")
	}
	if _, ok := h.core.Admit(Fork, "", "b", 3); !ok {
		t.Fatal("refused although there is place")
	}
	retry, ok := admit("c", 5)
	if ok {
		t.Fatal("12 of 10 places were given")
	}
	if retry < each || retry > each*5/4 {
		t.Fatalf("the excess of 2 is gone after %s, and the delay is %s", each, retry)
	}
	finish()
	if _, ok := admit("c", 5); !ok {
		t.Fatal("there was no place after the retry delay")
	}

	h = newHost(t.Fatalf, Config{Slots: 2, Bound: 10})
	if _, ok := h.core.Admit(Fork, "x", "a", 3); !ok {
		t.Fatal("refused although there is place")
	}
	if _, ok := h.core.Admit(Fork, "x", "b", 3); ok {
		t.Fatal("a client got more than half of the places by another tree")
	}
	if _, ok := h.core.Admit(Fork, "y", "c", 3); !ok {
		t.Fatal("another client was refused although there is place")
	}
	h.core.Leave("x", "a", 3)
	if _, ok := h.core.Admit(Fork, "x", "b", 3); !ok {
		t.Fatal("a place that was given back is lost")
	}
}

// Tenants that are gone are forgotten; those with debts only after a while.
func TestTenantsAreForgotten(t *testing.T) {
	h := newHost(t.Fatalf, Config{Slots: 2})
	hold := h.add(Work{Class: Fork, Tenant: "holds the line busy"})
	h.plan()
	for i := range 10_000 {
		k := h.add(Work{Class: Fork, Tenant: fmt.Sprint(i)})
		h.core.Waited(fmt.Sprint(i), time.Second)
		h.plan()
		h.now = h.now.Add(time.Second)
		h.done(k)
	}
	h.done(hold)
	if n := h.core.lines[Fork].tenants; n > 1000 {
		t.Errorf("%d tenants are remembered", n)
	}
	if n := len(h.core.waits.trees); n > maxTrees {
		t.Errorf("the waits of %d trees are remembered", n)
	}
}
