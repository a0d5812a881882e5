package service

import (
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/testenv"
)

// Timers of a dump stand still while nobody runs it, those that were set to an instant, too. If it fails, a program waits for
// less long, or not at all any more, than docs/HAZARDS.md says.
func TestTimersOfADump(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	_, sb := d.newTree(t)
	d.place(t, sb, attackProgram(t, "testdata/timers.c"))
	left := func(sandbox string) map[string]int {
		t.Helper()
		return outcomesOf(t, d.ok(t, sandbox, `echo >/in; while read -r line && [ "$line" != end ]; do echo "$line"; done </out`))
	}
	d.ok(t, sb.GetId(), "mkfifo /in /out; /root/program >/dev/null 2>&1 </dev/null & disown")
	begun := time.Now()
	was := left(sb.GetId())
	n := d.run(t, sb.GetId(), "true").GetNode().GetId()
	d.captured(t, n)
	saved := time.Now()
	const gap = 2 * time.Second
	until(t, "some time has passed", func() bool { return time.Since(saved) > gap })
	still := time.Since(saved)
	child := d.fork(t, n, 1)[0]
	now := left(child.GetId())
	ran := time.Since(begun) - still
	if len(now) != 6 || len(was) != 6 {
		t.Fatalf("of the timers there were %v, and are %v", was, now)
	}
	for name, before := range was {
		gone := time.Duration(before-now[name]) * time.Millisecond
		t.Logf("%s: %v, of %v that it ran at most", name, gone, ran)
		most := ran + 10*time.Millisecond // they are read in milliseconds, and kept in ticks
		if name == "timerfd_absolute" {
			most += time.Second // CRIU counts whole ones
		}
		if now[name] <= 0 || gone > most {
			t.Errorf("%s: %v have gone, and it ran for %v at most", name, gone, ran)
		}
	}
}
