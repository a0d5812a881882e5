package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// hierarchies is where cgroups are mounted: v2 once, v1 by controller.
type hierarchies struct {
	v2 string
	v1 map[string]string
}

// parseHierarchies reads mountinfo(5). Of several mounts of one hierarchy the
// first counts.
func parseHierarchies(mountinfo string) hierarchies {
	found := hierarchies{v1: map[string]string{}}
	for line := range strings.Lines(mountinfo) {
		head, tail, ok := strings.Cut(line, " - ")
		at, fs := strings.Fields(head), strings.Fields(tail)
		if !ok || len(at) < 5 || len(fs) < 3 {
			continue
		}
		switch fs[0] {
		case "cgroup2":
			if found.v2 == "" {
				found.v2 = at[4]
			}
		case "cgroup":
			for _, controller := range strings.Split(fs[2], ",") {
				if found.v1[controller] == "" {
					found.v1[controller] = at[4]
				}
			}
		}
	}
	return found
}

// cgroups starts a process in a fresh v2 group, freezes it and says where the
// limits of memory, pids and cpu come from.
func cgroups(ctx context.Context) []finding {
	found := parseHierarchies(readString("/proc/self/mountinfo"))
	if found.v2 == "" {
		return []finding{no("no cgroup v2 is mounted (mount one: mount -t cgroup2 none /sys/fs/cgroup/unified)")}
	}
	available := strings.Fields(readString(filepath.Join(found.v2, "cgroup.controllers")))
	mode, where := "pure v2", "v2 at "+found.v2
	var missing []string
	for _, controller := range []string{"memory", "pids", "cpu"} {
		if slices.Contains(available, controller) {
			continue
		}
		path, ok := found.v1[controller]
		if !ok {
			missing = append(missing, controller)
			continue
		}
		mode, where = "hybrid", where+", "+controller+" at "+path
	}
	if len(missing) > 0 {
		return []finding{no("%s, but no controller for %s in v2 or v1", where, strings.Join(missing, ", "))}
	}
	if err := freezeOne(ctx, found.v2); err != nil {
		return []finding{refusal(where, err)}
	}
	return []finding{yes("%s: %s; a process was started in a group and frozen", mode, where)}
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
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting a process in the group: %w", err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill() // a frozen v2 task can be killed

	events, err := os.Open(filepath.Join(dir, "cgroup.events"))
	if err != nil {
		return err
	}
	defer events.Close()
	if err := os.WriteFile(filepath.Join(dir, "cgroup.freeze"), []byte("1"), 0); err != nil {
		return fmt.Errorf("freezing the group: %w", err)
	}
	for ctx.Err() == nil {
		buf := make([]byte, 256)
		n, err := events.ReadAt(buf, 0)
		if n == 0 && err != nil {
			return fmt.Errorf("reading the group's events: %w", err)
		}
		if strings.Contains(string(buf[:n]), "frozen 1") {
			return nil
		}
		wait := []unix.PollFd{{Fd: int32(events.Fd()), Events: unix.POLLPRI}}
		if _, err := unix.Poll(wait, 1000); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("waiting for the freeze: %w", err)
		}
	}
	return fmt.Errorf("the group didn't freeze: %w", ctx.Err())
}
