// Package failpoint lets a test break an operation between two of its steps: by an
// error (that of a full disk, too), a panic, or the end of the process as kill -9 brings it. Or the process
// stops there, until the test has done what is to be done between them.
//
// A step calls Hit with its name. Unless a test has armed one, that is a single
// atomic load; no flag, variable or call of the service arms any.
package failpoint

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// Steps are all that there are, in the order of the operations that they belong
// to. A step that isn't listed panics when it is hit armed, so that none is forgotten.
var Steps = []string{
	"tree planted",
	"turn begun", "turn ran", "turn judged", "turn recorded",
	"shells kept", "dump saved", "dump sealed", "dump copied",
	"capture begun", "capture flushed", "capture frozen", "snapshot made", "snapshot sealed", "snapshot finished", "capture recorded",
	"fork recorded", "fork cloned", "fork started", "birth written", "fork enlisted", "turn replayed",
	"rollback made", "rollback recorded",
	"sandbox leaving", "sandbox dropped", "box killed",
	"tree archiving", "tree archived", "tree recalled",
	"prune recorded", "condemned removed", "state removed", "prune finished", "states evicted",
	"layer filled", "layer sealed", "image unpacked", "image recorded", "image removed",
	"export state", "export checkpoint", "import snapshot", "import state", "import read", "import trying", "import tried",
	"log appending", "log appended", "log made", "table begun", "table made",
	"restart adopted", "restart swept", "restart pool", "restart recorded",
}

// How an armed step breaks.
type How string

const (
	Error How = "error"
	Panic How = "panic"
	Kill  How = "kill"
	Full  How = "full" // an error of a disk that has no space just then
	Stop  How = "stop" // by SIGSTOP; it goes on with SIGCONT as if nothing had been
)

type plan struct {
	step string
	how  How
	left atomic.Int64
}

var armed atomic.Pointer[plan]

// Arm breaks a step when it is hit for the nth time from now on (1: the first), once.
// Only tests call it.
func Arm(step string, how How, nth int) error {
	if !slices.Contains(Steps, step) || nth < 1 || !slices.Contains([]How{Error, Panic, Kill, Full, Stop}, how) {
		return fault.New(fault.Invalid, "bad_failpoint", "there is no way to break %q by %q at hit %d", step, how, nth)
	}
	p := &plan{step: step, how: how}
	p.left.Store(int64(nth))
	armed.Store(p)
	return nil
}

// Parse reads what Arm takes from one line: "how n step".
func Parse(line string) (step string, how How, nth int, err error) {
	if _, err := fmt.Sscanf(line, "%s %d", &how, &nth); err != nil {
		return "", "", 0, fault.New(fault.Invalid, "bad_failpoint", "%q is not \"how n step\": %w", line, err)
	}
	parts := strings.SplitN(strings.TrimSpace(line), " ", 3)
	if len(parts) != 3 {
		return "", "", 0, fault.New(fault.Invalid, "bad_failpoint", "%q is not \"how n step\"", line)
	}
	return parts[2], how, nth, nil
}

// Broken reports whether the armed step has been hit.
func Broken() bool {
	p := armed.Load()
	return p != nil && p.left.Load() <= 0
}

// Hit breaks here if this step is armed.
func Hit(step string) error {
	p := armed.Load()
	if p == nil {
		return nil
	}
	return p.hit(step)
}

func (p *plan) hit(step string) error {
	if !slices.Contains(Steps, step) {
		panic("a failpoint that isn't listed: " + step)
	}
	if step != p.step || p.left.Add(-1) != 0 {
		return nil
	}
	switch p.how {
	case Kill:
		_ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL)
		select {} // nothing runs on after it
	case Stop:
		// To this very thread, which thus is the first to stand. A signal to the process may be taken by another one, and
		// this one would go on for a moment into what the test wants to come before.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		_ = syscall.Tgkill(syscall.Getpid(), syscall.Gettid(), syscall.SIGSTOP)
		return nil
	case Panic:
		panic("failpoint " + step)
	case Full:
		return fault.New(fault.Exhausted, "disk_full", "broken on purpose at %q: %w", step, syscall.ENOSPC)
	}
	return fault.New(fault.Internal, "failpoint", "broken on purpose at %q", step)
}
