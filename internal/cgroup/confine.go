package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// Share is what Boxwood as a whole may use of its host. The zero value is all of it.
type Share struct {
	// Cores as the kernel writes them, such as "0-3,8"; empty: all.
	Cores string
	// MemoryBytes of all sandboxes together; 0: no bound. The daemon isn't counted, so
	// that a sandbox never costs it its life.
	MemoryBytes int64
}

// ParseCores reads a list of cores such as "0-3,8".
func ParseCores(list string) (unix.CPUSet, error) {
	var set unix.CPUSet
	for _, part := range strings.Split(list, ",") {
		first, last, ranged := strings.Cut(strings.TrimSpace(part), "-")
		if !ranged {
			last = first
		}
		from, err1 := strconv.Atoi(first)
		to, err2 := strconv.Atoi(last)
		if err1 != nil || err2 != nil || from < 0 || to < from || to >= 8*len(set)*8 {
			return set, fmt.Errorf("%q is no list of cores such as 0-3,8", list)
		}
		for core := from; core <= to; core++ {
			set.Set(core)
		}
	}
	return set, nil
}

// Confine keeps this process and every sandbox on the share's cores, and all sandboxes
// together within its memory. It comes before the first process that becomes a sandbox
// is started: in a v1 hierarchy they are confined by being this process's children, in
// v2 by being in our group. A sandbox can't widen either.
func (r *Root) Confine(s Share) error {
	if s.MemoryBytes > 0 {
		text := strconv.FormatInt(s.MemoryBytes, 10)
		path := r.V2 + "/memory.max"
		if dir, ok := r.v1["memory"]; ok {
			path = dir + "/memory.limit_in_bytes"
		} else if !r.inV2["memory"] {
			return fault.New(fault.Unsupported, "no_controller", "this host has no cgroup controller for memory, so --memory can't be held")
		}
		if err := write(path, text); err != nil {
			return err
		}
	}
	if s.Cores == "" {
		return nil
	}
	set, err := ParseCores(s.Cores)
	if err != nil {
		return err
	}
	// By cpuset, which a sandbox can't widen, and not by an affinity alone, which it can.
	if sabotage.On("cores") {
		return setAffinity(&set)
	}
	refused := func(err error) error {
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ERANGE) || errors.Is(err, unix.EACCES) {
			return fault.New(fault.Invalid, "bad_cores", "this host has no cores %s", s.Cores).WithHint("nproc and /sys/devices/system/cpu/online show what there is")
		}
		return err
	}
	if r.cpuset == "" {
		mount := strings.TrimSuffix(r.V2, "/"+r.name)
		if !enable(mount, filepath.Dir(r.V2), "cpuset") {
			return fault.New(fault.Unsupported, "no_controller", "this host has no cgroup controller for cores (cpuset), so --cpus can't be held")
		}
		if err := write(r.V2+"/cpuset.cpus", s.Cores); err != nil {
			return refused(err)
		}
		return setAffinity(&set)
	}
	if err := os.MkdirAll(r.cpuset, 0o755); err != nil {
		return fmt.Errorf("making the cgroup %s: %w", r.cpuset, err)
	}
	mems, err := os.ReadFile(filepath.Dir(r.cpuset) + "/cpuset.mems")
	if err != nil {
		return fmt.Errorf("finding the host's memory nodes: %w", err)
	}
	if err := write(r.cpuset+"/cpuset.mems", strings.TrimSpace(string(mems))); err != nil {
		return err
	}
	if err := write(r.cpuset+"/cpuset.cpus", s.Cores); err != nil {
		return refused(err)
	}
	if r.before, err = ownGroup("cpuset"); err != nil {
		return err
	}
	return write(r.cpuset+"/cgroup.procs", strconv.Itoa(os.Getpid()))
}

// ownGroup is this process's group in the v1 hierarchy of a controller or, with "", in v2.
func ownGroup(controller string) (string, error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", fmt.Errorf("finding our own cgroup: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) == 3 && slices.Contains(strings.Split(parts[1], ","), controller) {
			return parts[2], nil
		}
	}
	return "/", nil
}

// unconfine puts this process back to where Confine took it from in a v1 hierarchy of
// cpuset, and removes our group there.
func (r *Root) unconfine() error {
	if r.cpuset == "" {
		return nil
	}
	if r.before != "" {
		mount := strings.TrimSuffix(r.cpuset, "/"+r.name)
		if err := write(filepath.Join(mount, r.before, "cgroup.procs"), strconv.Itoa(os.Getpid())); err != nil {
			return err
		}
		r.before = ""
	}
	if err := unix.Rmdir(r.cpuset); err != nil && err != unix.ENOENT {
		return fmt.Errorf("removing the cgroup %s: %w", r.cpuset, err)
	}
	return nil
}

// setAffinity keeps every thread of this process on the cores; later ones inherit it.
func setAffinity(set *unix.CPUSet) error {
	// Twice, for threads that were made while the first list was read.
	for range 2 {
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return fmt.Errorf("listing our threads: %w", err)
		}
		for _, thread := range threads {
			id, err := strconv.Atoi(thread.Name())
			if err != nil {
				continue
			}
			if err := unix.SchedSetaffinity(id, set); err != nil && err != unix.ESRCH {
				return fmt.Errorf("keeping the daemon on its cores: %w", err)
			}
		}
	}
	return nil
}

func cpusetOf(mounts Mounts, name string) string {
	if mounts.Cpuset == "" {
		return ""
	}
	return filepath.Join(mounts.Cpuset, name)
}
