package doctor

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// The two ioctls of linux/btrfs.h that the probe needs: _IOW(0x94, 14 and 23,
// struct of 4096 bytes).
const (
	btrfsSubvolumeCreate = 0x5000940e
	btrfsSnapshotCreate  = 0x50009417
)

// btrfsArgs is struct btrfs_ioctl_vol_args: a descriptor, and a name that ends in 0.
type btrfsArgs struct {
	fd   int64
	name [4088]byte
}

// btrfsArgsV2 is struct btrfs_ioctl_vol_args_v2.
type btrfsArgsV2 struct {
	fd      int64
	transid uint64
	flags   uint64
	unused  [4]uint64
	name    [4040]byte
}

// btrfsMake makes name below parent: a snapshot of source, or with source -1 an
// empty subvolume.
func btrfsMake(parent, source int, name string) error {
	var errno unix.Errno
	if source < 0 {
		var args btrfsArgs
		copy(args.name[:], name)
		_, _, errno = unix.Syscall(unix.SYS_IOCTL, uintptr(parent), btrfsSubvolumeCreate, uintptr(unsafe.Pointer(&args)))
	} else {
		args := btrfsArgsV2{fd: int64(source)}
		copy(args.name[:], name)
		_, _, errno = unix.Syscall(unix.SYS_IOCTL, uintptr(parent), btrfsSnapshotCreate, uintptr(unsafe.Pointer(&args)))
	}
	if errno != 0 {
		return errno
	}
	return nil
}
