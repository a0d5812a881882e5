// Package kernelobjects describes what lives in the kernel around a sandbox without
// a process of its own: SysV IPC, POSIX queues, mounts, host and domain name,
// network configuration, and what of pid 1 a turn can alter. Equal lines, equal
// objects. It shares no code with the inspector, whose verdicts it is held against.
//
// Not described, because nothing shows them outside: keyrings, netfilter tables,
// the priority of pid 1's I/O.
package kernelobjects

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"unsafe"

	"github.com/boxwood-rl/boxwood/internal/thread"
	"golang.org/x/sys/unix"
)

// Of describes the kernel objects around a sandbox's pid 1, given by its pid on the
// host. A thread enters the namespaces for it and is not used again.
func Of(pid1 int) (out []string, err error) {
	for _, name := range []string{"mountinfo", "limits"} {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid1, name))
		if err != nil {
			return nil, err
		}
		out = append(out, lines(name, data)...)
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid1))
	if err != nil {
		return nil, err
	}
	after := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	out = append(out, "priority "+after[15]+" nice "+after[16]+" policy "+after[38])
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid1))
	if err != nil {
		return nil, err
	}
	out = append(out, regexp.MustCompile(`Cpus_allowed:.*`).FindString(string(status)))
	err = thread.Discard(func() error {
		found, err := inside(pid1)
		out = append(out, found...)
		return err
	})
	return out, err
}

// lines of a file, each with its name before it, so that a difference is short.
func lines(name string, data []byte) (out []string) {
	for line := range strings.Lines(string(data)) {
		out = append(out, name+": "+strings.TrimSpace(line))
	}
	return out
}

func inside(pid1 int) (out []string, err error) {
	for _, ns := range []string{"ipc", "uts", "net"} {
		fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/%s", pid1, ns), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		err = unix.Setns(fd, 0)
		unix.Close(fd)
		if err != nil {
			return nil, fmt.Errorf("entering %s: %w", ns, err)
		}
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return nil, err
	}
	out = append(out, unix.ByteSliceToString(u.Nodename[:])+" "+unix.ByteSliceToString(u.Domainname[:]))
	for _, path := range []string{"/proc/sysvipc/shm", "/proc/sysvipc/msg", "/proc/sysvipc/sem", "/proc/thread-self/net/fib_trie",
		"/proc/thread-self/net/if_inet6", "/proc/sys/net/ipv4/ip_forward"} {
		data, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		out = append(out, lines(path, data)...)
	}
	queues, err := posixQueues()
	if err != nil {
		return nil, fmt.Errorf("listing POSIX queues: %w", err)
	}
	lo, err := loopback()
	if err != nil {
		return nil, fmt.Errorf("asking for lo: %w", err)
	}
	return append(out, queues, lo), nil
}

// posixQueues mounts the queues of this thread's namespace nowhere and reads them.
func posixQueues() (string, error) {
	fs, err := unix.Fsopen("mqueue", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return "", err
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return "", err
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(mnt)
	dir := fmt.Sprintf("/proc/thread-self/fd/%d", mnt)
	entries, err := os.ReadDir(dir + "/.")
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		fmt.Fprintf(&b, "queue %q %q %v\n", e.Name(), data, err)
	}
	return b.String(), nil
}

func loopback() (string, error) {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer unix.Close(s)
	out := "lo"
	for _, request := range []uintptr{unix.SIOCGIFFLAGS, unix.SIOCGIFMTU, unix.SIOCGIFTXQLEN} {
		var r [40]byte // struct ifreq
		copy(r[:], "lo")
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s), request, uintptr(unsafe.Pointer(&r))); errno != 0 {
			return "", errno
		}
		out += fmt.Sprintf(" %x", r[16:20])
	}
	return out, nil
}
