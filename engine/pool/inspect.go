package pool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/btrfs"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// Inspection is a look at a pool that no daemon has open. It changes nothing in it: what
// Open would clear away is listed, and the mark that says whether the host went
// down under the pool stays as it is.
type Inspection struct {
	p       *Btrfs
	held    bool
	unclean bool
	mounted string
}

// Inspect opens the pool of a state folder to be looked at: read-only, unless
// sandboxes of a daemon that is gone still have it mounted (the kernel then allows
// only what they have). NotFound "no_pool" if there is none, Busy "pool_in_use"
// while a daemon has it.
func Inspect(o Options) (_ *Inspection, err error) {
	i := &Inspection{p: &Btrfs{opts: o}}
	defer func() {
		if err != nil {
			i.Close()
		}
	}()
	image := filepath.Join(o.Dir, "pool.img")
	if _, err := os.Stat(image); o.ExistingBtrfs == "" && errors.Is(err, os.ErrNotExist) {
		return nil, fault.New(fault.NotFound, "no_pool", "there is no pool in %s", o.Dir)
	}
	if i.p.lock, err = lockFile(filepath.Join(o.Dir, "pool.lock")); err != nil {
		return nil, err
	}
	if i.p.root = o.ExistingBtrfs; i.p.root == "" {
		i.p.root = filepath.Join(o.Dir, "pool")
		if err := i.mount(&device{dir: o.Dir, image: image, at: i.p.root}); err != nil {
			return nil, err
		}
	}
	b, err := os.ReadFile(filepath.Join(i.p.root, "format"))
	if err != nil {
		return nil, fault.New(fault.DataLoss, "pool_format", "the pool in %s has no format: %w", i.p.root, err)
	}
	if string(b) != format {
		return nil, fault.New(fault.Precondition, "pool_format", "the pool in %s has format %q, this boxwood knows %q", i.p.root, strings.TrimSpace(string(b)), strings.TrimSpace(format)).
			WithHint("use the version that made it")
	}
	for name, f := range map[string]**os.File{"": &i.p.top, "layers": &i.p.layers, "snapshots": &i.p.snapshots} {
		if *f, err = os.Open(filepath.Join(i.p.root, name)); err != nil {
			return nil, err
		}
	}
	for n := range i.p.uppers {
		if i.p.uppers[n], err = os.Open(filepath.Join(i.p.root, "uppers", strconv.FormatInt(int64(n), 16))); err != nil {
			return nil, err
		}
	}
	return i, nil
}

// detachPatience is how long a loop device may take to go after its last user has.
const detachPatience = 2 * time.Second

func (i *Inspection) mount(d *device) error {
	i.unclean = !d.trusted()
	for since := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		loop, err := findLoop(d.image)
		if err != nil {
			return err
		}
		if i.held = loop != nil; !i.held {
			break
		}
		loop.Close()
		if time.Since(since) > detachPatience {
			break
		}
	}
	if err := os.Mkdir(d.at, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	flags := uintptr(unix.MS_RDONLY)
	if i.held {
		flags = 0
	}
	if err := d.mount(flags, ""); err != nil {
		return fault.New(fault.DataLoss, "pool_unreadable", "the pool %s can't be mounted: %w", d.image, err).
			WithHint("the kernel's log says why; a backup of the file, or `boxwood serve --rebuild-pool`, which withholds what is lost")
	}
	i.mounted = d.at
	return nil
}

// Close lets go of the pool.
func (i *Inspection) Close() error {
	for _, f := range i.p.folders() {
		if f != nil {
			f.Close()
		}
	}
	var err error
	if i.mounted != "" {
		if err = unix.Unmount(i.mounted, 0); err == unix.EBUSY {
			err = unix.Unmount(i.mounted, unix.MNT_DETACH)
		}
		i.mounted = ""
	}
	if i.p.lock != nil {
		i.p.lock.Close()
	}
	return err
}

// Held reports whether something still has the pool's file system mounted.
func (i *Inspection) Held() bool { return i.held }

// Unclean reports whether the host went down while the pool was in use: what is in it
// hasn't been read and compared with its checksums since.
func (i *Inspection) Unclean() bool { return i.unclean }

// Snapshots that are complete.
func (i *Inspection) Snapshots() ([]ids.Snapshot, error) {
	return listed[ids.Snapshot](i.p.snapshots)
}

// Uppers of all generations.
func (i *Inspection) Uppers() ([]ids.Generation, error) {
	return listed[ids.Generation](i.p.uppers[:]...)
}

// Layers that are complete.
func (i *Inspection) Layers() ([]ids.Layer, error) { return i.p.Layers() }

// Leftovers are what was half made or half removed, as paths below the pool.
func (i *Inspection) Leftovers() ([]string, error) {
	var out []string
	for _, dir := range i.p.folders() {
		entries, err := os.ReadDir(dir.Name())
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), newPrefix) || strings.HasPrefix(e.Name(), gonePrefix) {
				rel, _ := filepath.Rel(i.p.root, filepath.Join(dir.Name(), e.Name()))
				out = append(out, rel)
			}
		}
	}
	return out, nil
}

// Verify compares a snapshot with its seal, and the stack that it was written with.
func (i *Inspection) Verify(id ids.Snapshot, seal tree.Seal) error {
	f, err := i.p.openSubvol(i.p.snapshots, string(id))
	if err != nil {
		return sealFault(id, err)
	}
	defer f.Close()
	if i.held { // else nobody can have written into it since it was mounted
		if err := btrfs.Flush(i.p.snapshots, string(id), f); err != nil {
			return sealFault(id, err)
		}
	}
	if err := checkSeal(f, id, seal); err != nil {
		return err
	}
	stack, err := i.p.stackOf(id)
	if err != nil {
		return sealFault(id, err)
	}
	if fmt.Sprint(stack) != fmt.Sprint(seal.Layers) {
		return sealFault(id, fmt.Errorf("it lies on %v, its seal says %v", stack, seal.Layers))
	}
	return nil
}

func (p *Btrfs) stackOf(id ids.Snapshot) ([]ids.Layer, error) {
	return readStack(filepath.Join(p.snapshots.Name(), string(id)))
}

// listed gives the complete things of some folders.
func listed[T ~string](dirs ...*os.File) ([]T, error) {
	var out []T
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir.Name())
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), ".") {
				out = append(out, T(e.Name()))
			}
		}
	}
	return out, nil
}
