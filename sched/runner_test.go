package sched

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

func TestRunnerPromoteCancelClose(t *testing.T) {
	r := NewRunner(Config{Slots: 1})
	gate := make(chan struct{})
	var order []string
	job := func(name string) func(context.Context, time.Duration) error {
		return func(context.Context, time.Duration) error { order = append(order, name); return nil }
	}
	first := r.Submit(Work{Class: Shadow}, func(context.Context, time.Duration) error { <-gate; return nil })
	a := r.Submit(Work{Class: Shadow}, job("a"))
	b := r.Submit(Work{Class: Shadow}, job("b"))
	c := r.Submit(Work{Class: Shadow}, job("c"))
	b.Promote()
	why := errors.New("pruned")
	if !c.Cancel(why) {
		t.Fatal("a waiting job must be cancellable")
	}
	close(gate)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	<-first.Done()
	if err := errors.Join(b.Wait(ctx), a.Wait(ctx)); err != nil {
		t.Fatal(err)
	}
	if len(order) != 2 || order[0] != "b" {
		t.Fatalf("order %v, want b first", order)
	}
	if err := c.Wait(ctx); !errors.Is(err, why) {
		t.Fatalf("cancelled job gave %v", err)
	}
	r.Drain(ctx)
	if n := r.Pending(); n != 0 || ctx.Err() != nil {
		t.Fatalf("%d jobs pending after Drain, %v", n, ctx.Err())
	}
	r.Close()
	if err := r.Submit(Work{Class: Urgent}, job("late")).Wait(ctx); err == nil {
		t.Fatal("a closed runner took work")
	}
}

// Who waits for a slot and goes away leaves no hole, and what is late is told so without having begun.
func TestAcquire(t *testing.T) {
	r := NewRunner(Config{Slots: 1, Bound: 1})
	defer r.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	release, err := r.Acquire(ctx, Work{Class: Fork})
	if err != nil {
		t.Fatal(err)
	}
	gone, leave := context.WithCancelCause(ctx)
	why := errors.New("went away")
	leave(why)
	if _, err := r.Acquire(gone, Work{Class: Fork}); !errors.Is(err, why) {
		t.Fatalf("who had gone away got %v", err)
	}
	outcomes := make(chan error, 2)
	going, leave := context.WithCancelCause(ctx)
	go func() {
		_, err := r.Acquire(going, Work{Class: Fork})
		outcomes <- err
	}()
	within(ctx, t, func() bool { return r.Pending() == 2 })
	leave(why)
	if err := <-outcomes; !errors.Is(err, why) {
		t.Fatalf("who went away got %v", err)
	}
	late := r.Submit(Work{Class: Fork, Deadline: time.Now().Add(-time.Second)}, func(context.Context, time.Duration) error {
		t.Error("late work was begun")
		return nil
	})
	next := make(chan func(error), 1)
	go func() {
		release, err := r.Acquire(ctx, Work{Class: Fork})
		next <- release
		outcomes <- err
	}()
	within(ctx, t, func() bool { return r.Pending() == 3 })
	release(nil)
	if err := late.Wait(ctx); fault.As(err).Reason != "expired" {
		t.Fatalf("late work gave %v", err)
	}
	(<-next)(nil)
	if err := <-outcomes; err != nil || r.Pending() != 0 {
		t.Fatalf("%v, %d pending", err, r.Pending())
	}

	out, err := r.Admit(Fork, "", "a", 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Admit(Fork, "", "b", 1); !fault.Is(err, fault.Exhausted) || fault.As(err).RetryAfter <= 0 {
		t.Fatalf("a full queue gave %v", err)
	}
	out()
	if _, err := r.Admit(Fork, "", "b", 1); err != nil {
		t.Fatal(err)
	}
}

func within(ctx context.Context, t *testing.T, what func() bool) {
	t.Helper()
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for !what() {
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatal("it didn't come to it in time")
		}
	}
}
