package sched

import (
	"context"
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// The queue against a list that is searched the slow way: the same start order,
// the limit kept, every job started or cancelled once.
func TestQueueAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 4).Draw(t, "limit")
		patience := rapid.IntRange(1, 5).Draw(t, "patience")
		q := NewQueue(limit, patience)
		model := map[Ticket]Class{}
		ended := map[Ticket]bool{}
		running, streak := 0, 0
		oldest := func(c Class) (Ticket, bool) {
			var best Ticket
			for k, v := range model {
				if v == c && (best == 0 || k < best) {
					best = k
				}
			}
			return best, best != 0
		}
		for range rapid.IntRange(1, 80).Draw(t, "steps") {
			switch rapid.IntRange(0, 4).Draw(t, "op") {
			case 0:
				c := Class(rapid.IntRange(0, 1).Draw(t, "class"))
				model[q.Add(c)] = c
			case 1:
				k := Ticket(rapid.IntRange(1, 40).Draw(t, "promote"))
				want := model[k] == Shadow && has(model, k)
				if got := q.Promote(k); got != want {
					t.Fatalf("Promote(%d) = %v, want %v", k, got, want)
				}
				if want {
					model[k] = Urgent
				}
			case 2:
				k := Ticket(rapid.IntRange(1, 40).Draw(t, "cancel"))
				if got := q.Cancel(k); got != has(model, k) {
					t.Fatalf("Cancel(%d) = %v", k, got)
				}
				delete(model, k)
			case 3:
				want, ok := oldest(Urgent)
				if shadow, any := oldest(Shadow); any && (!ok || streak >= patience) {
					want, ok = shadow, true
				}
				if running >= limit {
					ok = false
				}
				got, gotOK := q.Next()
				if gotOK != ok || ok && got != want {
					t.Fatalf("Next() = %d, %v, want %d, %v", got, gotOK, want, ok)
				}
				if !ok {
					continue
				}
				if ended[got] {
					t.Fatalf("job %d started twice", got)
				}
				ended[got] = true
				if streak++; model[got] == Shadow {
					streak = 0
				}
				delete(model, got)
				running++
			case 4:
				if running > 0 {
					q.Done()
					running--
				}
			}
			if q.Running() != running || q.Waiting(Urgent)+q.Waiting(Shadow) != len(model) {
				t.Fatalf("running %d waiting %d, want %d and %d", q.Running(), q.Waiting(Urgent)+q.Waiting(Shadow), running, len(model))
			}
		}
	})
}

func has(m map[Ticket]Class, k Ticket) bool { _, ok := m[k]; return ok }

// A waiting shadow job starts although urgent work never runs dry.
func TestNoStarvation(t *testing.T) {
	q := NewQueue(1, 3)
	shadow := q.Add(Shadow)
	for i := range 10 {
		q.Add(Urgent)
		got, ok := q.Next()
		if !ok {
			t.Fatal("nothing started")
		}
		q.Done()
		if got == shadow {
			if i != 3 {
				t.Fatalf("shadow job overtaken %d times, want 3", i)
			}
			return
		}
	}
	t.Fatal("shadow job starved")
}

func TestRunnerPromoteCancelClose(t *testing.T) {
	r := NewRunner(1)
	gate := make(chan struct{})
	var order []string
	job := func(name string) func(context.Context, time.Duration) error {
		return func(context.Context, time.Duration) error { order = append(order, name); return nil }
	}
	first := r.Submit(Shadow, func(context.Context, time.Duration) error { <-gate; return nil })
	a := r.Submit(Shadow, job("a"))
	b := r.Submit(Shadow, job("b"))
	c := r.Submit(Shadow, job("c"))
	b.Promote()
	why := errors.New("pruned")
	if !c.Cancel(why) {
		t.Fatal("a waiting job must be cancellable")
	}
	close(gate)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
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
	if err := r.Submit(Urgent, job("late")).Wait(ctx); err == nil {
		t.Fatal("a closed runner took work")
	}
}
