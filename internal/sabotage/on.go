//go:build sabotage

package sabotage

import (
	"os"
	"sync/atomic"
)

var (
	named = os.Getenv("BOXWOOD_SABOTAGE")
	calls atomic.Int64
)

// On says whether this is the saboteur that the variable BOXWOOD_SABOTAGE names. Children inherit it: a daemon that a test
// starts is broken as its test is.
func On(name string) bool { return name == named }

// Hundredth is On for one call in a hundred.
func Hundredth(name string) bool { return On(name) && calls.Add(1)%100 == 50 }
