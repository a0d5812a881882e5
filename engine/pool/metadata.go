package pool

import (
	"errors"
	"os"
	"strings"
	"syscall"

	"github.com/boxwood-rl/boxwood/internal/xattr"
	"golang.org/x/sys/unix"
)

// copyMetadata gives dst the owner, mode, extended attributes and times of src.
// Attributes of overlayfs itself belong to a layer, not to the file.
func copyMetadata(src, dst string) error {
	var st syscall.Stat_t
	if err := syscall.Lstat(src, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: src, Err: err}
	}
	if err := os.Lchown(dst, int(st.Uid), int(st.Gid)); err != nil && !errors.Is(err, unix.EPERM) {
		return err
	}
	if err := copyXattrs(src, dst); err != nil {
		return err
	}
	if st.Mode&syscall.S_IFMT != syscall.S_IFLNK {
		// After the owner: chown(2) drops setuid bits.
		if err := unix.Chmod(dst, st.Mode&0o7777); err != nil {
			return &os.PathError{Op: "chmod", Path: dst, Err: err}
		}
	}
	times := []unix.Timespec{{Sec: st.Atim.Sec, Nsec: st.Atim.Nsec}, {Sec: st.Mtim.Sec, Nsec: st.Mtim.Nsec}}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, dst, times, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &os.PathError{Op: "utimensat", Path: dst, Err: err}
	}
	return nil
}

func copyXattrs(src, dst string) error {
	names, err := xattr.List(src)
	if err != nil {
		return err
	}
	for _, name := range names {
		if strings.HasPrefix(name, "trusted.overlay.") || strings.HasPrefix(name, "user.overlay.") {
			continue
		}
		value, err := xattr.Get(src, name)
		if err != nil {
			return err
		}
		err = unix.Lsetxattr(dst, name, value, 0)
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EOPNOTSUPP) {
			continue // without privileges: those that may be set
		}
		if err != nil {
			return &os.PathError{Op: "setxattr " + name, Path: dst, Err: err}
		}
	}
	return nil
}
