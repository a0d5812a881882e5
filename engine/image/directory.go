package image

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/xattr"
)

// openDirectory makes one layer of a folder, by way of a tar stream that depends
// on the folder's content alone: names in order, times in nanoseconds, one name
// of several as the file and the rest as links. The stream's digest is the
// layer's id. It is made twice, once for the id and once to be extracted; a
// folder that changes meanwhile is found out by its digest.
func openDirectory(ctx context.Context, dir string, progress Progress) (*source, error) {
	s := &source{close: func() {}}
	sum := sha256.New()
	n, err := writeTar(ctx, dir, io.MultiWriter(sum, &ticker{progress: func(done int64) { progress("reading", done, 0) }}), &s.notes)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", dir, err)
	}
	s.layers = []layer{{
		id: ids.Layer("sha256:" + hex.EncodeToString(sum.Sum(nil))), size: n,
		open: func() (io.ReadCloser, error) {
			r, w := io.Pipe()
			done := make(chan struct{})
			go func() {
				defer close(done)
				_, err := writeTar(ctx, dir, w, &leftOut{})
				w.CloseWithError(err)
			}()
			return &pipeEnd{r, done}, nil
		},
	}}
	return s, nil
}

// pipeEnd waits for the writer when it is closed.
type pipeEnd struct {
	*io.PipeReader
	done chan struct{}
}

func (p *pipeEnd) Close() error {
	err := p.PipeReader.Close()
	<-p.done
	return err
}

type ticker struct {
	progress   func(done int64)
	done, told int64
}

func (t *ticker) Write(p []byte) (int, error) {
	if t.done += int64(len(p)); t.done-t.told > meterStep {
		t.told = t.done
		t.progress(t.done)
	}
	return len(p), nil
}

type tarWriter struct {
	ctx   context.Context
	w     *tar.Writer
	dev   uint64
	links map[uint64]string // inode -> the first name
	notes *leftOut
	bytes int64
}

func writeTar(ctx context.Context, dir string, out io.Writer, notes *leftOut) (int64, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, err
	}
	t := &tarWriter{ctx: ctx, w: tar.NewWriter(out), dev: st.Dev, links: map[uint64]string{}, notes: notes}
	if err := t.folder(fd, "."); err != nil {
		return 0, err
	}
	return t.bytes, t.w.Close()
}

// folder writes an open folder and all below it.
func (t *tarWriter) folder(fd int, name string) error {
	if err := t.ctx.Err(); err != nil {
		return err
	}
	h, err := t.header(fd, name)
	if err != nil {
		return err
	}
	if err := t.w.WriteHeader(h); err != nil {
		return err
	}
	self, err := os.Open("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return err
	}
	names, err := self.Readdirnames(-1)
	self.Close()
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, n := range names {
		if err := t.child(fd, n, path.Join(name, n)); err != nil {
			return fmt.Errorf("%q: %w", path.Join(name, n), err)
		}
	}
	return nil
}

func (t *tarWriter) child(parent int, base, name string) error {
	fd, err := unix.Openat(parent, base, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Dev != t.dev {
		t.notes.add("%s: another file system is mounted there", name)
		return nil
	}
	kind := st.Mode & unix.S_IFMT
	switch kind {
	case unix.S_IFCHR, unix.S_IFBLK:
		t.notes.add("%s: a device node", name)
		return nil
	case unix.S_IFSOCK:
		t.notes.add("%s: a socket", name)
		return nil
	case unix.S_IFDIR:
		dir, err := unix.Openat(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(dir)
		return t.folder(dir, name)
	}
	h, err := t.header(fd, name)
	if err != nil {
		return err
	}
	if st.Nlink > 1 {
		if first, ok := t.links[st.Ino]; ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			return t.w.WriteHeader(h)
		}
		t.links[st.Ino] = name
	}
	if err := t.w.WriteHeader(h); err != nil || kind != unix.S_IFREG {
		return err
	}
	f, err := os.Open("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return err
	}
	defer f.Close()
	n, err := io.CopyN(t.w, f, h.Size)
	t.bytes += n
	if err == io.EOF {
		return fault.New(fault.Invalid, "bad_digest", "it shrank while it was read").WithHint("import a folder that nobody writes to")
	}
	return err
}

func (t *tarWriter) header(fd int, name string) (*tar.Header, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	h := &tar.Header{Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Sec, st.Mtim.Nsec), Format: tar.FormatPAX, PAXRecords: map[string]string{}}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		h.Typeflag, h.Size = tar.TypeReg, st.Size
	case unix.S_IFDIR:
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	case unix.S_IFLNK:
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(fd, "", buf)
		if err != nil {
			return nil, err
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, string(buf[:n])
	}
	return h, readXattrs(fd, h.PAXRecords)
}

func readXattrs(fd int, into map[string]string) error {
	names, err := xattr.ListFD(fd)
	if err != nil {
		return err
	}
	for _, name := range names {
		value, err := xattr.GetFD(fd, name)
		if err != nil {
			return err
		}
		into[xattrPrefix+name] = string(value)
	}
	return nil
}
