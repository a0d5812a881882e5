package box

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/engine/criu"
	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/internal/seccomp"
	"github.com/boxwood-rl/boxwood/internal/thread"
)

// Saved is what the processes of a box were saved as.
type Saved struct {
	// Images is the folder of CRIU's images, on the host.
	Images string `json:"-"`
	// Listener is the inode of pid 1's listening socket, which a restored pid 1 gets another for.
	Listener uint64 `json:"listener"`
	// Commands that pid 1 had counted.
	Commands uint64 `json:"commands"`
	// Calls that the processes may make beyond the usual.
	Calls seccomp.Groups `json:"calls,omitempty"`
	// Sessions says of each process that is in the group of a session which one that is; both
	// by their numbers inside.
	Sessions map[int]int `json:"sessions,omitempty"`
	// Channels are which of stdin, stdout and stderr each session, by its number, had still as it was given them. The
	// inodes of these are others in a child.
	Channels map[int][3]bool `json:",omitempty"`
	// Vetted, if set, is called when all is restored and nothing has run; its error ends the restore.
	Vetted func() error `json:"-"`
}

// Part closes all that connects pid 1 with the outside, which is how the processes of a
// box can be saved; until Rejoin the box is busy. Rejoin connects again, to a box that isn't frozen;
// on failure the box is lost, and killed.
func (b *box) Part(ctx context.Context, by *criu.Program) error {
	if err := b.use(); err != nil {
		return err
	}
	var err error
	if b.window, err = b.h.guard(b.rec.Slot, b.group); err != nil {
		b.using.Unlock()
		return fmt.Errorf("guarding a box: %w", err)
	}
	if by != nil {
		if b.saver, err = by.NewSaver(b.window); err != nil {
			b.endWindow()
			b.using.Unlock()
			return err
		}
	}
	if err = b.part(ctx); err != nil {
		b.endWindow()
		defer b.using.Unlock()
		cgroup.Kill(b.group.Dir)
		return fmt.Errorf("parting with pid 1: %w", b.orGone(err))
	}
	return nil
}

// guard has the nursery thaw a box that this daemon leaves frozen: see init/guard.c. The window
// is over when a byte is written to what is returned.
func (h *Host) guard(slot int, g *cgroup.Group) (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	ok := false
	defer func() {
		if !ok {
			w.Close()
		}
	}()
	freeze, err := os.OpenFile(filepath.Join(g.Dir, "cgroup.freeze"), os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	defer freeze.Close()
	lock, err := os.Open(h.controlDir(slot))
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
		return nil, err
	}
	if err := h.ask(opGuard, nil, int(freeze.Fd()), int(r.Fd()), int(lock.Fd())); err != nil {
		return nil, err
	}
	ok = true
	return w, nil
}

// ask has the nursery do something with descriptors.
func (h *Host) ask(what op, body []byte, fds ...int) error {
	h.spawning.Lock()
	defer h.spawning.Unlock()
	n := h.nursery
	n.wire.SetReadDeadline(time.Now().Add(stepLimit))
	id, err := n.wire.send(what, body, fds...)
	if err != nil {
		return err
	}
	_, err = n.wire.expect(n.buf, id, replyDone, 0)
	return err
}

// awaitGuard waits until nobody stands by to thaw a box any more.
func (h *Host) awaitGuard(ctx context.Context, slot int) error {
	lock, err := os.Open(h.controlDir(slot))
	if err != nil {
		return err
	}
	defer lock.Close()
	for {
		if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != unix.EWOULDBLOCK {
			return err
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("waiting for the end of a dump: %w", ctx.Err())
		}
	}
}

func (b *box) endWindow() {
	b.saver.Drop()
	b.saver = nil
	if b.window == nil {
		return
	}
	b.window.Write([]byte{1})
	b.window.Close()
	b.window = nil
}

func (b *box) part(ctx context.Context) error {
	b.wire.SetReadDeadline(stepDeadline(ctx))
	id, err := b.wire.send(opPart, nil)
	if err != nil {
		return err
	}
	var buf [1024]byte
	if _, err := b.wire.expect(buf[:], id, replyDone, 0); err != nil {
		return err
	}
	// The end of the connection says that pid 1 has closed the rest, too.
	if _, err := b.wire.receive(buf[:]); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		return errProtocol
	}
	return b.wire.Close()
}

func stepDeadline(ctx context.Context) time.Time {
	deadline := time.Now().Add(stepLimit)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		return d
	}
	return deadline
}

func (b *box) Rejoin(ctx context.Context) error {
	defer b.using.Unlock()
	b.endWindow()
	err := b.rejoin(ctx)
	if err != nil {
		cgroup.Kill(b.group.Dir)
		return fmt.Errorf("joining pid 1 again: %w", b.orGone(err))
	}
	return nil
}

func (b *box) rejoin(ctx context.Context) error {
	w, err := dial(b.h.controlDir(b.rec.Slot))
	if err != nil {
		return err
	}
	b.wire = w
	w.SetReadDeadline(stepDeadline(ctx))
	if err := b.hello(ctx); err != nil {
		return err
	}
	w.SetReadDeadline(time.Time{})
	return b.newLeaf()
}

// Save dumps the processes of a frozen box that has parted, into an empty folder.
// It stays frozen.
func (b *box) Save(ctx context.Context, images string) (Saved, error) {
	s := Saved{Images: images, Commands: b.starts.Load() + b.rec.Before, Calls: b.rec.Calls}
	link, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", b.rec.PID, listenerFD))
	if err != nil {
		return s, b.orGone(err)
	}
	if s.Listener, err = socketInode(link); err != nil {
		return s, err
	}
	if s.Sessions, err = b.sessionProcesses(); err != nil {
		return s, b.orGone(err)
	}
	s.Channels = b.ownChannels()
	return s, b.saver.Dump(ctx, criu.Save{PID: b.rec.PID, Cgroup: b.group.Dir, Images: images, External: criu.BoxMounts()})
}

// ownChannels is Saved.Channels.
func (b *box) ownChannels() map[int][3]bool {
	own := map[int][3]bool{}
	for _, s := range b.Sessions() {
		var has [3]bool
		for i, inode := range channelsOf(s.HostPID) {
			has[i] = inode != 0 && inode == s.inodes[i]
		}
		own[s.Number] = has
	}
	return own
}

// channelsOf are the inodes of a process's stdin, stdout and stderr; 0: it is neither a socket nor a pipe.
func channelsOf(pid int) (inodes [3]uint64) {
	for i := range inodes {
		link, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, i))
		if err != nil {
			continue
		}
		kind := "pipe:[%d]"
		if i == 0 {
			kind = "socket:[%d]"
		}
		_, _ = fmt.Sscanf(link, kind, &inodes[i])
	}
	return inodes
}

// findChannels finds those of sessions that were just restored and haven't run: own is Saved.Channels. pid 1
// knows the inodes that they had in the parent.
func (b *box) findChannels(own map[int][3]bool) {
	b.rec.Channels = map[int][3]uint64{}
	for i := range b.sessions.list {
		s := &b.sessions.list[i]
		s.inodes = channelsOf(s.HostPID)
		for k := range s.inodes {
			if !own[s.Number][k] {
				s.inodes[k] = 0
			}
		}
		b.rec.Channels[s.Number] = s.inodes
	}
}

// sessionProcesses lists the processes of sessions, whose groups are made again with them.
func (b *box) sessionProcesses() (map[int]int, error) {
	entries, err := os.ReadDir(b.group.Run)
	if err != nil {
		return nil, err
	}
	of := map[int]int{}
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), "s")
		n, err := strconv.Atoi(number)
		if !ok || err != nil {
			continue
		}
		pids, err := cgroup.Pids(b.sessionLeaf(n))
		if err != nil {
			return nil, err
		}
		for _, pid := range pids {
			if p, ok := readProc(pid); ok {
				of[p.PID] = n
			}
		}
	}
	return of, nil
}

// listenerFD is pid 1's descriptor of its socket: LISTENER of init/zygote.c.
const listenerFD = 4

func socketInode(link string) (uint64, error) {
	number, ok := strings.CutPrefix(link, "socket:[")
	if !ok {
		return 0, fmt.Errorf("pid 1's socket is %s: %w", printable(link), errProtocol)
	}
	return strconv.ParseUint(strings.TrimSuffix(number, "]"), 10, 64)
}

// Restore makes a box whose processes are those that were saved, on a root that
// stands as the saved one did. Its processes, pid 1 apart, are frozen: Resume
// lets them go on, after somebody watches.
//
// On failure nothing of the box is left.
func (h *Host) Restore(ctx context.Context, root Root, id Identity, s Saved, by *criu.Program) (Box, error) {
	if err := checkIdentity(id); err != nil {
		return nil, err
	}
	if id.Limits.Calls != s.Calls {
		return nil, fault.New(fault.Precondition, "other_calls", "it was saved with the calls %q allowed beyond the usual, not %q", s.Calls, id.Limits.Calls)
	}
	h.begin()
	defer h.end()
	z, err := h.take()
	if err != nil {
		return nil, err
	}
	b, err := z.revive(ctx, root, id, s, by)
	if err != nil {
		return nil, fmt.Errorf("restoring a box: %w", errors.Join(err, z.discard()))
	}
	return b, nil
}

// revive gives a zygote's groups, folder and ids to restored processes, and ends
// the zygote itself.
func (z *zygote) revive(ctx context.Context, root Root, id Identity, s Saved, by *criu.Program) (*box, error) {
	socket, err := z.newControl(id)
	if err != nil {
		return nil, fmt.Errorf("filling the control folder: %w", err)
	}
	defer socket.Close()
	tasks, err := z.group.OpenTasks()
	if err != nil {
		return nil, err
	}
	defer closeAll(tasks)
	z.pid, err = by.Restore(ctx, criu.Load{
		Images: s.Images, Control: z.h.controlDir(z.slot), Cgroup: z.group.Dir, Tasks: tasks,
		IDBase: uint32(idBase(z.slot)), Hostname: id.Hostname, Socket: socket, SocketInode: s.Listener,
		Root: func() (*os.File, error) {
			mount, err := z.prepareRoot(root, id)
			if err == nil {
				err = z.end(ctx)
			}
			if err != nil && mount != nil {
				mount.Close()
			}
			return mount, err
		},
		Stopped: func(root, program int) error {
			if s.Vetted != nil {
				if err := s.Vetted(); err != nil {
					return err
				}
			}
			if err := z.settle(root, program, s.Sessions); err != nil {
				return err
			}
			// What is restored makes no namespaces unless its policy allows it.
			return z.limitNamespace(root, s.Calls&seccomp.Namespaces != 0 || sabotage.On("nesting"))
		},
		Soon: z.h.root.Warm,
	})
	if err != nil {
		return nil, err
	}
	if z.start, err = startTime(z.pid); err != nil {
		return nil, err
	}
	if err := cgroup.Await(ctx, z.group.Run, "frozen", 1); err != nil {
		return nil, err
	}
	b := newUnstarted(z, record{Slot: z.slot, PID: z.pid, Start: z.start, Generation: id.Generation, Seed: id.Seed, Calls: s.Calls, Before: s.Commands, Wire: z.h.cfg.wire, Program: ProgramDigest()})
	b.held = true
	if err := b.rejoin(ctx); err != nil {
		return nil, err
	}
	if err := b.findSessions(ctx); err != nil {
		return nil, err
	}
	b.findChannels(s.Channels)
	if err := b.listenInside(ctx); err != nil {
		return nil, fmt.Errorf("handing over a socket: %w", err)
	}
	z.wire = b.wire
	b.begin()
	return b, nil
}

// end ends the zygote's process and keeps what is its own on the host.
func (z *zygote) end(ctx context.Context) error {
	unix.PidfdSendSignal(z.pidfd, unix.SIGKILL, nil, 0)
	if err := awaitExit(ctx, z.pidfd); err != nil {
		return err
	}
	unix.Close(z.pidfd)
	z.pidfd = -1
	z.release()
	return nil
}

// newControl puts what a restored pid 1 is to find into the control folder, and
// returns its socket.
func (z *zygote) newControl(id Identity) (*os.File, error) {
	dir := z.h.controlDir(z.slot)
	program := filepath.Join(dir, programName)
	if err := os.Remove(program); err != nil {
		return nil, err
	}
	if err := os.Link(filepath.Join(z.h.control, restoreProgram), program); err != nil {
		return nil, err
	}
	if err := z.putGeneration(id); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "machine-id"), []byte(id.MachineID+"\n"), 0o444); err != nil {
		return nil, err
	}
	return listen(dir)
}

// listenInside gives a restored pid 1 a socket of its own network namespace. The one that
// it came up with is of ours, which had to be there before that namespace was, and
// couldn't be saved.
func (b *box) listenInside(ctx context.Context) error {
	var socket *os.File
	err := thread.Discard(func() error {
		ns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/net", b.rec.PID), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(ns)
		if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
			return err
		}
		socket, err = listen(b.h.controlDir(b.rec.Slot))
		return err
	})
	if err != nil {
		return err
	}
	defer socket.Close()
	b.wire.SetReadDeadline(stepDeadline(ctx))
	defer b.wire.SetReadDeadline(time.Time{})
	id, err := b.wire.send(opListen, nil, int(socket.Fd()))
	if err != nil {
		return err
	}
	var buf [1024]byte
	_, err = b.wire.expect(buf[:], id, replyDone, 0)
	return err
}

// listen replaces the socket in a control folder.
func listen(dir string) (*os.File, error) {
	if err := os.Remove(filepath.Join(dir, socketName)); err != nil {
		return nil, err
	}
	folder, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(folder)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	path := fmt.Sprintf("/proc/self/fd/%d/%s", folder, socketName)
	if err = unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err == nil {
		if err = unix.Chmod(path, 0o600); err == nil {
			err = unix.Listen(fd, 64)
		}
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), socketName), nil
}

// limitNamespace does to a restored box what its first pid 1 did for itself: see init/nesting.c.
func (z *zygote) limitNamespace(root int, nests bool) error {
	userns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", root))
	if err != nil {
		return err
	}
	defer userns.Close()
	body := make([]byte, 4)
	if nests {
		body[0] = 1
	}
	return z.h.ask(opLimit, body, int(userns.Fd()))
}

// settle moves all restored processes but pid 1 to where a turn's are, and keeps them from running
// when CRIU lets go of them.
func (z *zygote) settle(root, program int, sessions map[int]int) error {
	fd, err := unix.PidfdOpen(root, 0)
	if err != nil {
		return err
	}
	z.pidfd, z.pid = fd, root
	inside, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", root))
	if err != nil {
		return err
	}
	pids, err := cgroup.Pids(z.group.Dir)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if pid == root || pid == program {
			continue
		}
		if ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid)); err != nil || ns != inside {
			continue // CRIU's own
		}
		dir := z.group.Run
		if len(sessions) > 0 {
			if p, ok := readProc(pid); ok && sessions[p.PID] > 0 {
				dir = fmt.Sprintf("%s/s%d", z.group.Run, sessions[p.PID])
				if err := cgroup.MakeLeaf(dir, idBase(z.slot)); err != nil && !errors.Is(err, os.ErrExist) {
					return err
				}
			}
		}
		if err := cgroup.Move(dir, pid); err != nil {
			return err
		}
	}
	return cgroup.BeginFreeze(z.group.Run)
}
