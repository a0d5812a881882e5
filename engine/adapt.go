package engine

import (
	"context"
	"runtime"
	"time"

	"github.com/boxwood-rl/boxwood/internal/hostload"
	"github.com/boxwood-rl/boxwood/sched"
)

// adaptEvery is how often it is looked at how much may run at once: long enough for a mean of what work takes, and short beside waits for models.
// A look costs three small reads.
const adaptEvery = time.Second

// adapting bounds what the slots of a line may become. What somebody waits for keeps a slot for each core, up to as many as there are at first; twice as
// many pieces as cores keep these busy while half of them wait for the disk or the kernel.
func adapting(cfg sched.Config) sched.Config {
	cores := runtime.NumCPU()
	cfg.Least, cfg.Most = min(cores, cfg.Slots), max(2*cores, cfg.Slots)
	return cfg
}

// adapter moves how much runs at once of what takes cores and memory: boxes, captures, removals. Clones are as many at once as the pool has folders for, and share
// transactions then; writes of dumps only take turns at the disk.
type adapter struct {
	lines []*sched.Runner
	was   *hostload.Stalls
	at    time.Time
}

// next takes in a reading of the host's pressure; nil: the kernel doesn't tell.
func (a *adapter) next(now *hostload.Stalls, at time.Time) {
	was, interval := a.was, at.Sub(a.at)
	a.was, a.at = now, at
	var p *sched.Pressure
	if now != nil {
		if was == nil || interval <= 0 {
			return // an interval begins
		}
		in := now.Since(*was)
		share := func(d time.Duration) float64 { return d.Seconds() / interval.Seconds() }
		p = &sched.Pressure{CPU: share(in.CPU), IO: share(in.IO), Memory: share(in.MemoryFull)}
	}
	for _, line := range a.lines {
		line.Adapt(p)
	}
}

func (e *Engine) adaptAgain(ctx context.Context) {
	defer e.wg.Done()
	a := adapter{lines: []*sched.Runner{e.attaches, e.captures, e.removals}}
	tick := time.NewTicker(adaptEvery)
	defer tick.Stop()
	failing := false
	for {
		now, err := hostload.ReadStalls()
		if err != nil && !failing {
			e.log.ErrorContext(ctx, "reading the host's pressure failed; limits go by what work takes alone", "error", err)
		}
		failing = err != nil
		a.next(now, time.Now())
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
