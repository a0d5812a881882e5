package archive

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/xattr"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// Manifest is all entries of one folder of changes, in the order in which a walk
// meets them: a folder before what is in it, names in byte order.
type Manifest struct {
	Entries []*pb.ArchiveEntry
	at      map[string]*pb.ArchiveEntry
	sum     hash.Hash
}

// NewManifest makes an empty one.
func NewManifest() *Manifest { return &Manifest{at: map[string]*pb.ArchiveEntry{}, sum: sha256.New()} }

// Add appends an entry. One that couldn't have come from a walk is refused: a path
// that leaves the folder, comes twice or hangs on what is no folder; a device that
// is no whiteout; an owner that no sandbox has.
func (m *Manifest) Add(e *pb.ArchiveEntry) error {
	if err := m.check(e); err != nil {
		return err
	}
	m.at[string(e.Path)] = e
	m.Entries = append(m.Entries, e)
	fmt.Fprintln(m.sum, describe(e))
	return nil
}

// Digest is the sha256 over what the entries say of the files.
func (m *Manifest) Digest() []byte { return m.sum.Sum(nil) }

// At finds an entry.
func (m *Manifest) At(path []byte) *pb.ArchiveEntry { return m.at[string(path)] }

// describe is all that makes a file what it is.
func describe(e *pb.ArchiveEntry) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%q %o %d:%d %d.%09d %q %q %d %x", e.Path, e.Mode, e.Uid, e.Gid, e.Mtime, e.MtimeNs, e.Target, e.Link, e.Size, e.Digest)
	for _, x := range e.Attributes {
		fmt.Fprintf(&b, " %q=%q", x.Name, x.Value)
	}
	return b.String()
}

// substance is what can't be changed about a file without making it anew.
func substance(e *pb.ArchiveEntry) string {
	return fmt.Sprintf("%o %q %q %d %x", e.Mode&unix.S_IFMT, e.Target, e.Link, e.Size, e.Digest)
}

const (
	maxEntries = 4 << 20
	maxPath    = 64 << 10
	maxOwner   = 1 << 16
)

func (m *Manifest) check(e *pb.ArchiveEntry) error {
	name := string(e.Path)
	bad := func(format string, args ...any) error {
		return Damaged("entry %.200q "+format, append([]any{name}, args...)...)
	}
	switch {
	case len(m.Entries) >= maxEntries:
		return bad("is one too many")
	case len(m.Entries) == 0 && (name != "" || kindOf(e) != unix.S_IFDIR):
		return bad("must be the folder itself")
	case len(m.Entries) > 0 && !cleanPath(name):
		return bad("is no path below the folder")
	case m.at[name] != nil:
		return bad("comes twice")
	case e.Uid >= maxOwner || e.Gid >= maxOwner:
		return bad("has owner %d:%d, which no sandbox has", e.Uid, e.Gid)
	case e.MtimeNs >= 1e9:
		return bad("has no time")
	}
	if name != "" {
		up := m.at[parent(name)]
		if up == nil || kindOf(up) != unix.S_IFDIR {
			return bad("lies in no folder of the archive")
		}
	}
	return m.checkKind(e, bad)
}

func (m *Manifest) checkKind(e *pb.ArchiveEntry, bad func(string, ...any) error) error {
	switch kindOf(e) {
	case unix.S_IFREG:
		if e.Size < 0 || len(e.Digest) != sha256.Size {
			return bad("is a file without size or digest")
		}
	case unix.S_IFLNK:
		if len(e.Target) == 0 || len(e.Target) > unix.PathMax || bytes.IndexByte(e.Target, 0) >= 0 {
			return bad("is a symbolic link to nowhere")
		}
	case unix.S_IFDIR, unix.S_IFIFO, unix.S_IFSOCK, unix.S_IFCHR: // a character device is a whiteout
	default:
		return bad("is of kind %o, which doesn't exist in a folder of changes", kindOf(e))
	}
	if len(e.Link) > 0 {
		first := m.at[string(e.Link)]
		if first == nil || kindOf(first) != kindOf(e) || kindOf(e) == unix.S_IFDIR || len(first.Link) > 0 || !bytes.Equal(first.Digest, e.Digest) {
			return bad("is linked to %.200q, which it can't be", e.Link)
		}
	}
	for i, x := range e.Attributes {
		if x.Name == "" || len(x.Name) > 255 || strings.ContainsRune(x.Name, 0) || len(x.Value) > 64<<10 ||
			i > 0 && e.Attributes[i-1].Name >= x.Name || !carried(x.Name) {
			return bad("has attribute %.100q, which it can't have", x.Name)
		}
	}
	return nil
}

func kindOf(e *pb.ArchiveEntry) uint32 { return e.Mode & unix.S_IFMT }

func cleanPath(name string) bool {
	return name != "" && len(name) <= maxPath && path.Clean("/"+name) == "/"+name && !strings.ContainsRune(name, 0)
}

func parent(name string) string {
	if dir := path.Dir(name); dir != "." {
		return dir
	}
	return ""
}

// carried: attributes that overlayfs keeps for itself and that name inodes of one
// host stay behind. What they are for, that a file copied up keeps the number of
// its lower one, holds within one pool.
func carried(name string) bool {
	for _, prefix := range []string{"trusted.overlay.", "user.overlay."} {
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			return rest == "opaque" || rest == "redirect" || rest == "metacopy"
		}
	}
	return true
}

// Walk calls visit for each file below an open folder, as entries of a manifest.
// content is open if it is a regular file that is no link to an earlier one. Nothing is
// followed, and nothing of it runs.
func Walk(ctx context.Context, dir *os.File, visit func(e *pb.ArchiveEntry, content *os.File) error) error {
	w := walker{ctx: ctx, visit: visit, links: map[uint64]*pb.ArchiveEntry{}}
	return w.at(int(dir.Fd()), ".", "")
}

type walker struct {
	ctx   context.Context
	visit func(*pb.ArchiveEntry, *os.File) error
	links map[uint64]*pb.ArchiveEntry
}

func (w *walker) at(dir int, name, full string) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	fd, err := unix.Openat2(dir, name, &unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: beneath()})
	if err != nil {
		return &os.PathError{Op: "open", Path: full, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &os.PathError{Op: "stat", Path: full, Err: err}
	}
	self := "/proc/self/fd/" + strconv.Itoa(fd)
	e := &pb.ArchiveEntry{Path: []byte(full), Mode: st.Mode, Uid: st.Uid, Gid: st.Gid, Mtime: st.Mtim.Sec, MtimeNs: uint32(st.Mtim.Nsec)}
	if e.Attributes, err = attributes(fd); err != nil {
		return &os.PathError{Op: "listxattr", Path: full, Err: err}
	}
	var content *os.File
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(fd, "", buf)
		if err != nil {
			return &os.PathError{Op: "readlink", Path: full, Err: err}
		}
		e.Target = bytes.Clone(buf[:n])
	case unix.S_IFREG:
		if content, err = os.OpenFile(self, os.O_RDONLY, 0); err != nil {
			return err
		}
		defer content.Close()
		if e.Size = st.Size; w.links[st.Ino] == nil {
			if e.Digest, err = digestOf(w.ctx, content); err != nil {
				return &os.PathError{Op: "read", Path: full, Err: err}
			}
		}
	case unix.S_IFCHR:
		if st.Rdev != 0 {
			return fmt.Errorf("%s is a device %d:%d", full, unix.Major(st.Rdev), unix.Minor(st.Rdev))
		}
	}
	if st.Nlink > 1 && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		if first, ok := w.links[st.Ino]; ok {
			e.Link, e.Digest, content = first.Path, first.Digest, nil
		} else {
			w.links[st.Ino] = e
		}
	}
	if err := w.visit(e, content); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil
	}
	return w.children(fd, self, full)
}

func (w *walker) children(fd int, self, full string) error {
	dir, err := os.Open(self)
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
		if err := w.at(fd, name, path.Join(full, name)); err != nil {
			return err
		}
	}
	return nil
}

func digestOf(ctx context.Context, f *os.File) ([]byte, error) {
	h := sha256.New()
	err := Copy(ctx, h, f)
	return h.Sum(nil), err
}

func attributes(fd int) ([]*pb.ArchiveEntry_Attribute, error) {
	names, err := xattr.ListFD(fd)
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	var out []*pb.ArchiveEntry_Attribute
	for _, name := range names {
		if !carried(name) {
			continue
		}
		value, err := xattr.GetFD(fd, name)
		if err != nil {
			return nil, err
		}
		out = append(out, &pb.ArchiveEntry_Attribute{Name: name, Value: value})
	}
	return out, nil
}

// Key is how a content is known.
func Key(e *pb.ArchiveEntry) string {
	return hex.EncodeToString(e.Digest) + strconv.FormatInt(e.Size, 16)
}
