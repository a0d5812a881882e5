package engine

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/hostload"
	"github.com/boxwood-rl/boxwood/sched"
)

// What a line may run at once follows readings of the host's pressure: up, while work waits and nothing else does, to twice the cores; down to one
// (to a slot for each core, of what somebody waits for) while all stand still for memory; and no further up than it began
// where the kernel doesn't tell.
func TestLimitsFollowReadings(t *testing.T) {
	const slots = 2
	line := sched.NewRunner(adapting(sched.Config{Slots: slots}))
	defer line.Close()
	end := make(chan struct{})
	defer close(end)
	most := max(2*runtime.NumCPU(), slots)
	for _, k := range []sched.Class{sched.Shadow, sched.Urgent} {
		for range 2 * most {
			line.Submit(sched.Work{Class: k}, func(ctx context.Context, _ time.Duration) error { <-end; return nil })
		}
	}
	a, now := adapter{lines: []*sched.Runner{line}}, time.Now()
	var stalls *hostload.Stalls
	read := func(memory float64) {
		for range 2 * most {
			now = now.Add(time.Second)
			if stalls != nil {
				next := *stalls
				next.MemoryFull += time.Duration(memory * float64(time.Second))
				stalls = &next
			}
			a.next(stalls, now)
		}
	}
	for _, step := range []struct {
		what           string
		known          bool
		memory         float64
		shadow, urgent int
	}{
		{"nobody knows", false, 0, slots, slots},
		{"the host has room", true, 0, most, most},
		{"all stand still for memory", true, 0.5, 1, min(slots, runtime.NumCPU())},
		{"nobody knows any more", false, 0, slots, slots},
		{"there is room again", true, 0, most, most},
	} {
		switch {
		case !step.known:
			stalls = nil
		case stalls == nil:
			stalls = &hostload.Stalls{MemoryFull: time.Hour} // since the host's start
		}
		read(step.memory)
		classes := line.Snapshot().Classes
		if shadow, urgent := classes[sched.Shadow].Limit, classes[sched.Urgent].Limit; shadow != step.shadow || urgent != step.urgent {
			t.Errorf("%s: %d in the shadow and %d urgent at once, want %d and %d", step.what, shadow, urgent, step.shadow, step.urgent)
		}
	}
}
