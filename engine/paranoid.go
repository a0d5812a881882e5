package engine

import (
	"fmt"
	"sync/atomic"

	"github.com/boxwood-rl/boxwood/engine/criu"
	"github.com/boxwood-rl/boxwood/engine/witness"
)

// With Config.Paranoid the witness sums what the processes have in memory in the freeze in which they are saved, after CRIU has done
// its work. A child has to have the same at the same addresses before it runs, or is a failed child: neither
// what CRIU saved nor what it restored is taken on trust. The kernel's own notes in memory (rseq) are left out: it writes them as it likes.

// memoryChecks counts what came of it since the daemon started.
type memoryChecks struct{ compared, differed, unknown atomic.Int64 }

// capability tells the figures in Info.
func (m *memoryChecks) capability() Capability {
	return Capability{Name: "verified memory", State: 1, Detail: fmt.Sprintf("%d children compared, %d differed, %d restored that were saved without sums",
		m.compared.Load(), m.differed.Load(), m.unknown.Load())}
}

// remember has the witness look into memory. The box is frozen, and saved to images.
func (k *dumpKeeper) remember(was *witness.State, images string) error {
	if !k.e.cfg.Paranoid {
		return nil
	}
	rseq, err := criu.Rseq(images)
	if err != nil {
		return fmt.Errorf("looking for what the kernel writes: %w", err)
	}
	return was.Remember(rseq)
}

// memoryDiff says where a child that stands still has something else in memory than its parent had.
func (k *dumpKeeper) memoryDiff(was, is *witness.State) ([]string, error) {
	switch {
	case !k.e.cfg.Paranoid:
		return nil, nil
	case !was.Remembers: // by a daemon that didn't
		k.memory.unknown.Add(1)
		return nil, nil
	}
	d, err := witness.MemoryDiff(was, is)
	if err != nil {
		return nil, err
	}
	k.memory.compared.Add(1)
	if len(d) > 0 {
		k.memory.differed.Add(1)
	}
	return d, nil
}
