//go:build sabotage_memory

package engine

import (
	"fmt"
	"os"
	"strings"

	"github.com/boxwood-rl/boxwood/engine/box"
)

// alterMemory changes a byte of the heap of the first process that has one.
func alterMemory(b box.Box) error {
	procs, err := b.Survivors()
	if err != nil {
		return err
	}
	for _, p := range procs {
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.HostPID))
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(maps)) {
			if !strings.Contains(line, "[heap]") {
				continue
			}
			var at int64
			if _, err := fmt.Sscanf(line, "%x-", &at); err != nil {
				return err
			}
			f, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", p.HostPID), os.O_RDWR, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			var one [1]byte
			if _, err := f.ReadAt(one[:], at+64); err != nil {
				return err
			}
			one[0] ^= 1
			_, err = f.WriteAt(one[:], at+64)
			return err
		}
	}
	return nil
}
