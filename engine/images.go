package engine

import (
	"context"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/boxwood-rl/boxwood/engine/image"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// ImportImage brings a root file system into the pool and records it. The same
// content again only adds the name.
func (e *Engine) ImportImage(ctx context.Context, path, name string, progress func(step string, done, total int64)) (*image.Result, error) {
	if err := checkImageName(name); err != nil {
		return nil, err
	}
	e.images.Lock() // an image being removed and one being imported may share layers
	defer e.images.Unlock()
	r, err := (&image.Importer{Pool: e.Pool}).Import(ctx, path, name, progress)
	if err != nil {
		return nil, err
	}
	var fresh bool
	var recorded tree.Image
	_, err = e.Store.Update(ctx, func(tx *tree.Tx) error {
		fresh = true
		if err := failpoint.Hit("image unpacked"); err != nil {
			return err
		}
		recorded = r.Image
		known, err := tx.Image(string(recorded.Digest))
		if fault.Is(err, fault.NotFound) {
			recorded.CreatedAt = time.Now()
			return tx.PutImage(recorded)
		}
		if err != nil {
			return err
		}
		fresh = false
		recorded.Names, recorded.CreatedAt = union(known.Names, recorded.Names), known.CreatedAt
		if e.Pool.Verify(known.Base, known.BaseSeal) == nil { // else the pool lost it, and the new one takes its place
			recorded.Base, recorded.BaseSeal = known.Base, known.BaseSeal
		}
		return tx.PutImage(recorded)
	})
	if err != nil {
		if !unsettled(err) {
			e.removeSnapshot(ctx, r.NewBase)
			e.removeStrayLayers(context.WithoutCancel(ctx))
		}
		return nil, fmt.Errorf("recording image %s: %w", r.Image.Digest, err)
	}
	r.Image = recorded
	_ = failpoint.Hit("image recorded")
	if !fresh && r.NewBase != r.Image.Base {
		e.removeSnapshot(ctx, r.NewBase)
	}
	e.removeCondemned(ctx)
	return r, nil
}

// checkImageName refuses what could be taken for another image's digest, or isn't what it looks like. An image needs no name.
func checkImageName(name string) error {
	odd := strings.ContainsFunc(name, func(r rune) bool { return r == utf8.RuneError || unicode.IsSpace(r) || !unicode.IsPrint(r) })
	if odd || len(name) > 255 || strings.HasPrefix(strings.ToLower(name), "sha256:") {
		return fault.New(fault.Invalid, "bad_name", "%.200q is no name for an image: it has up to 255 bytes, no spaces, and doesn't begin as a digest does", name)
	}
	return nil
}

// findImage finds an image by digest or name; a name without a tag means ":latest"
// if it isn't there as it stands.
func findImage(v interface {
	Image(ref string) (*tree.Image, error)
}, ref string) (*tree.Image, error) {
	image, err := v.Image(ref)
	if fault.Is(err, fault.NotFound) && !strings.Contains(ref, ":") {
		return v.Image(ref + ":latest")
	}
	return image, err
}

func union(a, b []string) []string {
	seen := map[string]bool{}
	var out []string
	for _, s := range append(append([]string{}, a...), b...) {
		if !seen[s] {
			seen[s] = true
			out = append(out, s)
		}
	}
	return out
}

// standOn finds an image that a tree of an archive stands on, and keeps it from being removed until done is called.
func (e *Engine) standOn(digest ids.Image) (image *tree.Image, done func(), err error) {
	e.mu.Lock()
	going := e.removing == digest
	if !going {
		e.importing[digest]++
	}
	e.mu.Unlock()
	done = func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.importing[digest]--; e.importing[digest] == 0 {
			delete(e.importing, digest)
		}
	}
	if !going {
		image, err = e.Store.View().Image(string(digest))
		if err == nil && image.Digest == digest { // not one of that name
			return image, done, nil
		}
		done()
	}
	return nil, nil, fault.New(fault.Precondition, "no_image", "the tree stands on image %s, which isn't here", digest).
		WithHint("import that image first; the digest must be the same")
}

// remove keeps trees of archives from coming to stand on an image until done is called. One that is coming
// may take as long as its client does, and isn't waited for.
func (e *Engine) remove(image ids.Image) (done func(), err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.importing[image] > 0 {
		return nil, fault.New(fault.Precondition, "image_in_use", "a tree that stands on image %s is being imported", image).
			WithHint("try again when it is here, or has failed")
	}
	e.removing = image
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.removing = ""
	}, nil
}

// RemoveImage removes an image that no tree stands on, and the layers that no
// other image has.
func (e *Engine) RemoveImage(ctx context.Context, ref string) (freed int64, err error) {
	e.images.Lock()
	defer e.images.Unlock()
	gone, err := findImage(e.Store.View(), ref)
	if err != nil {
		return 0, err
	}
	done, err := e.remove(gone.Digest)
	if err != nil {
		return 0, err
	}
	defer done()
	var shared map[ids.Layer]bool
	_, err = e.Store.Update(ctx, func(tx *tree.Tx) error {
		shared = map[ids.Layer]bool{}
		for other := range tx.Images() {
			if other.Digest != gone.Digest {
				for _, l := range other.Layers {
					shared[l] = true
				}
			}
		}
		return tx.DeleteImage(gone.Digest)
	})
	if err != nil {
		return 0, err
	}
	if err := failpoint.Hit("image removed"); err != nil {
		return 0, err
	}
	if err := e.spares.dropAll(ctx); err != nil { // they lie on layers
		return 0, fmt.Errorf("ending spares: %w", err)
	}
	e.removeCondemned(ctx)
	for i := len(gone.Layers) - 1; i >= 0; i-- {
		if shared[gone.Layers[i]] {
			continue
		}
		n, err := e.Pool.RemoveLayer(ctx, gone.Layers[i])
		if err != nil {
			return freed, fmt.Errorf("removing a layer of image %s: %w", gone.Digest, err)
		}
		freed += n
	}
	return freed, nil
}
