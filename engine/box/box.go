package box

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/engine/criu"
	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/fault"
)

// box is a zygote with a root. Lock order: killing, then using.
type box struct {
	h      *Host
	rec    record
	group  *cgroup.Group
	pidfd  *os.File
	done   chan struct{}
	starts atomic.Uint64 // commands that pid 1 has started

	// using is held by whoever talks to pid 1: one command at a time.
	using sync.Mutex
	wire  *wire
	leafs int    // leaves made so far
	ooms  uint64 // the group's count of processes killed for memory, as last read

	// jobs counts the beginnings and ends of what run does. Run was empty when it was
	// quiet-1; nothing else puts processes there, so that it is while jobs stays.
	jobs, quiet atomic.Uint64

	window *os.File // the guard's pipe, from Part to Rejoin
	saver  *criu.Saver

	hooks []string

	held bool // restored, and Run is frozen until Resume

	leafMu sync.Mutex
	leaf   string // the v2 folder that the running turn's processes live in
	// spent: leaf was killed. Linux 6.18 kills whatever is cloned into a group
	// that was ever killed itself (it compares the group's count of kills with
	// that of the cloning task's own group), so that the next command needs a new one.
	spent bool

	sessions sessions

	killing sync.Mutex
	killed  bool
}

func newUnstarted(z *zygote, r record) *box {
	return &box{h: z.h, rec: r, group: z.group, pidfd: os.NewFile(pollable(z.pidfd), "pid 1"),
		wire: z.wire, leaf: z.group.Run, hooks: z.hooks, done: make(chan struct{})}
}

// pollable makes the runtime's poller take a pidfd.
func pollable(fd int) uintptr {
	unix.SetNonblock(fd, true)
	return uintptr(fd)
}

func newBox(z *zygote, r record) *box {
	b := newUnstarted(z, r)
	b.begin()
	return b
}

// begin tells of the box and watches for the end of its pid 1.
func (b *box) begin() {
	if b.h.cfg.OnBox != nil {
		b.h.cfg.OnBox(b.group.RunID, false)
	}
	go func() {
		rc, err := b.pidfd.SyscallConn()
		if err == nil {
			rc.Read(func(fd uintptr) bool { return exited(int(fd)) })
			// A restored pid 1 is our child.
			rc.Control(func(fd uintptr) { unix.Waitid(unix.P_PIDFD, int(fd), nil, unix.WEXITED|unix.WNOHANG, nil) })
		}
		if b.h.cfg.OnBox != nil {
			b.h.cfg.OnBox(b.group.RunID, true)
		}
		close(b.done)
	}()
}

func (b *box) RunCgroup() uint64     { return b.group.RunID }
func (b *box) Commands() uint64      { return b.starts.Load() }
func (b *box) Done() <-chan struct{} { return b.done }

func (b *box) PID1() int { return b.rec.PID }

func (b *box) Hooks() []string { return b.hooks }

func (b *box) SetSeed(seed string) { b.rec.Seed = seed }

func (b *box) Program() string { return b.rec.Program }

func (b *box) Record() []byte {
	text, err := json.Marshal(b.rec)
	if err != nil { // of strings and numbers
		panic(err)
	}
	return text
}

// use takes the connection to pid 1.
func (b *box) use() error {
	if !b.using.TryLock() {
		return fault.New(fault.Busy, "box_busy", "a command is running in this box")
	}
	select {
	case <-b.done:
		b.using.Unlock()
		return errGone()
	default:
		return nil
	}
}

func errGone() error { return fault.New(fault.NotFound, "box_gone", "this box is gone") }

// hello asks a pid 1 that has had another daemon where it stands, and waits for
// the end of what it killed when that daemon went away.
func (b *box) hello(ctx context.Context) error {
	id, err := b.wire.send(opHello, nil)
	if err != nil {
		return err
	}
	var buf [1024]byte
	m, err := b.wire.expect(buf[:], id, replyHello, 0)
	if err != nil {
		return err
	}
	if len(m.body) != 16 {
		return errProtocol
	}
	b.count(binary.LittleEndian.Uint64(m.body))
	b.ooms = b.group.OOMKills()
	if n := binary.LittleEndian.Uint32(m.body[8:]); n > 0 {
		b.leafs = int(n)
		b.leaf = b.leafDir(b.leafs)
	}
	state := binary.LittleEndian.Uint32(m.body[12:])
	b.spent = b.spent || state != leafWhole
	if state == leafKilled {
		return cgroup.Await(ctx, b.leaf, "populated", 0)
	}
	return nil
}

// count takes pid 1's count of commands. That of a restored one began in the box
// that was saved.
func (b *box) count(commands uint64) { b.starts.Store(commands - b.rec.Before) }

// enum leaf_state of init/wire.h.
const (
	leafWhole = iota
	leafKilled
	leafGone
)

func (b *box) leafDir(n int) string { return fmt.Sprintf("%s/t%d", b.group.Run, n) }

func (b *box) turnLeaf() (dir string, spent bool) {
	b.leafMu.Lock()
	defer b.leafMu.Unlock()
	return b.leaf, b.spent
}

// killLeaf kills what the running turn has started, and returns where that was.
func (b *box) killLeaf() (string, error) {
	b.leafMu.Lock()
	defer b.leafMu.Unlock()
	b.spent = true
	return b.leaf, cgroup.Kill(b.leaf)
}

func (b *box) BeginTurn() error {
	if err := b.use(); err != nil {
		return err
	}
	defer b.using.Unlock()
	if len(b.Sessions()) > 0 {
		b.spare()
	}
	return b.newLeaf()
}

// newLeaf moves to a fresh leaf unless the present one is empty and of use. Who
// holds using calls it.
func (b *box) newLeaf() error {
	dir, spent := b.turnLeaf()
	populated := b.quiet.Load() != b.jobs.Load()+1 && cgroup.Populated(b.group.Run)
	if len(b.Sessions()) > 0 { // which live in groups of their own
		if dir != b.group.Run && !spent && !cgroup.Populated(dir) {
			return nil
		}
		b.group.RemoveLeaves(dir)
		return b.freshLeaf()
	}
	keep := dir
	if spent {
		keep = ""
	}
	if !populated && b.leafs > 0 {
		b.group.RemoveLeaves(keep)
	}
	if !populated && !spent {
		return nil
	}
	return b.freshLeaf()
}

// freshLeaf moves to one that nothing has run in.
func (b *box) freshLeaf() error {
	b.leafs++
	dir := b.leafDir(b.leafs)
	if err := cgroup.MakeLeaf(dir, idBase(b.rec.Slot)); err != nil {
		return err
	}
	leaf, kill, err := cgroup.OpenLeaf(dir)
	if err != nil {
		return err
	}
	defer closeAll([]int{leaf, kill})
	b.wire.SetReadDeadline(time.Now().Add(stepLimit))
	defer b.wire.SetReadDeadline(time.Time{})
	id, err := b.wire.send(opLeaf, binary.LittleEndian.AppendUint32(nil, uint32(b.leafs)), leaf, kill)
	if err != nil {
		return err
	}
	var buf [1024]byte
	if _, err := b.wire.expect(buf[:], id, replyDone, 0); err != nil {
		return fmt.Errorf("beginning a turn: %w", err)
	}
	b.leafMu.Lock()
	b.leaf, b.spent = dir, false
	b.leafMu.Unlock()
	return nil
}

func (b *box) KillTurn(ctx context.Context) error {
	leaf, err := b.killLeaf()
	if err != nil {
		return b.orGone(err)
	}
	if err := b.killStarted(ctx); err != nil {
		return err
	}
	return b.orGone(cgroup.Await(ctx, leaf, "populated", 0))
}

// orGone is err, or errGone if the box is, which then is the reason.
func (b *box) orGone(err error) error {
	if err == nil {
		return nil
	}
	select {
	case <-b.done:
		return errGone()
	default:
		return err
	}
}

// dyingPatience is how long processes that have ended, but still count, may take to be gone.
// A killed process gives back some GiB of memory a second before it is gone.
const dyingPatience = 250 * time.Millisecond

func (b *box) Survivors() ([]Proc, error) {
	for began := time.Now(); ; time.Sleep(100 * time.Microsecond) {
		// Most turns leave none: one file says so for Run and all its leaves.
		job := b.jobs.Load()
		if populated, err := cgroup.IsPopulated(b.group.Run); err != nil {
			return nil, b.orGone(err)
		} else if !populated {
			b.quiet.Store(job + 1)
			return nil, nil
		}
		procs, err := b.processes()
		if err != nil || slices.ContainsFunc(procs, func(p Proc) bool { return !p.dying }) {
			return procs, b.orGone(err)
		}
		// All that were listed have ended, maybe after they had started others, or have
		// been killed and are about to: a chain of processes that fork and exit must
		// not pass for none.
		if time.Since(began) < dyingPatience {
			continue
		}
		if len(procs) == 0 {
			procs = []Proc{{Cmdline: []byte("[processes that end as soon as they are looked at]")}}
		}
		return procs, nil
	}
}

func (b *box) processes() ([]Proc, error) {
	pids, err := cgroup.Pids(b.group.Run)
	if err != nil {
		return nil, err
	}
	procs := make([]Proc, 0, len(pids))
	for _, pid := range pids {
		if p, ok := readProc(pid); ok {
			procs = append(procs, p)
		}
	}
	return procs, nil
}

// exiting reports whether the kernel is taking a process down already.
func exiting(pid int) bool {
	const pfExiting = 0x4
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	fields := statFields(stat)
	if len(fields) < 7 {
		return false
	}
	flags, err := strconv.ParseUint(fields[6], 10, 32)
	return err == nil && flags&pfExiting != 0
}

// readProc reads what a process says of itself; false if it ended meanwhile. One
// that has no command line is called by its name in brackets.
func readProc(pid int) (Proc, bool) {
	const enough = 4096
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return Proc{}, false
	}
	p := Proc{HostPID: pid}
	for line := range strings.Lines(string(status)) {
		key, value, _ := strings.Cut(line, ":")
		switch key {
		case "Name":
			p.Name = strings.TrimSpace(value)
		case "NSpid":
			if f := strings.Fields(value); len(f) > 1 {
				fmt.Sscan(f[1], &p.PID)
			}
		case "SigPnd", "ShdPnd":
			pending, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
			p.dying = p.dying || err == nil && pending&(1<<(unix.SIGKILL-1)) != 0
		}
	}
	p.dying = p.dying || exiting(pid)
	if f, err := os.Open(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil {
		buf := make([]byte, enough)
		n, _ := f.Read(buf)
		f.Close()
		p.Cmdline = buf[:n]
	}
	if len(p.Cmdline) == 0 {
		p.Cmdline = []byte("[" + p.Name + "]")
	}
	return p, true
}

func (b *box) Freeze(ctx context.Context) error {
	return b.orGone(cgroup.Freeze(ctx, b.group.Dir))
}

func (b *box) Thaw() error { return b.orGone(cgroup.Thaw(b.group.Dir)) }

func (b *box) Resume() error {
	if !b.held {
		return nil
	}
	b.held = false
	return b.orGone(cgroup.Thaw(b.group.Run))
}

func (b *box) Root() (*os.File, error) {
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/root", b.rec.PID), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, b.orGone(err)
	}
	select {
	case <-b.done: // or it could be another process's
		f.Close()
		return nil, errGone()
	default:
		return f, nil
	}
}

func (b *box) Kill(ctx context.Context) error {
	b.killing.Lock()
	defer b.killing.Unlock()
	if b.killed {
		return nil
	}
	if err := cgroup.Kill(b.group.Dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("killing a box: %w", err)
	}
	select {
	case <-b.done:
	case <-ctx.Done():
		return fault.New(fault.Deadline, "kill_slow", "waiting for the end of a box's processes: %w", ctx.Err())
	}
	b.wire.Close()
	b.pidfd.Close()
	if err := errors.Join(b.group.Remove(), os.RemoveAll(b.h.controlDir(b.rec.Slot))); err != nil {
		return fmt.Errorf("killing a box: %w", err)
	}
	b.killed = true
	b.h.freeSlot(b.rec.Slot)
	return nil
}
