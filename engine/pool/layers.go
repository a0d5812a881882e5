package pool

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/btrfs"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

const (
	layerRoot = "root"
	upperName = "upper"
	workName  = "work"
	stackName = "stack"
)

// layerName is the folder of a layer. Ids arrive from archives and clients.
func layerName(id ids.Layer) (string, error) {
	name, ok := strings.CutPrefix(string(id), "sha256:")
	if b, err := hex.DecodeString(name); !ok || err != nil || len(b) != 32 || strings.ToLower(name) != name {
		return "", fault.New(fault.Invalid, "bad_id", "%q is not the id of a layer: sha256: and 64 hex digits", id)
	}
	return name, nil
}

// checkName refuses what could be a path or one of our prefixes.
func checkName(id string) error {
	if id == "" || id[0] == '.' || strings.ContainsAny(id, "/\x00") || len(id) > 128 {
		return fault.New(fault.Invalid, "bad_id", "%q can't be the name of a snapshot or generation", id)
	}
	return nil
}

func (p *Btrfs) layerDir(id ids.Layer) string {
	return filepath.Join(p.root, "layers", strings.TrimPrefix(string(id), "sha256:"), layerRoot)
}

func (p *Btrfs) LayerDirs(seal tree.Seal) (dirs []string) {
	for _, l := range seal.Layers {
		dirs = append(dirs, p.layerDir(l))
	}
	return dirs
}

func (p *Btrfs) HasLayer(id ids.Layer) bool {
	if _, err := layerName(id); err != nil {
		return false
	}
	_, err := os.Lstat(p.layerDir(id))
	return err == nil
}

func (p *Btrfs) Layers() ([]ids.Layer, error) { return layersIn(p.layers) }

func layersIn(dir *os.File) ([]ids.Layer, error) {
	names, err := listed[string](dir)
	layers := make([]ids.Layer, len(names))
	for i, name := range names {
		layers[i] = ids.Layer("sha256:" + name)
	}
	return layers, err
}

func (p *Btrfs) AddLayer(ctx context.Context, id ids.Layer, fill func(dir string) error) (err error) {
	name, err := layerName(id)
	if err != nil {
		return err
	}
	p.layerMu.Lock()
	defer p.layerMu.Unlock()
	if p.HasLayer(id) {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := p.checkSpace(); err != nil {
		return err
	}
	tmp := temporary(newPrefix, name)
	if err := p.fromNumbers(p.layers, tmp); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			p.sweep.add(p.layers, tmp)
		}
	}()
	at := filepath.Join(p.layers.Name(), tmp)
	root := filepath.Join(at, layerRoot)
	if err := os.Mkdir(root, 0o755); err != nil {
		return err
	}
	if err := os.Chmod(root, 0o755); err != nil { // whatever the umask
		return err
	}
	if err := fill(root); err != nil {
		return fmt.Errorf("filling layer %s: %w", id, err)
	}
	p.opts.hook("layer filled")
	if err := failpoint.Hit("layer filled"); err != nil {
		return err
	}
	if err := p.advanceNumbers(at); err != nil {
		return fmt.Errorf("numbering layer %s: %w", id, err)
	}
	if err := setReadOnly(at); err != nil {
		return err
	}
	p.opts.hook("layer sealed")
	if err := failpoint.Hit("layer sealed"); err != nil {
		return err
	}
	return os.Rename(at, filepath.Join(p.layers.Name(), name))
}

func setReadOnly(subvol string) error {
	f, err := os.Open(subvol)
	if err != nil {
		return err
	}
	defer f.Close()
	return btrfs.SetReadOnly(f, true)
}

// RemoveLayer reads what every snapshot and upper lies on: it is rare.
func (p *Btrfs) RemoveLayer(ctx context.Context, id ids.Layer) (int64, error) {
	name, err := layerName(id)
	if err != nil {
		return 0, err
	}
	p.layerMu.Lock()
	defer p.layerMu.Unlock()
	for _, dir := range append([]*os.File{p.snapshots}, p.uppers[:]...) {
		entries, err := os.ReadDir(dir.Name())
		if err != nil {
			return 0, err
		}
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), gonePrefix) {
				continue
			}
			stack, err := readStack(filepath.Join(dir.Name(), e.Name()))
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			if err != nil {
				return 0, err
			}
			for _, l := range stack {
				if l == id {
					return 0, fault.New(fault.Precondition, "layer_in_use", "layer %s is below %s", id, e.Name()).
						WithHint("remove the images and nodes that use it first")
				}
			}
		}
	}
	var freed int64
	if f, err := os.Open(filepath.Join(p.layers.Name(), name)); err == nil {
		freed, err = btrfs.NewBytes(f, 0)
		f.Close()
		if err != nil {
			return 0, err
		}
	}
	return freed, p.discard(p.layers, name)
}

func (p *Btrfs) OpenLayer(id ids.Layer) (*os.File, error) {
	if _, err := layerName(id); err != nil {
		return nil, err
	}
	f, err := os.Open(p.layerDir(id))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fault.New(fault.NotFound, "no_layer", "the pool has no layer %s", id)
	}
	return f, err
}

func writeStack(subvol string, layers []ids.Layer) error {
	var b strings.Builder
	for _, l := range layers {
		b.WriteString(string(l) + "\n")
	}
	return os.WriteFile(filepath.Join(subvol, stackName), []byte(b.String()), 0o600)
}

func readStack(subvol string) ([]ids.Layer, error) {
	b, err := os.ReadFile(filepath.Join(subvol, stackName))
	if err != nil {
		return nil, err
	}
	var layers []ids.Layer
	for _, line := range strings.Fields(string(b)) {
		layers = append(layers, ids.Layer(line))
	}
	return layers, nil
}
