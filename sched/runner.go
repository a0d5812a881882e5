package sched

import (
	"context"
	"sync"
	"time"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// Runner carries out what a Core decides: work that is submitted runs in a goroutine of
// its own that Close waits for; work that acquires runs in its caller's.
type Runner struct {
	ctx    context.Context
	cancel context.CancelFunc

	mu     sync.Mutex
	core   *Core
	jobs   map[Ticket]*Job
	closed bool
	drains []chan struct{} // closed when nothing is pending
	wg     sync.WaitGroup
}

// Job is one piece of submitted work.
type Job struct {
	run    *Runner
	ticket Ticket
	do     func(ctx context.Context, queued time.Duration) error
	added  time.Time
	begun  bool          // guarded by run.mu
	done   chan struct{} // for a job without do: it has begun, or never will
	err    error
}

// NewRunner makes a runner that decides as cfg says.
func NewRunner(cfg Config) *Runner {
	ctx, cancel := context.WithCancel(context.Background())
	return &Runner{ctx: ctx, cancel: cancel, core: New(cfg), jobs: map[Ticket]*Job{}}
}

// Submit puts work in line. do gets a context that ends when the runner closes
// and how long the job waited in line.
func (r *Runner) Submit(w Work, do func(ctx context.Context, queued time.Duration) error) *Job {
	j := &Job{run: r, do: do, added: time.Now(), done: make(chan struct{})}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.addLocked(j, w)
	return j
}

// Acquire waits until work that its caller does itself may start; release says
// that it has ended, and how. The error is that of ctx, or says that the work came too late or the runner is closed.
func (r *Runner) Acquire(ctx context.Context, w Work) (release func(error), err error) {
	j := &Job{run: r, added: time.Now(), done: make(chan struct{})}
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	r.mu.Lock()
	r.addLocked(j, w)
	begun := j.begun
	r.mu.Unlock()
	if !begun { // else no other thread need be woken
		select {
		case <-j.done:
		case <-ctx.Done():
			if j.Cancel(context.Cause(ctx)) {
				return nil, j.err
			}
			<-j.done // it begins this moment, or was dropped
		}
		if j.err != nil {
			return nil, j.err
		}
	}
	return j.end, nil
}

// Admit takes in n pieces of work of a class at once, or refuses them all with when to try again. leave gives
// their places back.
func (r *Runner) Admit(k Class, client, tenant string, n int) (leave func(), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if retry, ok := r.core.Admit(k, client, tenant, n); !ok {
		return nil, fault.New(fault.Exhausted, "queue_full", "there is no place for %d more in the queue", n).
			WithHint("by the pace of what runs, there will be after the retry delay").After(retry)
	}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.core.Leave(client, tenant, n)
	}, nil
}

// Waited tells how long a sandbox of a tenant waited for its model.
func (r *Runner) Waited(tenant string, d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.core.Waited(tenant, d)
}

func errClosed() error {
	return fault.New(fault.Unavailable, "shutting_down", "the daemon is shutting down")
}

func errLate(w time.Duration) error {
	return fault.New(fault.Deadline, "expired", "its deadline passed while it waited for %s to begin", w.Round(time.Millisecond))
}

func (r *Runner) addLocked(j *Job, w Work) {
	if r.closed {
		j.err = errClosed()
		close(j.done)
		return
	}
	j.ticket = r.core.Add(j.added, w)
	r.jobs[j.ticket] = j
	r.startLocked()
}

// startLocked carries a plan out.
func (r *Runner) startLocked() {
	now := time.Now()
	plan := r.core.Plan(now)
	for _, t := range plan.Drop {
		j := r.jobs[t]
		delete(r.jobs, t)
		j.err = errLate(now.Sub(j.added))
		close(j.done)
	}
	for _, t := range plan.Start {
		j := r.jobs[t]
		delete(r.jobs, t)
		j.begun = true
		if j.do == nil {
			close(j.done)
			continue
		}
		r.wg.Add(1)
		go j.work()
	}
}

func (j *Job) work() {
	defer j.run.wg.Done()
	j.err = j.do(j.run.ctx, time.Since(j.added))
	close(j.done)
	j.end(j.err)
}

// end gives the job's slot to what comes next.
func (j *Job) end(err error) {
	j.run.mu.Lock()
	defer j.run.mu.Unlock()
	if err == nil {
		j.run.core.Done(time.Now(), j.ticket)
	} else {
		j.run.core.Fail(time.Now(), j.ticket)
	}
	j.run.settleLocked()
}

// Promote says that someone waits for the job now.
func (j *Job) Promote() {
	j.run.mu.Lock()
	defer j.run.mu.Unlock()
	j.run.core.Promote(time.Now(), j.ticket)
}

// Cancel drops the job if it hasn't started; its Wait then returns why.
func (j *Job) Cancel(why error) bool {
	j.run.mu.Lock()
	defer j.run.mu.Unlock()
	if !j.run.core.Cancel(j.ticket) {
		return false
	}
	delete(j.run.jobs, j.ticket)
	j.err = why
	close(j.done)
	j.run.settleLocked()
	return true
}

// Done is closed when the job has ended or was cancelled.
func (j *Job) Done() <-chan struct{} { return j.done }

// Wait promotes the job and waits for its end.
func (j *Job) Wait(ctx context.Context) error {
	j.Promote()
	select {
	case <-j.done:
		return j.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Adapt looks at the limits again: see Core. What they leave room for starts.
func (r *Runner) Adapt(p *Pressure) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.core.Adapt(p)
	r.startLocked()
}

// Snapshot says what was done so far and how things stand.
func (r *Runner) Snapshot() Snapshot {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.core.Snapshot(time.Now())
}

// Waste tells that work of a class came to nothing although it went well.
func (r *Runner) Waste(k Class, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.core.Waste(k, took)
}

// Pending counts the jobs that haven't ended.
func (r *Runner) Pending() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.core.Pending()
}

// Drain waits until no job is left or ctx ends.
func (r *Runner) Drain(ctx context.Context) {
	r.mu.Lock()
	if r.core.Pending() == 0 {
		r.mu.Unlock()
		return
	}
	idle := make(chan struct{})
	r.drains = append(r.drains, idle)
	r.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}

// settleLocked starts what may start and tells Drain when nothing is left.
func (r *Runner) settleLocked() {
	r.startLocked()
	if r.core.Pending() > 0 {
		return
	}
	for _, idle := range r.drains {
		close(idle)
	}
	r.drains = nil
}

// Close cancels what hasn't started and waits for what has. Idempotent.
func (r *Runner) Close() {
	r.mu.Lock()
	r.closed = true
	waiting := make([]*Job, 0, len(r.jobs))
	for _, j := range r.jobs {
		waiting = append(waiting, j)
	}
	r.mu.Unlock()
	for _, j := range waiting {
		j.Cancel(errClosed())
	}
	r.cancel()
	r.wg.Wait()
}
