// Package cgroup makes the control groups of sandboxes, on hosts with pure v2
// and on hybrid ones.
//
// A sandbox has, below Boxwood's own group in the v2 hierarchy,
//
//	<root>/<name>      pid 1; limits, freezing and killing act here
//	<root>/<name>/run  what its turns start, with further leaves below
//
// and <root>/<name> again in each v1 hierarchy that holds a controller we use.
// Limits are written wherever the controller lives. No controller is enabled
// below <name>, so that run and its leaves may all hold processes.
//
// The v2 hierarchy is needed on every host: it gives CLONE_INTO_CGROUP, the
// freezer, cgroup.kill and the ids that BPF programs see.
package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// controllers that limits need.
var controllers = []string{"memory", "pids", "cpu"}

// Mounts says where the hierarchies are.
type Mounts struct {
	V2 string
	// V1 holds the mount point of each controller that isn't in v2.
	V1 map[string]string
	// Cpuset is where cpuset is, if it isn't in v2: it confines Boxwood as a whole only.
	Cpuset string
}

// FindMounts reads mount points from a file like /proc/self/mountinfo.
func FindMounts(mountinfo string) (Mounts, error) {
	f, err := os.Open(mountinfo)
	if err != nil {
		return Mounts{}, fmt.Errorf("finding cgroups: %w", err)
	}
	defer f.Close()
	m := Mounts{V1: map[string]string{}}
	for s := bufio.NewScanner(f); s.Scan(); {
		pre, post, ok := strings.Cut(s.Text(), " - ")
		left, right := strings.Fields(pre), strings.Fields(post)
		if !ok || len(left) < 5 || len(right) < 3 {
			continue
		}
		switch point := left[4]; right[0] {
		case "cgroup2":
			if m.V2 == "" {
				m.V2 = point
			}
		case "cgroup":
			for _, option := range strings.Split(right[2], ",") {
				if slices.Contains(controllers, option) && m.V1[option] == "" {
					m.V1[option] = point
				}
				if option == "cpuset" && m.Cpuset == "" {
					m.Cpuset = point
				}
			}
		}
	}
	if m.V2 == "" {
		return m, fault.New(fault.Unsupported, "no_cgroup2", "no cgroup v2 hierarchy is mounted").
			WithHint("mount one: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified")
	}
	return m, nil
}

// Root is Boxwood's own group in each hierarchy.
type Root struct {
	// V2 is its folder in the v2 hierarchy.
	V2          string
	name, mount string
	// v1 holds its folder for each controller that isn't in v2; two controllers
	// of one hierarchy share a folder.
	v1 map[string]string
	// v1dirs are these folders, each once, in a fixed order.
	v1dirs []string
	// cpuset is its folder in a v1 hierarchy of cpuset, empty if there is none; see Confine.
	cpuset string
	// before is where this process was in that hierarchy; empty unless Confine moved it.
	before string
	// inV2 are the controllers enabled in V2.
	inV2 map[string]bool
	// Missing controllers, whose limits can't be enforced on this host.
	Missing []string
}

// OpenRoot makes the groups called name, which may hold slashes.
func OpenRoot(name string) (*Root, error) {
	mounts, err := FindMounts("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	if name == "" || filepath.Clean("/"+name) != "/"+name {
		return nil, fault.New(fault.Invalid, "bad_cgroup", "%q is not the name of a cgroup", name)
	}
	r := &Root{V2: filepath.Join(mounts.V2, name), name: name, mount: mounts.V2, v1: map[string]string{}, inV2: map[string]bool{}}
	if err := os.MkdirAll(r.V2, 0o755); err != nil {
		return nil, fmt.Errorf("making the cgroup %s: %w", r.V2, err)
	}
	for _, c := range controllers {
		if point, ok := mounts.V1[c]; ok {
			dir := filepath.Join(point, name)
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return nil, fmt.Errorf("making the cgroup %s: %w", dir, err)
			}
			r.v1[c] = dir
			if !slices.Contains(r.v1dirs, dir) {
				r.v1dirs = append(r.v1dirs, dir)
			}
		} else if enable(mounts.V2, r.V2, c) {
			r.inV2[c] = true
		} else {
			r.Missing = append(r.Missing, c)
		}
	}
	r.cpuset = cpusetOf(mounts, name)
	return r, nil
}

// FindRoot gives the groups called name as far as they exist, and makes none; nil
// if there are none.
func FindRoot(name string) (*Root, error) {
	mounts, err := FindMounts("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	r := &Root{V2: filepath.Join(mounts.V2, name), name: name, v1: map[string]string{}}
	if _, err := os.Stat(r.V2); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	for c, point := range mounts.V1 {
		dir := filepath.Join(point, name)
		if _, err := os.Stat(dir); err != nil {
			continue
		}
		r.v1[c] = dir
		if !slices.Contains(r.v1dirs, dir) {
			r.v1dirs = append(r.v1dirs, dir)
		}
	}
	r.cpuset = cpusetOf(mounts, name)
	return r, nil
}

// enable turns a controller on from the mount down to the children of dir.
func enable(mount, dir, controller string) bool {
	rel, err := filepath.Rel(mount, dir)
	if err != nil {
		return false
	}
	at := mount
	for _, part := range append([]string{""}, strings.Split(rel, "/")...) {
		at = filepath.Join(at, part)
		if write(filepath.Join(at, "cgroup.subtree_control"), "+"+controller) != nil {
			return false
		}
	}
	return true
}

// Depth is the level of a sandbox's run group below the mounted v2 root, which
// has level 0: what bpf_get_current_ancestor_cgroup_id wants, unless the daemon
// itself lives in a cgroup namespace.
func (r *Root) Depth() int {
	mounts, err := FindMounts("/proc/self/mountinfo")
	if err != nil {
		return 0
	}
	rel, _ := filepath.Rel(mounts.V2, r.V2)
	return strings.Count(rel, "/") + 3
}

// Names lists the sandboxes' groups that exist in any hierarchy.
func (r *Root) Names() ([]string, error) {
	var names []string
	for _, dir := range append([]string{r.V2}, r.v1dirs...) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if e.IsDir() && !slices.Contains(names, e.Name()) {
				names = append(names, e.Name())
			}
		}
	}
	return names, nil
}

// Remove removes Boxwood's own groups, which must be empty.
func (r *Root) Remove() error {
	errs := []error{r.unconfine()}
	for _, dir := range append([]string{r.V2}, r.v1dirs...) {
		if err := unix.Rmdir(dir); err != nil && err != unix.ENOENT {
			errs = append(errs, fmt.Errorf("removing the cgroup %s: %w", dir, err))
		}
	}
	return errors.Join(errs...)
}

func write(path, text string) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening %s: %w", path, err)
	}
	_, err = unix.Write(fd, []byte(text))
	unix.Close(fd)
	if err != nil {
		return fmt.Errorf("writing %q to %s: %w", text, path, err)
	}
	return nil
}
