package inspector

import (
	"fmt"

	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// signs are what the kernel side saw of one sandbox; bpf/inspector.bpf.c says when
// each is set.
type signs uint64

const (
	sawNames signs = 1 << iota
	sawMeta
	sawOld
	sawOutside
	sawUnknown
	sawLost
	sawObject
	sawProc
	sawReach
	sawExternal
	sawURing
	sawNewMeta
	sawMount
	sawTimes
	sawTouched
	sawTerminal
	sawMoved
	sawWide
)

const (
	// eitherHalf can't be told apart further: both count as changed.
	eitherHalf = sawOutside | sawUnknown | sawLost | sawURing
	fileFlags  = sawNames | sawMeta | sawMoved | sawOld | eitherHalf
)

// signsIn is what the kernel side set in a word.
func signsIn(word uint64) signs {
	s := signs(word)
	if sabotage.On("flag") {
		s &^= sawOld
	}
	return s
}

// reason is what one of them means to a person; nr is the call that set it last.
func (f signs) reason(nr uint32) string {
	switch f {
	case sawOutside:
		return "a file outside the sandbox's own file system changed (" + callName(nr) + ")"
	case sawUnknown:
		return "a call that isn't understood: " + callName(nr)
	case sawLost:
		return "lost"
	case sawObject:
		return "a kernel object changed: " + callName(nr)
	case sawProc:
		return "a write to /proc or /sys"
	case sawReach:
		return "pid 1 or a group was altered: " + callName(nr)
	case sawURing:
		return "io_uring or kernel AIO was used"
	}
	return fmt.Sprintf("signs %#x", uint64(f))
}

// otherTable is set in the number of a call made in the 32-bit or x32 way.
const otherTable = 1 << 30

func callName(nr uint32) string {
	if nr&otherTable != 0 {
		return fmt.Sprintf("call %d of a 32-bit program", nr&^otherTable)
	}
	for _, c := range calls {
		if c.nr == int(nr) {
			return c.name
		}
	}
	return fmt.Sprintf("call %d", int32(nr))
}
