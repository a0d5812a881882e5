// Package sched decides what work of the host runs next.
//
// Queue is the decision alone: no clock, no goroutine, no I/O; the same calls
// give the same answers. Runner carries its decisions out. Neither knows what a
// sandbox, a capture or a fork is: work is a class and a function.
//
// Promises: no more than Limit jobs run at once; a job of a more urgent class
// starts before any waiting job of a lesser one; within a class first come,
// first served; a promoted job takes the place it would have had if it had been
// urgent from the start; every job that was added is started once or cancelled
// once. A lesser class is never starved for ever: after Patience starts of more
// urgent work in a row, the oldest lesser job goes first.
package sched

// Class orders work by who waits for it; lower is more urgent.
type Class int

const (
	// Urgent is work that a turn or a fork is waiting for.
	Urgent Class = iota
	// Shadow is work hidden behind the wait for the model.
	Shadow
	classes
)

// Ticket names one job in a Queue.
type Ticket uint64

// Queue holds waiting jobs and counts running ones. It is not safe for
// concurrent use; Runner guards it.
type Queue struct {
	// Limit of jobs that run at once.
	Limit int
	// Patience is how many urgent starts in a row may overtake a waiting shadow job.
	Patience int

	waiting [classes][]Ticket // each in order of arrival
	class   map[Ticket]Class
	next    Ticket
	running int
	streak  int
}

// NewQueue makes a queue that runs up to limit jobs at once.
func NewQueue(limit, patience int) *Queue {
	return &Queue{Limit: limit, Patience: patience, class: map[Ticket]Class{}}
}

// Add puts a job in line.
func (q *Queue) Add(c Class) Ticket {
	q.next++
	t := q.next
	q.class[t] = c
	q.waiting[c] = append(q.waiting[c], t)
	return t
}

// Promote makes a waiting job urgent. It reports false if the job has started,
// is cancelled, or is urgent already.
func (q *Queue) Promote(t Ticket) bool {
	c, ok := q.class[t]
	if !ok || c == Urgent {
		return false
	}
	q.remove(t, c)
	q.class[t] = Urgent
	line := q.waiting[Urgent]
	at := len(line)
	for at > 0 && line[at-1] > t {
		at--
	}
	q.waiting[Urgent] = append(line[:at:at], append([]Ticket{t}, line[at:]...)...)
	return true
}

// Cancel takes a waiting job out of the line; false if it has started or is unknown.
func (q *Queue) Cancel(t Ticket) bool {
	c, ok := q.class[t]
	if !ok {
		return false
	}
	q.remove(t, c)
	delete(q.class, t)
	return true
}

// Next starts the job whose turn it is, if one may start now.
func (q *Queue) Next() (Ticket, bool) {
	if q.running >= q.Limit {
		return 0, false
	}
	from := Urgent
	if len(q.waiting[Urgent]) == 0 || (q.streak >= q.Patience && len(q.waiting[Shadow]) > 0) {
		from = Shadow
	}
	if len(q.waiting[from]) == 0 {
		return 0, false
	}
	if from == Urgent {
		q.streak++
	} else {
		q.streak = 0
	}
	t := q.waiting[from][0]
	q.waiting[from] = q.waiting[from][1:]
	delete(q.class, t)
	q.running++
	return t, true
}

// Done says that a started job has ended.
func (q *Queue) Done() { q.running-- }

// Waiting counts the jobs of a class that haven't started.
func (q *Queue) Waiting(c Class) int { return len(q.waiting[c]) }

// Running counts the jobs that have started and not ended.
func (q *Queue) Running() int { return q.running }

func (q *Queue) remove(t Ticket, c Class) {
	line := q.waiting[c]
	for i, have := range line {
		if have == t {
			q.waiting[c] = append(line[:i:i], line[i+1:]...)
			return
		}
	}
}
