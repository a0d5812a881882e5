// Package btrfs calls the ioctls of btrfs that the pool stands on. Each
// function is one system call (Usage and HighestInode: a few), takes open
// descriptors and plain names, never paths, and returns the bare errno wrapped
// with what was tried.
package btrfs

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Sizes of the kernel's structs, held at compile time: the size is part of the
// ioctl's number.
const (
	_ = uint(unsafe.Sizeof(volArgs{}) - 4096)
	_ = uint(4096 - unsafe.Sizeof(volArgs{}))
	_ = uint(unsafe.Sizeof(volArgsV2{}) - 4096)
	_ = uint(4096 - unsafe.Sizeof(volArgsV2{}))
	_ = uint(unsafe.Sizeof(subvolInfoArgs{}) - 504)
	_ = uint(504 - unsafe.Sizeof(subvolInfoArgs{}))
	_ = uint(unsafe.Sizeof(inoLookupArgs{}) - 4096)
	_ = uint(4096 - unsafe.Sizeof(inoLookupArgs{}))
	_ = uint(unsafe.Sizeof(fsInfoArgs{}) - 1024)
	_ = uint(1024 - unsafe.Sizeof(fsInfoArgs{}))
	_ = uint(unsafe.Sizeof(searchArgs{}) - 4096)
	_ = uint(4096 - unsafe.Sizeof(searchArgs{}))
	_ = uint(unsafe.Sizeof(qgroupInherit{}) - 72)
	_ = uint(72 - unsafe.Sizeof(qgroupInherit{}))
	_ = uint(unsafe.Sizeof(qgroupLimitArgs{}) - 48)
	_ = uint(48 - unsafe.Sizeof(qgroupLimitArgs{}))
)

const (
	write = 1
	read  = 2
)

// code builds an ioctl number as <asm-generic/ioctl.h> does.
func code(dir, nr, size uintptr) uintptr { return dir<<30 | size<<16 | 0x94<<8 | nr }

var (
	iocSubvolCreate  = code(write, 14, unsafe.Sizeof(volArgs{}))
	iocSnapCreateV2  = code(write, 23, unsafe.Sizeof(volArgsV2{}))
	iocSnapDestroyV2 = code(write, 63, unsafe.Sizeof(volArgsV2{}))
	iocTreeSearch    = code(read|write, 17, unsafe.Sizeof(searchArgs{}))
	iocInoLookup     = code(read|write, 18, unsafe.Sizeof(inoLookupArgs{}))
	iocStartSync     = code(read, 24, 8)
	iocWaitSync      = code(write, 22, 8)
	iocGetFlags      = code(read, 25, 8)
	iocSetFlags      = code(write, 26, 8)
	iocFsInfo        = code(read, 31, unsafe.Sizeof(fsInfoArgs{}))
	iocQuotaCtl      = code(read|write, 40, 16)
	iocQgroupCreate  = code(write, 42, 16)
	iocQgroupLimit   = code(read, 43, unsafe.Sizeof(qgroupLimitArgs{}))
	iocSubvolInfo    = code(read, 60, unsafe.Sizeof(subvolInfoArgs{}))
	iocSync          = code(0, 8, 0)
)

// FirstInode is the number of a subvolume's root folder.
const FirstInode = 256

type volArgs struct {
	fd   int64
	name [4088]byte
}

type volArgsV2 struct {
	fd      int64
	transid uint64
	flags   uint64
	size    uint64
	inherit *qgroupInherit
	unused  [2]uint64
	name    [4040]byte // or the id of a subvolume
}

const (
	flagReadOnly      = 1 << 1
	flagQgroupInherit = 1 << 2
)

type qgroupLimit struct{ flags, maxRfer, maxExcl, rsvRfer, rsvExcl uint64 }

type qgroupInherit struct {
	flags uint64
	_     [3]uint64 // counts of groups and of references to copy: none
	lim   qgroupLimit
}

type qgroupLimitArgs struct {
	id  uint64
	lim qgroupLimit
}

const (
	limitMaxRfer     = 1 << 0
	inheritSetLimits = 1 << 0
)

type timespec struct {
	sec  uint64
	nsec uint32
	_    uint32
}

type subvolInfoArgs struct {
	treeID                             uint64
	name                               [256]byte
	parentID, dirID, generation, flags uint64
	uuid, parentUUID, receivedUUID     [16]byte
	ctransid, otransid, stransid       uint64
	rtransid                           uint64
	ctime, otime, stime, rtime         timespec
	reserved                           [8]uint64
}

type inoLookupArgs struct {
	treeID, objectID uint64
	name             [4080]byte
}

type fsInfoArgs struct {
	maxID, numDevices                    uint64
	fsid                                 [16]byte
	nodesize, sectorsize, cloneAlignment uint32
	csumType, csumSize                   uint16
	flags, generation                    uint64
	metadataUUID                         [16]byte
	reserved                             [944]byte
}

func ioctl(fd int, req uintptr, arg unsafe.Pointer) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(arg))
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
			continue
		}
		return errno
	}
}

func setName(dst []byte, name string) error {
	if name == "" || len(name) > 255 {
		return fmt.Errorf("name %q: %w", name, unix.EINVAL)
	}
	copy(dst, name)
	return nil
}

// Is reports whether the file lies on btrfs.
func Is(f *os.File) bool {
	var fs unix.Statfs_t
	return unix.Fstatfs(int(f.Fd()), &fs) == nil && fs.Type == unix.BTRFS_SUPER_MAGIC
}

// Create makes an empty subvolume in dir.
func Create(dir *os.File, name string) error {
	var a volArgs
	if err := setName(a.name[:], name); err != nil {
		return err
	}
	err := ioctl(int(dir.Fd()), iocSubvolCreate, unsafe.Pointer(&a))
	return wrap(err, "creating subvolume %s", name)
}

// Snapshot makes name in dir a snapshot of the subvolume whose root is open as
// src. Only src's own dirty data is written out first.
func Snapshot(dir *os.File, name string, src *os.File, readOnly bool) error {
	return snapshot(dir, name, src, readOnly, 0)
}

// SnapshotLimited is a writable Snapshot whose own new extents may take at most
// limit bytes, from the first instant on. It needs quotas.
func SnapshotLimited(dir *os.File, name string, src *os.File, limit uint64) error {
	return snapshot(dir, name, src, false, limit)
}

func snapshot(dir *os.File, name string, src *os.File, readOnly bool, limit uint64) error {
	a := volArgsV2{fd: int64(src.Fd())}
	if err := setName(a.name[:], name); err != nil {
		return err
	}
	if readOnly {
		a.flags |= flagReadOnly
	}
	var inherit *qgroupInherit
	if limit > 0 {
		inherit = &qgroupInherit{flags: inheritSetLimits, lim: qgroupLimit{flags: limitMaxRfer, maxRfer: limit}}
		a.flags |= flagQgroupInherit
		a.size, a.inherit = uint64(unsafe.Sizeof(*inherit)), inherit
	}
	err := ioctl(int(dir.Fd()), iocSnapCreateV2, unsafe.Pointer(&a))
	runtime.KeepAlive(inherit)
	runtime.KeepAlive(src)
	return wrap(err, "making snapshot %s", name)
}

// Destroy removes a subvolume, in use or not, read-only or not. It is gone from
// dir at once; its space comes back when the kernel's cleaner has run.
func Destroy(dir *os.File, name string) error {
	var a volArgsV2
	if err := setName(a.name[:], name); err != nil {
		return err
	}
	err := ioctl(int(dir.Fd()), iocSnapDestroyV2, unsafe.Pointer(&a))
	return wrap(err, "removing subvolume %s", name)
}

// SetReadOnly sets or clears a subvolume's read-only flag, and commits.
func SetReadOnly(subvol *os.File, ro bool) error {
	var flags uint64
	fd := int(subvol.Fd())
	if err := ioctl(fd, iocGetFlags, unsafe.Pointer(&flags)); err != nil {
		return wrap(err, "reading flags of %s", subvol.Name())
	}
	flags &^= flagReadOnly
	if ro {
		flags |= flagReadOnly
	}
	return wrap(ioctl(fd, iocSetFlags, unsafe.Pointer(&flags)), "setting flags of %s", subvol.Name())
}

// Info describes a subvolume.
type Info struct {
	ID       uint64
	ReadOnly bool
	UUID     [16]byte
	// ParentUUID is that of the subvolume this is a snapshot of.
	ParentUUID [16]byte
	// Generation is the last transaction that touched the subvolume's tree. Being
	// the source of a snapshot counts, so it grows with every clone.
	Generation uint64
	// Changed is the last transaction that changed an inode in it.
	Changed uint64
	// Made is the transaction it was made in.
	Made uint64
}

// GetInfo describes the subvolume that f lies in.
func GetInfo(f *os.File) (Info, error) {
	var a subvolInfoArgs
	if err := ioctl(int(f.Fd()), iocSubvolInfo, unsafe.Pointer(&a)); err != nil {
		return Info{}, wrap(err, "describing subvolume %s", f.Name())
	}
	// The root item's flag for read-only is bit 0, unlike the ioctl's bit 1.
	return Info{ID: a.treeID, ReadOnly: a.flags&1 != 0, UUID: a.uuid, ParentUUID: a.parentUUID,
		Generation: a.generation, Changed: a.ctransid, Made: a.otransid}, nil
}

// ID is the number of the subvolume that f lies in.
func ID(f *os.File) (uint64, error) {
	a := inoLookupArgs{objectID: FirstInode}
	if err := ioctl(int(f.Fd()), iocInoLookup, unsafe.Pointer(&a)); err != nil {
		return 0, wrap(err, "looking up the subvolume of %s", f.Name())
	}
	return a.treeID, nil
}

// FsInfo describes the file system.
type FsInfo struct {
	UUID       [16]byte
	Generation uint64
	NodeSize   uint32
}

// GetFsInfo describes the file system that f lies on.
func GetFsInfo(f *os.File) (FsInfo, error) {
	a := fsInfoArgs{flags: 1 << 1}
	if err := ioctl(int(f.Fd()), iocFsInfo, unsafe.Pointer(&a)); err != nil {
		return FsInfo{}, wrap(err, "describing the file system of %s", f.Name())
	}
	return FsInfo{UUID: a.fsid, Generation: a.generation, NodeSize: a.nodesize}, nil
}

// StartCommit ends the running transaction without waiting. The thread that
// commits then wakes the cleaner, which takes removed subvolumes apart; left
// alone, that happens every 30 s. Dirty data of files isn't written.
func StartCommit(f *os.File) error {
	var transid uint64
	return wrap(ioctl(int(f.Fd()), iocStartSync, unsafe.Pointer(&transid)), "starting a commit")
}

// Commit is StartCommit, and waits for that transaction to be on disk.
func Commit(f *os.File) error {
	var transid uint64
	fd := int(f.Fd())
	if err := ioctl(fd, iocStartSync, unsafe.Pointer(&transid)); err != nil {
		return wrap(err, "starting a commit")
	}
	return wrap(ioctl(fd, iocWaitSync, unsafe.Pointer(&transid)), "waiting for a commit")
}

// Sync writes everything out, of all subvolumes.
func Sync(f *os.File) error {
	return wrap(ioctl(int(f.Fd()), iocSync, nil), "syncing")
}

func wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}

// Flush writes the dirty data of one subvolume out and waits for it, and for
// nobody else's. It asks for a snapshot under a name that exists: the kernel
// flushes the source first, sees the name, and makes nothing. A kernel that
// looked at the name first would only make the flush do nothing. parent/name is
// any existing entry, such as the subvolume itself.
func Flush(parent *os.File, name string, subvol *os.File) error {
	err := Snapshot(parent, name, subvol, true)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	if err == nil {
		return fmt.Errorf("flushing %s: %s didn't exist", subvol.Name(), name)
	}
	return err
}
