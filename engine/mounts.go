package engine

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// inPrivateMounts tells the process that PrivateMounts started that it is done.
const inPrivateMounts = "BOXWOOD_PRIVATE_MOUNTS"

// PrivateMounts puts the daemon into a mount namespace of its own, so that a
// daemon killed at any instant leaves no mount on the host. A namespace belongs
// to a thread, so the program starts itself again in place: call this first in
// main, before anything that mustn't happen twice.
func PrivateMounts() error {
	if os.Getenv(inPrivateMounts) != "" {
		return os.Unsetenv(inPrivateMounts)
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("making a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return unix.Exec(self, os.Args, append(os.Environ(), inPrivateMounts+"=1"))
}
