package sched

import (
	"context"
	"sync"
	"time"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// Runner runs jobs in the order that a Queue decides, each in a goroutine of
// its own that Close waits for.
type Runner struct {
	ctx    context.Context
	cancel context.CancelFunc

	mu     sync.Mutex
	queue  *Queue
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
	done   chan struct{}
	err    error
}

// NewRunner makes a runner for up to limit jobs at once.
func NewRunner(limit int) *Runner {
	ctx, cancel := context.WithCancel(context.Background())
	return &Runner{ctx: ctx, cancel: cancel, queue: NewQueue(limit, 16), jobs: map[Ticket]*Job{}}
}

// Submit puts work in line. do gets a context that ends when the runner closes
// and how long the job waited in line.
func (r *Runner) Submit(c Class, do func(ctx context.Context, queued time.Duration) error) *Job {
	j := &Job{run: r, do: do, added: time.Now(), done: make(chan struct{})}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		j.err = errClosed()
		close(j.done)
		return j
	}
	j.ticket = r.queue.Add(c)
	r.jobs[j.ticket] = j
	r.startLocked()
	return j
}

func errClosed() error {
	return fault.New(fault.Unavailable, "shutting_down", "the daemon is shutting down")
}

func (r *Runner) startLocked() {
	for {
		t, ok := r.queue.Next()
		if !ok {
			return
		}
		j := r.jobs[t]
		delete(r.jobs, t)
		r.wg.Add(1)
		go j.work()
	}
}

func (j *Job) work() {
	defer j.run.wg.Done()
	j.err = j.do(j.run.ctx, time.Since(j.added))
	close(j.done)
	j.run.mu.Lock()
	defer j.run.mu.Unlock()
	j.run.queue.Done()
	j.run.settleLocked()
}

// Promote says that someone waits for the job now.
func (j *Job) Promote() {
	j.run.mu.Lock()
	defer j.run.mu.Unlock()
	j.run.queue.Promote(j.ticket)
}

// Cancel drops the job if it hasn't started; its Wait then returns why.
func (j *Job) Cancel(why error) bool {
	j.run.mu.Lock()
	defer j.run.mu.Unlock()
	if !j.run.queue.Cancel(j.ticket) {
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

// Pending counts the jobs that haven't ended.
func (r *Runner) Pending() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pendingLocked()
}

// Drain waits until no job is left or ctx ends.
func (r *Runner) Drain(ctx context.Context) {
	r.mu.Lock()
	if r.pendingLocked() == 0 {
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

func (r *Runner) pendingLocked() int {
	return r.queue.Waiting(Urgent) + r.queue.Waiting(Shadow) + r.queue.Running()
}

// settleLocked starts what may start and tells Drain when nothing is left.
func (r *Runner) settleLocked() {
	r.startLocked()
	if r.pendingLocked() > 0 {
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
