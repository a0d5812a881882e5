package service

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/engine/check"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/miniroot"
	"github.com/boxwood-rl/boxwood/internal/privileges"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// The tests of this package run a real daemon in a process of its own: this
// test binary, started again with daemonDir set.
const (
	daemonDir   = "BOXWOOD_TEST_DAEMON"
	rebuildPool = "BOXWOOD_TEST_REBUILD_POOL"
	smallPool   = "BOXWOOD_TEST_SMALL_POOL"
	breakAt     = "BOXWOOD_TEST_BREAK_AT" // see failpoint.Parse
	keepStates  = "BOXWOOD_TEST_KEEP"     // states that each tree keeps
	ignoreName  = "BOXWOOD_TEST_IGNORE"   // processes that count for nothing
	hookLimit   = "BOXWOOD_TEST_HOOKS"    // how long hooks may take
	verify      = "BOXWOOD_TEST_VERIFY"   // "files" or "memory" of every child
	forkBounds  = "BOXWOOD_TEST_FORKS"    // children on their way at once, and sandboxes
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(daemonDir); dir != "" {
		if err := runDaemon(dir); err != nil {
			fmt.Fprintln(os.Stderr, "daemon:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// A check mounts the pool for a moment. A daemon that another test starts just then must not get
	// a copy of that mount, which it would hold for as long as it lives.
	if os.Geteuid() == 0 {
		if err := engine.PrivateMounts(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	code := m.Run()
	for _, f := range shared.stop() {
		fmt.Fprintln(os.Stderr, "check of the shared daemon's state:", f)
		code = max(code, 1)
	}
	os.Exit(code)
}

func runDaemon(dir string) error {
	if err := engine.PrivateMounts(); err != nil {
		return err
	}
	if err := privileges.Drop(); err != nil && !errors.Is(err, privileges.ErrCgo) { // as under the race detector
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if at := os.Getenv(breakAt); at != "" {
		if err := arm(at); err != nil {
			return err
		}
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	o := engine.OpenOptions{PoolBytes: 4 << 30, Zygotes: 8, CRIU: testenv.CRIUPath(), Cgroup: "boxwood-test-" + filepath.Base(dir)}
	o.StateDir, o.Log, o.RebuildPool = dir, log, os.Getenv(rebuildPool) != ""
	if os.Getenv(smallPool) != "" {
		o.PoolBytes = 640 << 20
	}
	if limit := os.Getenv(hookLimit); limit != "" {
		var err error
		if o.HookLimit, err = time.ParseDuration(limit); err != nil {
			return err
		}
	}
	if bounds := os.Getenv(forkBounds); bounds != "" {
		if _, err := fmt.Sscan(bounds, &o.ForkQueue, &o.MaxSandboxes); err != nil {
			return err
		}
	}
	switch os.Getenv(verify) {
	case "files":
		o.Verify = 1
	case "memory":
		o.Paranoid = true
	}
	if name := os.Getenv(ignoreName); name != "" {
		o.IgnoreProcesses = []string{name}
	}
	if keep := os.Getenv(keepStates); keep != "" {
		n, err := strconv.Atoi(keep)
		if err != nil {
			return err
		}
		o.Retention = engine.Retention{Count: n, Every: 20 * time.Millisecond}
	}
	o2 := Options{Version: "test", Imports: Imports{filepath.Join(dir, "imports")}}
	accounts := exists(filepath.Join(dir, "clients.json"))
	if accounts {
		var err error
		if o2.Access, err = ReadAccess(filepath.Join(dir, "clients.json")); err != nil {
			return err
		}
		o.ClientWeights = o2.Access.Weights()
	}
	e, err := engine.Open(ctx, o)
	if err != nil {
		return err
	}
	l, err := Listen(filepath.Join(dir, "sock"), "")
	if err != nil {
		return err
	}
	overTCP := func(*Service) error { return nil }
	if accounts {
		overTCP = func(s *Service) error { return serveTCP(s, dir) }
	}
	service := New(e, log, o2)
	if err := overTCP(service); err != nil {
		return err
	}
	server := service.Server(nil)
	go func() { _ = server.Serve(l) }()
	fmt.Println("ready")
	go obey()
	<-ctx.Done()
	grace, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	Shutdown(grace, server)
	return e.Close(grace)
}

func arm(line string) error {
	step, how, nth, err := failpoint.Parse(line)
	if err != nil {
		return err
	}
	return failpoint.Arm(step, how, nth)
}

// obey takes the lines of standard input: "?" is answered by whether the armed step
// was hit, any other arms one.
func obey() {
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		switch err := error(nil); {
		case in.Text() == "?":
			fmt.Println(failpoint.Broken())
		default:
			err = arm(in.Text())
			fmt.Println("armed", err)
		}
	}
}

// daemon is a running daemon and a client of it.
type daemon struct {
	t      testing.TB
	dir    string
	cmd    *exec.Cmd
	log    *logTail
	conn   *grpc.ClientConn
	client boxwoodv1.BoxwoodClient
	image  string
	orders io.Writer
	said   chan string // its lines; closed when it has ended
}

// logTail keeps the end of the daemon's log for failures.
type logTail struct {
	mu    sync.Mutex
	lines []string
	race  []string // what the race detector said first: a daemon that is killed says so with no exit status
	done  chan struct{}
}

func (l *logTail) follow(r io.Reader) {
	defer close(l.done)
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		l.mu.Lock()
		if n := len(l.race); n > 0 && n < 60 || n == 0 && strings.Contains(sc.Text(), "WARNING: DATA RACE") {
			l.race = append(l.race, sc.Text())
		}
		if l.lines = append(l.lines, sc.Text()); len(l.lines) > 2000 {
			l.lines = l.lines[500:]
		}
		l.mu.Unlock()
	}
}

func (l *logTail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

// raced is what the race detector said of a daemon that has ended; empty: nothing.
func (l *logTail) raced() string {
	<-l.done
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.race, "\n")
}

// startDaemon starts a daemon on a state folder; empty: a fresh one, removed at
// the test's end.
func startDaemon(t testing.TB, dir string) *daemon {
	t.Helper()
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	if dir == "" {
		dir = stateDir(t)
	}
	d, err := launch(dir)
	if err != nil {
		t.Fatal(err)
	}
	d.t = t
	t.Cleanup(func() {
		d.stop()
		if t.Failed() {
			t.Logf("daemon's log:\n%s", d.log)
		}
	})
	return d
}

// stateDir is a folder on a real disk with a short path: unix sockets lie in it.
func stateDir(t testing.TB) string {
	dir, err := os.MkdirTemp("/var/tmp", "bw")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, f := range inspected(dir) {
			t.Error("check: ", f)
		}
		_ = os.RemoveAll(engine.FindRunDir(dir)) // that of a daemon that was killed
		_ = os.RemoveAll(dir)
	})
	return dir
}

// expected names, by state folder, the kinds of findings that a test brings about.
var expected sync.Map

// inspected holds a state folder against itself once its daemons have ended.
func inspected(dir string) []string {
	kind, _ := expected.Load(dir)
	return inspectedBut(dir, func(f check.Finding) bool { return f.Kind == kind })
}

func inspectedBut(dir string, fine func(check.Finding) bool) []string {
	if _, err := os.Stat(filepath.Join(dir, "tree")); err != nil {
		return nil // no daemon got that far
	}
	r, err := check.Run(context.Background(), check.Options{State: dir, Cgroup: "boxwood-test-" + filepath.Base(dir)})
	if err != nil {
		return []string{err.Error()}
	}
	var out []string
	for _, f := range r.Findings {
		if !fine(f) {
			out = append(out, f.String())
		}
	}
	return out
}

// starts is where commands with Pdeathsig are started: that signal comes when the thread ends that
// started them, and this one stays.
var starts = sync.OnceValue(func() chan<- func() {
	c := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range c {
			f()
		}
	}()
	return c
})

func startBound(cmd *exec.Cmd) error {
	done := make(chan error)
	starts() <- func() { done <- cmd.Start() }
	return <-done
}

func launch(dir string) (*daemon, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	d := &daemon{dir: dir, log: &logTail{done: make(chan struct{})}}
	d.cmd = exec.Command(self)
	d.cmd.Env = append(os.Environ(), daemonDir+"="+dir)
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	errs, err := d.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	out, err := d.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if d.orders, err = d.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := startBound(d.cmd); err != nil {
		return nil, err
	}
	go d.log.follow(errs)
	d.said = make(chan string, 16)
	go func() {
		defer close(d.said)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			d.said <- lines.Text()
		}
	}()
	select {
	case line := <-d.said:
		if line != "ready" {
			err = fmt.Errorf("the daemon didn't become ready: %q", line)
		}
	case <-time.After(60 * time.Second):
		err = fmt.Errorf("the daemon wasn't ready after 60 s")
	}
	if err == nil {
		d.conn, err = grpc.NewClient("unix://"+filepath.Join(dir, "sock"), grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage)))
	}
	if err != nil {
		_ = d.cmd.Process.Kill()
		<-d.log.done
		_ = d.cmd.Wait()
		return nil, fmt.Errorf("%w; log:\n%s", err, d.log)
	}
	d.client = boxwoodv1.NewBoxwoodClient(d.conn)
	return d, nil
}

// stop ends the daemon as an administrator would. Safe to call twice.
func (d *daemon) stop() {
	if d == nil || d.cmd == nil {
		return
	}
	_ = d.conn.Close()
	_ = d.cmd.Process.Signal(syscall.SIGTERM)
	done := make(chan struct{})
	go func() { _ = d.cmd.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(60 * time.Second):
		_ = d.cmd.Process.Signal(syscall.SIGQUIT) // its goroutines go to the log
		select {
		case <-done:
		case <-time.After(5 * time.Second):
			_ = d.cmd.Process.Kill()
			<-done
		}
		if d.t != nil {
			d.t.Errorf("the daemon didn't stop within 60 s; log:\n%s", d.log)
		}
	}
	if d.t != nil && !d.cmd.ProcessState.Success() && d.cmd.ProcessState.ExitCode() != -1 {
		d.t.Errorf("the daemon ended with %v", d.cmd.ProcessState)
	}
	d.noRace()
	d.cmd = nil
}

// tell gives the daemon a line and its answer; false if it has ended.
func (d *daemon) tell(line string) (string, bool) {
	_, _ = fmt.Fprintln(d.orders, line)
	select {
	case answer, alive := <-d.said:
		return answer, alive
	case <-time.After(30 * time.Second):
		return "no answer", true
	}
}

// kill ends the daemon in mid-work.
func (d *daemon) kill() {
	_ = d.cmd.Process.Kill() // before the connection ends, which would cancel turns
	_ = d.cmd.Wait()
	_ = d.conn.Close()
	d.noRace()
	d.cmd = nil
}

func (d *daemon) noRace() {
	if said := d.log.raced(); said != "" && d.t != nil {
		d.t.Errorf("the daemon: %s", said)
	}
}

// shared is one daemon for the tests that don't restart it.
var shared sharedDaemon

type sharedDaemon struct {
	once sync.Once
	d    *daemon
	dir  string
	err  error
}

func (s *sharedDaemon) stop() (findings []string) {
	if s.d != nil {
		s.d.stop()
		findings = inspected(s.dir)
		if said := s.d.log.raced(); said != "" {
			findings = append(findings, said)
		}
	}
	if s.dir != "" {
		_ = os.RemoveAll(s.dir)
	}
	return findings
}

// running gives the shared daemon, with the mini root imported.
func running(t testing.TB) *daemon {
	t.Helper()
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	shared.once.Do(func() {
		if shared.dir, shared.err = os.MkdirTemp("/var/tmp", "bw"); shared.err != nil {
			return
		}
		shared.d, shared.err = launch(shared.dir)
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	d := *shared.d
	d.t = t
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("daemon's log:\n%s", d.log)
		}
	})
	d.importRoot(t)
	return &d
}

func (d *daemon) importRoot(t testing.TB) {
	t.Helper()
	stream, err := d.client.ImportImage(ctx(t), &boxwoodv1.ImportImageRequest{Path: miniroot.Make(t), Name: "mini"})
	if err != nil {
		t.Fatal(err)
	}
	for {
		m, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal("importing the mini root: ", err)
		}
		if m.GetImage() != nil {
			d.image = m.GetImage().GetDigest()
		}
	}
}

// ctx bounds a test's calls.
func ctx(t testing.TB) context.Context {
	c, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	t.Cleanup(cancel)
	return c
}
