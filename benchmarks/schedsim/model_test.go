package main

import (
	"reflect"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/sched"
)

// Cores are shared evenly and no faster than they are, timers fire in order: else no figure means anything.
func TestClockSharesCores(t *testing.T) {
	c := &clock{cores: 2}
	ends := map[string]time.Duration{}
	run := func(name string, d time.Duration) { c.run(d, func() { ends[name] = c.now }) }
	run("a", 3*time.Second)
	run("b", 3*time.Second)
	c.after(time.Second, func() { run("c", time.Second); run("d", 2*time.Second) }) // four on two cores
	c.until(time.Minute)
	// c is over after 2 s at half speed; then three tasks with a second left each share two cores for 1.5 s.
	late := 4500 * time.Millisecond
	want := map[string]time.Duration{"c": 3 * time.Second, "a": late, "b": late, "d": late}
	for name, at := range want {
		if d := ends[name] - at; d < -time.Microsecond || d > time.Microsecond {
			t.Errorf("%s ended after %s, want %s", name, ends[name], at)
		}
	}
	if d := c.used - 9*time.Second; d < -time.Microsecond || d > time.Microsecond {
		t.Errorf("%s of processor time were used, want 9 s", c.used)
	}
}

// First come, first served is just that, or the comparison is with nothing.
func TestFIFO(t *testing.T) {
	c := &clock{cores: 4}
	l := newLine(c, 2, true)
	var order []sched.Class
	for _, k := range []sched.Class{sched.Shadow, sched.Prune, sched.Shadow, sched.Fork, sched.Urgent} {
		j := l.submit(sched.Work{Class: k}, time.Second)
		j.wait(func() { order = append(order, k) })
	}
	c.until(2500 * time.Millisecond)
	if want := []sched.Class{sched.Shadow, sched.Prune, sched.Shadow, sched.Fork}; !reflect.DeepEqual(order, want) {
		t.Errorf("%v ended, want %v", order, want)
	}
}

// What the simulator is there to show, at a small size: captures in the shadow expose next to nothing where replies that wait for them
// do, a full capture each turn costs the host most of what it has, and a flooding tree holds up others less than
// first come, first served does. The same seed gives the same figures.
func TestSimulatedClaims(t *testing.T) {
	m := machine{"test", 2, 96, 1}
	got := map[string]figures{}
	for _, p := range policies {
		got[p.name] = simulate(p, m, 1, 5*time.Second, 40*time.Second)
	}
	rate := func(name string) float64 { return float64(got[name].turns) }
	if rate("scheduled") < 0.97*rate("uncaptured") || rate("full_every_turn") > 0.9*rate("uncaptured") {
		t.Errorf("%v turns scheduled and %v with a full capture each, beside %v uncaptured", rate("scheduled"), rate("full_every_turn"), rate("uncaptured"))
	}
	if s, n := quantile(got["scheduled"].shares, 0.95), quantile(got["no_shadow"].shares, 0.95); s >= n/4 {
		t.Errorf("%.3f %% of time is exposed in the shadow, %.3f %% without it", s, n)
	}
	if s, f := quantile(got["scheduled"].child, 0.99), quantile(got["fifo"].child, 0.99); s >= f {
		t.Errorf("beside a flooding tree 99 of 100 children of others are ready within %.1f ms, and %.1f ms by order of arrival", s, f)
	}
	if again := simulate(policies[1], m, 1, 5*time.Second, 40*time.Second); !reflect.DeepEqual(again, got["scheduled"]) {
		t.Error("the same seed gave other figures")
	}
}
