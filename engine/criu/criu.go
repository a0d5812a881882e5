// Package criu saves the process tree of a box and restores it elsewhere, by the
// program CRIU. It knows what pids, cgroups, mounts and folders are, and nothing
// of nodes, snapshots or the protocol of pid 1.
//
// The contract of a dump. The tree lies in one v2 cgroup that is frozen already and
// stays frozen: thawing it is the caller's, who takes his snapshot of the files
// first. Nothing of the tree may cross the border of its namespaces but what the
// request names as external. What was saved is a folder of image files, which
// are never changed afterwards: see Seal. After a dump that failed the tree is as
// it was, or the error says that this isn't known (Error.Harmed): then it must be
// ended.
//
// The contract of a restore. The tree comes up in fresh namespaces, in a cgroup
// and on a root that the caller has made, under the id range that he names and
// with the host name that he gives. Stopped is called when every process
// is there and none has run; what it does is done before any of them goes on, and
// its error ends the restore. Of a restore that failed nothing is left but what the
// caller has made.
//
// Each call is a process of its own, `criu swrk`, spoken to over a socket pair with
// the messages of go-criu's package rpc. It runs in a mount namespace that holds a
// tmpfs on /run, whatever the host has there, since CRIU keeps what it has found out of the
// kernel in one, and takes 100 ms to find it out again.
//
// Time limits come in this order: CRIU's own, then SIGTERM, then giving up.
// CRIU that is killed while it holds a tree may leave it broken; that is looked for
// by the caller, who alone knows what the tree was like (see package witness).
package criu

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/checkpoint-restore/go-criu/v7/rpc"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/thread"
)

// Program is a CRIU that can be called. Safe for concurrent use.
type Program struct {
	path    string
	version string
	// mounts is the mount namespace that calls start from.
	mounts *os.File
}

// inside is where the namespace that CRIU runs in has a tmpfs of ours, with dev (the device nodes of
// a box), root and control (where a child's are put, in a further namespace). Root of
// a box can get there, which our own folders don't let him; and CRIU makes folders there.
const inside = "/tmp"

// Open starts from the program at path.
func Open(path string) (*Program, error) {
	if path == "" {
		return nil, fault.New(fault.Unsupported, "no_criu", "CRIU is missing").WithHint("make setup, or name it in BOXWOOD_CRIU")
	}
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, fault.New(fault.Unsupported, "no_criu", "CRIU is missing: %w", err).WithHint("make setup, or name it in BOXWOOD_CRIU")
	}
	if strings.HasPrefix(path, inside+"/") {
		return nil, fault.New(fault.Unsupported, "criu_in_tmp", "CRIU can't be used from %s, which is hidden from it", path).WithHint("put it somewhere else")
	}
	p := &Program{path: path}
	if err := thread.Discard(p.makeMounts); err != nil {
		return nil, fmt.Errorf("opening CRIU: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), versionLimit)
	defer cancel()
	resp, err := p.call(ctx, job{req: &rpc.CriuReq{Type: rpc.CriuReqType_VERSION.Enum()}})
	if err != nil {
		p.Close()
		return nil, fmt.Errorf("asking CRIU for its version: %w", err)
	}
	v := resp.GetVersion()
	p.version = fmt.Sprintf("%d.%d.%d", v.GetMajorNumber(), v.GetMinorNumber(), v.GetSublevel())
	return p, nil
}

// Version of the program, as "4.2.1".
func (p *Program) Version() string { return p.version }

// Path of the program.
func (p *Program) Path() string { return p.path }

// Close lets go of the mount namespace. Calls under way go on.
func (p *Program) Close() error {
	if p == nil || p.mounts == nil {
		return nil
	}
	err := p.mounts.Close()
	p.mounts = nil
	return err
}

// makeMounts makes the namespace that calls start from.
func (p *Program) makeMounts() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("making a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs("/run", &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		if err := unix.Mount("boxwood", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755,size=4m"); err != nil {
			return fmt.Errorf("mounting a tmpfs on /run: %w", err)
		}
	}
	if err := unix.Mount("boxwood", inside, "tmpfs", unix.MS_NOSUID, "mode=755,size=1m"); err != nil {
		return fmt.Errorf("mounting a tmpfs on %s: %w", inside, err)
	}
	for _, name := range []string{rootDir, controlDir, devDir, devDir + "/pts", devDir + "/shm"} {
		if err := os.Mkdir(filepath.Join(inside, name), 0o755); err != nil {
			return err
		}
	}
	if err := makeDevices(filepath.Join(inside, devDir)); err != nil {
		return err
	}
	f, err := os.Open("/proc/thread-self/ns/mnt")
	p.mounts = f
	return err
}

const (
	rootDir    = "root"
	controlDir = "control"
	devDir     = "dev"
)

// makeDevices makes what pid 1's nursery makes (engine/box/init/main.c): CRIU binds
// this folder where the saved tree had that one.
func makeDevices(dir string) error {
	for _, n := range []struct {
		name         string
		major, minor uint32
	}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}} {
		path := filepath.Join(dir, n.name)
		if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(n.major, n.minor))); err != nil {
			return fmt.Errorf("making %s: %w", path, err)
		}
		if err := os.Chmod(path, 0o666); err != nil { // whatever the umask
			return err
		}
	}
	for _, l := range [][2]string{{"pts/ptmx", "ptmx"}, {"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"},
		{"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"}} {
		if err := os.Symlink(l[0], filepath.Join(dir, l[1])); err != nil {
			return err
		}
	}
	return nil
}
