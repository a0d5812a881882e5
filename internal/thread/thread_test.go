package thread

import (
	"errors"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// onFirst is filled while the first thread has all the work.
var onFirst struct{ rounds, first, discarded int }

func init() { runtime.LockOSThread() } // main is on the first thread

func TestMain(m *testing.M) {
	runtime.UnlockOSThread()
	procs := runtime.GOMAXPROCS(1) // a goroutine that main waits for runs on main's thread
	for onFirst.rounds < 1000 {
		onFirst.rounds++
		seen := make(chan bool)
		go func() { seen <- unix.Gettid() == unix.Getpid() }()
		if <-seen {
			onFirst.first++
		}
		Discard(func() error {
			if unix.Gettid() == unix.Getpid() {
				onFirst.discarded++
			}
			return nil
		})
	}
	runtime.GOMAXPROCS(procs)
	os.Exit(m.Run())
}

// The first thread can't be ended, so it is never thrown away.
func TestTheFirstThreadIsKept(t *testing.T) {
	if onFirst.first == 0 {
		t.Fatalf("in %d rounds no goroutine ran on the first thread: this shows nothing", onFirst.rounds)
	}
	if onFirst.discarded > 0 {
		t.Errorf("%d of %d were run on the first thread, which takes goroutines: %d of %d others", onFirst.discarded, onFirst.rounds, onFirst.first, onFirst.rounds)
	}
}

// What f did to its thread is nobody's afterwards, and its error is the caller's.
func TestTheThreadEnds(t *testing.T) {
	var tid int
	want := errors.New("no")
	if err := Discard(func() error { tid = unix.Gettid(); return want }); err != want {
		t.Fatalf("%v instead of %v", err, want)
	}
	for {
		if err := unix.Tgkill(unix.Getpid(), tid, 0); err == unix.ESRCH {
			return
		}
		runtime.Gosched()
	}
}
