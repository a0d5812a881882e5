package sched

import (
	"math/rand/v2"
	"sync"
	"time"
)

// paceOf is how many of the last ends tell the pace: a large gang that is released at once is not all that is known.
const paceOf = 256

// Pace tells from how things ended until now when so many more will have, for things that nobody schedules: sandboxes end when
// their clients are done with them. It is safe for concurrent use.
type Pace struct {
	mu     sync.Mutex
	ends   []time.Time // a ring
	next   int         // in it
	chance *rand.Rand
}

// NewPace knows of no end. What is left to chance comes from seed.
func NewPace(seed uint64) *Pace { return &Pace{chance: rand.New(rand.NewPCG(seed, 1))} }

// Ended takes in an end.
func (p *Pace) Ended(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.ends) < paceOf {
		p.ends = append(p.ends, now)
		return
	}
	p.ends[p.next] = now
	p.next = (p.next + 1) % paceOf
}

// Retry is after how long n more will have ended, at the pace of the last ones; if nothing is known, and at most,
// after most. It is never less than 10 ms, and up to a quarter more by chance, so that those that are refused together don't come back together.
func (p *Pace) Retry(now time.Time, n int, most time.Duration) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := most
	if known := len(p.ends); known > 0 {
		oldest := p.ends[0]
		if known == paceOf {
			oldest = p.ends[p.next]
		}
		d = min(d, time.Duration(float64(now.Sub(oldest))/float64(known)*float64(n)))
	}
	return time.Duration(float64(max(d, 10*time.Millisecond)) * (1 + p.chance.Float64()/4))
}
