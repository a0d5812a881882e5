package archive

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"os"
	"path"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/xattr"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// Layer makes a folder of changes what a manifest says, from what another one says
// it is. Its methods are called in the order of the new entries.
//
// What is a folder in one manifest may be a link to anywhere in the other. So every path is followed
// from the open folder of changes, by Below: nothing outside is ever reached.
type Layer struct {
	dir   *os.File
	old   *Manifest
	now   *Manifest
	fresh map[string]bool // made anew, so that what is linked to it must be, too
}

// NewLayer begins; old is what the open folder dir holds now, an empty manifest: nothing.
func NewLayer(dir *os.File, old *Manifest) *Layer {
	return &Layer{dir: dir, old: old, now: NewManifest(), fresh: map[string]bool{}}
}

// Now is the manifest so far.
func (l *Layer) Now() *Manifest { return l.now }

// Before is the entry of the folder as it is now that e says nothing else than; nil: there is none.
func (l *Layer) Before(e *pb.ArchiveEntry) *pb.ArchiveEntry {
	was := l.old.At(e.Path)
	if was == nil || describe(was) != describe(e) {
		return nil
	}
	return was // where its content is from makes no difference: it is there
}

// at calls do with a path to what p names, which stands for that only until do returns.
func (l *Layer) at(p []byte, do func(at string) error) error {
	name, base := string(p), "."
	if name != "" {
		base = path.Base(name)
	}
	up, err := Below(int(l.dir.Fd()), parent(name), unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer up.Close()
	return do("/proc/self/fd/" + strconv.Itoa(int(up.Fd())) + "/" + base)
}

// Put makes one entry. For a regular file that isn't there yet with this content it
// gives the file to be filled and closed by Fill; else nil.
func (l *Layer) Put(e *pb.ArchiveEntry) (*os.File, error) {
	if err := l.now.Add(e); err != nil {
		return nil, err
	}
	was := l.old.At(e.Path)
	stays := was != nil && substance(was) == substance(e) && !l.fresh[string(e.Link)]
	if kindOf(e) == unix.S_IFDIR && was != nil && kindOf(was) == unix.S_IFDIR {
		stays = true
	}
	if stays && (describe(was) == describe(e) || kindOf(e) == unix.S_IFDIR) { // folders are dressed at the end
		return nil, nil
	}
	var f *os.File
	err := l.at(e.Path, func(at string) (err error) {
		if stays {
			return dress(at, e)
		}
		if was != nil {
			if err := os.RemoveAll(at); err != nil {
				return err
			}
		}
		l.fresh[string(e.Path)] = true
		f, err = l.make(at, e)
		return err
	})
	return f, err
}

// make makes what isn't there.
func (l *Layer) make(at string, e *pb.ArchiveEntry) (*os.File, error) {
	if len(e.Link) > 0 {
		return nil, l.at(e.Link, func(first string) error { return os.Link(first, at) })
	}
	switch kindOf(e) {
	case unix.S_IFDIR:
		if len(e.Path) == 0 {
			return nil, nil
		}
		return nil, os.Mkdir(at, 0o700)
	case unix.S_IFREG:
		return os.OpenFile(at, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	case unix.S_IFLNK:
		if err := os.Symlink(string(e.Target), at); err != nil {
			return nil, err
		}
	default:
		if err := unix.Mknod(at, e.Mode&unix.S_IFMT|0o600, 0); err != nil {
			return nil, &os.PathError{Op: "mknod", Path: string(e.Path), Err: err}
		}
	}
	return nil, dress(at, e)
}

// Fill ends a file that Put gave: it has all its content now, which is compared with
// what the entry says.
func (l *Layer) Fill(ctx context.Context, f *os.File, e *pb.ArchiveEntry) error {
	defer f.Close()
	if err := f.Truncate(e.Size); err != nil {
		return err
	}
	h := sha256.New()
	if err := Copy(ctx, h, io.NewSectionReader(f, 0, e.Size)); err != nil {
		return err
	}
	if !bytes.Equal(h.Sum(nil), e.Digest) {
		return Damaged("the content of %.200q isn't what its digest says", e.Path)
	}
	return l.at(e.Path, func(at string) error { return dress(at, e) })
}

// Close removes what the new manifest lacks and dresses the folders, the deepest
// first: what is made or removed in one changes its time. What lay in a folder that
// is none any more has gone with it.
func (l *Layer) Close() error {
	for _, e := range slices.Backward(l.old.Entries) {
		if l.now.At(e.Path) == nil {
			if err := l.at(e.Path, os.RemoveAll); err != nil && !missing(err) {
				return err
			}
		}
	}
	for _, e := range slices.Backward(l.now.Entries) {
		if kindOf(e) == unix.S_IFDIR {
			if err := l.at(e.Path, func(at string) error { return dress(at, e) }); err != nil {
				return err
			}
		}
	}
	return nil
}

// Same holds what a folder really is against the manifest that it was made from.
func (l *Layer) Same(ctx context.Context) error {
	got := NewManifest()
	if err := Walk(ctx, l.dir, func(e *pb.ArchiveEntry, _ *os.File) error { return got.Add(e) }); err != nil {
		return err
	}
	if !bytes.Equal(got.Digest(), l.now.Digest()) {
		for i, e := range got.Entries {
			if i < len(l.now.Entries) && describe(e) != describe(l.now.Entries[i]) {
				return Damaged("what was made isn't what it says: %s instead of %s", describe(e), describe(l.now.Entries[i]))
			}
		}
		return Damaged("what was made has %d entries instead of %d", len(got.Entries), len(l.now.Entries))
	}
	return nil
}

// dress gives a file its owner, permissions, attributes and time.
func dress(at string, e *pb.ArchiveEntry) error {
	if err := os.Lchown(at, int(e.Uid), int(e.Gid)); err != nil {
		return err
	}
	if err := dressAttributes(at, e); err != nil {
		return err
	}
	if kindOf(e) != unix.S_IFLNK { // after the owner: chown(2) drops setuid bits
		if err := unix.Chmod(at, e.Mode&0o7777); err != nil {
			return &os.PathError{Op: "chmod", Path: at, Err: err}
		}
	}
	t := unix.Timespec{Sec: e.Mtime, Nsec: int64(e.MtimeNs)}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, at, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &os.PathError{Op: "utimensat", Path: at, Err: err}
	}
	return nil
}

func dressAttributes(at string, e *pb.ArchiveEntry) error {
	there, err := xattr.List(at)
	if err != nil {
		return err
	}
	want := map[string]bool{}
	for _, x := range e.Attributes {
		want[x.Name] = true
	}
	for _, name := range there {
		if !want[name] {
			if err := unix.Lremovexattr(at, name); err != nil {
				return &os.PathError{Op: "removexattr " + name, Path: at, Err: err}
			}
		}
	}
	for _, x := range e.Attributes {
		if err := unix.Lsetxattr(at, x.Name, x.Value, 0); err != nil {
			return &os.PathError{Op: "setxattr " + x.Name, Path: at, Err: err}
		}
	}
	return nil
}
