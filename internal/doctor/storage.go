package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/btrfs"
	"github.com/boxwood-rl/boxwood/internal/overlay"
	"github.com/boxwood-rl/boxwood/internal/thread"
)

// idBase is where the probe's user namespace begins on the host.
const idBase = 100000

// storage makes a btrfs on a loop file, a snapshot in it, and an overlay of
// idmapped folders of it, as a sandbox's root will be.
func storage(ctx context.Context, stateDir string) []finding {
	found := []finding{unknown("not tried"), unknown("not tried: it lies on the btrfs")}
	// With the thread go its mount namespace and so every mount of the probe.
	_ = thread.Discard(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			found[0] = refusal("making a mount namespace", err)
			return nil
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			found[0] = refusal("making mounts private", err)
			return nil
		}
		found = storagePrivately(ctx, stateDir)
		return nil
	})
	return found
}

func storagePrivately(ctx context.Context, stateDir string) []finding {
	skipped := unknown("not tried: it lies on the btrfs")
	if info, err := os.Stat(stateDir); err != nil || !info.IsDir() {
		stateDir = os.TempDir()
	}
	dir, err := os.MkdirTemp(stateDir, ".doctor-")
	if err != nil {
		return []finding{unknown("making a folder: %v", err), skipped}
	}
	defer os.RemoveAll(dir)

	device, err := loopDevice(ctx, filepath.Join(dir, "btrfs.img"))
	if err != nil {
		return []finding{refusal("", err), skipped}
	}
	pool := filepath.Join(dir, "pool")
	if err := os.Mkdir(pool, 0o700); err != nil {
		device.Close()
		return []finding{unknown("making a folder: %v", err), skipped}
	}
	err = unix.Mount(device.Name(), pool, "btrfs", unix.MS_NOATIME, "nobarrier")
	name := device.Name()
	device.Close() // the mount keeps it; with the last of both it frees itself
	if err != nil {
		return []finding{refusal("mounting a btrfs from "+name, err), skipped}
	}
	defer unix.Unmount(pool, unix.MNT_DETACH)
	if err := snapshotWorks(pool); err != nil {
		return []finding{refusal("", err), skipped}
	}
	made := yes("made, mounted and snapshotted on a loop file under %s", stateDir)
	return []finding{made, idmappedOverlay(ctx, pool)}
}

// loopDevice makes a small btrfs in a file and binds it to a loop device that
// frees itself. The file is gone by name at once, so nothing can leave it behind.
func loopDevice(ctx context.Context, path string) (*os.File, error) {
	mkfs, err := exec.LookPath("mkfs.btrfs")
	if err != nil {
		return nil, refused{fmt.Errorf("no mkfs.btrfs in PATH (package btrfs-progs)")}
	}
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	defer os.Remove(path)
	if err := file.Truncate(128 << 20); err != nil {
		return nil, fmt.Errorf("making a sparse file: %w", err)
	}
	cmd := exec.CommandContext(ctx, mkfs, "-q", "-m", "single", path)
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("mkfs.btrfs: %w %s", err, lastLine(string(out)))
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, refused{fmt.Errorf("loop devices: %w", err)}
	}
	defer control.Close()
	for ctx.Err() == nil {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, refused{fmt.Errorf("finding a free loop device: %w", err)}
		}
		device, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", number), os.O_RDWR, 0)
		if err != nil {
			return nil, refused{fmt.Errorf("opening a loop device: %w", err)}
		}
		config := unix.LoopConfig{Fd: uint32(file.Fd())}
		config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
		err = unix.IoctlLoopConfigure(int(device.Fd()), &config)
		if err == nil {
			return device, nil
		}
		device.Close()
		if !errors.Is(err, unix.EBUSY) { // EBUSY: another was faster; take the next
			return nil, refused{fmt.Errorf("configuring a loop device: %w", err)}
		}
	}
	return nil, ctx.Err()
}

// snapshotWorks makes a subvolume with the folders of an upper, and snapshots it.
func snapshotWorks(pool string) error {
	parent, err := os.Open(pool)
	if err != nil {
		return fmt.Errorf("opening the btrfs: %w", err)
	}
	defer parent.Close()
	if err := btrfs.Create(parent, "live"); err != nil {
		return fmt.Errorf("making a subvolume: %w", err)
	}
	for _, folder := range []string{"lower", "live/upper", "live/work"} {
		if err := os.Mkdir(filepath.Join(pool, folder), 0o755); err != nil {
			return err
		}
	}
	source, err := os.Open(filepath.Join(pool, "live"))
	if err != nil {
		return err
	}
	defer source.Close()
	if err := btrfs.Snapshot(parent, "snapshot", source, true); err != nil {
		return fmt.Errorf("snapshotting a subvolume: %w", err)
	}
	return nil
}

// idmappedOverlay mounts a sandbox's root and reads back how it came out.
func idmappedOverlay(ctx context.Context, pool string) finding {
	userns, err := userNamespace(ctx)
	if err != nil {
		return refusal("making a user namespace for the id map", err)
	}
	defer userns.Close()
	mount, err := overlay.Mount(overlay.Options{
		Lower: []string{filepath.Join(pool, "lower")},
		Upper: filepath.Join(pool, "live/upper"), Work: filepath.Join(pool, "live/work"),
		UserNS: userns, IDBase: idBase,
	})
	if err != nil {
		return no("%v", err)
	}
	defer mount.Close()
	method, err := overlay.Probe()
	if err != nil {
		return no("%v", err)
	}
	settings, err := overlay.ReadBack(mount)
	if err != nil {
		return unknown("mounted with %s layers, but reading its options back: %v", method, err)
	}
	if wrong := settings.Wrong(); len(wrong) > 0 {
		return no("mounted, but with options of its own: %s", strings.Join(wrong, ", "))
	}
	return yes("mounted with %s layers; options read back as asked", method)
}

// userNamespace gives a namespace that maps 0 to idBase; it lives as long as
// the file.
func userNamespace(ctx context.Context) (*os.File, error) {
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: idBase, Size: 65536}}
	cmd := exec.CommandContext(ctx, "/bin/cat")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	userns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
	stdin.Close() // cat ends
	if waited := cmd.Wait(); err == nil && waited != nil {
		userns.Close()
		return nil, waited
	}
	return userns, err
}

// refused marks an error as the host's answer rather than a failed probe.
type refused struct{ error }

func (r refused) Unwrap() error { return r.error }

// refusal tells "this host can't" from "something went wrong".
func refusal(doing string, err error) finding {
	if doing != "" {
		doing += ": "
	}
	var no refused
	for _, errno := range []error{unix.EPERM, unix.EACCES, unix.ENODEV, unix.ENOSYS, unix.EOPNOTSUPP, unix.ENOTTY} {
		if errors.As(err, &no) || errors.Is(err, errno) {
			return finding{No, doing + err.Error()}
		}
	}
	return finding{Unknown, doing + err.Error()}
}
