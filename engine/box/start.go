package box

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/overlay"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/internal/seccomp"
	"github.com/boxwood-rl/boxwood/tree"
)

// Start makes a box of a zygote: its root is mounted and handed over. It takes a
// zygote from the pool or, if there is none, makes one, which costs as much again.
//
// On failure nothing of the box is left.
func (h *Host) Start(ctx context.Context, root Root, id Identity) (Box, error) {
	if err := checkIdentity(id); err != nil {
		return nil, err
	}
	h.begin()
	defer h.end()
	z, err := h.take()
	if err != nil {
		return nil, err
	}
	b, err := z.attach(ctx, root, id)
	if err != nil {
		if z.pidfd >= 0 {
			err = errors.Join(err, z.discard())
		}
		return nil, fmt.Errorf("starting a box: %w", err)
	}
	return b, nil
}

func checkIdentity(id Identity) error {
	if n := len(id.Hostname); n == 0 || n > 64 || strings.ContainsRune(id.Hostname, 0) {
		return fault.New(fault.Invalid, "bad_hostname", "%q is not a host name of 1 to 64 bytes", id.Hostname)
	}
	if len(id.MachineID) != 32 || strings.Trim(id.MachineID, "0123456789abcdef") != "" {
		return fault.New(fault.Invalid, "bad_machine_id", "%q is not a machine id of 32 hex digits", id.MachineID)
	}
	if !id.Limits.Calls.Valid() {
		return fault.New(fault.Invalid, "bad_calls", "groups %#x of system calls aren't known here", uint64(id.Limits.Calls))
	}
	if strings.ContainsRune(id.Generation+id.Seed, 0) {
		return fault.New(fault.Invalid, "bad_identity", "generation and seed may not hold NUL bytes")
	}
	return nil
}

// prepareRoot sets a box's limits and makes the overlay that its root will be, in no mount
// namespace yet.
func (z *zygote) prepareRoot(root Root, id Identity) (*os.File, error) {
	if id.Limits != (tree.Limits{}) {
		if err := z.group.SetLimits(groupLimits(id.Limits, z.h.cfg.Limits)); err != nil {
			return nil, err
		}
	}
	mount, err := overlay.Mount(overlay.Options{Lower: root.Lower, Upper: root.Upper, Work: root.Work,
		UserNS: z.userns, IDBase: uint32(idBase(z.slot))})
	if err != nil {
		return nil, err
	}
	if z.hooks, err = hooksOf(mount); err != nil {
		mount.Close()
		return nil, err
	}
	return mount, nil
}

func (z *zygote) attach(ctx context.Context, root Root, id Identity) (*box, error) {
	mount, err := z.prepareRoot(root, id)
	if err != nil {
		return nil, err
	}
	defer mount.Close()
	deadline := time.Now().Add(stepLimit)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := z.putGeneration(id); err != nil {
		return nil, err
	}
	z.wire.SetReadDeadline(deadline)
	req, err := z.wire.send(opAttach, attachBody(id), int(mount.Fd()), z.leaf, z.kill)
	if err != nil {
		return nil, err
	}
	var buf [1024]byte
	if _, err := z.wire.expect(buf[:], req, replyReady, 0); err != nil {
		var remote remoteError
		if errors.As(err, &remote) && strings.Contains(string(remote), "has no mount point") {
			return nil, fault.New(fault.Precondition, "no_mount_point", "%s", remote.Error()).
				WithHint("import the image again, so that it gets the mount points of a box")
		}
		return nil, err
	}
	z.wire.SetReadDeadline(time.Time{})
	z.releaseStage()
	return newBox(z, record{Slot: z.slot, PID: z.pid, Start: z.start, Generation: id.Generation, Seed: id.Seed, Calls: id.Limits.Calls, Wire: z.h.cfg.wire, Program: ProgramDigest()}), nil
}

// putGeneration puts what a box's programs read as /run/box/generation into its control folder.
func (z *zygote) putGeneration(id Identity) error {
	return os.WriteFile(filepath.Join(z.h.controlDir(z.slot), "generation"), []byte(id.Generation+"\n"), 0o444)
}

// What a box may do beyond the usual, as pid 1 is told: MAY_... of init/wire.h.
const (
	mayNest = 1 << iota
	mayGain
)

func attachBody(id Identity) []byte {
	may := uint32(0)
	if id.Limits.Calls&seccomp.Namespaces != 0 {
		may |= mayNest
	}
	if id.Limits.Calls&seccomp.Setuid != 0 || sabotage.On("gain") {
		may |= mayGain
	}
	body := binary.LittleEndian.AppendUint32(nil, may)
	body = append(append(body, id.Hostname...), 0)
	body = append(append(body, id.MachineID...), 0)
	return append(body, seccomp.Program(id.Limits.Calls)...)
}

// record is what Adopt needs to find a box again.
type record struct {
	Slot       int            `json:"slot"`
	PID        int            `json:"pid"`
	Start      uint64         `json:"start"` // of pid 1, in clock ticks after boot
	Generation string         `json:"generation,omitempty"`
	Seed       string         `json:"seed,omitempty"`
	Calls      seccomp.Groups `json:"calls,omitempty"`
	Before     uint64         `json:"before,omitempty"`  // commands that pid 1 had counted when it was saved
	Wire       int            `json:"wire,omitempty"`    // that its pid 1 speaks; none: 1
	Program    string         `json:"program,omitempty"` // see Box.Program
	// Channels of the sessions that were restored, by their numbers: see Session.inodes.
	Channels map[int][3]uint64 `json:"channels,omitempty"`
}

// statFields are those of /proc/PID/stat after the name, which may hold anything;
// none if there is no name.
func statFields(stat []byte) []string {
	end := bytes.LastIndexByte(stat, ')')
	if end < 0 {
		return nil
	}
	return strings.Fields(string(stat[end+1:]))
}

func parseStartTime(stat []byte) (uint64, error) {
	fields := statFields(stat)
	if len(fields) < 20 {
		return 0, errNoProcess
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

// Adopt finds a box that a former daemon has started. What that daemon's running
// command had started is dead when Adopt returns.
func (h *Host) Adopt(ctx context.Context, text []byte) (Box, error) {
	var r record
	if err := json.Unmarshal(text, &r); err != nil || r.Slot < 0 || r.Slot >= slotsMax || r.PID <= 1 {
		return nil, fault.New(fault.Invalid, "bad_record", "this is not the record of a box")
	}
	gone := fault.New(fault.NotFound, "box_gone", "the box of slot %d is gone", r.Slot)
	pidfd, err := unix.PidfdOpen(r.PID, 0)
	if err != nil {
		return nil, gone
	}
	if start, err := startTime(r.PID); err != nil || start != r.Start || exited(pidfd) {
		unix.Close(pidfd)
		return nil, gone
	}
	if r.Wire == 0 {
		r.Wire = 1
	}
	if r.Wire < wireOldest || r.Wire > wireNow {
		unix.Close(pidfd)
		return nil, fault.New(fault.Precondition, "other_protocol", "pid 1 of the box in slot %d speaks version %d of the protocol, and this daemon %d to %d",
			r.Slot, r.Wire, wireOldest, wireNow).WithHint("the sandbox is ended; fork the node that it stood at")
	}
	group, err := h.root.Find(strconv.Itoa(r.Slot))
	if err != nil {
		unix.Close(pidfd)
		return nil, gone
	}
	h.mu.Lock()
	taken := h.owned[r.Slot]
	if !taken {
		h.slots[r.Slot], h.owned[r.Slot] = true, true
	}
	h.mu.Unlock()
	if taken {
		unix.Close(pidfd)
		return nil, fault.New(fault.Precondition, "adopted", "the box of slot %d has been adopted already", r.Slot)
	}
	z := &zygote{h: h, slot: r.Slot, group: group, pid: r.PID, pidfd: pidfd, start: r.Start, leaf: -1, kill: -1}
	b, err := z.reconnect(ctx, r)
	if err != nil {
		h.mu.Lock()
		delete(h.owned, r.Slot) // Sweep may have it
		h.mu.Unlock()
		return nil, fmt.Errorf("adopting the box of slot %d: %w", r.Slot, err)
	}
	return b, nil
}

// reconnect owns z's descriptors: they are the box's, or closed when it fails.
func (z *zygote) reconnect(ctx context.Context, r record) (_ *box, err error) {
	b := newUnstarted(z, r)
	b.spent = true // for all that is known: pid 1 doesn't hear of KillTurn
	defer func() {
		if err != nil {
			b.pidfd.Close()
			z.release()
		}
	}()
	if err := z.h.awaitGuard(ctx, z.slot); err != nil {
		return nil, err
	}
	// A box that was left frozen couldn't answer, one that was restored hadn't been let go, and a session may have been about
	// to be interrupted.
	if err := cgroup.ThawAll(z.group.Dir); err != nil {
		return nil, err
	}
	if z.wire, err = dial(z.h.controlDir(z.slot)); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, stepLimit)
	defer cancel()
	deadline, _ := ctx.Deadline()
	z.wire.SetReadDeadline(deadline)
	b.wire = z.wire
	if err := b.hello(ctx); err != nil {
		return nil, err
	}
	z.wire.SetReadDeadline(time.Time{})
	if err := b.findSessions(ctx); err != nil {
		return nil, err
	}
	if err := b.newLeaf(); err != nil {
		return nil, err
	}
	b.begin()
	return b, nil
}

// dial connects to a pid 1 by its control folder, whose path may be longer than
// a socket address.
func dial(dir string) (*wire, error) {
	folder, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the control folder: %w", err)
	}
	defer unix.Close(folder)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d/%s", folder, socketName)}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("connecting to pid 1: %w", err)
	}
	return newWire(fd)
}
