package box

import (
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// CheckRoot looks whether /run/box and /etc/machine-id still are the mounts that
// were put there at the start. The other mounts can't be moved from inside, but a
// folder above these two can: a box made from that root would have nothing to
// mount them on, or cover a file of the sandbox's with them.
func (b *box) CheckRoot() error {
	root, err := b.Root()
	if err != nil {
		return err
	}
	defer root.Close()
	control := b.h.controlDir(b.rec.Slot)
	for at, source := range map[string]string{"/run/box": control, "/etc/machine-id": filepath.Join(control, "machine-id")} {
		if err := mountedAt(int(root.Fd()), at, source); err != nil {
			return fault.New(fault.Precondition, "mount_point_moved", "the mount point %s was moved or replaced, so that no sandbox could be made like this one: %w", at, err)
		}
	}
	return nil
}

// mountedAt returns nil if what a box finds at a path is a mount of source.
func mountedAt(root int, at, source string) error {
	fd, err := unix.Openat2(root, at, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var want unix.Stat_t
	if err := unix.Stat(source, &want); err != nil {
		return fmt.Errorf("looking at %s: %w", source, err)
	}
	var have unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_INO, &have); err != nil {
		return err
	}
	// The root of a mount, since the control folder has the file, too.
	if have.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0 || have.Ino != want.Ino || unix.Mkdev(have.Dev_major, have.Dev_minor) != want.Dev {
		return errors.New("something else is there")
	}
	return nil
}
