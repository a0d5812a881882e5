package box

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/fault"
)

// what pid 1 is to start: a command, or a process of its own that does a transfer.
type what uint32

const (
	runCommand what = iota
	readFile
	writeFile
	unpack
	pack
)

// job is one process to start, and where its bytes come from and go to.
type job struct {
	what           what
	argv, env      []string
	cwd, user      string
	in             io.Reader // nil: /dev/null
	deadline       time.Time
	stdout, stderr func([]byte) error
}

func (b *box) Exec(ctx context.Context, c Command) (Exit, error) {
	if len(c.Argv) == 0 {
		return Exit{}, fault.New(fault.Invalid, "no_command", "a command needs at least its name")
	}
	j := job{what: runCommand, argv: c.Argv, env: b.environment(c.Env), cwd: c.Cwd, user: c.User,
		deadline: c.Deadline, stdout: sink(c.Stdout), stderr: sink(c.Stderr)}
	if len(c.Stdin) > 0 {
		j.in = bytes.NewReader(c.Stdin)
	}
	return b.run(ctx, j)
}

func sink(f func([]byte)) func([]byte) error {
	return func(p []byte) error {
		if f != nil {
			f(p)
		}
		return nil
	}
}

// environment adds what belongs to the box's identity, unless the command says otherwise.
func (b *box) environment(env []string) []string {
	for _, own := range [...]struct{ key, value string }{
		{"BOXWOOD_GENERATION=", b.rec.Generation}, {"BOXWOOD_SEED=", b.rec.Seed},
	} {
		if own.value == "" || hasKey(env, own.key) {
			continue
		}
		env = append(env[:len(env):len(env)], own.key+own.value)
	}
	return env
}

func hasKey(env []string, key string) bool {
	for _, e := range env {
		if strings.HasPrefix(e, key) {
			return true
		}
	}
	return false
}

// request encodes struct exec_head of init/wire.h and what follows it. It reads
// the first bytes of stdin.
func (j *job) request(first []byte) ([]byte, error) {
	size := len(j.cwd) + len(j.user) + 2
	for _, list := range [...][]string{{j.cwd, j.user}, j.argv, j.env} {
		for _, s := range list {
			size += len(s) + 1
			if strings.IndexByte(s, 0) >= 0 {
				return nil, fault.New(fault.Invalid, "nul_byte", "arguments, environment, user and folder of a command may not hold NUL bytes")
			}
		}
	}
	if n := len(j.argv) + len(j.env); n > wordsMax {
		return nil, fault.New(fault.Invalid, "command_too_large", "arguments and environment have %d words; a box takes %d", n, wordsMax).
			WithHint("write them into a file, or use stdin")
	}
	if size > requestMax-chunk-20 {
		return nil, fault.New(fault.Invalid, "command_too_large", "arguments and environment have %d bytes, which is more than Linux takes", size).
			WithHint("write it into a file, or use stdin")
	}
	var input uint32
	if j.in != nil {
		n, err := io.ReadFull(j.in, first)
		first = first[:n]
		switch {
		case err == nil:
			input = 2
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			input = 1
		default:
			return nil, err
		}
	} else {
		first = nil
	}
	body := make([]byte, 20, 20+size+len(first))
	for _, list := range [...][]string{{j.cwd, j.user}, j.argv, j.env} {
		for _, s := range list {
			body = append(append(body, s...), 0)
		}
	}
	for i, v := range [...]uint32{uint32(len(j.argv)), uint32(len(j.env)), uint32(j.what), input, uint32(len(body) - 20)} {
		binary.LittleEndian.PutUint32(body[4*i:], v)
	}
	return append(body, first...), nil
}

// buffers for packets; a box has one only while it runs something.
var buffers = sync.Pool{New: func() any { return new([headSize + chunk]byte) }}

// running is a job that pid 1 works on.
type running struct {
	b        *box
	job      job
	id       uint32
	exit     Exit
	err      error     // of the caller's reader or writer
	killedAt time.Time // zero: it goes on
}

// killPatience is how long a killed command may take to be reported. After that
// pid 1 is beyond help (a process in an endless system call), and the box is killed.
const killPatience = 10 * time.Second

func (b *box) run(ctx context.Context, j job) (Exit, error) {
	if err := b.use(); err != nil {
		return Exit{}, err
	}
	defer b.using.Unlock()
	if err := ctx.Err(); err != nil {
		return Exit{Cancelled: true, Code: -1}, nil
	}
	buf := buffers.Get().(*[headSize + chunk]byte)
	defer buffers.Put(buf)
	body, err := j.request(buf[headSize:])
	if err != nil {
		return Exit{}, err
	}
	start := time.Now()
	if _, spent := b.turnLeaf(); spent {
		if err := b.newLeaf(); err != nil {
			return Exit{}, b.orGone(err)
		}
	}
	b.jobs.Add(1)
	defer b.jobs.Add(1)
	r := &running{b: b, job: j, exit: Exit{Code: -1}}
	b.wire.SetReadDeadline(j.deadline)
	if r.id, err = b.wire.send(opExec, body); err != nil {
		return b.lost(r.exit, start), nil
	}
	if ctx.Done() != nil {
		woken := make(chan struct{})
		stop := context.AfterFunc(ctx, func() { b.wire.SetReadDeadline(time.Unix(1, 0)); close(woken) })
		defer func() {
			if !stop() {
				<-woken // or it would cut short what comes next
			}
		}()
	}
	for over := false; !over; {
		m, err := b.wire.receive(buf[:])
		switch {
		case err == nil:
			over, err = r.handle(m, buf[:])
		case errors.Is(err, os.ErrDeadlineExceeded):
			err = r.kill(ctx)
		}
		if err != nil {
			return b.lost(r.exit, start), nil
		}
	}
	ooms := b.group.OOMKills()
	r.exit.OOMKilled = ooms > b.ooms
	b.ooms = ooms
	if !r.killedAt.IsZero() {
		// Its main process is gone; the rest of what the turn started follows.
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), killPatience)
		defer cancel()
		leaf, _ := b.turnLeaf()
		if err := cgroup.Await(end, leaf, "populated", 0); err != nil {
			return b.lost(r.exit, start), nil
		}
	}
	r.exit.Wall = time.Since(start)
	return r.exit, r.err
}

// lost ends a box that doesn't answer, or answers nonsense.
func (b *box) lost(e Exit, start time.Time) Exit {
	cgroup.Kill(b.group.Dir)
	<-b.done
	e.Code, e.Signal, e.Lost, e.Wall = -1, 0, true, time.Since(start)
	return e
}

// kill is called when the deadline has passed or ctx is done, and again while
// the command isn't reported dead: it may not have been cloned at the first time.
func (r *running) kill(ctx context.Context) error {
	now := time.Now()
	switch {
	case !r.killedAt.IsZero():
		if now.Sub(r.killedAt) > killPatience {
			return errProtocol
		}
	case ctx.Err() != nil:
		r.exit.Cancelled = true
	case !r.job.deadline.IsZero() && !now.Before(r.job.deadline):
		r.exit.TimedOut = true
	}
	return r.killNow(now)
}

func (r *running) killNow(now time.Time) error {
	if r.killedAt.IsZero() {
		r.killedAt = now
	}
	r.b.wire.SetReadDeadline(now.Add(20 * time.Millisecond))
	_, err := r.b.killLeaf()
	return err
}

// handle takes one reply; true at the last one.
func (r *running) handle(m message, buf []byte) (bool, error) {
	if m.id != r.id || len(m.fds) > 0 {
		m.closeFDs()
		return true, errProtocol
	}
	switch m.kind {
	case replyStdout:
		return false, r.output(r.job.stdout, m.body)
	case replyStderr:
		return false, r.output(r.job.stderr, m.body)
	case replyWant:
		return false, r.feed(buf[headSize:])
	case replyExit:
		return true, r.ended(m.body)
	case replyError: // it couldn't be started, for lack of processes or memory
		r.exit.Code = 126
		return true, r.output(r.job.stderr, []byte("boxwood: can't start a process: "+printable(string(m.body))+"\n"))
	}
	return true, errProtocol
}

// output gives bytes to the caller. If he can't take them, the command ends.
func (r *running) output(to func([]byte) error, p []byte) error {
	if r.err != nil {
		return nil
	}
	if r.err = to(p); r.err != nil {
		return r.killNow(time.Now())
	}
	return nil
}

// feed sends the next bytes of stdin.
func (r *running) feed(buf []byte) error {
	if r.job.in == nil {
		return errProtocol
	}
	n, err := io.ReadFull(r.job.in, buf)
	flags := uint16(more)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		flags, err = 0, nil
	}
	if err != nil {
		r.err = err
		return r.killNow(time.Now())
	}
	return r.b.wire.sendAs(r.id, opStdin, flags, buf[:n])
}

// ended decodes struct exit_body of init/wire.h.
func (r *running) ended(body []byte) error {
	if len(body) != 24 {
		return errProtocol
	}
	code, signal := int32(binary.LittleEndian.Uint32(body)), int32(binary.LittleEndian.Uint32(body[4:]))
	if code < -1 || code > 255 || signal < 0 || signal > 64 || (code == -1) != (signal > 0) {
		return errProtocol
	}
	r.exit.Code, r.exit.Signal = int(code), int(signal)
	r.exit.CPU = time.Duration(min(binary.LittleEndian.Uint64(body[8:]), 1<<50)) * time.Microsecond
	r.b.count(binary.LittleEndian.Uint64(body[16:]))
	return nil
}

// errnoFault makes a failure of a transfer that says "ERRNO TEXT".
func errnoFault(line []byte) error {
	var n int
	text := printable(string(line))
	number, path, ok := strings.Cut(text, " ")
	if _, err := fmt.Sscan(number, &n); err != nil || !ok || n <= 0 || n > 4095 {
		return fault.New(fault.Internal, "transfer", "transferring a file: %s", text)
	}
	kind, reason := fault.Internal, "transfer"
	errno := unix.Errno(n)
	switch errno {
	case unix.ENOENT:
		kind, reason = fault.NotFound, "no_such_file"
	case unix.EACCES, unix.EPERM, unix.EROFS, unix.ETXTBSY:
		kind, reason = fault.Denied, "file_denied"
	case unix.EISDIR, unix.ENOTDIR, unix.EINVAL, unix.ENAMETOOLONG, unix.ELOOP, unix.EEXIST, unix.ENXIO, unix.EOVERFLOW:
		kind, reason = fault.Invalid, "bad_file"
	case unix.ENOSPC, unix.EDQUOT, unix.ENOMEM, unix.EMFILE, unix.ENFILE:
		kind, reason = fault.Exhausted, "no_space"
	}
	return fault.New(kind, reason, "%s: %w", path, errno)
}
