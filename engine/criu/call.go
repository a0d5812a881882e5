package criu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/checkpoint-restore/go-criu/v7/rpc"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
	"github.com/boxwood-rl/boxwood/internal/thread"
)

const (
	versionLimit = 20 * time.Second
	// ownGrace is how much longer than CRIU's own limit a call may take, and
	// termGrace how long CRIU may take to end after SIGTERM.
	ownGrace  = 5 * time.Second
	termGrace = 5 * time.Second
	// replyMax is far above any reply of CRIU's.
	replyMax = 256 << 10
	// logMax is how much of a log is looked at.
	logMax = 64 << 10
)

// Error is a call that CRIU failed.
type Error struct {
	Doing string
	// Why is CRIU's own complaint, printable and short.
	Why string
	// Harmed: CRIU had to be stopped by force, or ended by itself, so that the tree
	// it was working on may not be what it was.
	Harmed bool
	// Late: a time limit passed.
	Late bool
}

func (e *Error) Error() string { return "CRIU: " + e.Doing + ": " + e.Why }

// Unwrap gives the fault by which callers tell what happened.
func (e *Error) Unwrap() error {
	if e.Late {
		return fault.New(fault.Deadline, "criu_time_limit", "CRIU: %s: %s", e.Doing, e.Why)
	}
	return fault.New(fault.Precondition, "criu_failed", "CRIU: %s: %s", e.Doing, e.Why)
}

// job is one call.
type job struct {
	doing string
	req   *rpc.CriuReq
	// files are handed to CRIU as descriptors 4, 5, ...; 3 is its socket.
	files []*os.File
	// cgroup is the v2 folder to run in, tasks the "tasks" files of v1 groups to join.
	cgroup string
	tasks  []int
	// apart: it gets a mount namespace of its own.
	apart bool
	// notify is called for each step that CRIU announces, while it waits.
	notify func(step string, pid int) error
	// logs is the folder that CRIU logs to; empty: none.
	logs string
}

const logName = "criu.log"

// worker is a CRIU that was started for one call.
type worker struct {
	cmd    *exec.Cmd
	conn   *os.File
	output *limited
	gone   chan struct{} // closed when it has ended
}

// call runs one job to its end. The process is gone when it returns.
func (p *Program) call(ctx context.Context, j job) (*rpc.CriuResp, error) {
	w, err := p.launch(j)
	if err != nil {
		return nil, err
	}
	return w.call(ctx, j)
}

// launch starts CRIU, which loads what it needs and waits for its call. Who gets a worker calls, or drops it.
func (p *Program) launch(j job) (*worker, error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	w := &worker{cmd: exec.Command(p.path, "swrk", "3"), conn: ours, output: &limited{}, gone: make(chan struct{})}
	cmd := w.cmd
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.ExtraFiles = append([]*os.File{theirs}, j.files...)
	cmd.Stdout, cmd.Stderr = w.output, w.output
	cmd.Dir = "/"
	cmd.WaitDelay = time.Second // a restored tree may hold what we read from
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if j.cgroup != "" {
		group, err := os.Open(j.cgroup)
		if err != nil {
			ours.Close()
			return nil, err
		}
		defer group.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(group.Fd())
	}
	if err := thread.Discard(func() error { return p.start(cmd, j) }); err != nil {
		ours.Close()
		return nil, fmt.Errorf("starting CRIU: %w", err)
	}
	go func() {
		cmd.Wait()
		close(w.gone)
	}()
	return w, nil
}

// drop ends a worker that nobody calls.
func (w *worker) drop() {
	w.conn.Close()
	w.cmd.Process.Kill() // it holds nothing yet
	<-w.gone
}

// inside runs f in the mount namespace of the worker.
func (w *worker) inside(f func() error) error {
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", w.cmd.Process.Pid))
	if err != nil {
		return err
	}
	defer ns.Close()
	return thread.Discard(func() error {
		if err := enter(ns); err != nil {
			return err
		}
		return f()
	})
}

// call makes the one call of a worker, and waits for its end.
func (w *worker) call(ctx context.Context, j job) (*rpc.CriuResp, error) {
	t := &talk{j: j, conn: w.conn, buf: make([]byte, replyMax)}
	resp, err := t.run(ctx)
	w.conn.Close()
	harmed := errors.Is(err, io.EOF) // it died with its work undone
	late := errors.Is(err, os.ErrDeadlineExceeded)
	if late {
		harmed = true
		w.cmd.Process.Signal(unix.SIGTERM)
	}
	select {
	case <-w.gone:
	case <-time.After(termGrace):
		harmed = true
		// It has been told to end, and holds the tree in a state that nobody knows.
		w.cmd.Process.Kill()
		<-w.gone
	}
	if err == nil {
		return resp, nil
	}
	// What it has started itself would outlive it: a process that it tries the kernel with sleeps for ever.
	unix.Kill(-w.cmd.Process.Pid, unix.SIGKILL)
	var remote refusal
	switch {
	case late:
		return nil, &Error{Doing: j.doing, Why: "it took longer than " + limitOf(ctx), Harmed: harmed, Late: true}
	case errors.As(err, &remote):
		return nil, &Error{Doing: j.doing, Why: complaint(j.logs, string(remote)), Harmed: harmed}
	case errors.Is(err, io.EOF):
		return nil, &Error{Doing: j.doing, Why: complaint(j.logs, "it ended unasked: "+w.output.String()), Harmed: true}
	}
	return nil, err // of notify
}

func limitOf(ctx context.Context) string {
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return "its caller waited"
	}
	return "its limit"
}

// start runs on a thread that ends when CRIU has been started.
func (p *Program) start(cmd *exec.Cmd, j job) error {
	for _, tasks := range j.tasks {
		if _, err := unix.Write(tasks, []byte("0")); err != nil {
			return fmt.Errorf("joining a v1 cgroup: %w", err)
		}
	}
	if err := enter(p.mounts); err != nil {
		return err
	}
	if j.apart {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("making a mount namespace: %w", err)
		}
	}
	return cmd.Start()
}

// enter takes this thread into a mount namespace.
func enter(ns *os.File) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil { // or setns is refused
		return err
	}
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("entering the mount namespace: %w", err)
	}
	return nil
}

func socketPair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "criu"), os.NewFile(uintptr(fds[1]), "criu's"), nil
}

// talk is the conversation of one job.
type talk struct {
	j    job
	conn *os.File
	buf  []byte
}

// refusal is CRIU's own message.
type refusal string

func (r refusal) Error() string { return string(r) }

func (t *talk) run(ctx context.Context) (*rpc.CriuResp, error) {
	if d, ok := ctx.Deadline(); ok {
		t.conn.SetReadDeadline(d.Add(ownGrace))
	}
	stop := context.AfterFunc(ctx, func() {
		if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
			t.conn.SetReadDeadline(time.Unix(1, 0))
		}
	})
	defer stop()
	if err := t.send(t.j.req); err != nil {
		return nil, err
	}
	var failed error // of notify: CRIU answers with a failure of its own then
	for {
		resp, err := t.receive()
		if err != nil {
			return nil, errors.Join(failed, err)
		}
		if resp.GetType() != rpc.CriuReqType_NOTIFY {
			if failed != nil {
				return nil, failed
			}
			if !resp.GetSuccess() {
				return nil, refusal(resp.GetCrErrmsg())
			}
			return resp, nil
		}
		if t.j.notify != nil && failed == nil {
			failed = t.j.notify(resp.GetNotify().GetScript(), int(resp.GetNotify().GetPid()))
		}
		ok := failed == nil
		if err := t.send(&rpc.CriuReq{Type: rpc.CriuReqType_NOTIFY.Enum(), NotifySuccess: &ok}); err != nil {
			return nil, errors.Join(failed, err)
		}
	}
}

func (t *talk) send(req *rpc.CriuReq) error {
	b, err := proto.Marshal(req)
	if err != nil {
		return err
	}
	if _, err := t.conn.Write(b); err != nil {
		if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
			return io.EOF
		}
		return err
	}
	return nil
}

func (t *talk) receive() (*rpc.CriuResp, error) {
	n, err := t.conn.Read(t.buf)
	switch {
	case err == nil && n == 0, errors.Is(err, unix.ECONNRESET):
		return nil, io.EOF
	case err != nil:
		return nil, err
	}
	resp := &rpc.CriuResp{}
	if err := proto.Unmarshal(t.buf[:n], resp); err != nil {
		return nil, fmt.Errorf("a reply of CRIU's: %w", err)
	}
	return resp, nil
}

// complaint is the first error in CRIU's log, or else what it said.
func complaint(logs, said string) string {
	if logs != "" {
		if f, err := os.Open(filepath.Join(logs, logName)); err == nil {
			defer f.Close()
			text, _ := io.ReadAll(io.LimitReader(f, logMax))
			for line := range strings.Lines(string(text)) {
				// "(00.012345)   pid: Error (file.c:123): words"
				if _, words, ok := strings.Cut(line, "Error ("); ok && !strings.Contains(words, "rlimit") {
					if _, after, ok := strings.Cut(words, "): "); ok {
						words = after
					}
					return short(words)
				}
			}
		}
	}
	if s := short(said); s != "" {
		return s
	}
	return "it failed without a word"
}

func short(s string) string {
	s = printable.Line(strings.TrimSpace(s))
	return s[:min(len(s), 300)]
}

// limited keeps the beginning of what is written.
type limited struct{ b []byte }

func (l *limited) Write(p []byte) (int, error) {
	l.b = append(l.b, p[:min(len(p), 4096-min(len(l.b), 4096))]...)
	return len(p), nil
}

func (l *limited) String() string { return string(l.b) }
