package inspector

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// groups is the cgroup v2 hierarchy, where the kernel's ids are looked up.
type groups struct {
	root string
	dir  *os.File
}

// initialCgroupNS is the inode number of the first cgroup namespace, fixed by the
// kernel (PROC_CGROUP_INIT_INO).
const initialCgroupNS = 0xEFFFFFFB

// openGroups refuses a cgroup namespace: depths seen from within it aren't those
// that the programs see, and a wrong depth watches nothing.
func openGroups() (*groups, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/cgroup", &st); err != nil {
		return nil, fmt.Errorf("finding the cgroup namespace: %w", err)
	}
	if st.Ino != initialCgroupNS {
		return nil, fault.New(fault.Unsupported, "cgroup-namespace", "the daemon runs in a cgroup namespace, from which sandboxes can't be watched").
			WithHint("start its container with --cgroupns=host")
	}
	root, err := cgroupRoot()
	if err != nil {
		return nil, err
	}
	dir, err := os.Open(root)
	if err != nil {
		return nil, fmt.Errorf("opening cgroup v2: %w", err)
	}
	return &groups{root: root, dir: dir}, nil
}

func (g *groups) close() error { return g.dir.Close() }

// kernfsHandle is FILEID_KERNFS: the handle is the 64-bit id.
const kernfsHandle = 0xfe

// level is how deep the group with this id lies; the root is level 0.
func (g *groups) level(id uint64) (uint32, error) {
	handle := unix.NewFileHandle(kernfsHandle, binary.NativeEndian.AppendUint64(nil, id))
	fd, err := unix.OpenByHandleAt(int(g.dir.Fd()), handle, unix.O_PATH|unix.O_CLOEXEC)
	if err != nil {
		return 0, fault.New(fault.Invalid, "cgroup", "finding control group %d: %w", id, err)
	}
	defer unix.Close(fd)
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return 0, fmt.Errorf("finding control group %d: %w", id, err)
	}
	rel, err := filepath.Rel(g.root, path)
	if err != nil || strings.HasPrefix(rel, "..") {
		return 0, fault.New(fault.Invalid, "cgroup", "control group %d isn't below %s: %s", id, g.root, path)
	}
	return uint32(strings.Count(rel, "/") + 1), nil
}

// cgroupRoot is where the v2 hierarchy is mounted, on pure v2 and hybrid hosts.
func cgroupRoot() (string, error) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("finding cgroup v2: %w", err)
	}
	for line := range strings.Lines(string(data)) {
		// id parent dev root mountpoint options ... - type source options
		before, after, _ := strings.Cut(line, " - ")
		f, kind := strings.Fields(before), strings.Fields(after)
		if len(f) > 4 && len(kind) > 0 && kind[0] == "cgroup2" && f[3] == "/" {
			return f[4], nil
		}
	}
	return "", fault.New(fault.Unsupported, "cgroup", "no cgroup v2 hierarchy is mounted").
		WithHint("mount -t cgroup2 none /sys/fs/cgroup/unified")
}
