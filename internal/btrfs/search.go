package btrfs

import (
	"encoding/binary"
	"os"
	"unsafe"
)

type searchKey struct {
	treeID, minObjectID, maxObjectID, minOffset, maxOffset, minTransid, maxTransid uint64
	minType, maxType, nrItems, _                                                   uint32
	_                                                                              [4]uint64
}

type searchArgs struct {
	key searchKey
	buf [4096 - 104]byte
}

type searchHeader struct {
	transid, objectID, offset uint64
	kind, length              uint32
}

const (
	rootTree  = 1
	quotaTree = 8

	extentDataKey = 108
	rootItemKey   = 132
	qgroupInfoKey = 242

	lastFreeInode = ^uint64(255)
	all           = ^uint64(0)
)

// search calls fn for the items from k's minimum to its maximum in key order;
// fn returns false to stop. max bounds the items of one call to the kernel.
func search(f *os.File, k searchKey, max uint32, fn func(h searchHeader, data []byte) bool) error {
	k.maxTransid = all
	for {
		a := searchArgs{key: k}
		a.key.nrItems = max
		if err := ioctl(int(f.Fd()), iocTreeSearch, unsafe.Pointer(&a)); err != nil {
			return wrap(err, "searching tree %d", k.treeID)
		}
		if a.key.nrItems == 0 {
			return nil
		}
		buf := a.buf[:]
		var h searchHeader
		for range a.key.nrItems {
			h = searchHeader{
				transid:  binary.NativeEndian.Uint64(buf),
				objectID: binary.NativeEndian.Uint64(buf[8:]),
				offset:   binary.NativeEndian.Uint64(buf[16:]),
				kind:     binary.NativeEndian.Uint32(buf[24:]),
				length:   binary.NativeEndian.Uint32(buf[28:]),
			}
			data := buf[32 : 32+h.length]
			buf = buf[32+h.length:]
			if !fn(h, data) {
				return nil
			}
		}
		// Go on right behind the last key.
		k.minObjectID, k.minType, k.minOffset = h.objectID, h.kind, h.offset+1
		if k.minOffset == 0 {
			if k.minType++; k.minType > 255 {
				if k.minType, k.minObjectID = 0, k.minObjectID+1; k.minObjectID == 0 {
					return nil
				}
			}
		}
	}
}

// HighestInode is the highest inode number in the subvolume that f lies in; the
// next file made in it, or in a snapshot of it, gets a higher one. The kernel
// searches upwards only, so this halves the range: 64 short searches.
func HighestInode(f *os.File) (uint64, error) {
	low, high := uint64(FirstInode), lastFreeInode // something lies at or above low, nothing at or above high
	for high-low > 1 {
		mid := low + (high-low)/2
		var found uint64
		err := search(f, searchKey{minObjectID: mid, maxObjectID: lastFreeInode, maxOffset: all, maxType: 255}, 1,
			func(h searchHeader, _ []byte) bool { found = h.objectID; return false })
		if err != nil {
			return 0, err
		}
		if found == 0 {
			high = mid
		} else {
			low = found
		}
	}
	return low, nil
}

// Exists reports whether the subvolume's tree is there: it stays after Destroy
// until the cleaner is done with it.
func Exists(f *os.File, id uint64) (bool, error) {
	found := false
	err := search(f, searchKey{treeID: rootTree, minObjectID: id, maxObjectID: id, minType: rootItemKey, maxType: rootItemKey, maxOffset: all}, 1,
		func(searchHeader, []byte) bool { found = true; return false })
	return found, err
}

// NewBytes is how many bytes of data and metadata the subvolume that f lies in
// holds that are younger than a transaction. It skips what is older by whole
// subtrees, so it costs what changed, not what is there.
func NewBytes(f *os.File, since uint64) (int64, error) {
	var total int64
	k := searchKey{minObjectID: 0, maxObjectID: all, maxType: 255, maxOffset: all, minTransid: since + 1}
	err := search(f, k, 512, func(h searchHeader, data []byte) bool {
		total += int64(h.length) + 25 // an item and its place in the leaf; inline data is in it
		// struct btrfs_file_extent_item: generation, ram_bytes, 4 bytes, type, disk_bytenr, disk_num_bytes, ...
		if h.kind == extentDataKey && len(data) >= 53 && data[20] != 0 {
			young := binary.LittleEndian.Uint64(data) > since
			if hole := binary.LittleEndian.Uint64(data[21:]) == 0; young && !hole {
				total += int64(binary.LittleEndian.Uint64(data[29:]))
			}
		}
		return true
	})
	return total, err
}
