// Package thread runs what changes the state of a thread (its namespaces, its v1 control groups) where nobody comes after it.
//
// Promise: what ran in Discard leaves nothing behind in this process. A Go thread ends with the goroutine that locked it, but for
// the first one: the runtime can't end that, and keeps it asleep for ever, in whatever namespaces and groups it was left in. So it is never given away.
package thread

import (
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// Discard runs f on a thread that ends with it, and gives what f gives.
func Discard(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // without an unlock: the thread ends with this function
		if first() && !sabotage.On("thread") {
			defer runtime.UnlockOSThread()
			done <- Discard(f) // runs elsewhere, as this one is taken meanwhile
			return
		}
		done <- f()
	}()
	return <-done
}

// first says whether this is the process's first thread.
func first() bool { return unix.Gettid() == unix.Getpid() }
