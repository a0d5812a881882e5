package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/btrfs"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/tree"
)

func (p *Btrfs) AddBase(ctx context.Context, id ids.Snapshot, layers []ids.Layer) (seal tree.Seal, err error) {
	if err := checkName(string(id)); err != nil {
		return seal, err
	}
	if len(layers) == 0 {
		return seal, fault.New(fault.Invalid, "no_layers", "a base needs at least one layer")
	}
	p.layerMu.Lock() // no layer of the stack goes away meanwhile
	defer p.layerMu.Unlock()
	for _, l := range layers {
		f, err := p.OpenLayer(l)
		if err != nil {
			return seal, err
		}
		f.Close()
	}
	if err := p.checkSpace(); err != nil {
		return seal, err
	}
	if _, err := os.Lstat(filepath.Join(p.snapshots.Name(), string(id))); err == nil {
		return seal, fault.New(fault.Exists, "snapshot_exists", "snapshot %s exists already", id)
	}
	tmp := temporary(newPrefix, string(id))
	if err := p.fromNumbers(p.snapshots, tmp); err != nil {
		return seal, err
	}
	defer func() {
		if err != nil {
			p.sweep.add(p.snapshots, tmp)
		}
	}()
	at := filepath.Join(p.snapshots.Name(), tmp)
	if err := writeStack(at, layers); err != nil {
		return seal, err
	}
	if err := os.Mkdir(filepath.Join(at, workName), 0o700); err != nil {
		return seal, err
	}
	// The root folder of an overlay shows what its upper says of it.
	upper := filepath.Join(at, upperName)
	if err := os.Mkdir(upper, 0o755); err != nil {
		return seal, err
	}
	if err := copyMetadata(p.layerDir(layers[len(layers)-1]), upper); err != nil {
		return seal, fmt.Errorf("copying the root folder's metadata: %w", err)
	}
	if err := touchLast(at); err != nil {
		return seal, err
	}
	seal, _, err = p.publish(id, tmp, layers)
	return seal, err
}

// publish writes a half-made snapshot out, makes it read-only, gives it its name
// and reads its seal. The seal is the transaction of the last change of an inode,
// and data that waits in the page cache is such a change only when it is written
// out. Making a subvolume writable ends a transaction, so whoever changes it
// after that does so in a later one than the seal's.
func (p *Btrfs) publish(id ids.Snapshot, tmp string, layers []ids.Layer) (seal tree.Seal, made uint64, err error) {
	f, err := os.Open(filepath.Join(p.snapshots.Name(), tmp))
	if err != nil {
		return seal, 0, err
	}
	defer f.Close()
	if err := btrfs.Flush(p.snapshots, tmp, f); err != nil {
		return seal, 0, p.spaceFault(err)
	}
	if err := btrfs.SetReadOnly(f, true); err != nil {
		return seal, 0, p.spaceFault(err)
	}
	p.opts.hook("snapshot sealed")
	if err := failpoint.Hit("snapshot sealed"); err != nil {
		return seal, 0, err
	}
	fd := int(p.snapshots.Fd())
	if err := unix.Renameat2(fd, tmp, fd, string(id), unix.RENAME_NOREPLACE); err != nil {
		return seal, 0, fmt.Errorf("publishing snapshot %s: %w", id, err)
	}
	info, err := btrfs.GetInfo(f)
	if err != nil {
		return seal, 0, errors.Join(err, p.Remove(id))
	}
	return tree.Seal{UUID: btrfs.FormatUUID(info.UUID), Generation: info.Changed, Layers: slices.Clone(layers)}, info.Made, nil
}

// checkSeal compares a snapshot with its seal by one ioctl; what was written into
// it shows once it is flushed. A seal's generation is the last transaction that
// changed an inode: a snapshot that somebody made writable, changed and made
// read-only again has a later one. (btrfs's own "generation" of a subvolume grows
// with each clone of it.)
func checkSeal(f *os.File, id ids.Snapshot, seal tree.Seal) error {
	info, err := btrfs.GetInfo(f)
	if err != nil {
		return sealFault(id, err)
	}
	var wrong string
	switch {
	case sabotage.On("seal"):
		return nil
	case !info.ReadOnly:
		wrong = "it is writable"
	case btrfs.FormatUUID(info.UUID) != seal.UUID:
		wrong = "it is another subvolume: " + btrfs.FormatUUID(info.UUID)
	case info.Changed != seal.Generation:
		wrong = fmt.Sprintf("it was changed in transaction %d, the seal says %d", info.Changed, seal.Generation)
	default:
		return nil
	}
	return sealFault(id, errors.New(wrong))
}

func sealFault(id ids.Snapshot, err error) error {
	if fault.Is(err, fault.Invalid) {
		return err
	}
	return fault.New(fault.DataLoss, "snapshot_changed", "snapshot %s isn't what was saved: %w", id, err).
		WithHint("the nodes that use it can't be restored; something outside boxwood touched the pool")
}

func (p *Btrfs) Verify(id ids.Snapshot, seal tree.Seal) error {
	f, err := p.openSubvol(p.snapshots, string(id))
	if err != nil {
		return sealFault(id, err)
	}
	defer f.Close()
	if err := btrfs.Flush(p.snapshots, string(id), f); err != nil {
		return sealFault(id, err)
	}
	return checkSeal(f, id, seal)
}

func (p *Btrfs) OpenSnapshot(id ids.Snapshot) (*os.File, error) {
	if err := checkName(string(id)); err != nil {
		return nil, err
	}
	f, err := os.Open(filepath.Join(p.snapshots.Name(), string(id), upperName))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fault.New(fault.NotFound, "no_snapshot", "the pool has no snapshot %s", id)
	}
	return f, err
}

func (p *Btrfs) SnapshotDir(id ids.Snapshot) string {
	return filepath.Join(p.snapshots.Name(), string(id), upperName)
}

func (p *Btrfs) Remove(id ids.Snapshot) error {
	if err := checkName(string(id)); err != nil {
		return err
	}
	p.mu.Lock()
	delete(p.made, string(id))
	p.mu.Unlock()
	return p.discard(p.snapshots, string(id))
}

func (p *Btrfs) Reconcile(uppers map[ids.Generation]bool, snapshots map[ids.Snapshot]bool) (int, error) {
	removed := 0
	var errs []error
	for _, dir := range append([]*os.File{p.snapshots}, p.uppers[:]...) {
		entries, err := os.ReadDir(dir.Name())
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, e := range entries {
			name := e.Name()
			if strings.HasPrefix(name, ".") || dir != p.snapshots && uppers[ids.Generation(name)] || dir == p.snapshots && snapshots[ids.Snapshot(name)] {
				continue
			}
			if err := p.discard(dir, name); err != nil {
				errs = append(errs, err)
				continue
			}
			removed++
		}
	}
	return removed, errors.Join(errs...)
}

// ExclusiveBytes is what the snapshot added to the generation's snapshot before
// it, or to the one its upper was cloned from. Quotas can't tell: they count
// extents for the upper that wrote them. It is known until the daemon restarts.
func (p *Btrfs) ExclusiveBytes(id ids.Snapshot) int64 {
	p.mu.Lock()
	since, ok := p.made[string(id)]
	p.mu.Unlock()
	if !ok {
		return 0
	}
	f, err := p.openSubvol(p.snapshots, string(id))
	if err != nil {
		return 0
	}
	defer f.Close()
	n, err := btrfs.NewBytes(f, since)
	if err != nil {
		return 0
	}
	return n
}
