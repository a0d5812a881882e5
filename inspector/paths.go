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

// where finds the name of an inode of the subvolume that upper lies in, as the
// sandbox sees it ("/etc/x"). aside: it isn't a file of the sandbox but overlayfs's
// own (work/). No name is found for an inode that was deleted.
func where(upper string, ino uint64) (path string, aside, ok bool) {
	fd, err := unix.Open(upper, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", false, false
	}
	defer unix.Close(fd)
	a := inoLookup{ino: ino}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), iocInoLookup, uintptr(unsafe.Pointer(&a))); errno != 0 {
		return "", false, false
	}
	name, _, _ := bytes.Cut(a.name[:], []byte{0})
	path = strings.TrimSuffix(string(name), "/")
	top := filepath.Base(upper)
	if path == top {
		return "/", false, true
	}
	if rest, ok := strings.CutPrefix(path, top+"/"); ok {
		return "/" + rest, false, true
	}
	return path, true, true
}
