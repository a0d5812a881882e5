package main

import (
	"math"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/boxwood-rl/boxwood/sched"
)

// Service times as docs/BENCHMARKS.md gives them for a machine without other work. All of
// each is taken to be processor time, though part of it is a wait for the disk.
const (
	turnCost    = 1990 * time.Microsecond // turn_ms.p50
	filesCost   = 2700 * time.Microsecond // snapshot_ms.p50
	spareCost   = 610 * time.Microsecond  // empty.ready_ms.p50
	bodyCost    = 1200 * time.Microsecond // empty.n64_total_ms = 38.5 on two cores
	dumpFork    = 33500 * time.Microsecond
	flushCost   = 200 * time.Microsecond  // fdatasync on a quiet machine
	removalCost = 1590 * time.Microsecond // of a subvolume with quotas
	sparesEach  = 4
)

// Slots for two cores, the engine's defaults. A larger host has more in proportion.
const (
	captureSlots = 2
	boxSlots     = 4
	removalSlots = 2
)

// dumpCost is dump.total_ms of a process with 1, 10 and 100 MiB, and how many of ten are such.
var dumpCost = []struct {
	cost  time.Duration
	often int
}{{41 * time.Millisecond, 5}, {64 * time.Millisecond, 4}, {213 * time.Millisecond, 1}}

// What sandboxes do is assumed, not measured: see docs/SCHEDULER.md.
const (
	treeSize     = 8 // sandboxes of a tree
	filesShare   = 0.17
	dumpShare    = 0.08
	command      = 20 * time.Millisecond // mean of an exponential distribution
	longCommand  = time.Second           // mean of one in a hundred
	modelWait    = 4 * time.Second       // median over trees of the median wait for the model
	treeSigma    = 0.8                   // spread of the medians of trees, of the logarithm
	waitSigma    = 0.6                   // and of one tree's waits
	gangEvery    = 4 * time.Second       // mean time between forks of 64 sandboxes' host
	gangLife     = 30 * time.Second
	floodEvery   = 5 * time.Second // one tree forks floodSize children so often
	floodSize    = 256
	dumpNodes    = 0.2 // share of forked nodes with processes
	bigGangShare = 0.1
)

// policy is one way to run a host.
type policy struct {
	name     string
	first    bool // come, first served
	full     bool // capture of both halves after each turn
	exposed  bool // the reply waits for the capture
	captures bool
}

var policies = []policy{
	{name: "uncaptured"},
	{name: "scheduled", captures: true},
	{name: "fifo", captures: true, first: true},
	{name: "no_shadow", captures: true, exposed: true},
	{name: "full_every_turn", captures: true, full: true},
}

// figures of one run, from the end of its warm-up on.
type figures struct {
	turns   int
	exposed []float64 // ms, of each turn after one that was captured; with no shadow, of that one
	shares  []float64 // of each sandbox's time, in percent
	first   []float64 // ms until the first child of a gang, the flooding tree's apart
	child   []float64 // ms until any
	cpu     float64   // share of the cores in use
}

// host is a simulated host.
type host struct {
	clock
	p        policy
	captures *line
	boxes    *line
	removals *line
	warm     time.Duration
	got      figures
	gangs    *rand.Rand
	boxesOf  []*sandbox
}

type sandbox struct {
	h       *host
	tree    string
	wait    *rand.Rand // one stream for each, so that policies meet the same
	work    *rand.Rand
	verdict *rand.Rand
	median  float64
	capture *job
	exposed time.Duration
}

// simulate runs a host for a while, after a warm-up.
func simulate(p policy, m machine, seed uint64, warm, d time.Duration) figures {
	h := &host{clock: clock{cores: float64(m.cores)}, p: p, warm: warm, gangs: rand.New(rand.NewPCG(seed, 1))}
	lineOf := func(slots int) *line { return newLine(&h.clock, slots*m.cores/2, p.first) }
	h.captures, h.boxes, h.removals = lineOf(captureSlots), lineOf(boxSlots), lineOf(removalSlots)
	trees := rand.New(rand.NewPCG(seed, 2))
	var median float64
	for i := range m.sandboxes {
		if i%treeSize == 0 {
			median = modelWait.Seconds() / m.pace * math.Exp(treeSigma*trees.NormFloat64())
		}
		stream := func(k uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, uint64(i)*4+k+1000)) }
		s := &sandbox{h: h, tree: strconv.Itoa(i / treeSize), wait: stream(0), work: stream(1), verdict: stream(2), median: median}
		h.boxesOf = append(h.boxesOf, s)
		s.think()
	}
	h.forkNext(time.Duration(float64(gangEvery) * 64 / float64(m.sandboxes)))
	h.floodNext()
	h.until(warm)
	used := h.used
	h.until(warm + d)
	h.got.cpu = (h.used - used).Seconds() / d.Seconds() / h.cores
	for _, s := range h.boxesOf {
		h.got.shares = append(h.got.shares, 100*s.exposed.Seconds()/d.Seconds())
	}
	return h.got
}

func (h *host) measured() bool { return h.now >= h.warm }

// think waits for the model, and then takes a turn.
func (s *sandbox) think() {
	d := time.Duration(s.median * math.Exp(waitSigma*s.wait.NormFloat64()) * float64(time.Second))
	s.h.after(d, func() {
		s.h.captures.by.Waited(s.tree, d)
		asked, job := s.h.now, s.capture
		job.wait(func() { // law 9
			if job != nil && !s.h.p.exposed {
				s.expose(s.h.now - asked)
			}
			s.capture = nil
			s.turn()
		})
	})
}

func (s *sandbox) expose(d time.Duration) {
	if s.h.measured() {
		s.exposed += d
		s.h.got.exposed = append(s.h.got.exposed, ms(d))
	}
}

func (s *sandbox) turn() {
	mean := command
	if s.work.IntN(100) == 0 {
		mean = longCommand
	}
	cost := turnCost + time.Duration(s.work.ExpFloat64()*float64(mean))
	s.h.run(cost, func() {
		kind, size := s.verdict.Float64(), s.verdict.IntN(10)
		if !s.h.p.captures || kind >= filesShare+dumpShare && !s.h.p.full {
			s.reply()
			return
		}
		cost := filesCost
		dumped := kind < dumpShare || s.h.p.full
		if dumped {
			cost += dumpTime(size)
		}
		w := sched.Work{Class: sched.Shadow, Tenant: s.tree}
		if s.h.p.exposed {
			w.Class = sched.Urgent
		}
		asked := s.h.now
		s.capture = s.h.captures.submit(w, cost)
		s.capture.then = append(s.capture.then, func() {
			if dumped {
				s.h.removals.submit(sched.Work{Class: sched.Persist, Tenant: s.tree}, flushCost)
			}
			if s.h.p.exposed {
				s.expose(s.h.now - asked)
				s.reply()
			}
		})
		if !s.h.p.exposed {
			s.reply()
		}
	})
}

func (s *sandbox) reply() {
	if s.h.measured() {
		s.h.got.turns++
	}
	s.think()
}

func dumpTime(of10 int) time.Duration {
	for _, d := range dumpCost {
		if of10 -= d.often; of10 < 0 {
			return d.cost
		}
	}
	panic("the shares of dumpCost don't add up to ten")
}

// forkNext forks the node at which some sandbox stands, at random times.
func (h *host) forkNext(every time.Duration) {
	h.after(time.Duration(h.gangs.ExpFloat64()*float64(every)), func() {
		s := h.boxesOf[h.gangs.IntN(len(h.boxesOf))]
		n := 8
		if h.gangs.Float64() < bigGangShare {
			n = 64
		}
		dump := h.gangs.Float64() < dumpNodes
		asked := h.now
		s.capture.wait(func() { h.fork(s.tree, n, dump, asked, true) })
		h.forkNext(every)
	})
}

func (h *host) floodNext() {
	h.after(floodEvery, func() {
		h.fork("flood", floodSize, false, h.now, false)
		h.floodNext()
	})
}

// fork makes n children, and after them spares for the next fork; they end after a while.
func (h *host) fork(tree string, n int, dump bool, asked time.Duration, counts bool) {
	left, begun := n, false
	for rank := range n {
		cost := bodyCost
		switch {
		case dump:
			cost = dumpFork
		case rank < sparesEach:
			cost = spareCost
		}
		j := h.boxes.submit(sched.Work{Class: sched.Fork, Tenant: tree, Rank: rank}, cost)
		j.then = append(j.then, func() {
			if counts && h.measured() {
				took := ms(h.now - asked)
				h.got.child = append(h.got.child, took)
				if !begun {
					h.got.first = append(h.got.first, took)
				}
			}
			begun = true
			if left--; left == 0 && !dump {
				for range sparesEach {
					h.boxes.submit(sched.Work{Class: sched.Refill, Tenant: tree}, bodyCost)
				}
			}
			h.after(gangLife, func() { h.removals.submit(sched.Work{Class: sched.Prune, Tenant: tree}, removalCost) })
		})
	}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
