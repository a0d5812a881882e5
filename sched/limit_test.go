package sched

import (
	"context"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// However the host is and whatever work takes, a limit stays within its bounds and never comes below 1, moves by one at most, and the same
// intervals give the same limits.
func TestLimitsStayWithinTheirBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := Config{Slots: rapid.IntRange(1, 16).Draw(t, "slots"), Least: rapid.IntRange(0, 16).Draw(t, "least"), Most: rapid.IntRange(0, 32).Draw(t, "most")}
		k := Class(rapid.IntRange(0, int(classes)-1).Draw(t, "class"))
		a, b := newLimit(k, cfg), newLimit(k, cfg)
		least := 1
		if k == Fork || k == Urgent {
			least = min(max(1, cfg.Least), cfg.Slots)
		}
		was := cfg.Slots
		for range rapid.IntRange(1, 200).Draw(t, "n") {
			short, done := rapid.Bool().Draw(t, "short"), uint64(rapid.IntRange(0, 9).Draw(t, "done"))
			took := time.Duration(rapid.IntRange(0, 1000).Draw(t, "took")) * time.Millisecond
			var p *Pressure
			if rapid.IntRange(0, 4).Draw(t, "known") > 0 {
				share := rapid.Float64Range(0, 1)
				p = &Pressure{share.Draw(t, "cpu"), share.Draw(t, "io"), share.Draw(t, "memory")}
			}
			a.next(short, done, took, p)
			b.next(short, done, took, p)
			if a.now < least || a.now > max(cfg.Slots, cfg.Most) || a.now-was > 1 || was-a.now > 1 {
				t.Fatalf("%d after %d, within %d and %d", a.now, was, least, cfg.Most)
			}
			if p == nil && a.now > max(was, cfg.Slots) {
				t.Fatalf("%d after %d, although nobody knows how the host is", a.now, was)
			}
			if a.now != b.now {
				t.Fatalf("the same intervals gave %d and %d", a.now, b.now)
			}
			was = a.now
		}
	})
}

// cores is a host of its own: pieces that run at once share them.
type cores struct {
	n    int
	each time.Duration // what a piece takes alone
}

// interval is one in which so many run at once.
func (c cores) interval(running int) (done uint64, took time.Duration, p *Pressure) {
	one := time.Duration(float64(c.each) * max(1, float64(running)/float64(c.n)))
	done = uint64(float64(running) * float64(time.Second) / float64(one))
	p = &Pressure{}
	if running > c.n {
		p.CPU = 0.9
	}
	return done, time.Duration(done) * one, p
}

// On a host of any size, with work that always waits, the limit settles: it moves between two neighbours at most, and what is done then is
// what the host, or the largest limit, can do. It does so again when others take cores away, or leave.
func TestLimitsSettle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := Config{Slots: rapid.IntRange(1, 8).Draw(t, "slots"), Most: rapid.IntRange(1, 32).Draw(t, "most")}
		l := newLimit(Shadow, cfg)
		host := cores{each: time.Duration(rapid.IntRange(1, 100).Draw(t, "each")) * time.Millisecond}
		for range rapid.IntRange(1, 3).Draw(t, "changes") {
			host.n = rapid.IntRange(1, 32).Draw(t, "cores")
			low, high := l.most, 0
			for i := range 200 {
				done, took, p := host.interval(l.now)
				l.next(true, done, took, p)
				if i >= 150 {
					low, high = min(low, l.now), max(high, l.now)
				}
			}
			if high-low > 1 {
				t.Fatalf("it still moves between %d and %d", low, high)
			}
			if low < min(host.n, l.most) {
				t.Fatalf("%d at once, and %d cores could do %d", low, host.n, l.most)
			}
		}
	})
}

// On a host with room the limit grows to what its work wants, and goes back when nothing asks for another; when pieces get in each other's
// way on a crowded one it goes down; a host that is crowded by others alone takes nothing away. Short memory does, but not from what gives memory back.
func TestLimitsFollowTheHost(t *testing.T) {
	l := newLimit(Shadow, Config{Slots: 2, Most: 8})
	next := func(n int, short bool, each time.Duration, p *Pressure) int {
		for range n {
			l.next(short, 20, 20*each, p)
		}
		return l.now
	}
	const usual, long = 10 * time.Millisecond, 40 * time.Millisecond
	calm, cpu, disk, memory := &Pressure{}, &Pressure{CPU: 0.9}, &Pressure{IO: 0.9}, &Pressure{Memory: 0.2}
	for _, step := range []struct {
		what  string
		n     int
		short bool
		each  time.Duration
		p     *Pressure
		want  int
	}{
		{"nothing waits", 20, false, usual, calm, 2},
		{"work waits on a host with room", 20, true, usual, calm, 8},
		{"it is crowded, and pieces take what they took", 20, true, usual, cpu, 8},
		{"its disk is, too", 20, true, usual, disk, 8},
		{"pieces take four times as long on a host with room", 3, true, long, calm, 8},
		{"pieces take four times as long on a crowded host", 6, true, long, cpu, 2},
		{"and on", 4, true, long, disk, 1},
		{"nothing waits, on a host with room", 20, false, usual, calm, 2},
		{"work waits again", 20, true, usual, calm, 8},
		{"all wait for memory", 20, true, usual, memory, 1},
		{"nobody knows how the host is", 20, true, usual, nil, 2},
		{"and pieces take four times as long", 3, true, long, nil, 1},
	} {
		if got := next(step.n, step.short, step.each, step.p); got != step.want {
			t.Errorf("%s: %d at once, want %d", step.what, got, step.want)
		}
	}
	l = newLimit(Prune, Config{Slots: 2, Most: 8})
	if got := next(20, true, usual, memory); got != 8 {
		t.Errorf("%d removals at once while all wait for the memory that they give back", got)
	}
}

// What a raised limit leaves room for starts at once, and what runs above a lowered one goes on.
func TestRunnerAdapts(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r := NewRunner(Config{Slots: 2, Most: 4})
	defer r.Close()
	end := make(chan struct{})
	for range 8 {
		r.Submit(Work{Class: Shadow}, func(context.Context, time.Duration) error { <-end; return nil })
	}
	shadow := func() Standing { return r.Snapshot().Classes[Shadow] }
	for want := 2; want <= 4; want++ {
		if got := shadow(); got.Running != want || got.Limit != want {
			t.Fatalf("%d run of %d, want %d", got.Running, got.Limit, want)
		}
		r.Adapt(&Pressure{})
	}
	for range 5 {
		r.Adapt(&Pressure{Memory: 1})
	}
	if got := shadow(); got.Running != 4 || got.Limit != 1 || got.Raised != 2 || got.Lowered != 3 {
		t.Fatalf("%+v", got)
	}
	close(end)
	within(ctx, t, func() bool { return r.Pending() == 0 })
	if got := shadow(); got.Done != 8 {
		t.Fatalf("%d of 8 were done", got.Done)
	}
}
