package criu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/checkpoint-restore/go-criu/v7/rpc"

	"github.com/boxwood-rl/boxwood/internal/thread"
)

// Load is what to restore, and into what.
type Load struct {
	// Images is the folder of a dump, which isn't changed. While a child is being made it has
	// links to these files in a folder beside that one.
	Images string
	// Root gives the root of the file system, a detached mount. It is called while CRIU loads what
	// it needs.
	Root func() (*os.File, error)
	// Control replaces the external mount at /run/box, and its file machine-id
	// that at /etc/machine-id.
	Control string
	// Cgroup is the v2 folder to come up in, Tasks the "tasks" files of the v1
	// groups.
	Cgroup string
	Tasks  []int
	// IDBase is what id 0 of the tree is on the host, 65536 ids in all.
	IDBase   uint32
	Hostname string
	// Socket takes the place of the listening socket that had this inode in the
	// saved tree.
	Socket      *os.File
	SocketInode uint64
	// Stopped is called when all processes are there and none has run. root is the
	// tree's root on the host, criu CRIU itself, which is in Cgroup, too.
	Stopped func(root, criu int) error
	// Soon is called at steps before that, and not waited for.
	Soon func()
}

// childPrefix begins the names of folders that only last as long as a restore.
const childPrefix = "child-"

// Keys of the external mounts that a box has.
var boxMounts = []External{{"dev", "/dev"}, {"box", "/run/box"}, {"machine-id", "/etc/machine-id"}}

// BoxMounts are the external mounts of a box, for Save.
func BoxMounts() []External { return append([]External(nil), boxMounts...) }

// Restore brings a saved tree up and returns its root's pid on the host. The root is a child of this
// process, which has to reap it.
func (p *Program) Restore(ctx context.Context, l Load) (pid int, err error) {
	var files []*os.File
	if l.Socket != nil {
		files = append(files, l.Socket)
	}
	w, err := p.launch(job{files: files, cgroup: l.Cgroup, tasks: l.Tasks, apart: true})
	if err != nil {
		return 0, err
	}
	if err := wideCounts(w.cmd.Process.Pid); err != nil {
		w.drop()
		return 0, fmt.Errorf("resource limits of CRIU: %w", err)
	}
	called := false
	defer func() {
		if !called {
			w.drop()
		}
	}()
	dir, err := os.MkdirTemp(filepath.Dir(l.Images), childPrefix)
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil { // it is read by root of the box, too
		return 0, err
	}
	if err := p.childImages(l, dir); err != nil {
		return 0, err
	}
	images, err := os.Open(dir)
	if err != nil {
		return 0, err
	}
	defer images.Close()
	o := p.options(ctx, images)
	o.Root = proto.String(filepath.Join(inside, rootDir))
	o.RstSibling = proto.Bool(true)
	o.NotifyScripts = proto.Bool(true)
	// The file of pid 1's program may be executed only when it is started, and only
	// read when it is restored. All others are those of the snapshot.
	o.SkipFileRwxCheck = proto.Bool(true)
	control := filepath.Join(inside, controlDir)
	o.External = []string{
		"mnt[dev]:" + filepath.Join(inside, devDir), "mnt[box]:" + control, "mnt[machine-id]:" + filepath.Join(control, "machine-id"),
	}
	if l.Socket != nil {
		o.InheritFd = []*rpc.InheritFd{{Key: proto.String(fmt.Sprintf("socket:[%d]", l.SocketInode)), Fd: proto.Int32(4)}}
	}
	at, err := l.Root()
	if err != nil {
		return 0, err
	}
	defer at.Close()
	tree, err := unix.OpenTree(unix.AT_FDCWD, l.Control, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return 0, fmt.Errorf("cloning the control folder: %w", err)
	}
	defer unix.Close(tree)
	if err := w.inside(func() error { return place(int(at.Fd()), tree) }); err != nil {
		return 0, err
	}
	var root int
	stopped := false
	called = true
	resp, err := w.call(ctx, job{
		doing: "restoring processes", logs: dir,
		req: &rpc.CriuReq{Type: rpc.CriuReqType_RESTORE.Enum(), Opts: o},
		notify: func(step string, pid int) error {
			switch step {
			case "setup-namespaces":
				root = pid
				return loopbackUp(root)
			case "pre-resume":
				stopped = true
				if l.Stopped != nil {
					return l.Stopped(root, w.cmd.Process.Pid)
				}
			default:
				if l.Soon != nil && !stopped {
					go l.Soon()
				}
			}
			return nil
		},
	})
	if err != nil {
		return 0, err
	}
	if !stopped {
		return 0, fmt.Errorf("CRIU resumed the restored processes unasked")
	}
	return int(resp.GetRestore().GetPid()), nil
}

// wideCounts does for CRIU what the nursery does for itself (wide_counts in engine/box/init/main.c): it makes the user
// namespace of a restored box. The limits of the processes themselves are in the dump.
func wideCounts(pid int) error {
	for _, what := range []int{unix.RLIMIT_MEMLOCK, unix.RLIMIT_MSGQUEUE, unix.RLIMIT_SIGPENDING} {
		if unix.Prlimit(pid, what, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}, nil) == nil {
			continue
		}
		var now unix.Rlimit
		if err := unix.Prlimit(pid, what, nil, &now); err != nil {
			return err
		}
		now.Cur = now.Max
		if err := unix.Prlimit(pid, what, &now, nil); err != nil {
			return err
		}
	}
	return nil
}

// place puts root and control folder where CRIU is told to find them, in a mount
// namespace that ends with it.
func place(root, control int) error {
	if err := unix.MoveMount(root, "", unix.AT_FDCWD, filepath.Join(inside, rootDir), unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("placing the root: %w", err)
	}
	at := filepath.Join(inside, controlDir)
	if err := unix.MoveMount(control, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("placing the control folder: %w", err)
	}
	// It holds pid 1's program, and /run may be noexec.
	if err := unix.Mount("", at, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("placing the control folder: %w", err)
	}
	return nil
}

// loopbackUp is called before sockets are restored.
func loopbackUp(pid int) error {
	err := thread.Discard(func() error {
		ns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/net", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(ns)
		if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
			return err
		}
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(s)
		req, err := unix.NewIfreq("lo")
		if err != nil {
			return err
		}
		req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
		return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, req)
	})
	if err != nil {
		return fmt.Errorf("bringing lo up: %w", err)
	}
	return nil
}
