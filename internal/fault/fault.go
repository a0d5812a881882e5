// Package fault holds the kinds of failure that Boxwood tells apart. Packages
// return them wrapped with %w; the gRPC service translates them once, at the
// edge, and the Python package maps them to exceptions once.
package fault

import (
	"errors"
	"fmt"
	"time"
)

// Kind says what a caller may do about a failure. Kinds match gRPC codes.
type Kind int

const (
	Internal     Kind = iota // a defect or a broken host
	Invalid                  // INVALID_ARGUMENT: the request can never work
	NotFound                 // NOT_FOUND
	Exists                   // ALREADY_EXISTS
	Precondition             // FAILED_PRECONDITION: not in this state; hint says which state
	Busy                     // ABORTED: try again when the other turn is over
	Exhausted                // RESOURCE_EXHAUSTED: pool, memory, slots, queue
	Unavailable              // UNAVAILABLE: shutting down, starting
	Deadline                 // DEADLINE_EXCEEDED
	Cancelled                // CANCELLED
	DataLoss                 // DATA_LOSS: what was saved isn't what is there
	Unsupported              // UNIMPLEMENTED: this host can't
	Denied                   // PERMISSION_DENIED
)

// Origin says whose failure it is; an infrastructure failure is never a reward.
type Origin int

const (
	Infrastructure Origin = iota
	Client
	Agent
)

// Error is one failure. Reason is a short stable code in lower case; Message
// is one line for a person; Hint says what to do and may be empty.
type Error struct {
	Kind       Kind
	Reason     string
	Message    string
	Hint       string
	RetryAfter time.Duration
	// Nearest is a node from which what was asked for can be had by running Turns turns
	// again; empty: none.
	Nearest string
	Turns   int
	cause   error
}

// New makes a failure. The format follows fmt.Errorf, %w included.
func New(kind Kind, reason, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Kind: kind, Reason: reason, Message: err.Error(), cause: errors.Unwrap(err)}
}

// WithHint adds what the caller can do about it.
func (e *Error) WithHint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

// From says from where what was asked for can be had.
func (e *Error) From(node string, turns int) *Error {
	e.Nearest, e.Turns = node, turns
	return e
}

// After says when a retry makes sense.
func (e *Error) After(d time.Duration) *Error {
	e.RetryAfter = d
	return e
}

func (e *Error) Error() string { return e.Message }
func (e *Error) Unwrap() error { return e.cause }

// Retryable says whether the same request may work later.
func (e *Error) Retryable() bool {
	switch e.Kind {
	case Busy, Exhausted, Unavailable:
		return true
	}
	return false
}

// Origin tells client mistakes from failures of the host.
func (e *Error) Origin() Origin {
	switch e.Kind {
	case Invalid, NotFound, Exists, Precondition, Busy, Cancelled, Denied:
		return Client
	}
	return Infrastructure
}

// As finds the failure in err's chain. What has none is Internal, reason "internal".
func As(err error) *Error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		if e.Message == err.Error() {
			return e
		}
		outer := *e
		outer.Message = err.Error() // keep the -ing phrases that were wrapped around it
		return &outer
	}
	return &Error{Kind: Internal, Reason: "internal", Message: err.Error(), cause: err}
}

// Is reports whether err is a failure of this kind.
func Is(err error, kind Kind) bool {
	var e *Error
	return errors.As(err, &e) && e.Kind == kind
}
