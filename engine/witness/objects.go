package witness

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/thread"
	"golang.org/x/sys/unix"
)

// Objects are what the kernel holds for a sandbox without any process.
type Objects struct {
	// SysV counts shared memory segments, message queues and semaphore sets.
	SysV int
	// Queues counts POSIX message queues.
	Queues int
	// Keys counts keys that users of the sandbox have in keyrings.
	Keys int
}

// None: nothing is there that a fresh sandbox doesn't have.
func (o Objects) None() bool { return o == Objects{} }

// ObjectsOf counts the objects around pid1, a host pid. A sandbox's root may change
// neither mounts nor names nor the network of his own namespaces; those of further
// namespaces last no longer than the processes in them.
func ObjectsOf(pid1 int) (o Objects, err error) {
	base, err := mapBase(pid1, "uid_map")
	if err != nil {
		return o, err
	}
	if o.Keys, err = keys(base); err != nil {
		return o, err
	}
	err = inside(pid1, "ipc", func() (err error) {
		for _, name := range []string{"shm", "msg", "sem"} {
			b, err := os.ReadFile("/proc/sysvipc/" + name)
			if err != nil && !os.IsNotExist(err) {
				return err
			}
			o.SysV += max(0, strings.Count(string(b), "\n")-1)
		}
		o.Queues, err = queues()
		return err
	})
	return o, err
}

// inside runs f in a namespace of pid1, by its name in /proc, on a thread that ends with it.
func inside(pid1 int, namespace string, f func() error) error {
	return thread.Discard(func() error {
		ns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/%s", pid1, namespace), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(ns)
		if err := unix.Setns(ns, 0); err != nil {
			return fmt.Errorf("entering the %s namespace: %w", namespace, err)
		}
		return f()
	})
}

// queues mounts those of this thread's namespace nowhere, and counts them.
func queues() (int, error) {
	fs, err := unix.Fsopen("mqueue", unix.FSOPEN_CLOEXEC)
	if err == unix.ENODEV {
		return 0, nil // a kernel without
	}
	if err != nil {
		return 0, fmt.Errorf("looking for POSIX queues: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return 0, fmt.Errorf("looking for POSIX queues: %w", err)
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("looking for POSIX queues: %w", err)
	}
	defer unix.Close(mnt)
	entries, err := os.ReadDir(fmt.Sprintf("/proc/thread-self/fd/%d/.", mnt))
	return len(entries), err
}

// keys counts those of the ids from base up, from lines such as
// " 1000:     9 8/8 3/200 40/20000": uid, uses, keys, quota.
func keys(base int) (n int, err error) {
	b, err := os.ReadFile("/proc/key-users")
	if os.IsNotExist(err) {
		return 0, nil
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 3 {
			continue
		}
		uid, err := strconv.Atoi(strings.TrimSuffix(f[0], ":"))
		if err != nil || uid < base || uid >= base+idsEach {
			continue
		}
		count, _, _ := strings.Cut(f[2], "/")
		k, _ := strconv.Atoi(count)
		n += k
	}
	return n, err
}

const idsEach = 65536

// LeaderOf describes what a turn can alter of pid 1, which all that it starts inherits.
func LeaderOf(pid1 int) (facts []string, err error) {
	dir := fmt.Sprintf("/proc/%d", pid1)
	err = inherited(dir, pid1, func(name, value string) { facts = append(facts, name+": "+value) })
	return facts, err
}

// inherited are facts that children of a process get from it.
func inherited(dir string, pid int, fact func(string, string)) error {
	f, err := statFields(dir)
	if err != nil {
		return err
	}
	fact("nice", f[16])
	fact("policy", f[38])
	for _, name := range []string{"limits", "oom_score_adj", "coredump_filter", "personality"} {
		b, err := os.ReadFile(dir + "/" + name)
		if err != nil && !os.IsNotExist(err) {
			return err
		}
		fact(name, digest(b))
	}
	st, err := status(dir)
	if err != nil {
		return err
	}
	fact("Cpus_allowed_list", st["Cpus_allowed_list"])
	const ofProcess = 1
	priority, _, errno := unix.Syscall(unix.SYS_IOPRIO_GET, ofProcess, uintptr(pid), 0)
	if errno != 0 {
		return fmt.Errorf("asking for the I/O priority of process %d: %w", pid, errno)
	}
	fact("I/O priority", strconv.Itoa(int(priority)))
	return nil
}
