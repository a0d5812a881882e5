package inspector

import (
	"bytes"
	"context"
	"maps"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// attrs is what is known of an inode without reading it. The kernel moves the
// time of change on whatever happens to an inode, and no program can set it.
type attrs struct {
	mode, uid, gid uint32
	nlink          uint64
	size           int64
	rdev           uint64
	mtime, ctime   int64
}

func attrsOf(st *unix.Stat_t) attrs {
	return attrs{
		mode: st.Mode, uid: st.Uid, gid: st.Gid, nlink: st.Nlink, size: st.Size, rdev: st.Rdev,
		mtime: st.Mtim.Nano(), ctime: st.Ctim.Nano(),
	}
}

// statAt is fstatat, without following a link, of a name below a directory, or, if the name is
// empty, of what is open there. It is most of what a barrier does, and allocates nothing for a name.
func statAt(dir int, name string, st *unix.Stat_t) error {
	var z [256]byte
	if len(name) >= len(z) || strings.IndexByte(name, 0) >= 0 {
		return unix.Fstatat(dir, name, st, unix.AT_SYMLINK_NOFOLLOW|unix.AT_EMPTY_PATH)
	}
	copy(z[:], name)
	_, _, errno := unix.Syscall6(unix.SYS_NEWFSTATAT, uintptr(dir), uintptr(unsafe.Pointer(&z[0])), uintptr(unsafe.Pointer(st)),
		unix.AT_SYMLINK_NOFOLLOW|unix.AT_EMPTY_PATH, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// pairs visits the inodes that two listed trees both have under one name. base never changes.
type pairs struct {
	ctx  context.Context
	base int // the base's top, open
	// from is a stamp: what has an older time of change isn't visited.
	from  int64
	visit func(basePath, path string, was, is attrs)
}

// all visits the pairs of a whole tree, its top included. Entries that vanished meanwhile are
// skipped: their going is an event that the next barrier sees.
func (p *pairs) all(top string, base, live *folder) error {
	fd, err := unix.Open(top, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := p.pair(fd, "", "", "", live.ino); err != nil {
		return err
	}
	return p.below(fd, "", "", base, live)
}

// pair visits name in the directory open at fd, if it is an inode that changed since.
// The paths are those of the directory; "" as a name is the directory itself.
func (p *pairs) pair(fd int, basePath, path, name string, ino uint64) error {
	var st unix.Stat_t
	err := statAt(fd, name, &st)
	if err == unix.ENOENT || err == nil && (st.Ino != ino || st.Ctim.Nano() < p.from) {
		return nil
	}
	if err != nil {
		return err
	}
	if name != "" {
		basePath, path = basePath+"/"+name, path+"/"+name
	}
	return p.known(basePath, path, &st)
}

func (p *pairs) known(basePath, path string, is *unix.Stat_t) error {
	var was unix.Stat_t
	if err := statAt(p.base, strings.TrimPrefix(basePath, "/"), &was); err != nil {
		return err
	}
	p.visit(basePath, path, attrsOf(&was), attrsOf(is))
	return nil
}

// below visits what lies in the directory open at fd.
func (p *pairs) below(fd int, basePath, path string, base, live *folder) error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	i, sub, wasSub := 0, 0, 0
	for _, e := range live.entries {
		var dir, was *folder
		if e.kind == unix.DT_DIR {
			dir = live.subs[sub]
			sub++
		}
		for ; i < len(base.entries) && base.entries[i].name < e.name; i++ {
			if base.entries[i].kind == unix.DT_DIR {
				wasSub++
			}
		}
		if i == len(base.entries) || base.entries[i] != e {
			continue // new, or another inode
		}
		if dir != nil {
			was = base.subs[wasSub]
		}
		if err := p.pair(fd, basePath, path, e.name, e.ino); err != nil {
			return err
		}
		if dir == nil {
			continue
		}
		if err := p.enter(fd, basePath, path, e.name, was, dir); err != nil {
			return err
		}
	}
	return nil
}

// enter visits what lies in the directory at name below the one open at fd.
func (p *pairs) enter(fd int, basePath, path, name string, base, live *folder) error {
	if len(base.entries) == 0 || len(live.entries) == 0 {
		return nil
	}
	child, err := unix.Openat(fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(child)
	return p.below(child, basePath+"/"+name, path+"/"+name, base, live)
}

// moved visits an inode that has another path than in the base, and what lies below it.
func (p *pairs) moved(top string, was, is place) error {
	fd, err := beneath(top, is.path, unix.O_PATH)
	if err != nil {
		return nil // moved again, or gone: the next barrier's
	}
	defer unix.Close(fd)
	if err := p.pair(fd, was.path, is.path, "", is.ino); err != nil {
		return err
	}
	if was.dir == nil || is.dir == nil {
		return nil
	}
	dir, err := beneath(top, is.path, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil
	}
	defer unix.Close(dir)
	return p.below(dir, was.path, is.path, was.dir, is.dir)
}

// beneath opens path below top without following any link, for looking only.
func beneath(top, path string, flags int) (int, error) {
	root, err := unix.Open(top, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(root)
	path = strings.TrimPrefix(path, "/")
	if path == "" {
		path = "."
	}
	if flags&unix.O_PATH == 0 { // which the kernel refuses beside it
		flags |= unix.O_NONBLOCK | unix.O_NOATIME
	}
	return unix.Openat2(root, path, &unix.OpenHow{
		Flags:   uint64(flags | unix.O_CLOEXEC | unix.O_NOFOLLOW),
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	})
}

// statBeneath is lstat of a path below top, without following any link.
func statBeneath(top, path string, st *unix.Stat_t) error {
	fd, err := beneath(top, path, unix.O_PATH)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Fstat(fd, st)
}

// same says that an inode found under these paths in two trees is the same to every
// program in the sandbox, although its time of change has moved: it was renamed and
// renamed back, linked and unlinked, or changed and changed back. Times of
// directories are left out, unless a call set them (times): they move with entries
// that are gone again. What can't be read is different. Content is compared up to limit bytes, taken off it.
func same(top1, path1, top2, path2 string, was, is attrs, times bool, limit *int64) bool {
	if was.mode != is.mode || was.uid != is.uid || was.gid != is.gid || was.rdev != is.rdev {
		return false
	}
	flags := unix.O_RDONLY
	dir := is.mode&unix.S_IFMT == unix.S_IFDIR
	switch {
	case dir && times && setByHand(was, is):
		return false
	case dir:
		flags |= unix.O_DIRECTORY
	case is.mode&unix.S_IFMT != unix.S_IFREG || was.size != is.size || was.mtime != is.mtime || was.nlink != is.nlink:
		return false
	}
	a, err := beneath(top1, path1, flags)
	if err != nil {
		return false
	}
	defer unix.Close(a)
	b, err := beneath(top2, path2, flags)
	if err != nil {
		return false
	}
	defer unix.Close(b)
	return sameMetadata(a, b) && (dir || sameContent(a, b, limit))
}

// setByHand says that a directory's time was set to something else than now, give
// or take a second: an entry that comes or goes moves the time of change with it,
// but a copy by overlayfs moves that again, a little later.
func setByHand(was, is attrs) bool {
	const second = 1_000_000_000
	return was.mtime != is.mtime && (is.mtime < is.ctime-second || is.mtime > is.ctime+second)
}

func sameMetadata(a, b int) bool {
	var s, t unix.Stat_t
	if unix.Fstat(a, &s) != nil || unix.Fstat(b, &t) != nil {
		return false
	}
	if s.Mode != t.Mode || s.Uid != t.Uid || s.Gid != t.Gid || s.Rdev != t.Rdev {
		return false
	}
	x, err := xattrs(a)
	if err != nil {
		return false
	}
	y, err := xattrs(b)
	if err != nil {
		return false
	}
	return maps.Equal(x, y) && inodeFlags(a) == inodeFlags(b)
}

// chattrs are the flags of chattr that a btrfs file can be given; others tell how
// a file system stores it.
const chattrs = 0x8104fc

func inodeFlags(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
	if err != nil {
		return 0
	}
	return n & chattrs
}

// xattrs of an open file, without those that overlayfs keeps for itself.
func xattrs(fd int) (map[string]string, error) {
	n, err := unix.Flistxattr(fd, nil)
	if err == unix.ENOTSUP || n == 0 && err == nil {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	names := make([]byte, n+256)
	if n, err = unix.Flistxattr(fd, names); err != nil {
		return nil, err
	}
	out := map[string]string{}
	for name := range bytes.SplitSeq(names[:n], []byte{0}) {
		if len(name) == 0 || bytes.HasPrefix(name, []byte("trusted.overlay.")) {
			continue
		}
		value := make([]byte, 64<<10)
		v, err := unix.Fgetxattr(fd, string(name), value)
		if err != nil {
			return nil, err
		}
		out[string(name)] = string(value[:v])
	}
	return out, nil
}

// sameAsBelow says that an entry which the upper layer has got shows what the
// layer below shows anyway: it was copied up, for a change that came to nothing.
// lower is the image's layers, lowest first. Files are compared up to limit bytes,
// which are taken off it.
func sameAsBelow(lower []string, upper, path string, dir, times bool, limit *int64) bool {
	flags := unix.O_RDONLY
	if dir {
		flags |= unix.O_DIRECTORY
	}
	for i := len(lower) - 1; i >= 0; i-- {
		below, err := beneath(lower[i], path, flags)
		if err == unix.ENOENT || err == unix.ENOTDIR {
			continue
		}
		if err != nil {
			return false
		}
		defer unix.Close(below)
		above, err := beneath(upper, path, flags)
		if err != nil {
			return false
		}
		defer unix.Close(above)
		// Only overlayfs writes the mark of a copy, so a file that a program has made
		// again, just as it lay in a layer that is hidden, isn't taken for one.
		if marksOf(above) != copiedUp || !sameMetadata(below, above) {
			return false
		}
		if dir {
			var was, is unix.Stat_t
			return unix.Fstat(below, &was) == nil && unix.Fstat(above, &is) == nil && !(times && setByHand(attrsOf(&was), attrsOf(&is)))
		}
		return sameContent(below, above, limit)
	}
	return false
}

func sameContent(a, b int, limit *int64) bool {
	var s, t unix.Stat_t
	if unix.Fstat(a, &s) != nil || unix.Fstat(b, &t) != nil {
		return false
	}
	if s.Mode&unix.S_IFMT != unix.S_IFREG || s.Size != t.Size || s.Mtim != t.Mtim || s.Nlink != t.Nlink {
		return false
	}
	if *limit -= s.Size; *limit < 0 {
		return false
	}
	x, y := make([]byte, 64<<10), make([]byte, 64<<10)
	for off := int64(0); off < s.Size; {
		n, err := unix.Pread(a, x, off)
		if err != nil || n == 0 {
			return false
		}
		for m := 0; m < n; {
			k, err := unix.Pread(b, y[m:n], off+int64(m))
			if err != nil || k == 0 {
				return false
			}
			m += k
		}
		if !bytes.Equal(x[:n], y[:n]) {
			return false
		}
		off += int64(n)
	}
	return true
}
