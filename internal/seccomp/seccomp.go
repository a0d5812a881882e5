// Package seccomp says which system calls a sandbox may make, and makes the program that the kernel
// asks before each of them.
//
// The list starts from the default that container runtimes share: what ordinary programs use is there, what reaches
// the host's kernel as a whole isn't (modules, mounts, clocks, tracing by BPF and perf, keyrings), and what lets a
// sandbox make namespaces, in which it would have all capabilities, isn't either. It differs in these:
//
//   - clone3(2) may be called, since its flags lie in memory, which no filter can see, and pid 1 needs it. That
//     nobody makes a namespace by it is the kernel's own limit of a box (see engine/box).
//   - Sockets are of the families unix, inet, inet6 and netlink, all that a network of loopback has a use for.
//   - sync(2) returns 0 and does nothing: it would flush what everybody on the host has written. What a sandbox
//     writes is flushed by its captures.
//   - Calls whose effect on a process no capture could save don't exist: Landlock, mseal(2), memfd_secret(2).
//
// Calls of the 32-bit interface are held to the same list, by their own numbers; those of x32 don't exist. What isn't on
// the list fails with EPERM, what is newer than the list with ENOSYS, so that libraries take the older way.
package seccomp

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

//go:generate go run ./gen

// Groups are what a sandbox may be allowed beyond the usual: calls, and what they may do. Their numbers lie in the log of trees.
type Groups uint64

const (
	// IOUring: a process that holds a ring can't be captured.
	IOUring Groups = 1 << iota
	// Keyring: keys can't be captured.
	Keyring
	Userfaultfd
	// Perf is perf_event_open(2), as far as kernel.perf_event_paranoid lets anybody use it.
	Perf
	// Namespaces are namespaces inside the sandbox, and mounts in them. Nothing opens more of the
	// kernel to whoever wants to break it, and processes in them can't be captured.
	Namespaces
	// Setuid opens no call: programs may gain rights that those who start them don't have, by setuid
	// bits and capabilities of files. Elsewhere no_new_privs is set.
	Setuid

	last
	// All is every group.
	All = last - 1
)

var groupNames = map[string]Groups{
	"io_uring": IOUring, "keyring": Keyring, "userfaultfd": Userfaultfd, "perf": Perf, "namespaces": Namespaces, "setuid": Setuid,
}

var groupCalls = map[Groups]string{
	IOUring:     "io_uring_setup io_uring_enter io_uring_register",
	Keyring:     "add_key request_key keyctl",
	Userfaultfd: "userfaultfd",
	Perf:        "perf_event_open",
	Namespaces: `clone unshare setns mount umount umount2 pivot_root sethostname setdomainname open_tree open_tree_attr move_mount
		fsopen fsconfig fsmount fspick mount_setattr statmount listmount listns`,
}

// Parse reads the names of groups.
func Parse(names []string) (g Groups, err error) {
	for _, name := range names {
		one, ok := groupNames[name]
		if !ok {
			return 0, fault.New(fault.Invalid, "bad_calls", "%q is no group of system calls", name).
				WithHint("these are: %s", strings.Join(slices.Sorted(maps.Keys(groupNames)), ", "))
		}
		g |= one
	}
	return g, nil
}

// Names are what Parse reads.
func (g Groups) Names() (names []string) {
	for name, one := range groupNames {
		if g&one != 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func (g Groups) String() string { return strings.Join(g.Names(), ",") }

// Valid: all groups are known here.
func (g Groups) Valid() bool { return g < last }

// usual calls are allowed whatever their arguments.
const usual = `
	accept accept4 access adjtimex alarm arch_prctl bind brk cachestat capget capset chdir chmod chown chown32 chroot
	clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime clock_gettime64 clock_nanosleep
	clock_nanosleep_time64 clone3 close close_range connect copy_file_range creat dup dup2 dup3 epoll_create epoll_create1
	epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 execve execveat exit
	exit_group faccessat faccessat2 fadvise64 fadvise64_64 fallocate fanotify_mark fchdir fchmod fchmodat fchmodat2 fchown
	fchown32 fchownat fcntl fcntl64 fdatasync fgetxattr file_getattr file_setattr flistxattr flock fork fremovexattr fsetxattr fstat
	fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futex futex_requeue futex_time64 futex_wait futex_waitv
	futex_wake futimesat get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid getegid32 geteuid
	geteuid32 getgid getgid32 getgroups getgroups32 getitimer getpeername getpgid getpgrp getpid getppid getpriority
	getrandom getresgid getresgid32 getresuid getresuid32 getrlimit getrusage getsid getsockname getsockopt gettid
	gettimeofday getuid getuid32 getxattr getxattrat inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel
	io_destroy io_getevents io_pgetevents io_pgetevents_time64 io_setup io_submit ioctl ioprio_get ioprio_set ipc kill lchown
	lchown32 lgetxattr link linkat listen listxattr listxattrat llistxattr _llseek lremovexattr lseek lsetxattr lstat lstat64
	madvise map_shadow_stack membarrier memfd_create mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mmap2
	modify_ldt mprotect mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend
	mq_timedsend_time64 mq_unlink mremap msgctl msgget msgrcv msgsnd msync munlock munlockall munmap name_to_handle_at
	nanosleep newfstatat _newselect nice open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc
	pkey_free pkey_mprotect poll ppoll ppoll_time64 prctl pread64 preadv preadv2 prlimit64 process_mrelease process_vm_readv
	process_vm_writev pselect6 pselect6_time64 ptrace pwrite64 pwritev pwritev2 read readahead readdir readlink readlinkat
	readv recvfrom recvmmsg recvmmsg_time64 recvmsg remap_file_pages removexattr removexattrat rename renameat
	renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
	rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min
	sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64
	sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop
	semtimedop semtimedop_time64 sendfile sendfile64 sendmmsg sendmsg sendto set_robust_list set_thread_area
	set_tid_address setfsgid setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups setgroups32 setitimer setpgid
	setpriority setregid setregid32 setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit setsid
	setsockopt setuid setuid32 setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaction sigaltstack signal signalfd
	signalfd4 sigpending sigprocmask sigreturn sigsuspend splice stat stat64 statfs statfs64 statx symlink symlinkat
	sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_gettime64
	timer_settime timer_settime64 timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime
	timerfd_settime64 times tkill truncate truncate64 ugetrlimit umask uname unlink unlinkat utime utimensat
	utimensat_time64 utimes vfork vmsplice wait4 waitid waitpid write writev`

// absent calls fail as if the kernel didn't have them. 32-bit programs that open sockets by socketcall(2), whose
// arguments no filter can see, take socket(2) then, if their library knows it.
const absent = "landlock_create_ruleset landlock_add_rule landlock_restrict_self mseal memfd_secret socketcall"

const newNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// Return values of a filter (linux/seccomp.h).
const (
	retAllow = 0x7fff0000
	retErrno = 0x00050000
	retKill  = 0x80000000 // the process
)

var families = []uint32{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK}

// personalities: Linux as it is, its variant that says 2.6, 32-bit ones of both, and asking.
var personalities = []uint32{0, 0x20000, 0x8, 0x20008, 0xffffffff}

// rule says what becomes of a call: ret, unless one of a few arguments decides.
type rule struct {
	ret uint32
	// oneOf: the call is allowed if its first argument is one of these.
	oneOf []uint32
	// without: it is allowed if its first argument has none of these bits.
	without uint32
}

// rules by name. What has none isn't allowed.
func rules(g Groups) map[string]rule {
	r := map[string]rule{
		"clone":       {ret: errno(unix.EPERM), without: newNamespaces},
		"socket":      {ret: errno(unix.EAFNOSUPPORT), oneOf: families},
		"socketpair":  {ret: errno(unix.EAFNOSUPPORT), oneOf: families},
		"personality": {ret: errno(unix.EPERM), oneOf: personalities},
		"sync":        {ret: errno(0)},
	}
	set := func(names string, ret uint32) {
		for _, name := range strings.Fields(names) {
			r[name] = rule{ret: ret}
		}
	}
	set(usual, retAllow)
	set(absent, errno(unix.ENOSYS))
	for group, names := range groupCalls {
		if g&group != 0 {
			set(names, retAllow)
		}
	}
	return r
}

func errno(e unix.Errno) uint32 { return retErrno | uint32(e) }

// newest of the calls that the list was made over; what comes after is unknown.
func newest(abi int) (n int) {
	for _, of := range numbers {
		n = max(n, of[abi])
	}
	return n
}

// byNumber is what becomes of each call of an interface, by its number. The last is for all that are newer.
func byNumber(r map[string]rule, abi int) []rule {
	table := make([]rule, newest(abi)+2)
	for i := range table {
		table[i].ret = errno(unix.EPERM)
	}
	table[len(table)-1].ret = errno(unix.ENOSYS)
	for name, of := range numbers {
		if one, ok := r[name]; ok && of[abi] >= 0 {
			table[of[abi]] = one
		}
	}
	return table
}

// Program is the filter of a sandbox that may use the usual calls and those of g, as the kernel takes it: struct sock_filter
// after struct sock_filter.
func Program(g Groups) []byte {
	if !g.Valid() {
		panic(fmt.Sprintf("groups %#x of system calls", uint64(g)))
	}
	if sabotage.On("seccomp") {
		return encode([]instruction{{ret, 0, 0, retAllow}})
	}
	return programs[g&^Setuid]()
}

// Digest changes when any program does: whether processes that were saved under one may go on under another.
func Digest() []byte { return digest() }
