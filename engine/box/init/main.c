// The nursery: a small root process on the host that makes zygotes. It exists
// because cloning from it copies a few dozen pages where cloning from the daemon
// copies the page tables of a large heap, and because its mount namespace holds
// four mounts where the host's holds dozens, all of which a clone copies.
//
// Its children execute boxinit again on their way to being pid 1, from their
// control folder, so that CRIU finds their program by a name in the box. That file is
// root's on the host and can be executed but not read (0111), which makes the
// kernel count their memory to the host's user namespace: nobody inside can trace
// them or read their /proc folder, whatever capabilities he gains.
//
// It ends when the daemon does, or when it has thawed what that left frozen; attached
// boxes live on without it.
#include "wire.h"

#include <linux/mount.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <grp.h>

static const int DAEMON = 3;

static void fail(const char *what)
{
	reply_error(DAEMON, 0, "starting the nursery: %s: %s", what, strerror(errno));
	_exit(1);
}

static void make_devices(void)
{
	static const struct { const char *name; int major, minor; } nodes[] = {
		{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0},
	};
	static const char *const links[][2] = {
		{"pts/ptmx", "dev/ptmx"}, {"/proc/self/fd", "dev/fd"}, {"/proc/self/fd/0", "dev/stdin"},
		{"/proc/self/fd/1", "dev/stdout"}, {"/proc/self/fd/2", "dev/stderr"},
	};
	char path[64];
	for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
		snprintf(path, sizeof path, "dev/%s", nodes[i].name);
		if (mknod(path, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)))
			fail(path);
	}
	for (size_t i = 0; i < sizeof links / sizeof *links; i++)
		if (symlink(links[i][0], links[i][1]))
			fail(links[i][1]);
}

// make_root gives this process a mount namespace of its own with just what
// zygotes need. A user namespace may mount proc and sysfs only where it can see
// whole ones already, which is what hostproc and hostsys are for.
static void make_root(const char *control)
{
	static const char *const folders[] = {
		"dev", "dev/pts", "dev/shm", "hostproc", "hostsys", "control", "new",
		"p", "s", "d", "run", "run/box", "ro", // stages of a zygote: proc, sys, dev, control folder
	};
	if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
		fail("making a mount namespace");
	int ctl = syscall(SYS_open_tree, AT_FDCWD, control, OPEN_TREE_CLONE | O_CLOEXEC);
	if (ctl < 0 || mount("boxwood", control, "tmpfs", MS_NOSUID, "mode=755,size=1m") || chdir(control))
		fail(control);
	umask(0);
	for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
		if (mkdir(folders[i], 0755))
			fail(folders[i]);
	int id = open("m", O_CREAT | O_WRONLY | O_CLOEXEC, 0444); // where machine-id is staged
	if (id < 0)
		fail("m");
	close(id);
	make_devices();
	if (mount("proc", "hostproc", "proc", 0, NULL) || mount("sysfs", "hostsys", "sysfs", 0, NULL))
		fail("mounting proc and sysfs");
	// It holds pid 1's program, and /run may be noexec.
	if (syscall(SYS_move_mount, ctl, "", AT_FDCWD, "control", MOVE_MOUNT_F_EMPTY_PATH) ||
	    mount(NULL, "control", NULL, MS_BIND | MS_REMOUNT | MS_NOSUID | MS_NODEV, NULL))
		fail("moving the control folder");
	close(ctl);
	if (syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/"))
		fail("pivoting");
}

static int write_map(int pid, const char *which, uint32_t base)
{
	char path[64], map[64];
	snprintf(path, sizeof path, "/hostproc/%d/%s", pid, which);
	int n = snprintf(map, sizeof map, "0 %u 65536", base);
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	int rc = write(fd, map, n) == n ? 0 : -1;
	close(fd);
	return rc;
}

static const struct {
	int what;
	rlim_t most;
} counts[] = {{RLIMIT_MEMLOCK, 8 << 20}, {RLIMIT_MSGQUEUE, 819200}, {RLIMIT_SIGPENDING, 16384}};

// wide_counts lifts the limits of what the kernel counts by user, as far as the daemon may. It counts that for the maker
// of a user namespace, too, who is root for all boxes, and holds it to the limit that he had when he made it:
// were that a box's own, one that takes its share would leave nothing to the others.
static void wide_counts(void)
{
	for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
		struct rlimit now, all = {RLIM_INFINITY, RLIM_INFINITY};
		if (!setrlimit(counts[i].what, &all))
			continue;
		if (getrlimit(counts[i].what, &now))
			fail("resource limits");
		now.rlim_cur = now.rlim_max;
		if (setrlimit(counts[i].what, &now))
			fail("resource limits");
	}
}

// own_counts are the limits of a box's processes, for each user of it. The memory is the box's in any case.
static int own_counts(void)
{
#ifndef WITHOUT_LIMITS
	for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
		struct rlimit now;
		if (getrlimit(counts[i].what, &now))
			return -1;
		rlim_t most = counts[i].most < now.rlim_max ? counts[i].most : now.rlim_max;
		if (setrlimit(counts[i].what, &(struct rlimit){most, most}))
			return -1;
	}
#endif
	return 0;
}

// zygote is the whole life of one: it waits for its id map, joins the v1 cgroups
// (by its own "0" into "tasks": moving oneself waits for no grace period, moving
// another does), becomes root of its namespaces and stages what it can.
static void zygote(int sock, uint32_t slot, const int *fds, int nfds)
{
	char go;
	if (recv(sock, &go, 1, 0) != 1)
		_exit(0);
	for (int i = 1; i < nfds; i++)
		if (write(fds[i], "0", 1) != 1) {
			reply_error(sock, 0, "joining a v1 cgroup: %s", strerror(errno));
			_exit(1);
		}
	if (dup2(sock, 3) != 3 || syscall(SYS_close_range, 4, ~0U, 0))
		_exit(1);
	if (own_counts()) {
		reply_error(3, 0, "resource limits: %s", strerror(errno));
		_exit(1);
	}
	if (setgroups(0, NULL) || setresgid(0, 0, 0) || setresuid(0, 0, 0)) {
		reply_error(3, 0, "becoming root of the box: %s", strerror(errno));
		_exit(1);
	}
	stage(slot);
	_exit(1); // stage has said why
}

static void spawn(uint32_t id, const char *body, size_t n, const int *fds, int nfds)
{
	uint32_t slot, base, pid32;
	int pair[2], pidfd = -1;
	if (n != 8 || nfds < 1) {
		reply_error(DAEMON, id, "malformed request for a zygote");
		return;
	}
	memcpy(&slot, body, 4);
	memcpy(&base, body + 4, 4);
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) {
		reply_error(DAEMON, id, "making a socket pair: %s", strerror(errno));
		return;
	}
	struct clone_args args = {
		.flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_PIDFD | CLONE_INTO_CGROUP,
		.pidfd = (uintptr_t)&pidfd,
		.exit_signal = SIGCHLD,
		.cgroup = fds[0],
	};
	long pid = syscall(SYS_clone3, &args, sizeof args);
	if (pid == 0) {
		close(pair[0]);
		zygote(pair[1], slot, fds, nfds);
	}
	char path[64];
	int ns = -1;
	if (pid > 0) {
		snprintf(path, sizeof path, "/hostproc/%ld/ns/user", pid);
		ns = open(path, O_RDONLY | O_CLOEXEC);
	}
	if (pid < 0 || ns < 0 || write_map(pid, "gid_map", base) || write_map(pid, "uid_map", base) || send(pair[0], "g", 1, MSG_NOSIGNAL) != 1) {
		reply_error(DAEMON, id, "cloning a zygote: %s", strerror(errno));
	} else {
		int out[] = {pidfd, pair[0], ns};
		pid32 = pid;
		reply(DAEMON, id, R_SPAWNED, &pid32, sizeof pid32, out, 3);
	}
	close(pair[0]); // a zygote that was never told to go ends here
	close(pair[1]);
	close(pidfd);
	close(ns);
}

// own_signals undoes what the daemon was started with: under nohup, say, every
// sandbox would ignore hang-ups. libc keeps two signals to itself, so it isn't asked.
static void own_signals(void)
{
	struct {
		void (*handler)(int);
		unsigned long flags;
		void (*restorer)(void);
		unsigned long mask;
	} dfl = {SIG_DFL, 0, NULL, 0};
	unsigned long none = 0;
	for (int sig = 1; sig <= 64; sig++)
		syscall(SYS_rt_sigaction, sig, &dfl, NULL, sizeof dfl.mask); // not KILL and STOP
	syscall(SYS_rt_sigprocmask, SIG_SETMASK, &none, NULL, sizeof none);
}

// own_limits are those of every sandbox, whatever the daemon was started with. Processes and memory
// are bounded by cgroups; for what the kernel counts by user, see own_counts.
static void own_limits(void)
{
	static const struct {
		int what;
		rlim_t soft, hard;
	} limits[] = {
		{RLIMIT_CORE, 0, RLIM_INFINITY}, // core dumps write past the inspector
		{RLIMIT_NOFILE, 1024, 524288},
		{RLIMIT_NICE, 0, 0},
		{RLIMIT_RTPRIO, 0, 0},
		{RLIMIT_RTTIME, RLIM_INFINITY, RLIM_INFINITY},
		{RLIMIT_STACK, 8 << 20, RLIM_INFINITY},
		{RLIMIT_NPROC, RLIM_INFINITY, RLIM_INFINITY},
		{RLIMIT_FSIZE, RLIM_INFINITY, RLIM_INFINITY},
		{RLIMIT_DATA, RLIM_INFINITY, RLIM_INFINITY},
		{RLIMIT_AS, RLIM_INFINITY, RLIM_INFINITY},
		{RLIMIT_CPU, RLIM_INFINITY, RLIM_INFINITY},
		{RLIMIT_RSS, RLIM_INFINITY, RLIM_INFINITY},
		{RLIMIT_LOCKS, RLIM_INFINITY, RLIM_INFINITY},
	};
#ifdef WITHOUT_LIMITS
	return;
#endif
	for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
		struct rlimit now, want = {limits[i].soft, limits[i].hard};
		if (getrlimit(limits[i].what, &now) || !setrlimit(limits[i].what, &want))
			continue;
		// A daemon that may not raise what it was given hands on less.
		want.rlim_max = want.rlim_max < now.rlim_max ? want.rlim_max : now.rlim_max;
		want.rlim_cur = want.rlim_cur < want.rlim_max ? want.rlim_cur : want.rlim_max;
		if (setrlimit(limits[i].what, &want))
			fail("resource limits");
	}
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "pid1"))
		pid1();
	if (argc != 3 || strcmp(argv[1], "nursery")) {
		fputs("boxinit is started by boxwood\n", stderr);
		return 2;
	}
	prctl(PR_SET_DUMPABLE, 0);
	prctl(PR_SET_NAME, "boxinit");
	uint32_t action = SECCOMP_RET_ERRNO;
	if (syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action))
		fail("this kernel has no seccomp filters (CONFIG_SECCOMP_FILTER)");
	own_signals();
	own_limits();
	wide_counts();
	signal(SIGCHLD, SIG_IGN); // children are reaped by the kernel; zygotes put it back
	signal(SIGINT, SIG_IGN);  // a terminal's ^C is for the daemon to handle
	setsid();
	make_root(argv[2]);
	reply(DAEMON, 0, R_DONE, NULL, 0, NULL, 0);
	for (;;) {
		static char buf[sizeof(struct head) + 256];
		int fds[FDS_MAX], nfds;
		wait_guarded(DAEMON);
		int n = receive(DAEMON, buf, sizeof buf, fds, &nfds, 0);
		if (n <= 0) {
			wait_guarded(-1);
			return 0;
		}
		struct head h;
		if (n >= (int)sizeof h) {
			memcpy(&h, buf, sizeof h);
			if (h.op == OP_SPAWN)
				spawn(h.id, buf + sizeof h, n - sizeof h, fds, nfds);
			if (h.op == OP_LIMIT && nfds == 1 && n == (int)sizeof h + 4) {
				uint32_t nests;
				memcpy(&nests, buf + sizeof h, 4);
				limit_from_outside(h.id, DAEMON, nests, fds[0]);
			}
			if (h.op == OP_GUARD && nfds == 3 && guard(fds)) {
				nfds = 0; // they are the guard's
				reply(DAEMON, h.id, R_DONE, NULL, 0, NULL, 0);
			} else if (h.op == OP_GUARD) {
				reply_error(DAEMON, h.id, "too many boxes are guarded");
			}
		}
		for (int i = 0; i < nfds; i++)
			close(fds[i]);
	}
}
