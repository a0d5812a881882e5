// Package treewalk describes a file tree line by line, so that tests, captures
// and benchmarks can say whether two trees are equal, and where not. It shares
// no code with the parts whose work it judges.
//
// One line is one name, in byte order of paths:
//
//	"dir/file" file 0644 0:0 mtime=1700000000.000000001 size=3 links="dir/file" sha256=2cf2... user.x="y"
//
// "links" names the first of several names of one file that the walk met. The
// root itself is ".". It never leaves the root, follows no symbolic link and
// enters no other mount: such a place is a line of type "mount" and no more.
package treewalk

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Options leave out what may differ where trees are equal in substance.
type Options struct {
	IgnoreDirTimes bool // modification times of folders
	Inodes         bool // show inode numbers
	// IDBase is taken off owners, groups and the roots of files' capabilities: the first host id
	// of the user namespace that the tree belongs to.
	IDBase uint32
	// Skip leaves out a path (relative to the root) and all below it.
	Skip func(path string) bool
	// Err is asked before each name, and again and again in a file, since a hole may be as large as a file can be; its error ends
	// the walk.
	Err func() error
}

// Digest walks the tree below a folder and returns its lines and the sha256
// over them in hex.
func Digest(dir string, o Options) (lines []string, sum string, err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, "", err
	}
	defer f.Close()
	return DigestAt(f, o)
}

// DigestAt is Digest of an open folder.
func DigestAt(dir *os.File, o Options) (lines []string, sum string, err error) {
	w := walker{o: o, first: map[uint64]string{}}
	if err := w.visit(int(dir.Fd()), ".", "."); err != nil {
		return nil, "", fmt.Errorf("walking %s: %w", dir.Name(), err)
	}
	slices.SortFunc(w.entries, func(a, b entry) int { return strings.Compare(a.path, b.path) })
	h := sha256.New()
	for _, e := range w.entries {
		if e.nlink > 1 {
			if first, ok := w.first[e.ino]; !ok || e.path < first {
				w.first[e.ino] = e.path
			}
		}
	}
	for _, e := range w.entries {
		line := e.before
		if e.nlink > 1 {
			line += " links=" + strconv.Quote(w.first[e.ino])
		}
		line += e.after
		lines = append(lines, line)
		io.WriteString(h, line+"\n")
	}
	return lines, hex.EncodeToString(h.Sum(nil)), nil
}

// Diff gives the lines that only one of two trees has, with "-" or "+" before
// them, at most max.
func Diff(a, b []string, max int) []string {
	in := func(lines []string) map[string]bool {
		m := make(map[string]bool, len(lines))
		for _, l := range lines {
			m[l] = true
		}
		return m
	}
	var out []string
	for _, side := range []struct {
		sign  string
		lines []string
		other map[string]bool
	}{{"-", a, in(b)}, {"+", b, in(a)}} {
		for _, l := range side.lines {
			if !side.other[l] && len(out) < max {
				out = append(out, side.sign+" "+l)
			}
		}
	}
	return out
}

type entry struct {
	path, before, after string
	ino, nlink          uint64
}

type walker struct {
	o       Options
	entries []entry
	first   map[uint64]string
}

var kinds = map[uint32]string{
	unix.S_IFREG: "file", unix.S_IFDIR: "dir", unix.S_IFLNK: "link", unix.S_IFIFO: "fifo",
	unix.S_IFSOCK: "socket", unix.S_IFCHR: "char", unix.S_IFBLK: "block",
}

// visit describes name in the folder at, known as full below the root.
func (w *walker) visit(at int, name, full string) error {
	if w.o.Skip != nil && w.o.Skip(full) {
		return nil
	}
	if w.o.Err != nil {
		if err := w.o.Err(); err != nil {
			return err
		}
	}
	fd, err := unix.Openat2(at, name, &unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_XDEV | unix.RESOLVE_BENEATH})
	if errors.Is(err, unix.EXDEV) {
		w.entries = append(w.entries, entry{path: full, before: strconv.Quote(full) + " mount"})
		return nil
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: full, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: full, Err: err}
	}
	kind := st.Mode & unix.S_IFMT
	e := entry{path: full, ino: st.Ino, nlink: uint64(st.Nlink)}
	var b strings.Builder
	fmt.Fprintf(&b, "%q %s %04o %d:%d", full, kinds[kind], st.Mode&0o7777, st.Uid-w.o.IDBase, st.Gid-w.o.IDBase)
	if kind == unix.S_IFDIR {
		e.nlink = 1
	}
	if kind != unix.S_IFDIR || !w.o.IgnoreDirTimes {
		fmt.Fprintf(&b, " mtime=%d.%09d", st.Mtim.Sec, st.Mtim.Nsec)
	}
	if kind == unix.S_IFREG {
		fmt.Fprintf(&b, " size=%d", st.Size)
	}
	if kind == unix.S_IFCHR || kind == unix.S_IFBLK {
		fmt.Fprintf(&b, " dev=%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	}
	if w.o.Inodes {
		fmt.Fprintf(&b, " ino=%d", st.Ino)
	}
	e.before = b.String()
	if e.after, err = content(fd, kind, w.o); err != nil {
		return &os.PathError{Op: "read", Path: full, Err: err}
	}
	w.entries = append(w.entries, e)
	if kind != unix.S_IFDIR {
		return nil
	}
	return w.children(fd, full)
}

func (w *walker) children(fd int, full string) error {
	dir, err := os.Open("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return err
	}
	names, err := dir.Readdirnames(-1)
	dir.Close()
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, name := range names {
		if err := w.visit(fd, name, path.Join(full, name)); err != nil {
			return err
		}
	}
	return nil
}

// content describes what the inode open as path descriptor fd holds.
func content(fd int, kind uint32, o Options) (string, error) {
	self := "/proc/self/fd/" + strconv.Itoa(fd)
	var b strings.Builder
	switch kind {
	case unix.S_IFREG:
		f, err := os.OpenFile(self, os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			return "", err
		}
		defer f.Close()
		h := sha256.New()
		if _, err := io.Copy(h, asking{f, o.Err}); err != nil {
			return "", err
		}
		fmt.Fprintf(&b, " sha256=%x", h.Sum(nil))
	case unix.S_IFLNK:
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(fd, "", buf)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&b, " to=%q", buf[:n])
	}
	return b.String() + xattrs(self, o.IDBase), nil
}

// asking is Options.Err before each read.
type asking struct {
	r   io.Reader
	err func() error
}

func (a asking) Read(p []byte) (int, error) {
	if a.err != nil {
		if err := a.err(); err != nil {
			return 0, err
		}
	}
	return a.r.Read(p)
}

// xattrs are sorted by name. A file whose attributes can't be read has the error
// as its attribute: that, too, must be equal.
func xattrs(self string, base uint32) string {
	buf := make([]byte, 64<<10)
	n, err := unix.Listxattr(self, buf)
	if err != nil {
		if errors.Is(err, unix.EOPNOTSUPP) {
			return ""
		}
		return fmt.Sprintf(" xattrs=%v", err)
	}
	names := strings.FieldsFunc(string(buf[:n]), func(r rune) bool { return r == 0 })
	slices.Sort(names)
	var b strings.Builder
	for _, name := range names {
		value := make([]byte, 64<<10)
		if n, err := unix.Getxattr(self, name, value); err != nil {
			fmt.Fprintf(&b, " %s=(%v)", name, err)
		} else {
			fmt.Fprintf(&b, " %s=%q", name, inner(name, value[:n], base))
		}
	}
	return b.String()
}

// inner is the value of an attribute as it is inside a user namespace that begins at base: capabilities of a file name its root.
func inner(name string, value []byte, base uint32) []byte {
	const at = 20 // rootid of struct vfs_ns_cap_data
	if name == "security.capability" && len(value) == at+4 {
		binary.LittleEndian.PutUint32(value[at:], binary.LittleEndian.Uint32(value[at:])-base)
	}
	return value
}
