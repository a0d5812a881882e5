// What a zygote does before it has a root, and how it takes one.
//
// Paths here are those of the nursery's small root (see make_root), which the
// zygote's mount namespace is a copy of: /p /s /d /ro /m are staged mounts, /run/box
// is the control folder while it may be written to, /new
// is where the overlay goes.
#include "wire.h"

#include <linux/filter.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/un.h>

enum { SAFE = MS_NOSUID | MS_NODEV | MS_NOEXEC };

// What a zygote hands to itself when it executes pid 1's program.
enum { CONN = 3, LISTENER = 4, MACHINE_ID = 5, NESTING = 6, HANDED = 7 };

static int machine_id = MACHINE_ID; // written at attach; nobody else can write to the folder
static int nesting = NESTING;       // the limit of namespaces, written at attach

static int bad(const char *what)
{
	reply_error(3, 0, "staging a zygote: %s: %s", what, strerror(errno));
	return -1;
}

static int read_only_bind(const char *from, const char *to, unsigned long flags)
{
#ifdef WITHOUT_MASKS
	return from == to ? 0 : mount(from, to, NULL, MS_BIND, NULL);
#endif
	return mount(from, to, NULL, MS_BIND, NULL) || mount(NULL, to, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | flags, NULL);
}

static int stage_mounts(int *nest)
{
	if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
		return bad("making mounts private");
	if (mount("proc", "/p", "proc", SAFE, NULL) || (*nest = open_nesting("/p")) < 0 || limit_inotify("/p") ||
	    read_only_bind("/p/sys", "/p/sys", SAFE))
		return bad("proc");
	if (mount("sysfs", "/s", "sysfs", SAFE | MS_RDONLY, NULL))
		return bad("sysfs");
	if (read_only_bind("/dev", "/d", MS_NOSUID | MS_NOEXEC))
		return bad("dev");
	if (mount("devpts", "/d/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5"))
		return bad("devpts");
	return 0;
}

// stage_control binds our socket in the control folder, which after that can be
// seen from inside only through a read-only mount. The socket is bound by the name
// that it has in the box.
static int stage_control(uint32_t slot, int nest)
{
	char path[64];
	snprintf(path, sizeof path, "/control/%u", slot);
	if (mount(path, "/run/box", NULL, MS_BIND, NULL) || chdir("/run/box"))
		return bad("control folder");
	struct sockaddr_un a = {.sun_family = AF_UNIX, .sun_path = "/run/box/init.sock"};
	int l = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	umask(077);
	if (l < 0 || bind(l, (struct sockaddr *)&a, sizeof a) || listen(l, 64))
		return bad("init.sock");
	umask(0);
	int id = open("machine-id", O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0444);
	if (id < 0 || chdir("/"))
		return bad("machine-id");
	if (read_only_bind(path, "/ro", MS_NOSUID | MS_NODEV) || read_only_bind("/run/box/machine-id", "/m", SAFE))
		return bad("read-only control folder");
	// By way of numbers that are none of theirs.
	const int from[] = {l, id, nest}, to[] = {LISTENER, MACHINE_ID, NESTING};
	for (int i = 0; i < 3; i++)
		if (dup2(from[i], 2 * HANDED + i) < 0)
			return bad("descriptors");
	for (int i = 0; i < 3; i++)
		if (dup2(2 * HANDED + i, to[i]) < 0)
			return bad("descriptors");
	return 0;
}

static int loopback_up(void)
{
	int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	struct ifreq r = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
	if (s < 0 || ioctl(s, SIOCSIFFLAGS, &r))
		return bad("lo");
	close(s);
	return 0;
}

void stage(uint32_t slot)
{
	static char *const argv[] = {"boxinit", "pid1", NULL}, *const envp[] = {NULL};
	sigset_t all;
	sigfillset(&all);
	signal(SIGCHLD, SIG_DFL);
	signal(SIGINT, SIG_DFL);
	if (sigprocmask(SIG_SETMASK, &all, NULL)) {
		bad("signals");
		return;
	}
	int nest;
	if (stage_mounts(&nest) || stage_control(slot, nest))
		return;
	execve("/ro/boxinit", argv, envp);
	bad("/ro/boxinit");
}

// own_files replaces what was inherited from outside: whatever crosses the border of a
// box, CRIU can't save.
static int own_files(void)
{
	int null = open("/d/null", O_RDWR);
	if (null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0 || syscall(SYS_close_range, HANDED, ~0U, 0))
		return bad("descriptors");
	if (null >= HANDED)
		return 0; // closed with the rest
	return null > 2 ? close(null) : 0;
}

// pid1 goes on where stage left off, in a program that the box has a name for.
void pid1(void)
{
	uint64_t start = now_us();
	for (int fd = CONN; fd < HANDED; fd++)
		fcntl(fd, F_SETFD, FD_CLOEXEC);
	setsid(); // the nursery's session can't be seen from inside
	if (prctl(PR_SET_DUMPABLE, 0))
		_exit(1);
	drop_bounding_set();
	if (own_files() || loopback_up())
		_exit(1);
	uint32_t us = now_us() - start;
	reply(CONN, 0, R_STAGED, &us, sizeof us, NULL, 0);
	serve(CONN, LISTENER);
}

// place opens a mount point below the new root. What is there may have been left
// by a hostile turn, so that no symlink may lead out of it.
static int place(int sock, uint32_t id, int root, const char *to)
{
	struct open_how how = {.flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_IN_ROOT};
	int fd = syscall(SYS_openat2, root, to, &how, sizeof how);
	if (fd < 0 && (errno == ENOENT || errno == ENOTDIR))
		reply_error(sock, id, "the root has no mount point %s", to);
	else if (fd < 0)
		reply_error(sock, id, "opening mount point %s: %s", to, strerror(errno));
	return fd;
}

// put moves a staged mount, or one that fd stands for, to its place.
static int put(int sock, uint32_t id, int from, const char *path, int root, const char *to)
{
	int fd = place(sock, id, root, to);
	if (fd < 0)
		return -1;
	int rc = syscall(SYS_move_mount, from, path, fd, "", MOVE_MOUNT_T_EMPTY_PATH | (*path ? 0 : MOVE_MOUNT_F_EMPTY_PATH));
	if (rc)
		reply_error(sock, id, "mounting %s: %s", to, strerror(errno));
	close(fd);
	return rc;
}

// attach takes the overlay as root. The reply goes out before the old root is
// unmounted (that waits for a grace period of the kernel): no command can start
// before this function is over. After a failure the zygote is of no use.
int attach(int sock, uint32_t id, const char *body, size_t n, int overlay, uint64_t start)
{
	const char *end = body + n, *host = body + 4, *mid = n > 4 ? memchr(host, 0, n - 4) : NULL, *filter = mid ? memchr(mid + 1, 0, end - mid - 1) : NULL;
	if (!filter || ++filter == end || (end - filter) % sizeof(struct sock_filter)) {
		reply_error(sock, id, "malformed request to attach");
		return -1;
	}
	mid++;
	size_t mid_len = strlen(mid);
	uint32_t may;
	memcpy(&may, body, sizeof may);
	if (syscall(SYS_move_mount, overlay, "", AT_FDCWD, "/new", MOVE_MOUNT_F_EMPTY_PATH)) {
		reply_error(sock, id, "mounting the root: %s", strerror(errno));
		return -1;
	}
	int root = open("/new", O_PATH | O_CLOEXEC);
	int folder = place(sock, id, root, "/dev/shm");
	if (root < 0 || folder < 0)
		return -1;
	// /dev/shm is a folder of the overlay, so that what is written there is saved.
	int shm = syscall(SYS_open_tree, folder, "", OPEN_TREE_CLONE | O_CLOEXEC | AT_EMPTY_PATH);
	struct mount_attr flags = {.attr_set = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV};
	if (shm < 0 || syscall(SYS_mount_setattr, shm, "", AT_EMPTY_PATH, &flags, sizeof flags)) {
		reply_error(sock, id, "making /dev/shm: %s", strerror(errno));
		return -1;
	}
	if (put(sock, id, AT_FDCWD, "/p", root, "/proc") || put(sock, id, AT_FDCWD, "/s", root, "/sys") ||
	    put(sock, id, AT_FDCWD, "/d", root, "/dev") || put(sock, id, shm, "", root, "/dev/shm") ||
	    put(sock, id, AT_FDCWD, "/ro", root, "/run/box") || put(sock, id, AT_FDCWD, "/m", root, "/etc/machine-id"))
		return -1;
#ifdef WITHOUT_NESTING
	may |= MAY_NEST;
#endif
	if (!(may & MAY_NEST) && forbid_nesting(nesting)) {
		reply_error(sock, id, "forbidding namespaces: %s", strerror(errno));
		return -1;
	}
	if (write(machine_id, mid, mid_len) != (ssize_t)mid_len || write(machine_id, "\n", 1) != 1 ||
	    sethostname(host, strlen(host)) || chdir("/new") || syscall(SYS_pivot_root, ".", ".")) {
		reply_error(sock, id, "taking the root: %s", strerror(errno));
		return -1;
	}
	uint32_t us = now_us() - start;
	reply(sock, id, R_READY, &us, sizeof us, NULL, 0);
	if (umount2(".", MNT_DETACH) || chdir("/"))
		return -1;
	close(machine_id);
	close(nesting);
	close(shm);
	close(folder);
	close(root);
	// Everything that this process starts has the filter and no_new_privs, too. Setting one takes a capability that is given up next.
	struct sock_fprog p = {.len = (end - filter) / sizeof(struct sock_filter), .filter = (struct sock_filter *)filter};
#ifndef WITHOUT_FILTER
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &p))
		return -1;
#endif
#ifndef WITHOUT_NO_NEW_PRIVS
	if (!(may & MAY_GAIN) && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		return -1;
#endif
	limit_own_capabilities();
	return 0;
}
