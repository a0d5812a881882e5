package engine

import (
	"testing"

	"github.com/boxwood-rl/boxwood/engine/box"
)

// What a failed child says of its hook is all that its owner hears of it.
func TestHookFailuresAreTold(t *testing.T) {
	for _, c := range []struct {
		name string
		exit box.Exit
		said string
		want string
	}{
		{"status", box.Exit{Code: 3}, "it is\nbroken\n", "ended with status 3: it is broken"},
		{"silent", box.Exit{Code: 1}, "\n", "ended with status 1"},
		{"signal", box.Exit{Code: -1, Signal: 9}, "", "was killed by signal 9 (SIGKILL)"},
		{"memory", box.Exit{Code: -1, Signal: 9, OOMKilled: true}, "", "was out of memory"},
		{"lost", box.Exit{Code: -1, Lost: true}, "x", "was running when the sandbox was lost: x"},
	} {
		if got := howEnded(c.exit) + quoted([]byte(c.said)); got != c.want {
			t.Errorf("%s: %q instead of %q", c.name, got, c.want)
		}
	}
}
