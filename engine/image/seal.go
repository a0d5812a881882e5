package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/ids"
)

// mountPoints are what every image must have, with the modes of what is missing.
var mountPoints = []struct {
	path string
	mode uint32 // with its kind
}{
	{"proc", unix.S_IFDIR | 0o555},
	{"sys", unix.S_IFDIR | 0o555},
	{"dev", unix.S_IFDIR | 0o755},
	{"dev/shm", unix.S_IFDIR | 0o1777},
	{"dev/pts", unix.S_IFDIR | 0o755},
	{"run", unix.S_IFDIR | 0o755},
	{"run/box", unix.S_IFDIR | 0o755},
	{"tmp", unix.S_IFDIR | 0o1777},
	{"etc", unix.S_IFDIR | 0o755},
	{"etc/machine-id", unix.S_IFREG | 0o444},
}

// node is a file or folder of the seal layer: one that is missing, or a folder
// of the image on the way to one, whose metadata must go on to show.
type node struct {
	path     string
	mode     uint32
	uid, gid uint32
	mtime    unix.Timespec
	xattrs   map[string]string

	added  bool // the image lacks it
	opaque bool // it hides what lower layers have below it
}

// seal adds the seal layer of a stack and returns its id: the digest of what is
// in it, so that images with the same needs share one.
func (im *Importer) seal(ctx context.Context, layers []ids.Layer, notes *leftOut) (id ids.Layer, fresh bool, err error) {
	m, err := openMerged(im, layers)
	if err != nil {
		return "", false, err
	}
	defer m.close()
	nodes, err := m.missing(notes)
	if err != nil {
		return "", false, err
	}
	sum := sha256.New()
	fmt.Fprintln(sum, "boxwood seal layer 1")
	for _, n := range nodes {
		fmt.Fprintf(sum, "%q %o %d:%d %d.%d %q\n", n.path, n.mode, n.uid, n.gid, n.mtime.Sec, n.mtime.Nsec, n.xattrs)
	}
	id = ids.Layer("sha256:" + hex.EncodeToString(sum.Sum(nil)))
	if im.Pool.HasLayer(id) {
		return id, false, nil
	}
	return id, true, im.Pool.AddLayer(ctx, id, func(dir string) error {
		for _, n := range nodes {
			if err := n.make(dir); err != nil {
				return fmt.Errorf("making /%s: %w", n.path, err)
			}
		}
		for _, n := range slices.Backward(nodes) { // a folder after what is in it
			if err := n.dress(dir); err != nil {
				return fmt.Errorf("making /%s: %w", n.path, err)
			}
		}
		return nil
	})
}

// The folder is ours and holds no symbolic link, so plain paths are safe.
func (n *node) make(dir string) error {
	at := filepath.Join(dir, n.path)
	if n.mode&unix.S_IFMT == unix.S_IFDIR {
		if err := os.Mkdir(at, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		return nil
	}
	f, err := os.OpenFile(at, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

func (n *node) dress(dir string) error {
	at := filepath.Join(dir, n.path)
	if err := os.Lchown(at, int(n.uid), int(n.gid)); err != nil && !(os.IsPermission(err) && os.Geteuid() != 0) {
		return err
	}
	for name, value := range n.xattrs {
		if err := unix.Lsetxattr(at, name, []byte(value), 0); err != nil {
			return fmt.Errorf("attribute %s: %w", name, err)
		}
	}
	if err := unix.Chmod(at, n.mode&0o7777); err != nil {
		return err
	}
	return unix.UtimesNanoAt(unix.AT_FDCWD, at, []unix.Timespec{n.mtime, n.mtime}, unix.AT_SYMLINK_NOFOLLOW)
}

// merged looks paths up in a stack of layers as overlayfs would.
type merged struct{ layers []*os.File } // highest first

func openMerged(im *Importer, layers []ids.Layer) (*merged, error) {
	m := &merged{}
	for _, id := range slices.Backward(layers) {
		f, err := im.Pool.OpenLayer(id)
		if err != nil {
			m.close()
			return nil, err
		}
		m.layers = append(m.layers, f)
	}
	return m, nil
}

func (m *merged) close() {
	for _, f := range m.layers {
		f.Close()
	}
}

// missing gives the nodes of the seal layer, the root first and parents before
// what is in them.
func (m *merged) missing(notes *leftOut) ([]node, error) {
	root, err := m.root()
	if err != nil {
		return nil, err
	}
	nodes := []node{*root}
	at := map[string]*node{".": root}
	needed := map[string]bool{".": true}
	for _, mp := range mountPoints {
		n, err := m.lookUp(mp.path)
		if err != nil {
			return nil, fmt.Errorf("looking for /%s: %w", mp.path, err)
		}
		if n != nil && n.mode&unix.S_IFMT != mp.mode&unix.S_IFMT {
			notes.add("%s: a sandbox needs another kind of file there, which takes its place", mp.path)
			n = nil
		}
		if n == nil || at[path.Dir(mp.path)].added {
			n = &node{mode: mp.mode, mtime: root.mtime, added: true}
			for p := mp.path; p != "."; p = path.Dir(p) {
				needed[p] = true
			}
		}
		n.path = mp.path
		at[mp.path] = n
	}
	for _, mp := range mountPoints {
		if needed[mp.path] {
			nodes = append(nodes, *at[mp.path])
		}
	}
	return nodes, nil
}

// root is the merged root folder: that of the highest layer whose archive
// mentions it. Those that don't have the time 0 there.
func (m *merged) root() (*node, error) {
	var first *node
	for _, l := range m.layers {
		n, err := describe(l, ".")
		if err != nil {
			return nil, err
		}
		n.path = "."
		if n.mtime.Nano() != 0 {
			return n, nil
		}
		if first == nil {
			first = n
		}
	}
	return first, nil
}

// lookUp finds what the merged tree has at a path, or nil.
func (m *merged) lookUp(name string) (*node, error) {
	layers := m.layers
	var found *node
	dir := "."
	for part := range strings.SplitSeq(name, "/") {
		dir = path.Join(dir, part)
		found = nil
		var below []*os.File // layers whose folder at dir shows
		for _, l := range layers {
			n, err := describe(l, dir)
			if errors.Is(err, unix.ENOENT) {
				continue
			}
			if err != nil {
				return nil, err
			}
			kind := n.mode & unix.S_IFMT
			if kind == unix.S_IFCHR || found != nil && kind != unix.S_IFDIR {
				break // a whiteout, or something that a folder above it hides
			}
			if found == nil {
				found = n
			}
			if kind != unix.S_IFDIR {
				break
			}
			below = append(below, l)
			if n.opaque {
				break
			}
		}
		if found == nil || found.mode&unix.S_IFMT != unix.S_IFDIR && dir != name {
			return nil, nil
		}
		layers = below
	}
	return found, nil
}

// describe reads what one layer has at a path, without following a link. Only
// folders of the layer lead there: lookUp has seen each of them.
func describe(layer *os.File, name string) (*node, error) {
	fd, err := unix.Openat2(int(layer.Fd()), name, &unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_XDEV})
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	n := &node{mode: st.Mode, uid: st.Uid, gid: st.Gid, mtime: st.Mtim, xattrs: map[string]string{}}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return n, nil
	}
	raw := map[string]string{}
	if err := readXattrs(fd, raw); err != nil {
		return nil, err
	}
	for key, value := range raw {
		name := strings.TrimPrefix(key, xattrPrefix)
		if strings.HasSuffix(name, ".overlay.opaque") {
			n.opaque = value == "y"
		} else {
			n.xattrs[name] = value
		}
	}
	return n, nil
}
