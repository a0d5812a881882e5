package engine

import (
	"context"
	"io"
	"sync"
	"time"

	"github.com/apache/arrow/go/v17/arrow"

	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/hostload"
	"github.com/boxwood-rl/boxwood/sched"
)

const (
	// sampleEvery is how long an interval of the tables "scheduler" and "host" is.
	sampleEvery = 10 * time.Second
	// sampleAgain is how long one is at least, so that exports in a row don't fill the tables.
	sampleAgain = 100 * time.Millisecond
)

// Line is one of the things that there is little of, with what waits for it.
type Line struct {
	Line stats.Line
	sched.Snapshot
}

// Lines reads the scheduler's counters.
func (e *Engine) Lines() []Line {
	return []Line{
		{stats.LineClones, e.clones.Snapshot()}, {stats.LineBoxes, e.attaches.Snapshot()}, {stats.LineCaptures, e.captures.Snapshot()},
		{stats.LineRemovals, e.removals.Snapshot()}, {stats.LineWrites, e.dumps.line.Snapshot()},
	}
}

// sampler keeps what the last rows of "scheduler" and "host" were taken from.
type sampler struct {
	mu    sync.Mutex
	host  hostload.Sample
	lines map[stats.Line]sched.Snapshot
}

func (e *Engine) sampleAgain(ctx context.Context) {
	defer e.wg.Done()
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	failing := false
	for {
		err := e.sample()
		if err != nil && !failing {
			e.log.ErrorContext(ctx, "measuring the host failed; the table host has no row for it", "error", err)
		}
		failing = err != nil
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// sample writes the rows of an interval that ends now. The first call begins one.
func (e *Engine) sample() error {
	s := &e.sampler
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.host.At.IsZero() && time.Since(s.host.At) < sampleAgain {
		return nil
	}
	now, err := hostload.Read()
	if err != nil {
		return err
	}
	was, lines := s.host, map[stats.Line]sched.Snapshot{}
	s.host = now
	for _, l := range e.Lines() {
		lines[l.Line] = l.Snapshot
	}
	before := s.lines
	s.lines = lines
	if before == nil {
		return nil
	}
	interval := now.At.Sub(was.At)
	for line, snapshot := range lines {
		for k, standing := range snapshot.Classes {
			if did := standing.Since(before[line].Classes[k]); !did.Idle() {
				e.Stats.Scheduler(stats.SchedulerRow{At: now.At, Interval: interval, Line: line, Class: sched.Class(k), Slots: snapshot.Slots, Standing: did})
			}
		}
	}
	info, err := e.Info()
	if err != nil {
		return err
	}
	row := stats.HostRow{
		At: now.At, Interval: interval, MemoryTotal: now.MemoryTotal, MemoryAvailable: now.MemoryAvailable,
		PoolTotal: info.Pool.Total, PoolUsed: info.Pool.Used, Processor: now.Processor - was.Processor, Resident: now.Resident,
		Sandboxes: int64(info.Sandboxes), Nodes: int64(info.Nodes), Zygotes: int64(info.Zygotes), PendingRemovals: int64(info.PendingRemovals),
	}
	if now.Stalls != nil && was.Stalls != nil {
		in := now.Stalls.Since(*was.Stalls)
		row.Stalls = &in
	}
	e.Stats.Host(row)
	return nil
}

// ExportStats writes the rows of a table that the filter wants as one Arrow IPC stream.
func (e *Engine) ExportStats(ctx context.Context, table string, f stats.Filter, w io.Writer) error {
	if err := e.sampleFor(table); err != nil {
		return err
	}
	return e.Stats.Export(ctx, table, f, w)
}

// ReadStats gives the rows of a table that the filter wants, batch by batch.
func (e *Engine) ReadStats(ctx context.Context, table string, f stats.Filter, begin func(*arrow.Schema) (emit func(arrow.Record) error)) error {
	if err := e.sampleFor(table); err != nil {
		return err
	}
	return e.Stats.Read(ctx, table, f, begin)
}

// sampleFor has a table that is measured end with now.
func (e *Engine) sampleFor(table string) error {
	if table != stats.Scheduler && table != stats.Host {
		return nil
	}
	return e.sample()
}
