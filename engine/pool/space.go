package pool

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// spaceAge is how old a measurement of free space may be: statfs on btrfs walks
// the devices' allocations, and Clone shouldn't pay for that.
const spaceAge = 200 * time.Millisecond

// measure reads total, used and the low watermark. The file that holds the pool
// is sparse, so the pool can't have more free space than the disk below it: were
// that to fill up first, btrfs would turn read-only under every sandbox.
func (p *Btrfs) measure() (Usage, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if time.Since(p.asOf) < spaceAge {
		return p.space, nil
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(p.top.Fd()), &fs); err != nil {
		return Usage{}, err
	}
	u := Usage{Total: int64(fs.Blocks) * fs.Bsize}
	free := int64(fs.Bavail) * fs.Bsize
	if p.device != nil {
		var host unix.Statfs_t
		if err := unix.Statfs(p.opts.Dir, &host); err != nil {
			return Usage{}, err
		}
		free = min(free, int64(host.Bavail)*host.Bsize)
	}
	u.Used = u.Total - free
	if u.LowWater = p.opts.LowWater; u.LowWater == 0 {
		u.LowWater = min(max(u.Total/20, 256<<20), 10<<30)
	}
	p.space, p.asOf = u, time.Now()
	return u, nil
}

func (p *Btrfs) Usage() (Usage, error) {
	u, err := p.measure()
	if err != nil {
		return u, err
	}
	for _, dir := range append([]*os.File{p.snapshots}, p.uppers[:]...) {
		n := &u.Uppers
		if dir == p.snapshots {
			n = &u.Snapshots
		}
		entries, err := os.ReadDir(dir.Name())
		if err != nil {
			return u, err
		}
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), ".") {
				*n++
			}
		}
	}
	return u, nil
}

// checkSpace refuses new work below the low watermark.
func (p *Btrfs) checkSpace() error {
	u, err := p.measure()
	if err != nil {
		return err
	}
	if free := u.Total - u.Used; free < u.LowWater {
		p.sweep.hurry()
		return poolFull("the pool in %s has %d MiB left, new work needs %d MiB free", filepath.Dir(p.root), free>>20, u.LowWater>>20)
	}
	return nil
}

// spaceFault makes a pool_full of the kernel's ENOSPC.
func (p *Btrfs) spaceFault(err error) error {
	if lacksSpace(err) {
		return poolFull("the pool in %s is full: %w", filepath.Dir(p.root), err)
	}
	return err
}

func lacksSpace(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)
}

func poolFull(format string, args ...any) error {
	return fault.New(fault.Exhausted, "pool_full", format, args...).
		WithHint("prune trees, remove images or release sandboxes; or give the pool a bigger disk").After(time.Second)
}
