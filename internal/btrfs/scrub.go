package btrfs

import (
	"os"
	"unsafe"
)

type scrubArgs struct {
	devid, start, end, flags uint64
	progress                 [15]uint64
	unused                   [109]uint64
}

const (
	_ = uint(unsafe.Sizeof(scrubArgs{}) - 1024)
	_ = uint(1024 - unsafe.Sizeof(scrubArgs{}))
)

var iocScrub = code(read|write, 27, unsafe.Sizeof(scrubArgs{}))

// Damage is what a scrub found.
type Damage struct{ Read, Checksum, Verify, Super uint64 }

// Scrub reads all that is allocated on the first device and compares metadata
// and data with their checksums, and metadata with the generation it should have.
// It changes nothing and takes as long as reading does.
func Scrub(f *os.File) (Damage, error) {
	a := scrubArgs{devid: 1, end: all, flags: 1}
	err := ioctl(int(f.Fd()), iocScrub, unsafe.Pointer(&a))
	return Damage{Read: a.progress[4], Checksum: a.progress[5], Verify: a.progress[6], Super: a.progress[9]}, wrap(err, "scrubbing")
}
