package btrfs

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"unsafe"
)

// EnableSimpleQuotas turns on accounting by owner (Linux >= 6.7): each extent
// counts for the subvolume that wrote it. What was written before counts for
// nobody. It does nothing if quotas of any kind are on; see SimpleQuotas.
func EnableSimpleQuotas(f *os.File) error {
	a := struct{ cmd, status uint64 }{cmd: 4}
	return wrap(ioctl(int(f.Fd()), iocQuotaCtl, unsafe.Pointer(&a)), "enabling simple quotas")
}

// SimpleQuotas reports whether simple quotas are on. (Full qgroups cost more
// with every snapshot; the pool doesn't use them.)
func SimpleQuotas(f *os.File) bool {
	info, err := GetFsInfo(f)
	if err != nil {
		return false
	}
	b, err := os.ReadFile("/sys/fs/btrfs/" + FormatUUID(info.UUID) + "/qgroups/mode")
	return err == nil && strings.TrimSpace(string(b)) == "squota"
}

// Limit bounds what a subvolume may own; 0 lifts the bound.
func Limit(f *os.File, subvol, bytes uint64) error {
	a := qgroupLimitArgs{id: subvol, lim: qgroupLimit{flags: limitMaxRfer, maxRfer: bytes}}
	if bytes == 0 {
		a.lim.maxRfer = all
	}
	return wrap(ioctl(int(f.Fd()), iocQgroupLimit, unsafe.Pointer(&a)), "limiting subvolume %d", subvol)
}

// Owned is what quotas count for a subvolume, and whether they count for it.
func Owned(f *os.File, subvol uint64) (bytes uint64, ok bool, err error) {
	k := searchKey{treeID: quotaTree, minType: qgroupInfoKey, maxType: qgroupInfoKey, minOffset: subvol, maxOffset: subvol}
	err = search(f, k, 1, func(h searchHeader, data []byte) bool {
		if len(data) >= 16 {
			bytes, ok = binary.LittleEndian.Uint64(data[8:]), true
		}
		return false
	})
	return bytes, ok, err
}

// ForgetQuota removes the quota group that a removed subvolume left behind. It
// fails while others still hold extents that the subvolume wrote.
func ForgetQuota(f *os.File, subvol uint64) error {
	a := struct{ create, id uint64 }{0, subvol}
	return wrap(ioctl(int(f.Fd()), iocQgroupCreate, unsafe.Pointer(&a)), "removing the quota group of subvolume %d", subvol)
}

// FormatUUID writes a UUID in the usual form.
func FormatUUID(u [16]byte) string {
	h := hex.EncodeToString(u[:])
	return fmt.Sprintf("%s-%s-%s-%s-%s", h[:8], h[8:12], h[12:16], h[16:20], h[20:])
}
