package inspector

import (
	"bytes"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// inoLookup is struct btrfs_ioctl_ino_lookup_args.
type inoLookup struct {
	root, ino uint64
	name      [4080]byte
}

const iocInoLookup = 3<<30 | 4096<<16 | 0x94<<8 | 18

// pathFinder finds the names of inodes of the subvolume that upper lies in: in a listing,
// if there is one, or else where the file system has them.
type pathFinder struct {
	listed map[uint64][]string
	upper  string
	fd     int // upper, once it was asked; -1: not yet
}

// finder finds the names of inodes. Those that are wanted are looked for in the listing, unless
// it is large: a question to the file system takes as long as 300 names, about 5 µs.
func (w *watch) finder(listed *folder, wanted map[uint64]bool) *pathFinder {
	p := &pathFinder{upper: w.subject.Upper, fd: -1}
	if listed != nil && listed.size < 300*len(wanted) {
		p.listed = listed.paths(wanted)
	}
	return p
}

func (p *pathFinder) close() {
	if p.fd >= 0 {
		unix.Close(p.fd)
	}
}

// where finds the name of an inode as the sandbox sees it ("/etc/x"). aside: it isn't a file of
// the sandbox but overlayfs's own (work/). No name is found for an inode that was deleted.
func (p *pathFinder) where(ino uint64) (path string, aside, ok bool) {
	if paths := p.listed[ino]; len(paths) > 0 {
		if paths[0] == "" {
			return "/", false, true
		}
		return paths[0], false, true
	}
	if ino == 0 {
		return "", false, false
	}
	if p.fd < 0 {
		fd, err := unix.Open(p.upper, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return "", false, false
		}
		p.fd = fd
	}
	a := inoLookup{ino: ino}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(p.fd), iocInoLookup, uintptr(unsafe.Pointer(&a))); errno != 0 {
		return "", false, false
	}
	name, _, _ := bytes.Cut(a.name[:], []byte{0})
	path = strings.TrimSuffix(string(name), "/")
	top := filepath.Base(p.upper)
	if path == top {
		return "/", false, true
	}
	if rest, ok := strings.CutPrefix(path, top+"/"); ok {
		return "/" + rest, false, true
	}
	return path, true, true
}
