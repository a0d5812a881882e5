//go:build !sabotage_memory

package engine

import "github.com/boxwood-rl/boxwood/engine/box"

// alterMemory: what is restored has in memory what was saved (law 5). The build tag sabotage_memory breaks this on purpose;
// TestParanoid must then fail.
func alterMemory(box.Box) error { return nil }
