// Package image brings root file systems into the pool: folders, `docker save`
// archives, OCI layouts and plain tars of a root.
//
// What it promises: each layer is stored once, under its diff id, whichever
// images it is in; what lies in the pool has the content, holes, hard links,
// owners, modes (setuid too), times and extended attributes of the archive, with
// ids as they are there (a sandbox's mount shifts them). Device nodes and sockets
// are left out and told. Archives are hostile: an entry that leads out of its
// layer stops the import by name, and no system call of the import follows a
// symbolic link or leaves the layer's folder. An import that fails leaves nothing
// behind.
//
// On top of each image lies a "seal" layer of ours: the mount points that a
// sandbox needs and the image lacks. It holds nothing else, so that the merged
// tree is the image's.
package image

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// Importer imports into a pool. To keep an import apart from the removal of layers
// that it shares is the caller's part.
type Importer struct {
	Pool pool.Pool
}

// Result is an imported image.
type Result struct {
	Image tree.Image
	// NewBase is the base made by this import: Image.Base.
	NewBase ids.Snapshot
	// LeftOut says what the archive holds and the image doesn't, with the
	// reason: the first MaxLeftOut of LeftOutCount.
	LeftOut      []string
	LeftOutCount int64
}

// MaxLeftOut bounds Result.LeftOut.
const MaxLeftOut = 64

// Progress is told of each step ("layer 2 of 5") with bytes done, and in all, or
// 0 where that isn't known. It may be nil.
type Progress func(step string, done, total int64)

// config is what of an image's configuration a sandbox uses.
type config struct {
	Env  map[string]string
	Cwd  string
	User string
}

// layer is one layer of a source, read as an uncompressed tar.
type layer struct {
	id   ids.Layer
	size int64 // in the archive, perhaps compressed; for progress
	open func() (io.ReadCloser, error)
	// whiteouts: names that start with ".wh." delete what is below.
	whiteouts bool
}

// source is an opened image that isn't in the pool yet.
type source struct {
	layers []layer // lowest first
	config config
	notes  leftOut
	close  func()
}

type leftOut struct {
	first []string
	count int64
}

func (l *leftOut) add(format string, args ...any) {
	if l.count++; len(l.first) < MaxLeftOut {
		l.first = append(l.first, fmt.Sprintf(format, args...))
	}
}

// Import finds out what path is and imports it under a name, which may be empty.
// Bad content is fault.Invalid; a pool without room is fault.Exhausted.
func (im *Importer) Import(ctx context.Context, path, name string, progress func(step string, done, total int64)) (_ *Result, err error) {
	if progress == nil {
		progress = func(string, int64, int64) {}
	}
	src, err := open(ctx, path, progress)
	if err != nil {
		return nil, err
	}
	defer src.close()
	r := &Result{Image: tree.Image{Env: src.config.Env, Cwd: src.config.Cwd, User: src.config.User, CreatedAt: time.Now()}}
	if name != "" {
		r.Image.Names = []string{name}
	}
	var added []ids.Layer
	defer func() {
		if err != nil {
			err = errors.Join(err, im.undo(context.WithoutCancel(ctx), added))
		}
	}()
	notes := &src.notes
	for i, l := range src.layers {
		if !im.Pool.HasLayer(l.id) {
			step := fmt.Sprintf("layer %d of %d", i+1, len(src.layers))
			if err := im.add(ctx, l, notes, func(done int64) {
				total := l.size
				if done > total {
					total = 0 // it was compressed: unknown
				}
				progress(step, done, total)
			}); err != nil {
				return nil, fmt.Errorf("importing %s, %s: %w", path, step, err)
			}
			added = append(added, l.id)
		}
		if r.Image.Layers = append(r.Image.Layers, l.id); slices.Contains(r.Image.Layers[:i], l.id) {
			// The same layer twice has no effect beyond its upper place, and
			// overlayfs takes no folder twice.
			at := slices.Index(r.Image.Layers, l.id)
			r.Image.Layers = slices.Delete(r.Image.Layers, at, at+1)
		}
	}
	progress("mount points", 0, 0)
	seal, fresh, err := im.seal(ctx, r.Image.Layers, notes)
	if err != nil {
		return nil, fmt.Errorf("adding mount points to %s: %w", path, err)
	}
	if fresh {
		added = append(added, seal)
	}
	r.Image.Layers = append(r.Image.Layers, seal)
	r.Image.Digest = digest(r.Image.Layers, src.config)
	r.NewBase = ids.NewSnapshot()
	r.Image.Base = r.NewBase
	if r.Image.BaseSeal, err = im.Pool.AddBase(ctx, r.NewBase, r.Image.Layers); err != nil {
		return nil, err
	}
	for _, l := range src.layers {
		r.Image.Bytes += l.size
	}
	r.LeftOut, r.LeftOutCount = notes.first, notes.count
	return r, nil
}

// undo removes the layers that a failed import added.
func (im *Importer) undo(ctx context.Context, added []ids.Layer) error {
	var errs []error
	for _, id := range slices.Backward(added) {
		if _, err := im.Pool.RemoveLayer(ctx, id); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// add extracts a layer, and compares what it read with the layer's id.
func (im *Importer) add(ctx context.Context, l layer, notes *leftOut, progress func(done int64)) error {
	return im.Pool.AddLayer(ctx, l.id, func(dir string) error {
		in, err := l.open()
		if err != nil {
			return badArchive(err)
		}
		defer in.Close()
		r := &meter{ctx: ctx, in: in, sum: sha256.New(), pool: im.Pool, progress: progress}
		x, err := newExtractor(dir, l.whiteouts, notes)
		if err != nil {
			return err
		}
		err = x.extract(tar.NewReader(r))
		x.close()
		if err == nil {
			_, err = io.Copy(io.Discard, r) // the digest counts what follows the archive's end, too
		}
		if err != nil {
			return badArchive(err)
		}
		if got := ids.Layer("sha256:" + hex.EncodeToString(r.sum.Sum(nil))); got != l.id {
			return fault.New(fault.Invalid, "bad_digest", "a layer has digest %s, but the image says %s", got, l.id).
				WithHint("the archive is damaged, or the folder changed while it was read")
		}
		return nil
	})
}

// badArchive types what reading an archive can fail with.
func badArchive(err error) error {
	var typed *fault.Error
	switch {
	case errors.As(err, &typed) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, unix.ENOSPC):
		return fault.New(fault.Exhausted, "pool_full", "the pool is full: %w", err).WithHint("remove images or prune trees")
	case errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF):
		return fault.New(fault.Invalid, "bad_archive", "the archive ends too early: %w", err).WithHint("copy it again, in full")
	}
	return fault.New(fault.Invalid, "bad_archive", "the archive can't be read: %w", err)
}

// meter reads a layer: it hashes, counts, and stops when the caller gives up or
// the pool fills up. A small archive can hold a huge layer.
type meter struct {
	ctx      context.Context
	in       io.Reader
	sum      hash.Hash
	pool     pool.Pool
	progress func(done int64)
	done     int64
	checked  int64
}

const meterStep = 16 << 20

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.in.Read(p)
	m.sum.Write(p[:n])
	if m.done += int64(n); m.done-m.checked < meterStep && err == nil {
		return n, nil
	}
	m.checked = m.done
	m.progress(m.done)
	if cerr := m.ctx.Err(); cerr != nil {
		return n, cerr
	}
	if u, uerr := m.pool.Usage(); uerr == nil && u.Total > 0 && u.Total-u.Used < u.LowWater {
		return n, fault.New(fault.Exhausted, "pool_full", "the pool has %d MiB left, and %d must stay free", (u.Total-u.Used)>>20, u.LowWater>>20).
			WithHint("remove images or prune trees")
	}
	return n, err
}

// digest names an image by its layers, in order, and its configuration.
func digest(layers []ids.Layer, c config) ids.Image {
	b, err := json.Marshal(struct {
		Layers []ids.Layer
		Config config
	}{layers, c})
	if err != nil {
		panic(err) // strings only
	}
	sum := sha256.Sum256(b)
	return ids.Image("sha256:" + hex.EncodeToString(sum[:]))
}

func envMap(env []string) map[string]string {
	m := make(map[string]string, len(env))
	for _, e := range env {
		k, v, _ := strings.Cut(e, "=")
		m[k] = v
	}
	return m
}
