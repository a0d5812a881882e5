package sched

import (
	"slices"
	"time"
)

const (
	// sizesOf is the quantile of past bursts whose size is made ahead: nine of ten find all they ask for.
	sizesOf = 0.9
	// gapsOf is the quantile of past gaps after twice of which nobody is waited for any more.
	gapsOf = 0.9
	// maxDemands are remembered; those that were quiet for longest are forgotten.
	maxDemands = 1024
)

// Demands tell how many of each of many things to make ahead, by how they were asked for until now. Those that are asked for in less time than it takes
// to make them are one burst. What isn't known is taken to come again once, soon, and half as large as may be. It has no clock; the same calls
// give the same answers. The zero value knows of nothing.
type Demands[K comparable] struct {
	// Most of one thing that are made ahead, and how long they are kept at most.
	Most int
	Life time.Duration

	of map[K]*demand
}

type demand struct {
	last  time.Time // it was asked for
	burst int       // how many of, in the burst that this was of
	gaps  window    // seconds between bursts
	sizes window    // of those before
}

// Asked says that n of a thing were asked for, with together the time that it takes to make as many as may be. So many should be ready from now on, for as long as is
// said; none if the next are expected when they would have ended.
func (d *Demands[K]) Asked(now time.Time, k K, n int, together time.Duration) (ahead int, keep time.Duration) {
	if d.of == nil {
		d.of = map[K]*demand{}
	}
	one := d.of[k]
	if one == nil {
		if len(d.of) >= maxDemands {
			d.forget()
		}
		one = &demand{last: now}
		d.of[k] = one
	}
	if gap := now.Sub(one.last); gap > together {
		one.gaps.push(gap.Seconds())
		one.sizes.push(float64(one.burst))
		one.burst = 0
	}
	one.burst, one.last = one.burst+n, now
	if one.gaps.len() == 0 {
		return min(one.burst, max(1, d.Most/2)), d.Life
	}
	if one.gaps.quantile(0.5) > d.Life.Seconds() {
		return 0, 0
	}
	ahead = int(one.sizes.quantile(sizesOf))
	if one.sizes.len() < enough {
		ahead = max(ahead, one.burst)
	}
	keep = time.Duration(2 * one.gaps.quantile(gapsOf) * float64(time.Second))
	return min(ahead, d.Most), min(max(keep, d.Life/4), d.Life) // a short pause isn't the end
}

// Gone forgets the things that won't be asked for any more.
func (d *Demands[K]) Gone(gone func(K) bool) {
	for k := range d.of {
		if gone(k) {
			delete(d.of, k)
		}
	}
}

// forget drops the quietest eighth, so that it isn't done for each that comes.
func (d *Demands[K]) forget() {
	var last []time.Time
	for _, one := range d.of {
		last = append(last, one.last)
	}
	slices.SortFunc(last, time.Time.Compare)
	d.Gone(func(k K) bool { return !d.of[k].last.After(last[len(last)/8]) })
}
