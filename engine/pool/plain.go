package pool

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
	"github.com/boxwood-rl/boxwood/tree"
)

// Plain is the reference implementation, for tests without privileges: it copies.
//
// There is no overlay. A base is a copy of its layers merged; Upper.Dir is that
// whole tree, to be used as it is, and Upper.Layers is empty. Snapshots are
// copies of whole trees, too, and equal to an instant only if nobody writes
// meanwhile. Limits aren't held: Quotas is false.
//
//	layers/<hex>/root/  snapshots/<id>/{upper/,stack}  uppers/<generation>/{upper/,work/,stack}
//
// A seal's UUID is made at random, its Generation taken from the digest over the
// tree's content. What is half made lies in tmp/ and is removed by OpenPlain.
type Plain struct {
	dir string

	// mu is held for the whole of each call: this one is simple, not fast.
	mu sync.Mutex
}

var _ Pool = (*Plain)(nil)

// OpenPlain opens the pool in a folder, which is made if it isn't there.
func OpenPlain(dir string) (*Plain, error) {
	p := &Plain{dir: dir}
	if err := os.RemoveAll(p.path("tmp")); err != nil {
		return nil, err
	}
	for _, name := range []string{"layers", "snapshots", "uppers", "tmp"} {
		if err := os.MkdirAll(p.path(name), 0o700); err != nil {
			return nil, err
		}
	}
	return p, nil
}

func (p *Plain) path(parts ...string) string {
	return filepath.Join(append([]string{p.dir}, parts...)...)
}

// Quotas reports that limits aren't held.
func (p *Plain) Quotas() bool { return false }

// Distrusted is false: the reference isn't for hosts that go down.
func (p *Plain) Distrusted() bool { return false }

// publish makes dir/name by filling a temporary folder.
func (p *Plain) publish(dir, name string, fill func(tmp string) error) error {
	tmp, err := os.MkdirTemp(p.path("tmp"), "")
	if err != nil {
		return err
	}
	defer removeTree(tmp)
	if err := fill(tmp); err != nil {
		return err
	}
	return os.Rename(tmp, p.path(dir, name))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func (p *Plain) HasLayer(id ids.Layer) bool {
	name, err := layerName(id)
	return err == nil && exists(p.path("layers", name))
}

func (p *Plain) Layers() ([]ids.Layer, error) {
	dir, err := os.Open(p.path("layers"))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return layersIn(dir)
}

func (p *Plain) AddLayer(ctx context.Context, id ids.Layer, fill func(dir string) error) error {
	name, err := layerName(id)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.HasLayer(id) || ctx.Err() != nil {
		return ctx.Err()
	}
	return p.publish("layers", name, func(tmp string) error {
		root := filepath.Join(tmp, layerRoot)
		if err := os.Mkdir(root, 0o755); err != nil {
			return err
		}
		if err := fill(root); err != nil {
			return fmt.Errorf("filling layer %s: %w", id, err)
		}
		return nil
	})
}

func (p *Plain) RemoveLayer(ctx context.Context, id ids.Layer) (int64, error) {
	name, err := layerName(id)
	if err != nil {
		return 0, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	stacks, err := filepath.Glob(p.path("*", "*", stackName))
	if err != nil {
		return 0, err
	}
	for _, s := range stacks {
		layers, err := readStack(filepath.Dir(s))
		if err != nil {
			return 0, err
		}
		for _, l := range layers {
			if l == id {
				return 0, fault.New(fault.Precondition, "layer_in_use", "layer %s is below %s", id, filepath.Base(filepath.Dir(s))).
					WithHint("remove the images and nodes that use it first")
			}
		}
	}
	return 0, removeTree(p.path("layers", name))
}

func (p *Plain) OpenLayer(id ids.Layer) (*os.File, error) {
	name, err := layerName(id)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(p.path("layers", name, layerRoot))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fault.New(fault.NotFound, "no_layer", "the pool has no layer %s", id)
	}
	return f, err
}

func (p *Plain) AddBase(ctx context.Context, id ids.Snapshot, layers []ids.Layer) (tree.Seal, error) {
	if err := checkName(string(id)); err != nil {
		return tree.Seal{}, err
	}
	if len(layers) == 0 {
		return tree.Seal{}, fault.New(fault.Invalid, "no_layers", "a base needs at least one layer")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, l := range layers {
		if !p.HasLayer(l) {
			return tree.Seal{}, fault.New(fault.NotFound, "no_layer", "the pool has no layer %s", l)
		}
	}
	return p.snapshot(id, layers, func(upper string) error {
		for _, l := range layers {
			name, _ := layerName(l)
			if err := mergeTree(p.path("layers", name, layerRoot), upper); err != nil {
				return err
			}
		}
		return nil
	})
}

func (p *Plain) snapshot(id ids.Snapshot, layers []ids.Layer, fill func(upper string) error) (seal tree.Seal, err error) {
	if exists(p.path("snapshots", string(id))) {
		return seal, fault.New(fault.Exists, "snapshot_exists", "snapshot %s exists already", id)
	}
	uuid := string(ids.NewSnapshot())
	err = p.publish("snapshots", string(id), func(tmp string) error {
		upper := filepath.Join(tmp, upperName)
		if err := os.Mkdir(upper, 0o755); err != nil {
			return err
		}
		if err := fill(upper); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(tmp, "uuid"), []byte(uuid), 0o600); err != nil {
			return err
		}
		if seal.Generation, err = contentNumber(upper); err != nil {
			return err
		}
		return writeStack(tmp, layers)
	})
	seal.UUID, seal.Layers = uuid, append([]ids.Layer(nil), layers...)
	return seal, err
}

func contentNumber(dir string) (uint64, error) {
	_, sum, err := treewalk.Digest(dir, treewalk.Options{})
	if err != nil {
		return 0, err
	}
	b, err := hex.DecodeString(sum)
	return binary.BigEndian.Uint64(b), err
}

func (p *Plain) Clone(ctx context.Context, from ids.Snapshot, seal tree.Seal, as ids.Generation, _ int64) (*Upper, error) {
	if err := checkName(string(as)); err != nil {
		return nil, err
	}
	if err := p.Verify(from, seal); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if exists(p.path("uppers", string(as))) {
		return nil, fault.New(fault.Exists, "generation_exists", "generation %s has an upper already", as)
	}
	err := p.publish("uppers", string(as), func(tmp string) error {
		if err := os.Mkdir(filepath.Join(tmp, workName), 0o700); err != nil {
			return err
		}
		if err := writeStack(tmp, seal.Layers); err != nil {
			return err
		}
		return mergeTree(p.path("snapshots", string(from), upperName), filepath.Join(tmp, upperName))
	})
	if err != nil {
		return nil, err
	}
	return p.FindUpper(as)
}

func (p *Plain) FindUpper(as ids.Generation) (*Upper, error) {
	if err := checkName(string(as)); err != nil {
		return nil, err
	}
	dir := p.path("uppers", string(as))
	if !exists(dir) {
		return nil, fault.New(fault.NotFound, "no_upper", "generation %s has no upper", as)
	}
	return &Upper{Generation: as, Dir: filepath.Join(dir, upperName), Work: filepath.Join(dir, workName)}, nil
}

func (p *Plain) Flush(ctx context.Context, of ids.Generation) error {
	_, err := p.FindUpper(of)
	return err
}

func (p *Plain) Snapshot(ctx context.Context, of ids.Generation, as ids.Snapshot) (*Pending, error) {
	if err := checkName(string(as)); err != nil {
		return nil, err
	}
	up, err := p.FindUpper(of)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if exists(p.path("snapshots", string(as))) {
		return nil, fault.New(fault.Exists, "snapshot_exists", "snapshot %s exists already", as)
	}
	layers, err := readStack(p.path("uppers", string(of)))
	if err != nil {
		return nil, err
	}
	tmp, err := os.MkdirTemp(p.path("tmp"), "")
	if err != nil {
		return nil, err
	}
	copied := filepath.Join(tmp, upperName)
	if err := mergeTree(up.Dir, copied); err != nil {
		return nil, errors.Join(err, removeTree(tmp))
	}
	return &Pending{
		Finish: func(ctx context.Context) (tree.Seal, error) {
			p.mu.Lock()
			defer p.mu.Unlock()
			defer removeTree(tmp)
			if err := ctx.Err(); err != nil {
				return tree.Seal{}, err
			}
			return p.snapshot(as, layers, func(upper string) error {
				if err := os.Remove(upper); err != nil {
					return err
				}
				return os.Rename(copied, upper)
			})
		},
		Abort: func() { removeTree(tmp) },
	}, nil
}

func (p *Plain) Verify(id ids.Snapshot, seal tree.Seal) error {
	if err := checkName(string(id)); err != nil {
		return err
	}
	uuid, err := os.ReadFile(p.path("snapshots", string(id), "uuid"))
	if err != nil {
		return sealFault(id, err)
	}
	if string(uuid) != seal.UUID {
		return sealFault(id, errors.New("it is another one: "+string(uuid)))
	}
	n, err := contentNumber(p.path("snapshots", string(id), upperName))
	if err == nil && n != seal.Generation {
		err = errors.New("its content was changed")
	}
	if err != nil {
		return sealFault(id, err)
	}
	return nil
}

func (p *Plain) OpenSnapshot(id ids.Snapshot) (*os.File, error) {
	if err := checkName(string(id)); err != nil {
		return nil, err
	}
	f, err := os.Open(p.SnapshotDir(id))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fault.New(fault.NotFound, "no_snapshot", "the pool has no snapshot %s", id)
	}
	return f, err
}

func (p *Plain) SnapshotDir(id ids.Snapshot) string {
	return p.path("snapshots", string(id), upperName)
}

// LayerDirs: a snapshot is a whole tree.
func (p *Plain) LayerDirs(tree.Seal) []string { return nil }

func (p *Plain) Release(of ids.Generation) error { return p.remove("uppers", string(of)) }
func (p *Plain) Remove(id ids.Snapshot) error    { return p.remove("snapshots", string(id)) }

func (p *Plain) remove(dir, name string) error {
	if err := checkName(name); err != nil {
		return err
	}
	return removeTree(p.path(dir, name))
}

func (p *Plain) PendingRemovals() int          { return 0 }
func (p *Plain) Drain(_ context.Context) error { return nil }

func (p *Plain) Reconcile(uppers map[ids.Generation]bool, snapshots map[ids.Snapshot]bool) (removed int, err error) {
	for dir, keep := range map[string]func(string) bool{
		"uppers":    func(n string) bool { return uppers[ids.Generation(n)] },
		"snapshots": func(n string) bool { return snapshots[ids.Snapshot(n)] },
	} {
		entries, rerr := os.ReadDir(p.path(dir))
		err = errors.Join(err, rerr)
		for _, e := range entries {
			if keep(e.Name()) {
				continue
			}
			if rerr := p.remove(dir, e.Name()); rerr != nil {
				err = errors.Join(err, rerr)
				continue
			}
			removed++
		}
	}
	return removed, err
}

// Usage knows no bounds, and counts only things.
func (p *Plain) Usage() (u Usage, err error) {
	for dir, n := range map[string]*int{"snapshots": &u.Snapshots, "uppers": &u.Uppers} {
		entries, rerr := os.ReadDir(p.path(dir))
		*n, err = len(entries), errors.Join(err, rerr)
	}
	return u, err
}

func (p *Plain) ExclusiveBytes(ids.Snapshot) int64 { return 0 }
func (p *Plain) Close() error                      { return nil }

// removeTree also removes folders that their owner may not write to.
func removeTree(dir string) error {
	if os.Geteuid() != 0 {
		filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				os.Chmod(path, 0o700)
			}
			return nil
		})
	}
	return os.RemoveAll(dir)
}
