package main

import (
	"time"

	"github.com/boxwood-rl/boxwood/sched"
)

// decider is what is compared: sched.Core, or first come, first served.
type decider interface {
	Add(now time.Time, w sched.Work) sched.Ticket
	Promote(now time.Time, t sched.Ticket) bool
	Plan(now time.Time) sched.Plan
	Done(now time.Time, t sched.Ticket)
	Waited(tenant string, d time.Duration)
}

// fifo serves in the order of arrival, whoever waits.
type fifo struct {
	slots, running int
	next           sched.Ticket
	waiting        []sched.Ticket
}

func (f *fifo) Add(time.Time, sched.Work) sched.Ticket {
	f.next++
	f.waiting = append(f.waiting, f.next)
	return f.next
}

func (f *fifo) Plan(time.Time) (p sched.Plan) {
	for f.running < f.slots && len(f.waiting) > 0 {
		p.Start = append(p.Start, f.waiting[0])
		f.waiting = f.waiting[1:]
		f.running++
	}
	return p
}

func (f *fifo) Done(time.Time, sched.Ticket)         { f.running-- }
func (f *fifo) Promote(time.Time, sched.Ticket) bool { return false }
func (f *fifo) Waited(string, time.Duration)         {}

// line is one of the engine's: what a decider starts runs on the clock's cores.
type line struct {
	clock *clock
	by    decider
	jobs  map[sched.Ticket]*job
}

type job struct {
	line   *line
	ticket sched.Ticket
	cost   time.Duration
	over   bool
	then   []func()
}

func newLine(c *clock, slots int, first bool) *line {
	l := &line{clock: c, jobs: map[sched.Ticket]*job{}}
	if l.by = sched.New(sched.Config{Slots: slots}); first {
		l.by = &fifo{slots: slots}
	}
	return l
}

// submit puts work in line that takes one core for cost.
func (l *line) submit(w sched.Work, cost time.Duration) *job {
	j := &job{line: l, cost: cost}
	j.ticket = l.by.Add(l.clock.time(), w)
	l.jobs[j.ticket] = j
	l.start()
	return j
}

func (l *line) start() {
	for _, t := range l.by.Plan(l.clock.time()).Start {
		j := l.jobs[t]
		delete(l.jobs, t)
		l.clock.run(j.cost, func() {
			l.by.Done(l.clock.time(), t)
			j.over = true
			for _, f := range j.then {
				f()
			}
			l.start()
		})
	}
}

// wait calls f when the job is over, and says that somebody waits for it.
func (j *job) wait(f func()) {
	if j == nil || j.over {
		f()
		return
	}
	j.then = append(j.then, f)
	j.line.by.Promote(j.line.clock.time(), j.ticket)
}
