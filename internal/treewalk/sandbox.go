package treewalk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Sandbox gives the lines of a sandbox's files as it sees them itself: of its root, and after "/dev/shm " of that, which is a mount of its
// own. pid is a process in it, as the host counts. It has to stand still. Times of folders move with what a restore makes in
// them for a moment, and are left out.
func Sandbox(root *os.File, pid int, stop func() error) (lines []string, err error) {
	ids, err := os.ReadFile(fmt.Sprintf("/proc/%d/uid_map", pid))
	if err != nil {
		return nil, err
	}
	var first, base uint32
	if _, err := fmt.Sscan(string(ids), &first, &base); err != nil {
		return nil, fmt.Errorf("the map of ids %q: %w", ids, err)
	}
	o := Options{IgnoreDirTimes: true, IDBase: base, Err: stop}
	if lines, _, err = DigestAt(root, o); err != nil {
		return nil, err
	}
	fd, err := unix.Openat2(int(root.Fd()), "dev/shm", &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
	if errors.Is(err, fs.ErrNotExist) {
		return lines, nil // the lines of a sandbox that has it are others
	}
	if err != nil {
		return nil, err
	}
	shm := os.NewFile(uintptr(fd), "/dev/shm")
	defer shm.Close()
	more, _, err := DigestAt(shm, o)
	for _, l := range more {
		lines = append(lines, "/dev/shm "+l)
	}
	return lines, err
}
