// Package overlaytest makes what tests and benchmarks of overlays need.
package overlaytest

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// UserNS opens a fresh user namespace that maps the 65,536 ids from 0 to those
// from base. It lives as long as the file.
func UserNS(base uint32) (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer w.Close()
	m := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(base), Size: 1 << 16}}
	cmd := exec.Command("/bin/cat")
	cmd.Stdin = r
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: m, GidMappings: m, Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // Pdeathsig comes when this thread ends
	defer runtime.UnlockOSThread()
	err = cmd.Start()
	r.Close()
	if err != nil {
		return nil, fmt.Errorf("starting a process in a user namespace: %w", err)
	}
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", cmd.Process.Pid))
	w.Close()
	cmd.Wait()
	return ns, err
}

// MustUserNS is UserNS for the time of a test.
func MustUserNS(t testing.TB, base uint32) *os.File {
	t.Helper()
	ns, err := UserNS(base)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

// MustAttach puts a detached mount on dir for the time of a test.
func MustAttach(t testing.TB, mount *os.File, dir string) {
	t.Helper()
	if err := unix.MoveMount(int(mount.Fd()), "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		t.Fatalf("attaching a mount on %s: %v", dir, err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
}
