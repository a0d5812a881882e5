package box

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// A session is a program that lives on between commands and is told what to do on
// a private channel, which is its stdin: see init/session.c. What is said there is
// the caller's affair (engine/shell).

// SessionSpec is a session to start.
type SessionSpec struct {
	Name      string // unique in the box, 1 to 63 bytes
	Argv, Env []string
	Cwd, User string
	TTY       bool // stdout and stderr are its controlling terminal, else a pipe each
	Terminal  Terminal
	Umask     uint32
	// PID and PTS of a session that has to have the numbers it had: its pid in the box, and
	// that of its terminal. 0: any, and -1: any.
	PID, PTS int
}

// Terminal is the state of a terminal that doesn't belong to a program.
type Terminal struct {
	Rows, Cols uint16
	Termios    []byte // the kernel's struct termios2; nil: as a new terminal has it
}

// Session is a session of a box.
type Session struct {
	Name         string
	Number       int // never used again in one box
	PID, HostPID int
	TTY          bool
	PTS          int // of the terminal that it has or, without TTY, sets instead of one
	// inodes of its stdin, stdout and stderr, as far as they are no terminal.
	inodes [3]uint64
}

// Talk is one exchange with a session.
type Talk struct {
	Session string
	Say     []byte
	// Heard is called with what the session says back, in order, behind the output that
	// it had written before. It reports whether that was the end of the exchange.
	Heard func(p []byte) (over bool, err error)
	// Stdout and Stderr get what the session and its children write meanwhile; with
	// a terminal, all comes to Stdout. They must not block.
	Stdout, Stderr func([]byte)
	// Keys are typed into the terminal once the session has been told.
	Keys []byte
	// Deadline after which the exchange is interrupted; zero: none.
	Deadline time.Time
	// Changes: it may change something, and counts as a command. Interrupt is for such alone.
	Changes bool
}

// TalkEnd is how an exchange ended.
type TalkEnd struct {
	// Exit says how the session ended, if it did; else its Code means nothing. TimedOut and
	// Cancelled say what stopped the exchange.
	Exit
	Ended bool
	// Interrupted: what ran was sent SIGINT. Killed: that didn't help.
	Interrupted, Killed bool
}

// The steps by which an exchange is stopped: an interrupt, then the end of what was
// started since its beginning, then an interrupt for a shell that goes on, then the end of the session.
const (
	interruptPatience = 500 * time.Millisecond
	reportPatience    = 100 * time.Millisecond
	childrenPatience  = 500 * time.Millisecond
)

// Each interrupt freezes its session for a moment, no longer than freezePatience. However many are asked for, the session
// is heard in between, and goes on for nine tenths of the time.
const (
	interruptPause = 10 * time.Millisecond
	freezePatience = 500 * time.Millisecond
)

// sessions is what a box knows of its own.
type sessions struct {
	mu     sync.Mutex
	list   []Session
	next   int
	spared map[int]bool // processes of sessions that were there when the turn began, by host pid
	// interrupt asks the exchange that runs to send an interrupt; nil: none runs.
	interrupt func()
	typed     func(keys []byte) error // types into the terminal of the exchange that runs
	talking   string
}

func (b *box) sessionLeaf(number int) string { return fmt.Sprintf("%s/s%d", b.group.Run, number) }

// Sessions are those that haven't ended, in the order of their numbers.
func (b *box) Sessions() []Session {
	b.sessions.mu.Lock()
	defer b.sessions.mu.Unlock()
	return slices.Clone(b.sessions.list)
}

func (b *box) session(name string) (Session, error) {
	for _, s := range b.Sessions() {
		if s.Name == name {
			return s, nil
		}
	}
	return Session{}, fault.New(fault.NotFound, "no_session", "there is no session %q here", name).
		WithHint("open_session opens one; a shell that exits, or is killed since it can't be interrupted, ends its session")
}

func (b *box) forget(name string) {
	b.sessions.mu.Lock()
	defer b.sessions.mu.Unlock()
	b.sessions.list = slices.DeleteFunc(b.sessions.list, func(s Session) bool { return s.Name == name })
}

const sessionNameMax = 63

func checkSession(spec SessionSpec) error {
	if n := len(spec.Name); n == 0 || n > sessionNameMax || strings.ContainsFunc(spec.Name, func(r rune) bool { return r <= ' ' || r > '~' || r == '/' }) {
		return fault.New(fault.Invalid, "bad_session_name", "%q is no name for a session: 1 to %d printable characters without spaces and slashes", spec.Name, sessionNameMax)
	}
	if len(spec.Argv) == 0 || len(spec.Terminal.Termios) != 0 && len(spec.Terminal.Termios) != termiosSize {
		return fault.New(fault.Invalid, "bad_session", "a session needs a program, and terminal settings of %d bytes if any", termiosSize)
	}
	return nil
}

const (
	termiosSize     = 44
	sessionHeadSize = 8*4 + termiosSize + sessionNameMax + 1
	sessionSize     = 3*8 + 4*4 + sessionNameMax + 1 + 4*4 + termiosSize + 4
	anyPTS          = 1<<32 - 1
)

// OpenSession starts a session. Whether its program could be executed shows in the first exchange.
func (b *box) OpenSession(ctx context.Context, spec SessionSpec) (Session, error) {
	if err := checkSession(spec); err != nil {
		return Session{}, err
	}
	if err := b.use(); err != nil {
		return Session{}, err
	}
	defer b.using.Unlock()
	if _, err := b.session(spec.Name); err == nil {
		return Session{}, fault.New(fault.Exists, "session_exists", "there is a session %q already", spec.Name)
	}
	// What a turn starts beside the session has to be killed without it.
	if dir, _ := b.turnLeaf(); dir == b.group.Run {
		if err := b.freshLeaf(); err != nil {
			return Session{}, b.orGone(err)
		}
	}
	j := job{what: runCommand, argv: spec.Argv, env: b.environment(spec.Env), cwd: spec.Cwd, user: spec.User}
	request, err := j.request(nil)
	if err != nil {
		return Session{}, err
	}
	b.sessions.mu.Lock()
	b.sessions.next++
	number := b.sessions.next
	b.sessions.mu.Unlock()
	dir := b.sessionLeaf(number)
	if err := cgroup.MakeLeaf(dir, idBase(b.rec.Slot)); err != nil {
		return Session{}, b.orGone(err)
	}
	leaf, kill, err := cgroup.OpenLeaf(dir)
	if err != nil {
		return Session{}, b.orGone(err)
	}
	defer closeAll([]int{leaf, kill})
	b.jobs.Add(1)
	defer b.jobs.Add(1)
	m, err := b.ask(ctx, opOpen, append(spec.head(number), request...), replyOpened, leaf)
	if err != nil {
		unix.Rmdir(dir)
		return Session{}, fmt.Errorf("opening session %q: %w", spec.Name, b.orGone(err))
	}
	s, rest := decodeSession(m)
	if len(rest) > 0 {
		return Session{}, errProtocol
	}
	s.Name = spec.Name
	if pids, err := cgroup.Pids(dir); err == nil && len(pids) > 0 {
		s.HostPID = pids[0] // nobody else is there yet
	} // else it has ended already, which its first exchange tells
	b.sessions.mu.Lock()
	b.sessions.list = append(b.sessions.list, s)
	b.sessions.mu.Unlock()
	return s, nil
}

// head encodes struct session_head of init/wire.h.
func (spec *SessionSpec) head(number int) []byte {
	h := make([]byte, 0, sessionHeadSize+128)
	u32 := func(v uint32) { h = binary.LittleEndian.AppendUint32(h, v) }
	flag := func(ok bool) uint32 {
		if ok {
			return 1
		}
		return 0
	}
	pts := uint32(anyPTS)
	if spec.PTS >= 0 {
		pts = uint32(spec.PTS)
	}
	for _, v := range []uint32{uint32(number), uint32(spec.PID), flag(spec.TTY), pts,
		uint32(spec.Terminal.Rows), uint32(spec.Terminal.Cols), spec.Umask, flag(spec.Terminal.Termios != nil)} {
		u32(v)
	}
	h = append(h, spec.Terminal.Termios...)
	h = append(h, make([]byte, termiosSize-len(spec.Terminal.Termios))...)
	h = append(h, spec.Name...)
	return append(h, make([]byte, sessionNameMax+1-len(spec.Name))...)
}

// decodeSession takes one struct session_body off a reply, which is hostile.
func decodeSession(p []byte) (s Session, rest []byte) {
	if len(p) < sessionSize {
		return s, p
	}
	u32 := func(at int) int { return int(binary.LittleEndian.Uint32(p[at:])) }
	name, _, _ := strings.Cut(string(p[40:40+sessionNameMax+1]), "\x00")
	s = Session{Name: name, Number: u32(24), PID: u32(28), TTY: u32(32) != 0, PTS: u32(36)}
	for i := range s.inodes {
		s.inodes[i] = binary.LittleEndian.Uint64(p[8*i:])
	}
	return s, p[sessionSize:]
}

// ask sends one request and returns the body of its one reply. Who holds using calls it.
func (b *box) ask(ctx context.Context, o op, body []byte, want kind, fds ...int) ([]byte, error) {
	deadline := time.Now().Add(stepLimit)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	b.wire.SetReadDeadline(deadline)
	defer b.wire.SetReadDeadline(time.Time{})
	id, err := b.wire.send(o, body, fds...)
	if err != nil {
		return nil, err
	}
	buf := buffers.Get().(*[headSize + chunk]byte)
	defer buffers.Put(buf)
	m, err := b.wire.expect(buf[:], id, want, 0)
	if err != nil {
		return nil, err
	}
	return slices.Clone(m.body), nil
}

// TerminalOf reads the settings of a session's terminal, and how many keys wait there
// that nobody has read. A session without one has none.
func (b *box) TerminalOf(ctx context.Context, name string) (Terminal, int, error) {
	s, err := b.session(name)
	if err != nil {
		return Terminal{}, 0, err
	}
	if !s.TTY {
		return Terminal{}, 0, nil
	}
	if err := b.use(); err != nil {
		return Terminal{}, 0, err
	}
	defer b.using.Unlock()
	p, err := b.ask(ctx, opSessions, nil, replySessions)
	if err != nil {
		return Terminal{}, 0, b.orGone(err)
	}
	for len(p) >= sessionSize {
		found, rest := decodeSession(p)
		if at := 40 + sessionNameMax + 1; found.Number == s.Number {
			u32 := func(i int) uint32 { return binary.LittleEndian.Uint32(p[at+4*i:]) }
			if u32(2) == 0 {
				break
			}
			return Terminal{Rows: uint16(u32(0)), Cols: uint16(u32(1)), Termios: slices.Clone(p[at+16 : at+16+termiosSize])}, int(int32(u32(3))), nil
		}
		p = rest
	}
	return Terminal{}, 0, fmt.Errorf("reading the terminal of session %q: %w", name, errProtocol)
}

// CloseSession ends a session and all that it has started. One that isn't there is NotFound.
func (b *box) CloseSession(ctx context.Context, name string) error {
	s, err := b.session(name)
	if err != nil {
		return err
	}
	if err := b.use(); err != nil {
		return err
	}
	defer b.using.Unlock()
	return b.endSession(ctx, s)
}

func (b *box) endSession(ctx context.Context, s Session) error {
	dir := b.sessionLeaf(s.Number)
	if err := cgroup.Kill(dir); err != nil {
		return b.orGone(err)
	}
	if err := cgroup.Await(ctx, dir, "populated", 0); err != nil {
		return b.orGone(err)
	}
	b.forget(s.Name)
	unix.Rmdir(dir)
	return nil
}

// Interrupt sends SIGINT to what runs in a session's foreground; false: nothing runs there.
func (b *box) Interrupt(name string) (bool, error) {
	if _, err := b.session(name); err != nil {
		return false, err
	}
	b.sessions.mu.Lock()
	defer b.sessions.mu.Unlock()
	if b.sessions.interrupt == nil || b.sessions.talking != name {
		return false, nil
	}
	b.sessions.interrupt()
	return true, nil
}

// Type types keys into the terminal of the session that an exchange which changes something runs in, and gives it a size unless
// rows is 0; false: none runs there. What the terminal has no room for is lost.
func (b *box) Type(name string, keys []byte, rows, cols uint16) (bool, error) {
	s, err := b.session(name)
	if err != nil {
		return false, err
	}
	if !s.TTY {
		return false, fault.New(fault.Invalid, "no_terminal", "session %s has no terminal to type into", name)
	}
	b.sessions.mu.Lock()
	defer b.sessions.mu.Unlock()
	if b.sessions.typed == nil || b.sessions.talking != name {
		return false, nil
	}
	if rows > 0 {
		if err := resize(s, rows, cols); err != nil {
			return false, fmt.Errorf("resizing the terminal of session %s: %w", name, err)
		}
	}
	if len(keys) == 0 {
		return true, nil
	}
	return true, b.orGone(b.sessions.typed(keys))
}

// resize opens a session's terminal as the session sees it. What lies there is the box's own, and may be anything.
func resize(s Session, rows, cols uint16) error {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", s.HostPID), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	at, err := unix.Openat2(root, fmt.Sprintf("dev/pts/%d", s.PTS), &unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		return err
	}
	defer unix.Close(at)
	var st unix.Stat_t
	if err := unix.Fstat(at, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || unix.Major(st.Rdev) != ptsMajor {
		return fault.New(fault.Precondition, "no_terminal", "what lies there is no terminal")
	}
	tty, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", at), unix.O_RDONLY|unix.O_NOCTTY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(tty)
	return unix.IoctlSetWinsize(tty, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols})
}

// ptsMajor is the first of the kernel's numbers for the ends of terminals that programs have; the others belong to such as have more
// than a million.
const ptsMajor = 136

// spare remembers what runs in sessions at a turn's beginning.
func (b *box) spare() {
	b.sessions.mu.Lock()
	defer b.sessions.mu.Unlock()
	b.sessions.spared = map[int]bool{}
	for _, s := range b.sessions.list {
		pids, err := cgroup.Pids(b.sessionLeaf(s.Number))
		if err != nil {
			continue
		}
		for _, pid := range pids {
			b.sessions.spared[pid] = true
		}
	}
}

// killStarted kills what sessions have started in this turn, and leaves the sessions.
func (b *box) killStarted(ctx context.Context) error {
	var errs []error
	b.sessions.mu.Lock()
	list, spared := slices.Clone(b.sessions.list), b.sessions.spared
	b.sessions.mu.Unlock()
	for _, s := range list {
		errs = append(errs, b.killChildren(ctx, s, spared))
	}
	return errors.Join(errs...)
}

// killChildren kills all in a session's group but the session and what is spared. They are frozen
// while they are killed, or one that forks fast enough would get away.
func (b *box) killChildren(ctx context.Context, s Session, spared map[int]bool) error {
	dir := b.sessionLeaf(s.Number)
	others := func() (out []int, err error) {
		pids, err := cgroup.Pids(dir)
		for _, pid := range pids {
			if pid != s.HostPID && !spared[pid] {
				out = append(out, pid)
			}
		}
		return out, err
	}
	pids, err := others()
	if err != nil || len(pids) == 0 {
		return b.orGone(err)
	}
	if err := cgroup.Freeze(ctx, dir); err != nil {
		return b.orGone(err)
	}
	pids, err = others()
	for _, pid := range pids { // frozen, so that no pid is another process's now
		unix.Kill(pid, unix.SIGKILL)
	}
	return b.orGone(errors.Join(err, cgroup.Thaw(dir)))
}

// reads reports whether a session is at what it is told. One without a stdin runs what has closed it: the shell itself
// only ever puts one in another's place.
func reads(s Session) bool {
	link, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/0", s.HostPID))
	if errors.Is(err, os.ErrNotExist) {
		return false
	}
	return err != nil || link == fmt.Sprintf("socket:[%d]", s.inodes[0])
}

// member is a process in a session's group, by what /proc/PID/stat says on the host.
type member struct {
	pid, parent, group int
	stopped            bool
	start              uint64
}

func (b *box) members(s Session) (all []member) {
	pids, _ := cgroup.Pids(b.sessionLeaf(s.Number))
	for _, pid := range pids {
		stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		f := statFields(stat)
		if len(f) < 20 {
			continue
		}
		m := member{pid: pid, stopped: f[0] == "T"}
		m.parent, _ = strconv.Atoi(f[1])
		m.group, _ = strconv.Atoi(f[2])
		m.start, _ = strconv.ParseUint(f[19], 10, 64)
		all = append(all, m)
	}
	return all
}

// foreground is the process group in a session's foreground, as far as the kernel knows; 0: none.
func foreground(s Session) int {
	if !s.TTY {
		return s.HostPID
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.HostPID))
	fields := statFields(stat)
	if err != nil || len(fields) < 6 {
		return 0
	}
	group, _ := strconv.Atoi(fields[5])
	return group
}

// interruptGroup sends SIGINT to a process group. What is stopped takes no signal before it goes on.
func interruptGroup(group int, all []member) bool {
	if group <= 1 || unix.Kill(-group, unix.SIGINT) != nil {
		return false
	}
	if slices.ContainsFunc(all, func(m member) bool { return m.group == group && m.stopped }) && !sabotage.On("reach") {
		unix.Kill(-group, unix.SIGCONT)
	}
	return true
}

// job is the process group that a shell without a terminal may be waiting for in the foreground, other than its own; 0: none.
// A job of set -m has one, and what makes itself one, as timeout does. Nobody but the shell knows what it
// waits for, but it can only be the last that it has started.
func (k *talk) job(all []member) int {
	if k.session.TTY || sabotage.On("reach") {
		return 0
	}
	shell, last := k.session.HostPID, member{}
	for _, m := range all {
		if m.parent == shell && !k.spared[m.pid] && (m.start > last.start || m.start == last.start && m.pid > last.pid) {
			last = m
		}
	}
	if last.group == shell {
		return 0
	}
	return last.group
}

// waiting reports whether a process is blocked in wait4.
func waiting(pid int) bool {
	call, err := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", pid))
	return err == nil && strings.HasPrefix(string(call), fmt.Sprintf("%d ", unix.SYS_WAIT4))
}

// interruptPending reports whether a process hasn't yet taken a SIGINT that it was sent.
func interruptPending(pid int) bool {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "ShdPnd:"); ok {
			signals, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
			return err == nil && signals&(1<<(unix.SIGINT-1)) != 0
		}
	}
	return false
}

// talk is an exchange that pid 1 works on.
type talk struct {
	b       *box
	session Session
	Talk
	id      uint32
	end     TalkEnd
	rest    []byte
	keys    []byte
	asked   chan struct{} // an interrupt, until it is sent
	next    time.Time     // when it may be; never zero, which would be no deadline
	stopped time.Time     // when the first step of stopping was taken; zero: it goes on
	due     time.Time     // when the next one is
	step    int
	struck  bool // the shell was sent the interrupt that is asked for; the job that it may wait for wasn't
	left    bool // it was told that the exchange is over
	over    bool // so Heard said
	err     error
	spared  map[int]bool
}

// Talk says something to a session and hears its answer to the end. Cancelling ctx
// stops it as its deadline does. One that can't be stopped ends with its session.
func (b *box) Talk(ctx context.Context, t Talk) (TalkEnd, error) {
	s, err := b.session(t.Session)
	if err != nil {
		return TalkEnd{}, err
	}
	if err := b.use(); err != nil {
		return TalkEnd{}, err
	}
	defer b.using.Unlock()
	buf := buffers.Get().(*[headSize + chunk]byte)
	defer buffers.Put(buf)
	start := time.Now()
	k := &talk{b: b, session: s, Talk: t, rest: t.Say, keys: t.Keys, asked: make(chan struct{}, 1), next: time.Unix(1, 0), spared: map[int]bool{}}
	k.end.Code = -1
	if pids, err := cgroup.Pids(b.sessionLeaf(s.Number)); err == nil {
		for _, pid := range pids {
			k.spared[pid] = true
		}
	}
	b.jobs.Add(1)
	defer b.jobs.Add(1)
	body := binary.LittleEndian.AppendUint32(nil, uint32(s.Number))
	changes := uint32(0)
	if t.Changes {
		changes = 1
	}
	b.wire.SetReadDeadline(t.Deadline)
	defer b.wire.SetReadDeadline(time.Time{})
	if k.id, err = b.wire.send(opAttend, binary.LittleEndian.AppendUint32(body, changes)); err != nil {
		return TalkEnd{Exit: b.lost(k.end.Exit, start), Ended: true}, nil
	}
	wake := func() { b.wire.SetReadDeadline(time.Unix(1, 0)) }
	if t.Changes {
		b.sessions.mu.Lock()
		b.sessions.talking = s.Name
		b.sessions.interrupt = func() {
			if k.ask() {
				wake()
			}
		}
		b.sessions.typed = func(keys []byte) error { return b.wire.sendAs(k.id, opType, 0, keys) }
		b.sessions.mu.Unlock()
		defer func() {
			b.sessions.mu.Lock()
			b.sessions.talking, b.sessions.interrupt, b.sessions.typed = "", nil, nil
			b.sessions.mu.Unlock()
		}()
	}
	if ctx.Done() != nil {
		woken := make(chan struct{})
		stop := context.AfterFunc(ctx, func() { wake(); close(woken) })
		defer func() {
			if !stop() {
				<-woken
			}
		}()
	}
	for !k.left {
		m, err := b.wire.receive(buf[:])
		switch {
		case err == nil:
			err = k.handle(m)
		case errors.Is(err, os.ErrDeadlineExceeded):
			err = k.stop(ctx)
		}
		if err != nil {
			return TalkEnd{Exit: b.lost(k.end.Exit, start), Ended: true}, nil
		}
	}
	ooms := b.group.OOMKills()
	k.end.OOMKilled = ooms > b.ooms
	b.ooms = ooms
	if k.end.Ended {
		// What it started goes with it: nobody could speak of it any more.
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), killPatience)
		defer cancel()
		if err := b.endSession(stop, s); err != nil {
			return TalkEnd{Exit: b.lost(k.end.Exit, start), Ended: true}, nil
		}
	}
	k.end.Wall = time.Since(start)
	return k.end, k.err
}

func (k *talk) handle(m message) error {
	if m.id != k.id || len(m.fds) > 0 {
		m.closeFDs()
		return errProtocol
	}
	out := func(to func([]byte)) error {
		if to != nil && !k.over {
			to(m.body)
		}
		return nil
	}
	switch m.kind {
	case replyStdout:
		return out(k.Stdout)
	case replyStderr:
		return out(k.Stderr)
	case replyWant:
		return k.say()
	case replyHeard:
		if k.over {
			return nil
		}
		over, err := k.Heard(m.body)
		if k.err = err; over || err != nil {
			k.over = true
			return k.b.wire.sendAs(k.id, opLeave, 0, nil)
		}
		return nil
	case replyLeft:
		if !k.over || len(m.body) != 24 {
			return errProtocol
		}
		k.b.starts.Store(binary.LittleEndian.Uint64(m.body[16:]))
		k.left = true
		return nil
	case replyExit:
		r := running{b: k.b, exit: k.end.Exit}
		if err := r.ended(m.body); err != nil {
			return err
		}
		k.end.Exit, k.end.Ended, k.left = r.exit, true, true
		return nil
	case replyError: // pid 1 knows no such session: it ended while nobody looked
		k.end.Ended, k.left = true, true
		return nil
	}
	return errProtocol
}

func (k *talk) say() error {
	if len(k.rest) > 0 {
		n := min(len(k.rest), chunk)
		p := k.rest[:n]
		k.rest = k.rest[n:]
		return k.b.wire.sendAs(k.id, opStdin, more, p)
	}
	for len(k.keys) > 0 {
		n := min(len(k.keys), 4096)
		if err := k.b.wire.sendAs(k.id, opType, 0, k.keys[:n]); err != nil {
			return err
		}
		k.keys = k.keys[n:]
		if k.b.rec.Wire >= 3 {
			return nil // it says when it wants more
		}
	}
	return nil
}

// ask asks for an interrupt; false: one is asked for already.
func (k *talk) ask() bool {
	select {
	case k.asked <- struct{}{}:
		return true
	default:
		return false
	}
}

// stop takes the next step, each time that the one before hasn't helped in its time. However many interrupts are asked for, they
// neither put off a step nor bring one on.
func (k *talk) stop(ctx context.Context) error {
	if len(k.asked) > 0 && !time.Now().Before(k.next) {
		if err := k.strike(); err != nil {
			return err
		}
	}
	now := time.Now()
	switch {
	case !k.stopped.IsZero() && now.Before(k.due):
		k.wait(k.due)
		return nil
	case !k.stopped.IsZero():
	case ctx.Err() != nil:
		k.end.Cancelled = true
		k.stopped = now
	case !k.Deadline.IsZero() && !now.Before(k.Deadline):
		k.end.TimedOut = true
		k.stopped = now
	default: // woken for the interrupt, or for nothing
		k.wait(k.Deadline)
		if ctx.Err() != nil { // since it was asked
			k.wait(time.Unix(1, 0))
		}
		return nil
	}
	k.step++
	switch k.step {
	case 1:
		return k.strikeAndWait(interruptPatience)
	case 2:
		k.end.Killed = true
		limit, cancel := context.WithTimeout(context.Background(), childrenPatience)
		defer cancel()
		if err := k.b.killChildren(limit, k.session, k.spared); err != nil && !fault.Is(err, fault.Deadline) {
			return err
		}
		k.wait(time.Now().Add(reportPatience))
		return nil
	case 3: // it goes on with what comes next in its list
		return k.strikeAndWait(childrenPatience)
	}
	if now.Sub(k.stopped) > interruptPatience+childrenPatience+reportPatience+childrenPatience+killPatience {
		return errProtocol
	}
	k.wait(now.Add(20 * time.Millisecond))
	return cgroup.Kill(k.b.sessionLeaf(k.session.Number))
}

// strike sends an interrupt that is asked for, if something runs that it could hit. The session is looked at frozen: what it
// was doing, it takes the signal before it goes on.
func (k *talk) strike() error {
	begun := time.Now()
	dir := k.b.sessionLeaf(k.session.Number)
	limit, cancel := context.WithTimeout(context.Background(), freezePatience)
	defer cancel()
	err := cgroup.Freeze(limit, dir)
	if err == nil && k.hit() {
		<-k.asked
	}
	if fault.Is(err, fault.Deadline) {
		err = nil
	}
	took := time.Since(begun)
	k.next = begun.Add(took + max(9*took, interruptPause))
	return k.b.orGone(errors.Join(err, cgroup.Thaw(dir)))
}

// hit sends SIGINT to what runs in the foreground of a frozen session, and reports whether that is all; else it is to look again.
//
// A shell that reads what it is told would lose a part of the line that it is at, and run the rest. Then its stdin is its
// channel, and while it runs a command it is something else.
//
// A job in a group of its own is in the foreground if the shell goes on waiting once it has taken the interrupt: one that runs
// wait, or something beside a job in the background, doesn't.
func (k *talk) hit() (done bool) {
	shell, all := k.session.HostPID, k.b.members(k.session)
	reading := reads(k.session) && !sabotage.On("strike")
	switch {
	case k.struck && interruptPending(shell):
		return false
	case k.struck:
		if !reading && waiting(shell) {
			interruptGroup(k.job(all), all)
		}
		k.struck = false
		return true
	case reading:
		if slices.ContainsFunc(all, func(m member) bool { return m.pid == shell && m.stopped }) {
			unix.Kill(shell, unix.SIGCONT) // or it will never run anything that could be interrupted
		}
		return false
	case !interruptGroup(foreground(k.session), all):
		return false
	}
	k.end.Interrupted = true
	k.struck = k.job(all) != 0
	return !k.struck
}

// strikeAndWait is a step: what is interrupted has its time from then on, however long that took on a busy host.
func (k *talk) strikeAndWait(patience time.Duration) error {
	k.ask()
	err := k.strike()
	if k.session.TTY && len(k.rest) == 0 && err == nil {
		err = k.b.wire.sendAs(k.id, opType, 0, nil) // what waits for a terminal that a key has stopped could end no other way
	}
	k.wait(time.Now().Add(patience))
	return err
}

// wait has stop called at a time, or as soon as an interrupt that is asked for may be sent.
func (k *talk) wait(until time.Time) {
	k.due = until
	k.b.wire.SetReadDeadline(until)
	// By who set a deadline just before, or again, as nothing ran that it could hit.
	if len(k.asked) > 0 && (until.IsZero() || k.next.Before(until)) {
		k.b.wire.SetReadDeadline(k.next)
	}
}

// house gives a session that was restored with everything else a group of its own. What it had
// started stays where it is.
func (b *box) house(s Session) error {
	dir := b.sessionLeaf(s.Number)
	err := cgroup.MakeLeaf(dir, idBase(b.rec.Slot))
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	if err == nil && s.HostPID > 0 {
		err = os.WriteFile(dir+"/cgroup.procs", []byte(strconv.Itoa(s.HostPID)), 0)
	}
	if err != nil {
		return fmt.Errorf("giving session %s a group: %w", s.Name, err)
	}
	return nil
}

// findSessions asks a pid 1 that has had another daemon for its sessions.
func (b *box) findSessions(ctx context.Context) error {
	p, err := b.ask(ctx, opSessions, nil, replySessions)
	if err != nil {
		return err
	}
	for len(p) >= sessionSize {
		var s Session
		s, p = decodeSession(p)
		if checkSession(SessionSpec{Name: s.Name, Argv: []string{""}}) != nil || s.Number <= 0 || s.Number > 1<<30 {
			return errProtocol
		}
		pids, err := cgroup.Pids(b.group.Run)
		if err != nil {
			return err
		}
		for _, pid := range pids {
			if q, ok := readProc(pid); ok && q.PID == s.PID {
				s.HostPID = pid
			}
		}
		if inodes, restored := b.rec.Channels[s.Number]; restored {
			s.inodes = inodes
		}
		if err := b.house(s); err != nil {
			return err
		}
		b.sessions.list = append(b.sessions.list, s)
		b.sessions.next = max(b.sessions.next, s.Number)
	}
	if len(p) > 0 {
		return errProtocol
	}
	// Numbers aren't used again, and their groups may be there still.
	entries, err := os.ReadDir(b.group.Run)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if n, err := strconv.Atoi(strings.TrimPrefix(e.Name(), "s")); err == nil && strings.HasPrefix(e.Name(), "s") {
			b.sessions.next = max(b.sessions.next, n)
		}
	}
	slices.SortFunc(b.sessions.list, func(x, y Session) int { return x.Number - y.Number })
	return nil
}
