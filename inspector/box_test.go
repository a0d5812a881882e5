package inspector

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/btrfs"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/internal/thread"
)

// host is what all tests of this package share: a btrfs on a loop file, the
// program that does things, and a parent control group.
type host struct {
	pool, ways, cgroup string
	sleepers           string // what testdata/sleepers.c does
	lower              string // a layer of the image: /lw
	undo               []func()
}

// patience is how long a program may take before it is taken to hang.
const patience = 5 * time.Minute

// Where gcc takes minutes, what it would make is brought along.
var programs = flag.String("programs", "", "folder with the programs of testdata, built static; none: gcc builds them")

var (
	theHost  *host
	hostErr  error // why there is none
	hostOnce sync.Once
	boxes    atomic.Int32
)

func TestMain(m *testing.M) {
	// What whoever started the tests left open is no box's.
	if err := unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if theHost != nil {
		theHost.close()
	}
	os.Exit(code)
}

func (h *host) close() {
	for i := len(h.undo) - 1; i >= 0; i-- {
		h.undo[i]()
	}
}

func mustHost(t testing.TB) *host {
	t.Helper()
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	if *programs == "" {
		testenv.Require(t, testenv.Program("gcc"))
	}
	hostOnce.Do(func() {
		h := &host{}
		if hostErr = h.open(); hostErr != nil {
			h.close()
			return
		}
		theHost = h
	})
	if hostErr != nil {
		t.Fatal("making what all tests share: ", hostErr)
	}
	return theHost
}

func run(name string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %v: %w: %s", name, args, err, out)
	}
	return nil
}

func (h *host) open() error {
	dir, err := os.MkdirTemp("", "boxwood-inspector-")
	if err != nil {
		return err
	}
	h.undo = append(h.undo, func() { os.RemoveAll(dir) })
	built := *programs
	if built == "" {
		built = dir
		for _, name := range []string{"ways", "sleepers"} {
			if err := run("gcc", "-O1", "-w", "-static", "-pthread", "-o", filepath.Join(built, name), "testdata/"+name+".c"); err != nil {
				return err
			}
		}
	}
	h.ways, h.sleepers = filepath.Join(built, "ways"), filepath.Join(built, "sleepers")
	// On a file system of its own: layers must not lie within each other.
	h.lower = filepath.Join(dir, "lower")
	if err := os.Mkdir(h.lower, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", h.lower, "tmpfs", 0, "size=1m"); err != nil {
		return err
	}
	h.undo = append(h.undo, func() { unix.Unmount(h.lower, unix.MNT_DETACH) })
	if err := os.MkdirAll(filepath.Join(h.lower, "lw/tmp"), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(h.lower, "lw/file"), []byte("of the image"), 0o644); err != nil {
		return err
	}
	img := filepath.Join(dir, "img")
	h.pool = filepath.Join(dir, "pool")
	if err := os.Mkdir(h.pool, 0o755); err != nil {
		return err
	}
	if err := run("truncate", "-s", "2G", img); err != nil {
		return err
	}
	if err := run("mkfs.btrfs", "-q", "-m", "single", img); err != nil {
		return err
	}
	if err := run("mount", "-o", "loop,noatime,nobarrier", img, h.pool); err != nil {
		return err
	}
	h.undo = append(h.undo, func() { unix.Unmount(h.pool, unix.MNT_DETACH) })
	root, err := cgroupRoot()
	if err != nil {
		return err
	}
	h.cgroup = filepath.Join(root, fmt.Sprintf("boxwood-inspector-test-%d", os.Getpid()))
	if err := os.Mkdir(h.cgroup, 0o755); err != nil {
		return err
	}
	h.undo = append(h.undo, func() { os.Remove(h.cgroup) })
	return nil
}

// box is a stand-in for a sandbox: an overlay of the host's root and a clone of a
// snapshot, and a control group that turns run in.
type box struct {
	t       testing.TB
	h       *host
	name    string
	root    string
	subvol  string
	cgroup  string // .../run
	fd      *os.File
	subject Subject
	snaps   int
}

// mustBox makes one. seed fills the upper folder before the base is taken.
func mustBox(t testing.TB, seed func(upper string)) *box {
	t.Helper()
	h := mustHost(t)
	b := &box{t: t, h: h, name: fmt.Sprintf("b%d", boxes.Add(1))}
	pool := b.mustOpen(h.pool)
	b.subvol = filepath.Join(h.pool, b.name)
	b.must(btrfs.Create(pool, b.name+"-seed"))
	seedDir := filepath.Join(h.pool, b.name+"-seed")
	for _, d := range []string{"upper/w/d", "upper/w/e", "work"} {
		b.must(os.MkdirAll(filepath.Join(seedDir, d), 0o755))
	}
	b.must(run("cp", h.ways, h.sleepers, filepath.Join(seedDir, "upper")))
	w := filepath.Join(seedDir, "upper/w")
	for name, content := range map[string]string{
		"old": strings.Repeat("a", 8192), "other": strings.Repeat("b", 8192),
		"big": strings.Repeat("c", 1<<20), "empty": "", "x": "x", "d/f": "f",
	} {
		b.must(os.WriteFile(filepath.Join(w, name), []byte(content), 0o644))
	}
	b.must(unix.Setxattr(filepath.Join(w, "x"), "user.k", []byte("v"), 0))
	if seed != nil {
		seed(filepath.Join(seedDir, "upper"))
	}
	src := b.mustOpen(seedDir)
	b.must(btrfs.Sync(src))
	base := b.name + "-base0"
	b.must(btrfs.Snapshot(pool, base, src, true))
	b.must(btrfs.Snapshot(pool, b.name, src, false))
	src.Close()
	b.must(btrfs.Destroy(pool, b.name+"-seed"))
	t.Cleanup(func() {
		btrfs.Destroy(pool, base)
		btrfs.Destroy(pool, b.name)
		pool.Close()
	})
	b.mount()
	b.group()
	sub := b.mustOpen(b.subvol)
	id, err := btrfs.ID(sub)
	b.must(err)
	sub.Close()
	var st unix.Stat_t
	b.must(unix.Stat(b.cgroup, &st))
	b.subject = Subject{
		Cgroup: st.Ino, Upper: b.subvol + "/upper", Subvolume: id,
		Base: filepath.Join(h.pool, base, "upper"), Lower: []string{"/", h.lower}, Survivors: b.survivors,
	}
	// A change in the tick of the base's last change can't be told from it.
	for made := stamp(); stamp() == made; {
		runtime.Gosched()
	}
	return b
}

func (b *box) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) mustOpen(path string) *os.File {
	b.t.Helper()
	f, err := os.Open(path)
	b.must(err)
	return f
}

func (b *box) mount() {
	b.root = b.subvol + "-root"
	b.must(os.Mkdir(b.root, 0o755))
	b.must(unix.Mount("overlay", b.root, "overlay", unix.MS_NOATIME,
		fmt.Sprintf("lowerdir=%s:/,upperdir=%s/upper,workdir=%s/work,redirect_dir=on,metacopy=off,index=off,volatile", b.h.lower, b.subvol, b.subvol)))
	b.t.Cleanup(func() {
		unix.Unmount(b.root, unix.MNT_DETACH)
		os.Remove(b.root)
	})
	for _, m := range [][2]string{{"/dev", "/dev"}, {"/dev/pts", "/dev/pts"}, {"/proc", "/proc"}} {
		b.must(unix.Mount(m[0], b.root+m[1], "", unix.MS_BIND, ""))
		b.t.Cleanup(func() { unix.Unmount(b.root+m[1], unix.MNT_DETACH) })
	}
}

func (b *box) group() {
	slot := filepath.Join(b.h.cgroup, b.name)
	b.cgroup = filepath.Join(slot, "run")
	b.must(os.MkdirAll(b.cgroup, 0o755))
	f, err := os.Open(b.cgroup)
	b.must(err)
	b.fd = f
	b.t.Cleanup(func() {
		f.Close()
		b.kill()
		os.Remove(b.cgroup)
		os.Remove(slot)
	})
}

// kill ends everything in the box and waits until it is gone.
func (b *box) kill() {
	os.WriteFile(filepath.Join(b.cgroup, "cgroup.kill"), []byte("1"), 0)
	events := filepath.Join(b.cgroup, "cgroup.events")
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	unix.InotifyAddWatch(fd, events, unix.IN_MODIFY)
	for range 100 {
		data, _ := os.ReadFile(events)
		if !strings.Contains(string(data), "populated 1") {
			return
		}
		// The kernel's own kill spares processes whose first thread has ended.
		procs, _ := b.survivors()
		for _, p := range procs {
			_ = syscall.Kill(p.PID, syscall.SIGKILL)
		}
		unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100)
		unix.Read(fd, make([]byte, 4096))
	}
}

// survivors waits, as a sandbox does, for those that the kernel is taking down.
func (b *box) survivors() ([]Survivor, error) {
	for deadline := time.Now().Add(time.Minute); ; {
		data, err := os.ReadFile(filepath.Join(b.cgroup, "cgroup.procs"))
		if err != nil {
			return nil, err
		}
		var out []Survivor
		ending := false
		for _, f := range strings.Fields(string(data)) {
			pid, err := strconv.Atoi(f)
			if err != nil {
				return nil, err
			}
			cmdline, _ := os.ReadFile("/proc/" + f + "/cmdline")
			ending = ending || exiting(f)
			out = append(out, Survivor{PID: pid, HostPID: pid, Cmdline: cmdline})
		}
		if !ending || time.Now().After(deadline) {
			return out, nil
		}
	}
}

// exiting reports whether the kernel has begun to take each thread of a process down. One whose first thread alone has ended goes on.
func exiting(pid string) bool {
	const pfExiting = 0x4
	threads, _ := filepath.Glob("/proc/" + pid + "/task/*/stat")
	for _, thread := range threads {
		stat, err := os.ReadFile(thread)
		if err != nil {
			continue
		}
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(fields) < 7 {
			continue
		}
		if flags, err := strconv.ParseUint(fields[6], 10, 64); err == nil && flags&pfExiting == 0 {
			return false
		}
	}
	return true
}

// turn runs a program in the box to its end, in fresh uts, ipc, net and mount
// namespaces, and fails the test if the program does.
func (b *box) turn(argv ...string) {
	b.t.Helper()
	out, err := b.try(argv...)
	for _, why := range []string{"Function not implemented", "Operation not supported"} {
		if err != nil && strings.Contains(out, why) {
			testenv.Require(b.t, func() string { return "this kernel hasn't got it: " + out })
		}
	}
	if err != nil {
		b.t.Fatalf("%v: %v: %s", argv, err, out)
	}
}

// loopbackAlone gives this thread a network of its own, as sandboxes have.
func loopbackAlone() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, lo)
}

func (b *box) try(argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience+*loadFor)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Err = nil // the path is one of the box
	cmd.Dir = "/w"
	// Without a place in memory where the kernel says which processor a thread is on,
	// so that the oracle can compare memory.
	cmd.Env = []string{"GLIBC_TUNABLES=glibc.pthread.rseq=0", "STORM=" + strconv.FormatFloat(loadFor.Seconds(), 'f', 3, 64), "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME=/w"}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Chroot: b.root, UseCgroupFD: true, CgroupFD: int(b.fd.Fd()),
		Cloneflags: unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWNS,
	}
	var out strings.Builder
	r, w, err := os.Pipe()
	b.must(err)
	cmd.Stdout, cmd.Stderr = w, w
	start := func() error {
		if err := loopbackAlone(); err != nil {
			return err
		}
		return cmd.Start()
	}
	if err := thread.Discard(start); err != nil {
		r.Close()
		w.Close()
		return "", err
	}
	w.Close()
	err = cmd.Wait() // the pipe may stay open: a survivor holds it
	r.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
	buf := make([]byte, 64<<10)
	n, _ := r.Read(buf)
	out.Write(buf[:n])
	r.Close()
	return out.String(), err
}

// snapshot takes the next base, as a capture would.
func (b *box) snapshot() string {
	b.t.Helper()
	b.snaps++
	name := fmt.Sprintf("%s-base%d", b.name, b.snaps)
	pool, src := b.mustOpen(b.h.pool), b.mustOpen(b.subvol)
	defer pool.Close()
	defer src.Close()
	b.must(btrfs.Snapshot(pool, name, src, true))
	b.t.Cleanup(func() {
		pool, err := os.Open(b.h.pool)
		if err == nil {
			btrfs.Destroy(pool, name)
			pool.Close()
		}
	})
	return filepath.Join(b.h.pool, name, "upper")
}

func mustKernel(t testing.TB, o Options) *Kernel {
	t.Helper()
	mustHost(t)
	k, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	return k
}

func mustWatch(t testing.TB, k *Kernel, b *box) Watch {
	t.Helper()
	w, err := k.Watch(b.subject)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}
