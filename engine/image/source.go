package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// open finds out what path is: a folder with an "oci-layout" file is an OCI
// layout, any other folder a root; a tar with "manifest.json" is of `docker
// save`, one with "oci-layout" an OCI layout, one with /bin, /etc or /usr a root.
func open(ctx context.Context, path string, progress Progress) (*source, error) {
	st, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fault.New(fault.NotFound, "no_file", "there is no %s", path)
	}
	if err != nil {
		return nil, err
	}
	if st.IsDir() {
		if _, err := os.Stat(filepath.Join(path, "oci-layout")); err == nil {
			return openLayout(path)
		}
		return openDirectory(ctx, path, progress)
	}
	if !st.Mode().IsRegular() {
		return nil, fault.New(fault.Invalid, "unknown_archive", "%s is neither a folder nor a file", path)
	}
	return openArchive(ctx, path, progress)
}

// openArchive unpacks compressed archives into a temporary file first: layers are
// found by reading the archive from its start.
func openArchive(ctx context.Context, path string, progress Progress) (*source, error) {
	scratch, err := os.MkdirTemp("", "boxwood-import-")
	if err != nil {
		return nil, err
	}
	s, err := openArchiveIn(ctx, path, scratch, progress)
	if err != nil {
		os.RemoveAll(scratch)
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	s.close = func() { os.RemoveAll(scratch) }
	return s, nil
}

func openArchiveIn(ctx context.Context, path, scratch string, progress Progress) (*source, error) {
	plain, err := decompress(ctx, path, scratch, progress)
	if err != nil {
		return nil, badArchive(err)
	}
	kind, err := kindOfTar(plain)
	if err != nil {
		return nil, badArchive(err)
	}
	switch kind {
	case "docker":
		return openDocker(plain)
	case "oci":
		dir := filepath.Join(scratch, "layout")
		if err := os.Mkdir(dir, 0o700); err != nil {
			return nil, err
		}
		if err := unpackLayout(ctx, plain, dir); err != nil {
			return nil, badArchive(err)
		}
		return openLayout(dir)
	case "root":
		return openRootTar(ctx, plain, progress)
	}
	return nil, fault.New(fault.Invalid, "unknown_archive", "it is no archive that boxwood knows").
		WithHint("a folder, `docker save`, an OCI layout, or a tar of a root file system")
}

func decompress(ctx context.Context, name, scratch string, progress Progress) (string, error) {
	in, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer in.Close()
	head := make([]byte, 6)
	n, _ := io.ReadFull(in, head)
	head = head[:n]
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}), bytes.HasPrefix(head, []byte("\xfd7zXZ")), bytes.HasPrefix(head, []byte("BZh")):
		return "", fault.New(fault.Invalid, "unknown_archive", "it is compressed in a way boxwood doesn't read").WithHint("decompress it, or use gzip")
	default:
		return name, nil
	}
	if _, err := in.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	gz, err := gzip.NewReader(bufio.NewReaderSize(in, 1<<20))
	if err != nil {
		return "", err
	}
	plain := filepath.Join(scratch, "archive.tar")
	out, err := os.OpenFile(plain, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return "", err
	}
	defer out.Close()
	_, err = copyCtx(ctx, out, gz, func(done int64) { progress("decompressing", done, 0) })
	return plain, err
}

// copyCtx copies until the caller gives up.
func copyCtx(ctx context.Context, w io.Writer, r io.Reader, progress func(done int64)) (total int64, err error) {
	for {
		n, err := io.CopyN(w, r, meterStep)
		total += n
		progress(total)
		if err == io.EOF {
			return total, nil
		}
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return total, err
		}
	}
}

// kindOfTar reads headers until one tells.
func kindOfTar(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	kind, entries := "", 0
	for r := tar.NewReader(f); ; entries++ {
		h, err := r.Next()
		if err == io.EOF && entries > 0 {
			return kind, nil
		}
		if err != nil {
			if kind == "root" {
				return kind, nil // read in full later, which says what is wrong
			}
			return "", err
		}
		clean := path.Clean("./" + strings.TrimLeft(h.Name, "/"))
		top, _, _ := strings.Cut(clean, "/")
		switch {
		case clean == "manifest.json":
			return "docker", nil // newer ones hold an OCI layout as well
		case clean == "oci-layout" || clean == "index.json":
			kind = "oci"
		case kind == "" && (top == "bin" || top == "etc" || top == "usr"):
			kind = "root"
		}
	}
}

func openDocker(name string) (*source, error) {
	opener := func() (io.ReadCloser, error) { return os.Open(name) }
	manifest, err := tarball.LoadManifest(opener)
	if err != nil {
		return nil, badArchive(err)
	}
	if len(manifest) != 1 {
		var tags []string
		for _, m := range manifest {
			tags = append(tags, m.RepoTags...)
		}
		return nil, fault.New(fault.Invalid, "many_images", "the archive holds %d images: %s", len(manifest), strings.Join(tags, ", ")).
			WithHint("save one at a time")
	}
	img, err := tarball.Image(opener, nil)
	if err != nil {
		return nil, badArchive(err)
	}
	// Asking this kind of image for a layer's size would compress the layer.
	sizes, err := sizesInTar(name, manifest[0].Layers)
	if err != nil {
		return nil, badArchive(err)
	}
	return fromImage(img, sizes)
}

// sizesInTar gives the sizes of files of an archive, 0 for what isn't a file there.
func sizesInTar(name string, files []string) ([]int64, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	found := map[string]int64{}
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		found[path.Clean(h.Name)] = h.Size
	}
	sizes := make([]int64, len(files))
	for i, file := range files {
		sizes[i] = found[path.Clean(file)]
	}
	return sizes, nil
}

// openLayout takes the one image of a layout, or the one for this machine of an
// index over several platforms.
func openLayout(dir string) (*source, error) {
	index, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, badArchive(err)
	}
	img, err := pick(index, 4)
	if err != nil {
		return nil, badArchive(err)
	}
	// The layout's reader doesn't compare what it reads with its name.
	raw, err := img.RawManifest()
	if err != nil {
		return nil, badArchive(err)
	}
	m, err := v1.ParseManifest(bytes.NewReader(raw))
	if err != nil {
		return nil, badArchive(err)
	}
	c, err := img.RawConfigFile()
	if err != nil {
		return nil, badArchive(err)
	}
	if err := compare("the configuration", c, m.Config.Digest); err != nil {
		return nil, err
	}
	sizes := make([]int64, len(m.Layers))
	for i, l := range m.Layers {
		sizes[i] = l.Size
	}
	return fromImage(img, sizes)
}

func compare(what string, content []byte, want v1.Hash) error {
	sum := sha256.Sum256(content)
	if got := hex.EncodeToString(sum[:]); want.Algorithm != "sha256" || got != want.Hex {
		return fault.New(fault.Invalid, "bad_digest", "%s has digest sha256:%s, but the image says %s", what, got, want).
			WithHint("the archive is damaged; copy it again")
	}
	return nil
}

func pick(index v1.ImageIndex, depth int) (v1.Image, error) {
	m, err := index.IndexManifest()
	if err != nil {
		return nil, err
	}
	if depth == 0 {
		return nil, fault.New(fault.Invalid, "bad_archive", "its indexes are nested too deep")
	}
	var found []v1.Descriptor
	for _, d := range m.Manifests {
		if d.Platform == nil || d.Platform.OS == "linux" && d.Platform.Architecture == runtime.GOARCH {
			found = append(found, d)
		}
	}
	if len(found) != 1 {
		return nil, fault.New(fault.Invalid, "many_images", "the layout holds %d images for linux/%s, not one", len(found), runtime.GOARCH).
			WithHint("copy one image into a layout of its own")
	}
	d := found[0]
	if d.MediaType.IsIndex() {
		below, err := index.ImageIndex(d.Digest)
		if err != nil {
			return nil, err
		}
		return pick(below, depth-1)
	}
	img, err := index.Image(d.Digest)
	if err != nil {
		return nil, err
	}
	raw, err := img.RawManifest()
	if err != nil {
		return nil, err
	}
	return img, compare("the manifest", raw, d.Digest)
}

// fromImage takes the sizes of the layers as they are in the archive.
func fromImage(img v1.Image, sizes []int64) (*source, error) {
	c, err := img.ConfigFile()
	if err != nil {
		return nil, badArchive(err)
	}
	layers, err := img.Layers()
	if err != nil {
		return nil, badArchive(err)
	}
	if n := len(c.RootFS.DiffIDs); len(layers) == 0 || len(layers) != n || len(sizes) != n {
		return nil, fault.New(fault.Invalid, "bad_archive", "the image has %d layers and %d diff ids", len(sizes), n)
	}
	s := &source{close: func() {}, config: config{Env: envMap(c.Config.Env), Cwd: c.Config.WorkingDir, User: c.Config.User}}
	for i, l := range layers {
		s.layers = append(s.layers, layer{id: ids.Layer(c.RootFS.DiffIDs[i].String()), size: sizes[i], open: l.Uncompressed, whiteouts: true})
	}
	return s, nil
}

// openRootTar reads the tar twice: its digest is the layer's id.
func openRootTar(ctx context.Context, name string, progress Progress) (*source, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	sum := sha256.New()
	n, err := copyCtx(ctx, sum, f, func(done int64) { progress("reading", done, 0) })
	if err != nil {
		return nil, err
	}
	return &source{close: func() {}, layers: []layer{{
		id: ids.Layer("sha256:" + hex.EncodeToString(sum.Sum(nil))), size: n,
		open: func() (io.ReadCloser, error) { return os.Open(name) },
	}}}, nil
}

// unpackLayout writes an OCI layout that came as a tar into a folder of ours.
// Only plain files with the names of a layout are taken.
func unpackLayout(ctx context.Context, name, dir string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		clean, ok := cleanName(h.Name)
		switch {
		case !ok:
			return refuse(h, "no such name can be in a layout")
		case h.Typeflag == tar.TypeDir:
			continue
		case h.Typeflag != tar.TypeReg:
			return refuse(h, "a layout holds plain files only")
		case clean != "oci-layout" && clean != "index.json" && !strings.HasPrefix(clean, "blobs/"):
			continue
		}
		if err := root.MkdirAll(path.Dir(clean), 0o700); err != nil {
			return err
		}
		out, err := root.OpenFile(clean, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		_, err = copyCtx(ctx, out, r, func(int64) {})
		if err = errors.Join(err, out.Close()); err != nil {
			return err
		}
	}
}
