// Package privileges gives up what the daemon could do as root and doesn't have to. What it starts has no more, either; a
// sandbox has the capabilities of its own user namespace, which come from nowhere else.
package privileges

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// kept are the capabilities that the daemon, CRIU and what else it starts need, with what for.
var kept = map[string]uint{
	"CAP_CHOWN":              unix.CAP_CHOWN,              // owners of files in images, changes, archives
	"CAP_DAC_OVERRIDE":       unix.CAP_DAC_OVERRIDE,       // files of every user of a sandbox
	"CAP_DAC_READ_SEARCH":    unix.CAP_DAC_READ_SEARCH,    // the same; a cgroup by its id
	"CAP_FOWNER":             unix.CAP_FOWNER,             // modes and times of them
	"CAP_FSETID":             unix.CAP_FSETID,             // setgid bits of them
	"CAP_IPC_LOCK":           unix.CAP_IPC_LOCK,           // restored locked memory, maps of BPF on old kernels
	"CAP_IPC_OWNER":          unix.CAP_IPC_OWNER,          // System V objects of a dump
	"CAP_KILL":               unix.CAP_KILL,               // processes of sandboxes
	"CAP_MKNOD":              unix.CAP_MKNOD,              // device nodes and whiteouts of sandboxes
	"CAP_NET_ADMIN":          unix.CAP_NET_ADMIN,          // loopback, and sockets of a dump
	"CAP_NET_BIND_SERVICE":   unix.CAP_NET_BIND_SERVICE,   // serve --listen on any port, ports of a dump
	"CAP_SETFCAP":            unix.CAP_SETFCAP,            // capabilities of files in images
	"CAP_SETGID":             unix.CAP_SETGID,             // ids of sandboxes
	"CAP_SETPCAP":            unix.CAP_SETPCAP,            // capabilities of a dump's processes
	"CAP_SETUID":             unix.CAP_SETUID,             // ids of sandboxes
	"CAP_SYS_ADMIN":          unix.CAP_SYS_ADMIN,          // mounts, namespaces, btrfs, cgroups
	"CAP_SYS_CHROOT":         unix.CAP_SYS_CHROOT,         // roots of a dump's processes
	"CAP_SYS_NICE":           unix.CAP_SYS_NICE,           // priorities of them, cores of sandboxes
	"CAP_SYS_PTRACE":         unix.CAP_SYS_PTRACE,         // looking at processes, and dumping them
	"CAP_SYS_RESOURCE":       unix.CAP_SYS_RESOURCE,       // limits of sandboxes
	"CAP_SYS_TIME":           unix.CAP_SYS_TIME,           // offsets of the clocks of a dump's processes
	"CAP_PERFMON":            unix.CAP_PERFMON,            // programs of the inspector
	"CAP_BPF":                unix.CAP_BPF,                // the same
	"CAP_CHECKPOINT_RESTORE": unix.CAP_CHECKPOINT_RESTORE, // pids of a dump's processes
}

// Kept are their names, sorted.
func Kept() []string {
	names := make([]string, 0, len(kept))
	for name := range kept {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Mask has a bit for each of them, as /proc/PID/status shows it.
func Mask() (mask uint64) {
	for _, c := range kept {
		mask |= 1 << c
	}
	return mask
}

// ErrCgo: a program that is built with cgo can't change all its threads.
var ErrCgo = fmt.Errorf("giving up capabilities: %w: the program is built with cgo", syscall.ENOTSUP)

// Drop gives up all but these, for every thread of the process and all that it will start. There is no way back.
func Drop() error {
	mask := Mask()
	for c := range uint(63) {
		if mask&(1<<c) != 0 {
			continue
		}
		switch _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uintptr(c), 0); errno {
		case 0, unix.EINVAL: // or the kernel knows of no such capability
		case syscall.ENOTSUP:
			return ErrCgo
		default:
			return fmt.Errorf("giving up capability %d: %w", c, errno)
		}
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&head, &sets[0]); err != nil {
		return fmt.Errorf("reading capabilities: %w", err)
	}
	for i, half := range []uint32{uint32(mask), uint32(mask >> 32)} {
		sets[i].Effective &= half
		sets[i].Permitted &= half
		sets[i].Inheritable = 0
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&sets[0])), 0); errno != 0 {
		return fmt.Errorf("giving up capabilities: %w", errno)
	}
	return nil
}

// Held reads the sets of a process's thread from its status file: those in Prm, Eff and Bnd together.
func Held(status string) (mask uint64, err error) {
	found := 0
	for line := range strings.Lines(status) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":\t")
		if name != "CapPrm" && name != "CapEff" && name != "CapBnd" && name != "CapInh" && name != "CapAmb" {
			continue
		}
		var set uint64
		if _, err := fmt.Sscanf(value, "%x", &set); err != nil {
			return 0, fmt.Errorf("reading %q: %w", line, err)
		}
		mask |= set
		found++
	}
	if found != 5 {
		return 0, fmt.Errorf("there are %d sets of capabilities in a status", found)
	}
	return mask, nil
}
