package pool

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/boxwood-rl/boxwood/internal/btrfs"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// AddSnapshot: a half-made one has a name that Open clears away, like any other.
func (p *Btrfs) AddSnapshot(ctx context.Context, id ids.Snapshot, over Made, fill func(upper string) error) (seal tree.Seal, err error) {
	if err := checkName(string(id)); err != nil {
		return seal, err
	}
	if err := ctx.Err(); err != nil {
		return seal, err
	}
	if err := p.checkSpace(); err != nil {
		return seal, err
	}
	tmp := temporary(newPrefix, string(id))
	defer func() {
		if err != nil {
			p.sweep.add(p.snapshots, tmp)
			err = p.spaceFault(err)
		}
	}()
	layers := over.Seal.Layers
	if over.ID != "" {
		if err := p.over(over, tmp); err != nil {
			return seal, err
		}
	} else {
		if layers = over.Layers; len(layers) == 0 {
			return seal, fault.New(fault.Invalid, "no_layers", "a snapshot needs at least one layer")
		}
		if err := p.blank(tmp, layers); err != nil {
			return seal, err
		}
	}
	if err := fill(filepath.Join(p.snapshots.Name(), tmp, upperName)); err != nil {
		return seal, fmt.Errorf("filling snapshot %s: %w", id, err)
	}
	seal, made, err := p.publish(id, tmp, layers)
	_ = made
	return seal, err
}

// over makes tmp a writable copy of a snapshot.
func (p *Btrfs) over(m Made, tmp string) error {
	src, err := p.openSubvol(p.snapshots, string(m.ID))
	if err != nil {
		return sealFault(m.ID, err)
	}
	defer src.Close()
	if err := checkSeal(src, m.ID, m.Seal); err != nil {
		return err
	}
	return btrfs.Snapshot(p.snapshots, tmp, src, false)
}

// blank makes tmp an empty folder of changes over a stack. No layer of it goes away meanwhile, nor afterwards, as it is
// below tmp then; what fills tmp may take long.
func (p *Btrfs) blank(tmp string, layers []ids.Layer) error {
	p.layerMu.Lock()
	defer p.layerMu.Unlock()
	for _, l := range layers {
		f, err := p.OpenLayer(l)
		if err != nil {
			return err
		}
		f.Close()
	}
	if err := p.fromNumbers(p.snapshots, tmp); err != nil {
		return err
	}
	at := filepath.Join(p.snapshots.Name(), tmp)
	if err := writeStack(at, layers); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(at, workName), 0o700); err != nil {
		return err
	}
	return os.Mkdir(filepath.Join(at, upperName), 0o755)
}

// AddSnapshot: the whole tree of the one before is copied.
func (p *Plain) AddSnapshot(ctx context.Context, id ids.Snapshot, over Made, fill func(upper string) error) (tree.Seal, error) {
	if err := checkName(string(id)); err != nil {
		return tree.Seal{}, err
	}
	if over.ID != "" {
		if err := p.Verify(over.ID, over.Seal); err != nil {
			return tree.Seal{}, err
		}
		over.Layers = over.Seal.Layers
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.snapshot(id, over.Layers, func(upper string) error {
		if over.ID != "" {
			if err := mergeTree(p.path("snapshots", string(over.ID), upperName), upper); err != nil {
				return err
			}
		}
		return fill(upper)
	})
}
