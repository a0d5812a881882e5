package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

const (
	whiteoutPrefix = ".wh."
	opaqueMarker   = ".wh..wh..opq"
	xattrPrefix    = "SCHILY.xattr."
	// maxID is the highest id that a sandbox's range of 65,536 can show.
	maxID = 65535
)

// extractor writes the entries of a layer into a folder. Every path is resolved
// by openat2(2) below that folder and without symbolic links; the last name is
// only ever given to calls that don't follow one.
type extractor struct {
	root      *os.File
	whiteouts bool
	notes     *leftOut

	// The folder of the entry before: archives go folder by folder.
	parentName string
	parent     int

	dirs     map[string]unix.Timespec // times to set when all is written
	rootSeen bool
	buf      []byte
}

func newExtractor(dir string, whiteouts bool, notes *leftOut) (*extractor, error) {
	root, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	return &extractor{root: root, whiteouts: whiteouts, notes: notes, parent: -1,
		dirs: map[string]unix.Timespec{}, buf: make([]byte, 128<<10)}, nil
}

func (x *extractor) close() {
	x.forget()
	x.root.Close()
}

func (x *extractor) forget() {
	if x.parent >= 0 {
		unix.Close(x.parent)
	}
	x.parent, x.parentName = -1, ""
}

func (x *extractor) extract(r *tar.Reader) error {
	for {
		h, err := r.Next()
		if err == io.EOF {
			return x.setTimes()
		}
		if err != nil {
			return err
		}
		if err := x.entry(h, r); err != nil {
			return entryFault(h, err)
		}
	}
}

func entryFault(h *tar.Header, err error) error {
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.EXDEV) {
		return refuse(h, "it leads through a symbolic link or out of the layer")
	}
	if errors.Is(err, unix.ENOTDIR) {
		return refuse(h, "its folder is a file")
	}
	return fmt.Errorf("entry %q: %w", h.Name, err)
}

func refuse(h *tar.Header, format string, args ...any) error {
	return fault.New(fault.Invalid, "bad_entry", "entry %q is refused: %s", h.Name, fmt.Sprintf(format, args...))
}

// cleanName gives the path below the layer's root, "." for the root itself. Names
// that start with "/" or "./" are usual; ".." isn't.
func cleanName(name string) (string, bool) {
	for _, part := range strings.Split(name, "/") {
		if part == ".." || len(part) > 255 {
			return "", false
		}
	}
	if strings.ContainsRune(name, 0) {
		return "", false
	}
	return path.Clean("./" + strings.TrimLeft(name, "/")), true
}

func (x *extractor) entry(h *tar.Header, r io.Reader) error {
	name, ok := cleanName(h.Name)
	if !ok {
		return refuse(h, "no such name can be in a layer")
	}
	if h.Uid < 0 || h.Uid > maxID || h.Gid < 0 || h.Gid > maxID {
		return refuse(h, "it belongs to %d:%d, and a sandbox has the ids from 0 to %d", h.Uid, h.Gid, maxID)
	}
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	if name == "." {
		if h.Typeflag != tar.TypeDir {
			return refuse(h, "the root must be a folder")
		}
		x.rootSeen = true
		x.dirs["."] = timeOf(h)
		return x.metadata(int(x.root.Fd()), h)
	}
	dir, base := path.Split(name)
	parent, err := x.openParent(path.Clean(dir), timeOf(h))
	if err != nil {
		return err
	}
	if x.whiteouts && strings.HasPrefix(base, whiteoutPrefix) {
		return x.whiteout(h, parent, base)
	}
	return x.create(h, r, parent, name, base)
}

// openParent opens a folder below the root, and makes what is missing of it.
func (x *extractor) openParent(dir string, at unix.Timespec) (int, error) {
	if x.parent >= 0 && x.parentName == dir {
		return x.parent, nil
	}
	x.forget()
	fd, err := x.openDir(dir)
	if errors.Is(err, unix.ENOENT) {
		up, base := path.Split(dir)
		above, aerr := x.openParent(path.Clean(up), at)
		if aerr != nil {
			return -1, aerr
		}
		if err := x.mkdir(above, base); err != nil {
			return -1, err
		}
		x.dirs[dir] = at
		fd, err = x.openDir(dir)
	}
	if err != nil {
		return -1, err
	}
	x.forget()
	x.parent, x.parentName = fd, dir
	return fd, nil
}

func (x *extractor) openDir(dir string) (int, error) {
	return unix.Openat2(int(x.root.Fd()), dir, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV})
}

// mkdir makes a folder; in place of this layer's own whiteout it hides what is
// below.
func (x *extractor) mkdir(parent int, base string) error {
	white, err := x.clear(parent, base, true)
	if err != nil {
		return err
	}
	if err := unix.Mkdirat(parent, base, 0o755); err != nil && err != unix.EEXIST {
		return err
	}
	if !white {
		return nil
	}
	fd, err := unix.Openat(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return setOpaque(fd)
}

func setOpaque(fd int) error {
	err := unix.Fsetxattr(fd, "trusted.overlay.opaque", []byte("y"), 0)
	if errors.Is(err, unix.EPERM) { // without privileges; only the plain pool reads it
		err = unix.Fsetxattr(fd, "user.overlay.opaque", []byte("y"), 0)
	}
	return err
}

// clear takes away what is in an entry's place: the later entry of one name
// counts. It reports whether that was a whiteout.
func (x *extractor) clear(parent int, base string, dir bool) (white bool, err error) {
	var st unix.Stat_t
	if err := unix.Fstatat(parent, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		if err == unix.ENOENT {
			return false, nil
		}
		return false, err
	}
	kind := st.Mode & unix.S_IFMT
	if kind == unix.S_IFDIR {
		if dir {
			return false, nil
		}
		return false, unix.EISDIR
	}
	return kind == unix.S_IFCHR, unix.Unlinkat(parent, base, 0)
}

func (x *extractor) whiteout(h *tar.Header, parent int, base string) error {
	if base == opaqueMarker {
		return setOpaque(parent)
	}
	if strings.HasPrefix(base, whiteoutPrefix+whiteoutPrefix) {
		return nil // bookkeeping of aufs
	}
	hidden := strings.TrimPrefix(base, whiteoutPrefix)
	if hidden == "" || hidden == "." || hidden == ".." {
		return refuse(h, "it deletes %q", hidden)
	}
	err := unix.Mknodat(parent, hidden, unix.S_IFCHR, 0)
	if err == unix.EEXIST {
		return nil // whiteouts are about the layers below
	}
	return err
}

func (x *extractor) create(h *tar.Header, r io.Reader, parent int, name, base string) error {
	switch h.Typeflag {
	case tar.TypeChar, tar.TypeBlock:
		x.notes.add("%s: a device node", name)
		return nil
	case tar.TypeDir:
		if err := x.mkdir(parent, base); err != nil {
			return err
		}
		x.dirs[name] = timeOf(h)
	default:
		if _, err := x.clear(parent, base, false); err == unix.EISDIR {
			return refuse(h, "a folder of the same layer is in its place")
		} else if err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
	case tar.TypeReg, '\x00', tar.TypeGNUSparse, tar.TypeCont:
		fd, err := unix.Openat(parent, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), base)
		defer f.Close()
		if err := x.write(f, r, h.Size); err != nil {
			return err
		}
		return x.metadataAndTime(fd, h)
	case tar.TypeSymlink:
		if err := unix.Symlinkat(h.Linkname, parent, base); err != nil {
			return err
		}
	case tar.TypeFifo:
		if err := unix.Mknodat(parent, base, unix.S_IFIFO|0o600, 0); err != nil {
			return err
		}
	case tar.TypeLink:
		return x.link(h, parent, base) // the file has its metadata
	default:
		return refuse(h, "its type %q is unknown", h.Typeflag)
	}
	fd, err := unix.Openat(parent, base, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return x.metadataAndTime(fd, h)
}

func (x *extractor) link(h *tar.Header, parent int, base string) error {
	target, ok := cleanName(h.Linkname)
	if !ok || target == "." {
		return refuse(h, "it is a hard link to %q, outside of the layer", h.Linkname)
	}
	dir, name := path.Split(target)
	from, err := x.openDir(path.Clean("./" + dir))
	if err != nil {
		if err == unix.ENOENT {
			return refuse(h, "it is a hard link to %q, which isn't in the layer", h.Linkname)
		}
		return err
	}
	defer unix.Close(from)
	var st unix.Stat_t
	if err := unix.Fstatat(from, name, &st, unix.AT_SYMLINK_NOFOLLOW); err == unix.ENOENT {
		return refuse(h, "it is a hard link to %q, which isn't in the layer", h.Linkname)
	} else if err != nil {
		return err
	}
	if kind := st.Mode & unix.S_IFMT; kind == unix.S_IFDIR || kind == unix.S_IFCHR {
		return refuse(h, "it is a hard link to %q, which is no file", h.Linkname)
	}
	return unix.Linkat(from, name, parent, base, 0)
}

const block = 4096

// write copies a file's content; blocks of zeros become holes.
func (x *extractor) write(f *os.File, r io.Reader, size int64) error {
	var at, end int64
	for {
		n, err := io.ReadFull(r, x.buf)
		for b := x.buf[:n]; len(b) > 0; {
			run := dataRun(b)
			if run > 0 {
				if _, err := f.WriteAt(b[:run], at); err != nil {
					return err
				}
				end = at + int64(run)
			} else {
				run = min(block, len(b))
			}
			at += int64(run)
			b = b[run:]
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF && at == size {
			break
		}
		if err != nil {
			return err
		}
	}
	if at != size {
		return io.ErrUnexpectedEOF
	}
	if end < size {
		return f.Truncate(size)
	}
	return nil
}

// dataRun is the length of the blocks at the start of b that aren't zero.
func dataRun(b []byte) int {
	n := 0
	for n < len(b) {
		chunk := b[n:min(n+block, len(b))]
		if isZero(chunk) {
			break
		}
		n += len(chunk)
	}
	return n
}

func isZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

func timeOf(h *tar.Header) unix.Timespec {
	if h.ModTime.IsZero() || h.ModTime.Unix() < 0 || h.ModTime.Unix() > math.MaxInt32*4 {
		return unix.Timespec{}
	}
	return unix.NsecToTimespec(h.ModTime.UnixNano())
}

func (x *extractor) metadataAndTime(fd int, h *tar.Header) error {
	if err := x.metadata(fd, h); err != nil {
		return err
	}
	if h.Typeflag == tar.TypeDir {
		return nil // setTimes, when its content is complete
	}
	return setTime(fd, timeOf(h))
}

// metadata sets owner, attributes and mode, in this order: a change of owner
// drops setuid bits and capabilities. fd may be a path descriptor.
func (x *extractor) metadata(fd int, h *tar.Header) error {
	err := unix.Fchownat(fd, "", h.Uid, h.Gid, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil && !(errors.Is(err, unix.EPERM) && os.Geteuid() != 0) {
		return fmt.Errorf("setting its owner: %w", err)
	}
	self := fmt.Sprintf("/proc/self/fd/%d", fd)
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, xattrPrefix)
		if !ok {
			continue
		}
		if strings.HasPrefix(name, "trusted.overlay.") || strings.HasPrefix(name, "user.overlay.") {
			x.notes.add("%s: attribute %s, which overlayfs would obey", h.Name, name)
			continue
		}
		if err := unix.Setxattr(self, name, []byte(value), 0); err != nil {
			if errors.Is(err, unix.ENOSPC) {
				return err
			}
			x.notes.add("%s: attribute %s: %v", h.Name, name, err)
		}
	}
	if h.Typeflag == tar.TypeSymlink {
		return nil
	}
	mode := uint32(h.Mode) & 0o7777
	if err := unix.Chmod(self, mode); err != nil {
		return fmt.Errorf("setting its mode: %w", err)
	}
	return nil
}

func setTime(fd int, at unix.Timespec) error {
	err := unix.UtimesNanoAt(fd, "", []unix.Timespec{at, at}, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("setting its time: %w", err)
	}
	return nil
}

// setTimes sets the times of folders, which writing into them had moved. A layer
// whose archive doesn't mention its root gets the time 0 there: see mergedRoot.
func (x *extractor) setTimes() error {
	x.forget()
	if !x.rootSeen {
		x.dirs["."] = unix.NsecToTimespec(time.Unix(0, 0).UnixNano())
	}
	for dir, at := range x.dirs {
		fd, err := x.openDir(dir)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
			continue // a later entry replaced it
		}
		if err != nil {
			return err
		}
		err = setTime(fd, at)
		unix.Close(fd)
		if err != nil {
			return err
		}
	}
	return nil
}
