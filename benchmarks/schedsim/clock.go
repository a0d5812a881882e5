package main

import (
	"container/heap"
	"time"
)

// epoch is when simulated time begins.
var epoch = time.Unix(1_000_000_000, 0)

// clock is simulated time on a host whose cores are shared evenly by all that runs: with more tasks than
// cores each gets its share of them, as under the kernel's fair scheduler.
type clock struct {
	cores  float64
	now    time.Duration
	timers timers
	next   uint64
	tasks  []*task
	used   time.Duration // processor time
}

type timer struct {
	at   time.Duration
	nth  uint64 // of two at once the one that was set first
	fire func()
}

type task struct {
	left float64 // seconds of one core
	end  func()
}

// time is the simulated time of day.
func (c *clock) time() time.Time { return epoch.Add(c.now) }

// after fires once d has passed.
func (c *clock) after(d time.Duration, fire func()) {
	c.next++
	heap.Push(&c.timers, timer{c.now + max(0, d), c.next, fire})
}

// run works for as long as one core takes d, and then calls end.
func (c *clock) run(d time.Duration, end func()) {
	c.tasks = append(c.tasks, &task{max(0, d.Seconds()), end})
}

// until lets time pass.
func (c *clock) until(end time.Duration) {
	for {
		at, timed := end, false
		if len(c.timers) > 0 && c.timers[0].at <= end {
			at, timed = c.timers[0].at, true
		}
		rate := 1.0
		if n := float64(len(c.tasks)); n > c.cores {
			rate = c.cores / n
		}
		first := -1
		for i, t := range c.tasks {
			if first < 0 || t.left < c.tasks[first].left {
				first = i
			}
		}
		if first >= 0 {
			if ends := c.now + time.Duration(c.tasks[first].left/rate*float64(time.Second)); ends < at {
				c.pass(ends-c.now, rate)
				done := c.tasks[first]
				c.tasks = append(c.tasks[:first], c.tasks[first+1:]...)
				done.end()
				continue
			}
		}
		c.pass(at-c.now, rate)
		if !timed {
			return
		}
		heap.Pop(&c.timers).(timer).fire()
	}
}

func (c *clock) pass(d time.Duration, rate float64) {
	worked := d.Seconds() * rate
	for _, t := range c.tasks {
		t.left -= worked
	}
	c.used += time.Duration(worked * float64(len(c.tasks)) * float64(time.Second))
	c.now += d
}

type timers []timer

func (t timers) Len() int { return len(t) }
func (t timers) Less(i, k int) bool {
	return t[i].at < t[k].at || t[i].at == t[k].at && t[i].nth < t[k].nth
}
func (t timers) Swap(i, k int) { t[i], t[k] = t[k], t[i] }
func (t *timers) Push(x any)   { *t = append(*t, x.(timer)) }
func (t *timers) Pop() any {
	old := *t
	last := old[len(old)-1]
	*t = old[:len(old)-1]
	return last
}
