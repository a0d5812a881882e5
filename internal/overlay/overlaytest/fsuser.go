package overlaytest

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// AsFSUser runs fn with file-system ids id:id and all capabilities: as the root
// of a sandbox whose range starts at id does. The calling goroutine must end
// soon after: its thread is never used again.
func AsFSUser(id int, fn func() error) error {
	runtime.LockOSThread()
	unix.SetfsgidRetGid(id)
	unix.SetfsuidRetUid(id)
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("reading capabilities: %w", err)
	}
	data[0].Effective, data[1].Effective = data[0].Permitted, data[1].Permitted
	if err := unix.Capset(&header, &data[0]); err != nil {
		return fmt.Errorf("raising capabilities: %w", err)
	}
	return fn()
}
