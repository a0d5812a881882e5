package box

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
)

// zygote is a pid 1 that waits for its root, and all that is its own on the host.
type zygote struct {
	h      *Host
	slot   int
	group  *cgroup.Group
	pid    int
	pidfd  int
	start  uint64 // of pid, in clock ticks after boot: tells a reused pid
	wire   *wire
	userns *os.File
	// leaf and kill are handed to pid 1 at attach: where its first turn runs.
	leaf, kill int
	hooks      []string // of its root
}

// socketName is pid 1's listening socket in its control folder.
const socketName = "init.sock"

// newZygote makes one, all steps of which are undone on failure.
func (h *Host) newZygote() (z *zygote, err error) {
	slot, err := h.takeSlot()
	if err != nil {
		return nil, err
	}
	z = &zygote{h: h, slot: slot, pidfd: -1, leaf: -1, kill: -1}
	defer func() {
		if err != nil {
			z.discard()
			z, err = nil, fmt.Errorf("making a zygote: %w", err)
		}
	}()
	dir := h.controlDir(slot)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return z, err
	}
	if err := os.Link(filepath.Join(h.control, startProgram), filepath.Join(dir, programName)); err != nil {
		return z, err
	}
	if err := unix.Chown(dir, idBase(slot), idBase(slot)); err != nil {
		return z, err
	}
	if z.group, err = h.root.Make(strconv.Itoa(slot), idBase(slot), groupLimits(h.cfg.Limits, h.cfg.Limits)); err != nil {
		return z, err
	}
	if z.leaf, z.kill, err = cgroup.OpenLeaf(z.group.Run); err != nil {
		return z, err
	}
	if err := z.spawn(); err != nil {
		return z, err
	}
	var buf [1024]byte
	z.wire.SetReadDeadline(time.Now().Add(stepLimit))
	if _, err := z.wire.expect(buf[:], 0, replyStaged, 0); err != nil {
		return z, err
	}
	z.wire.SetReadDeadline(time.Time{})
	// From here on nobody inside can connect, let alone replace anything.
	for _, path := range []string{filepath.Join(dir, socketName), dir} {
		if err := os.Lchown(path, 0, 0); err != nil {
			return z, err
		}
	}
	if z.start, err = startTime(z.pid); err != nil {
		return z, err
	}
	return z, nil
}

func (z *zygote) spawn() error {
	z.h.spawning.Lock()
	defer z.h.spawning.Unlock()
	b, err := z.h.nursery.spawn(z.slot, z.group)
	if err != nil {
		return err
	}
	z.pid, z.pidfd, z.wire, z.userns = b.pid, b.pidfd, b.wire, b.userns
	return nil
}

// discard ends a zygote that will not be a box, however far it got.
func (z *zygote) discard() error {
	z.release()
	ctx, cancel := context.WithTimeout(context.Background(), stepLimit)
	defer cancel()
	if z.pidfd >= 0 {
		unix.PidfdSendSignal(z.pidfd, unix.SIGKILL, nil, 0)
		err := awaitExit(ctx, z.pidfd)
		unix.Close(z.pidfd)
		z.pidfd = -1
		if err != nil {
			return err // the slot stays taken
		}
	}
	if err := z.h.removeTraces(ctx, z.slot); err != nil {
		return err
	}
	z.h.freeSlot(z.slot)
	return nil
}

// release closes what only a zygote needs.
func (z *zygote) release() {
	if z.wire != nil {
		z.wire.Close()
		z.wire = nil
	}
	z.releaseStage()
}

func (z *zygote) releaseStage() {
	if z.userns != nil {
		z.userns.Close()
		z.userns = nil
	}
	for _, fd := range []*int{&z.leaf, &z.kill} {
		if *fd >= 0 {
			unix.Close(*fd)
			*fd = -1
		}
	}
}

// exited reports whether a process is gone.
func exited(pidfd int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0)
	return err == nil && n == 1
}

// awaitExit waits for the end of pid 1. The kernel tells of it after everything
// else in its pid namespace is gone and its mounts are unmounted.
func awaitExit(ctx context.Context, pidfd int) error {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 20)
		if err != nil && err != unix.EINTR {
			return fmt.Errorf("waiting for pid 1 of a box to end: %w", err)
		}
		if n == 1 {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("waiting for pid 1 of a box to end: %w", err)
		}
	}
}

var errNoProcess = errors.New("no such process")

// startTime is field 22 of /proc/PID/stat. The name in field 2 may hold anything.
func startTime(pid int) (uint64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, errNoProcess
	}
	return parseStartTime(text)
}
