package pool

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/boxwood-rl/boxwood/internal/xattr"
	"golang.org/x/sys/unix"
)

// mergeTree lays the tree of a layer over dst as overlayfs would show it:
// whiteouts delete, opaque folders replace. What is linked within src is linked
// in dst. dst is made if it isn't there.
func mergeTree(src, dst string) error {
	m := merger{links: map[uint64]string{}}
	return m.lay(src, dst)
}

type merger struct{ links map[uint64]string }

func (m *merger) lay(src, dst string) error {
	var st syscall.Stat_t
	if err := syscall.Lstat(src, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: src, Err: err}
	}
	kind := st.Mode & syscall.S_IFMT
	if kind == syscall.S_IFDIR {
		return m.layFolder(src, dst)
	}
	if err := removeTree(dst); err != nil {
		return err
	}
	if kind == syscall.S_IFCHR && st.Rdev == 0 {
		return nil // a whiteout: there is nothing below it any more
	}
	if st.Nlink > 1 {
		if first, ok := m.links[st.Ino]; ok {
			return os.Link(first, dst)
		}
		m.links[st.Ino] = dst
	}
	var err error
	switch kind {
	case syscall.S_IFREG:
		err = copyFile(src, dst)
	case syscall.S_IFLNK:
		var to string
		if to, err = os.Readlink(src); err == nil {
			err = os.Symlink(to, dst)
		}
	default:
		err = unix.Mknod(dst, st.Mode, int(st.Rdev))
	}
	if err != nil {
		return err
	}
	return copyMetadata(src, dst)
}

func (m *merger) layFolder(src, dst string) error {
	if fi, err := os.Lstat(dst); err == nil && (!fi.IsDir() || isOpaque(src)) {
		if err := removeTree(dst); err != nil {
			return err
		}
	}
	if err := os.Mkdir(dst, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	if err := os.Chmod(dst, 0o700); err != nil { // so that we may write into it
		return err
	}
	entries, err := os.ReadDir(src)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := m.lay(filepath.Join(src, e.Name()), filepath.Join(dst, e.Name())); err != nil {
			return err
		}
	}
	return copyMetadata(src, dst)
}

func isOpaque(dir string) bool {
	names, err := xattr.List(dir)
	return err == nil && (slices.Contains(names, "trusted.overlay.opaque") || slices.Contains(names, "user.overlay.opaque"))
}

func copyFile(src, dst string) error {
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
