package pool

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/btrfs"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// Clone is on the path of every fork: one snapshot ioctl, and around it a few
// look-ups that don't touch the disk. The seal is compared before, and again
// after: making the clone flushes the snapshot, which shows what somebody wrote
// into it but a moment ago.
func (p *Btrfs) Clone(ctx context.Context, from ids.Snapshot, seal tree.Seal, as ids.Generation, limit int64) (*Upper, error) {
	if err := checkName(string(as)); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := p.checkSpace(); err != nil {
		return nil, err
	}
	src, err := p.openSubvol(p.snapshots, string(from))
	if err != nil {
		return nil, sealFault(from, err)
	}
	defer src.Close()
	if err := checkSeal(src, from, seal); err != nil {
		return nil, err
	}
	if limit > 0 && p.quotas {
		err = btrfs.SnapshotLimited(p.uppersOf(as), string(as), src, uint64(limit))
	} else {
		err = btrfs.Snapshot(p.uppersOf(as), string(as), src, false)
	}
	if errors.Is(err, unix.EEXIST) {
		return nil, fault.New(fault.Exists, "generation_exists", "generation %s has an upper already", as)
	}
	if err != nil {
		return nil, p.spaceFault(err)
	}
	up, err := p.upper(as, seal.Layers)
	if err == nil {
		err = checkSeal(src, from, seal)
	}
	if err != nil {
		return nil, errors.Join(err, p.Release(as))
	}
	return up, nil
}

func (p *Btrfs) upper(as ids.Generation, layers []ids.Layer) (*Upper, error) {
	f, err := p.openSubvol(p.uppersOf(as), string(as))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	id, err := btrfs.ID(f)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(p.uppersOf(as).Name(), string(as))
	up := &Upper{Generation: as, Dir: filepath.Join(dir, upperName), Work: filepath.Join(dir, workName), Subvolume: id}
	for _, l := range layers {
		up.Layers = append(up.Layers, p.layerDir(l))
	}
	return up, nil
}

func (p *Btrfs) FindUpper(as ids.Generation) (*Upper, error) {
	if err := checkName(string(as)); err != nil {
		return nil, err
	}
	layers, err := readStack(filepath.Join(p.uppersOf(as).Name(), string(as)))
	if err != nil {
		return nil, upperFault(as, err)
	}
	return p.upper(as, layers)
}

// openSubvol opens a subvolume by its name in one of the pool's folders.
func (p *Btrfs) openSubvol(dir *os.File, name string) (*os.File, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: filepath.Join(dir.Name(), name), Err: err}
	}
	return os.NewFile(uintptr(fd), filepath.Join(dir.Name(), name)), nil
}

func upperFault(as ids.Generation, err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return fault.New(fault.NotFound, "no_upper", "generation %s has no upper", as)
	}
	return err
}

func (p *Btrfs) Flush(ctx context.Context, of ids.Generation) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	src, err := p.openSubvol(p.uppersOf(of), string(of))
	if err != nil {
		return upperFault(of, err)
	}
	defer src.Close()
	return btrfs.Flush(p.uppersOf(of), string(of), src)
}

// Snapshot is one ioctl: it runs while the sandbox is frozen.
func (p *Btrfs) Snapshot(ctx context.Context, of ids.Generation, as ids.Snapshot) (*Pending, error) {
	if err := checkName(string(as)); err != nil {
		return nil, err
	}
	src, err := p.openSubvol(p.uppersOf(of), string(of))
	if err != nil {
		return nil, upperFault(of, err)
	}
	defer src.Close()
	if _, err := os.Lstat(filepath.Join(p.snapshots.Name(), string(as))); err == nil {
		return nil, fault.New(fault.Exists, "snapshot_exists", "snapshot %s exists already", as)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	tmp := temporary(newPrefix, string(as))
	if err := btrfs.Snapshot(p.snapshots, tmp, src, false); err != nil {
		return nil, p.spaceFault(err)
	}
	p.opts.hook("snapshot made")
	if err := failpoint.Hit("snapshot made"); err != nil {
		p.sweep.add(p.snapshots, tmp)
		return nil, err
	}
	return &Pending{
		Finish: func(ctx context.Context) (tree.Seal, error) { return p.finish(ctx, of, as, tmp) },
		Abort:  func() { p.sweep.add(p.snapshots, tmp) },
	}, nil
}

// finish empties work/ (overlayfs leaves the mark of a volatile mount there,
// which forbids another), and seals and publishes the snapshot.
func (p *Btrfs) finish(ctx context.Context, of ids.Generation, as ids.Snapshot, tmp string) (seal tree.Seal, err error) {
	at := filepath.Join(p.snapshots.Name(), tmp)
	defer func() {
		if err != nil {
			p.sweep.add(p.snapshots, tmp)
		}
	}()
	if err := ctx.Err(); err != nil {
		return seal, err
	}
	for _, name := range []string{"work", "index"} {
		if err := os.RemoveAll(filepath.Join(at, workName, name)); err != nil {
			return seal, err
		}
	}
	layers, err := readStack(at)
	if err != nil {
		return seal, err
	}
	seal, made, err := p.publish(as, tmp, layers)
	if err != nil {
		return seal, err
	}
	p.remember(of, as, made)
	return seal, nil
}

// remember keeps from when on the bytes of a snapshot are its own: from the
// generation's snapshot before, or from the clone.
func (p *Btrfs) remember(of ids.Generation, as ids.Snapshot, made uint64) {
	p.mu.Lock()
	since, ok := p.since[string(of)]
	p.mu.Unlock()
	if !ok {
		src, err := p.openSubvol(p.uppersOf(of), string(of))
		if err != nil {
			return // released meanwhile: unknown
		}
		info, err := btrfs.GetInfo(src)
		src.Close()
		if err != nil {
			return
		}
		since = info.Made
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.made[string(as)] = since
	p.since[string(of)] = made
}

func (p *Btrfs) Release(of ids.Generation) error {
	if err := checkName(string(of)); err != nil {
		return err
	}
	p.mu.Lock()
	delete(p.since, string(of))
	p.mu.Unlock()
	return p.discard(p.uppersOf(of), string(of))
}

// discard takes a name away at once and leaves the rest to the sweeper. If there is no room to
// rename it, and nothing is made again by that name, the sweeper takes it as it is called.
func (p *Btrfs) discard(dir *os.File, name string) error {
	fd, gone := int(dir.Fd()), temporary(gonePrefix, name)
	err := unix.Renameat2(fd, name, fd, gone, unix.RENAME_NOREPLACE)
	switch {
	case err == unix.ENOENT:
		return nil
	case lacksSpace(err) && dir != p.layers:
		gone = name
	case err != nil:
		return p.spaceFault(&os.LinkError{Op: "rename", Old: name, New: gone, Err: err})
	}
	p.sweep.add(dir, gone)
	return nil
}
