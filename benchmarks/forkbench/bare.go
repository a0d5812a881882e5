package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/checkpoint-restore/go-criu/v7/rpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/doctor"
	"github.com/boxwood-rl/boxwood/internal/thread"
)

// bare is CRIU by itself: what it takes to restore and to dump the processes that Boxwood
// forks and captures, with nothing around it. Each call goes to a `criu swrk` that is
// running already and gets the options that Boxwood gives; the root is a plain folder, and
// nobody clones, watches, or looks at what came out.
type bare struct {
	criu     string
	group    string   // v2 folder that restored processes are born in
	mounts   *os.File // the mount namespace that calls start from
	memory   string   // a folder of a tmpfs, where dumps are
	images   string   // of the dump that is restored, in there: CRIU writes beside them
	listener uint64   // inode of pid 1's socket
}

// place is where a call finds its folders: a tmpfs in a mount namespace of its own,
// which root of a sandbox can look into.
const place = "/mnt"

// newBare prepares restores of a dump onto root.
func newBare(root, group, dump string) *bare {
	memory := filepath.Join("/dev/shm", group)
	b := &bare{criu: doctor.FindCRIU(), memory: memory, images: filepath.Join(memory, "images")}
	if b.criu == "" {
		must(fmt.Errorf("CRIU is missing: make setup"))
	}
	text, err := os.ReadFile(filepath.Join(dump, "dump.json"))
	must(err)
	var about struct{ Listener uint64 }
	must(json.Unmarshal(text, &about))
	b.listener = about.Listener
	must(os.Mkdir(memory, 0o755))
	must(os.CopyFS(b.images, os.DirFS(filepath.Join(dump, "images"))))
	mounts, err := cgroup.FindMounts("/proc/self/mountinfo")
	must(err)
	b.group = filepath.Join(mounts.V2, group)
	must(os.MkdirAll(b.group, 0o755))
	for _, dir := range []string{"proc", "dev", "sys", "run/box", "dev/shm"} {
		must(os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	must(os.WriteFile(filepath.Join(root, "etc/machine-id"), nil, 0o644))
	onThread(func() error { return b.makeMounts(root) })
	return b
}

func (b *bare) close() {
	must(os.Remove(b.group))
	must(os.RemoveAll(b.memory))
}

// onThread runs f on a thread that ends with it.
func onThread(f func() error) { must(thread.Discard(f)) }

func (b *bare) makeMounts(root string) error {
	mount := func(from, to, kind string, flags uintptr, data string) {
		if err := unix.Mount(from, to, kind, flags, data); err != nil {
			must(fmt.Errorf("mounting %s: %w", to, err))
		}
	}
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return err
	}
	mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	mount("bench", "/run", "tmpfs", 0, "mode=755") // CRIU keeps what it knows of the kernel there
	mount("bench", place, "tmpfs", 0, "mode=755")
	for _, dir := range []string{"root", "control", "dev", "dev/pts", "dev/shm"} {
		must(os.Mkdir(filepath.Join(place, dir), 0o755))
	}
	mount(root, filepath.Join(place, "root"), "", unix.MS_BIND, "")
	mount("", filepath.Join(place, "root"), "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_NOATIME, "") // as a sandbox's is
	for name, dev := range map[string]uint64{"null": unix.Mkdev(1, 3), "zero": unix.Mkdev(1, 5), "full": unix.Mkdev(1, 7),
		"random": unix.Mkdev(1, 8), "urandom": unix.Mkdev(1, 9), "tty": unix.Mkdev(5, 0)} {
		path := filepath.Join(place, "dev", name)
		must(unix.Mknod(path, unix.S_IFCHR|0o666, int(dev)))
		must(os.Chmod(path, 0o666))
	}
	must(os.Symlink("pts/ptmx", filepath.Join(place, "dev/ptmx")))
	f, err := os.Open("/proc/thread-self/ns/mnt")
	b.mounts = f
	return err
}

// fill puts into the control folder what pid 1 of the sandbox has in its own.
func (b *bare) fill(pid1 int) {
	from := fmt.Sprintf("/proc/%d/root/run/box", pid1)
	onThread(func() error {
		programs, err := filepath.Glob(from + "/*")
		must(err)
		contents := map[string][]byte{}
		for _, path := range programs {
			if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() {
				contents[filepath.Base(path)], err = os.ReadFile(path)
				must(err)
			}
		}
		must(unix.Unshare(unix.CLONE_FS))
		must(unix.Setns(int(b.mounts.Fd()), unix.CLONE_NEWNS))
		for name, content := range contents {
			must(os.WriteFile(filepath.Join(place, "control", name), content, 0o555))
		}
		return nil
	})
}

// swrk is a CRIU that waits for its one call.
type swrk struct {
	cmd  *exec.Cmd
	conn *os.File
	logs string
}

// start gives one that has loaded all it needs. in: a cgroup to be born in.
func (b *bare) start(in string, files ...*os.File) *swrk {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	must(err)
	s := &swrk{cmd: exec.Command(b.criu, "swrk", "3"), conn: os.NewFile(uintptr(fds[0]), "criu")}
	theirs := os.NewFile(uintptr(fds[1]), "criu's")
	s.cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	s.cmd.ExtraFiles, s.cmd.Dir = append([]*os.File{theirs}, files...), "/"
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if in != "" {
		group, err := os.Open(in)
		must(err)
		defer group.Close()
		s.cmd.SysProcAttr.UseCgroupFD, s.cmd.SysProcAttr.CgroupFD = true, int(group.Fd())
	}
	onThread(func() error {
		must(unix.Unshare(unix.CLONE_FS))
		must(unix.Setns(int(b.mounts.Fd()), unix.CLONE_NEWNS))
		return s.cmd.Start()
	})
	theirs.Close()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		call, err := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", s.cmd.Process.Pid))
		must(err)
		// recvfrom or recvmsg of descriptor 3
		if f := strings.Fields(string(call)); len(f) > 1 && (f[0] == "45" || f[0] == "47") && f[1] == "0x3" {
			return s
		}
		if time.Now().After(deadline) {
			must(fmt.Errorf("CRIU doesn't wait for a request: %s", call))
		}
	}
}

// call makes the one call, and says how long it took.
func (s *swrk) call(doing string, req *rpc.CriuReq) (*rpc.CriuResp, time.Duration) {
	text, err := proto.Marshal(req)
	must(err)
	began := time.Now()
	_, err = s.conn.Write(text)
	must(err)
	buf := make([]byte, 64<<10)
	n, err := s.conn.Read(buf)
	took := time.Since(began)
	must(err)
	resp := &rpc.CriuResp{}
	must(proto.Unmarshal(buf[:n], resp))
	if !resp.GetSuccess() {
		log, _ := os.ReadFile(filepath.Join(s.logs, "log"))
		must(fmt.Errorf("bare CRIU, %s: %v %s\n%s", doing, resp.GetCrErrno(), resp.GetCrErrmsg(), log))
	}
	s.conn.Close()
	must(s.cmd.Wait())
	return resp, took
}

func (b *bare) options(images *os.File) *rpc.CriuOpts {
	return &rpc.CriuOpts{
		ImagesDirFd: proto.Int32(int32(images.Fd())), LogFile: proto.String("log"), LogLevel: proto.Int32(2),
		ManageCgroupsMode: rpc.CriuCgMode_IGNORE.Enum(), NetworkLock: rpc.CriuNetworkLockMethod_SKIP.Enum(),
		EmptyNs: proto.Uint32(unix.CLONE_NEWNET), TcpEstablished: proto.Bool(true), FileLocks: proto.Bool(true), GhostLimit: proto.Uint32(256 << 20),
	}
}

// dump saves the processes below pid into an empty folder, and leaves them frozen.
func (b *bare) dump(pid int, s *swrk, into string) time.Duration {
	images, err := os.Open(into)
	must(err)
	defer images.Close()
	o := b.options(images)
	o.Pid, o.LeaveRunning, o.FreezeCgroup = proto.Int32(int32(pid)), proto.Bool(true), proto.String(b.group)
	for _, at := range [][2]string{{"dev", "/dev"}, {"box", "/run/box"}, {"machine-id", "/etc/machine-id"}} {
		o.External = append(o.External, fmt.Sprintf("mnt[%s]:%s", at[1], at[0]))
	}
	s.logs = into
	_, took := s.call("dumping", &rpc.CriuReq{Type: rpc.CriuReqType_DUMP.Enum(), Opts: o})
	return took
}

// window freezes the processes below pid, dumps them and thaws them: as much of a capture
// as CRIU alone would take.
func (b *bare) window(pid int) time.Duration {
	into, err := os.MkdirTemp(b.memory, "dump-")
	must(err)
	defer os.RemoveAll(into)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s := b.start("")
	began := time.Now()
	must(cgroup.Freeze(ctx, b.group))
	b.dump(pid, s, into)
	must(cgroup.Thaw(b.group))
	return time.Since(began)
}

// restore brings the processes up and returns pid 1, a child of ours.
func (b *bare) restore() (pid int, took time.Duration) {
	// Something that nothing ever comes from, and that can be dumped, is in the place of pid 1's socket.
	quiet, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	must(err)
	socket := os.NewFile(uintptr(quiet), "eventfd")
	defer socket.Close()
	s := b.start(b.group, socket)
	images, err := os.Open(b.images)
	must(err)
	defer images.Close()
	o := b.options(images)
	o.Root = proto.String(filepath.Join(place, "root"))
	o.RstSibling, o.SkipFileRwxCheck = proto.Bool(true), proto.Bool(true)
	o.InheritFd = []*rpc.InheritFd{{Key: proto.String(fmt.Sprintf("socket:[%d]", b.listener)), Fd: proto.Int32(4)}}
	control := filepath.Join(place, "control")
	o.External = []string{"mnt[dev]:" + filepath.Join(place, "dev"), "mnt[box]:" + control, "mnt[machine-id]:" + filepath.Join(control, "machine-id")}
	s.logs = b.images
	resp, took := s.call("restoring", &rpc.CriuReq{Type: rpc.CriuReqType_RESTORE.Enum(), Opts: o})
	return int(resp.GetRestore().GetPid()), took
}

// end kills what restore made.
func (b *bare) end(pid int) {
	must(unix.Kill(pid, unix.SIGKILL))
	_, err := unix.Wait4(pid, nil, 0, nil)
	must(err)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	must(cgroup.Await(ctx, b.group, "populated", 0))
}
