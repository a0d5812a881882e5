package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/fault"
)

// cgroups starts a process in a fresh v2 group, freezes it and says where the
// limits of memory, pids and cpu come from; and whether there is an io controller.
func cgroups(ctx context.Context) []finding {
	found, err := cgroup.FindMounts("/proc/self/mountinfo")
	if fault.Is(err, fault.Unsupported) {
		return []finding{no("%v (%s)", err, fault.As(err).Hint), unknown("not tried: it is in v2")}
	}
	if err != nil {
		return []finding{unknown("%v", err), unknown("not tried")}
	}
	available := strings.Fields(readString(filepath.Join(found.V2, "cgroup.controllers")))
	return []finding{groupLimits(ctx, found, available), ioController(found, available)}
}

// ioController says whether a group of v2 can be held to a share of the disk. What v1 throttles doesn't see what is written back later.
func ioController(found cgroup.Mounts, available []string) finding {
	if slices.Contains(available, "io") {
		return yes("io is in v2 at %s", found.V2)
	}
	return no("v2 at %s has no io", found.V2)
}

func groupLimits(ctx context.Context, found cgroup.Mounts, available []string) finding {
	mode, where := "pure v2", "v2 at "+found.V2
	var missing []string
	for _, controller := range []string{"memory", "pids", "cpu"} {
		if slices.Contains(available, controller) {
			continue
		}
		path, ok := found.V1[controller]
		if !ok {
			missing = append(missing, controller)
			continue
		}
		mode, where = "hybrid", where+", "+controller+" at "+path
	}
	if len(missing) > 0 {
		return no("%s, but no controller for %s in v2 or v1", where, strings.Join(missing, ", "))
	}
	if err := freezeOne(ctx, found.V2); err != nil {
		return refusal(where, err)
	}
	return yes("%s: %s; a process was started in a group and frozen", mode, where)
}

// freezeOne starts a process in a new group below v2 and waits until it is frozen.
func freezeOne(ctx context.Context, v2 string) (err error) {
	dir := filepath.Join(v2, fmt.Sprintf("boxwood-doctor-%d", os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(dir)) }()
	group, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer group.Close()

	cmd := exec.CommandContext(ctx, "/bin/cat")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd()), Pdeathsig: syscall.SIGKILL}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	defer stdin.Close()
	runtime.LockOSThread() // see runBound
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting a process in the group: %w", err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill() // a frozen v2 task can be killed

	return cgroup.Freeze(ctx, dir)
}
