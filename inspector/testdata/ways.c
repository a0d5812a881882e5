/* Every way of changing something that the inspector must see, and many ways of
 * changing nothing: `ways NAME...` does one after the other. The status is 0 when
 * the calls did what they say. Before the names:
 *   -t  an idle thread shares the descriptors meanwhile
 *   -r  a thread swaps them for the null device and back all the time
 *   -i  the descriptors are inherited: the parent has opened them
 *   -s  no names: leave a process behind that holds them and a mapping of old
 *   -S  that process does it
 *
 * In the working directory: old, other (8 KiB), big (1 MiB), empty, x (user.k),
 * d/f, e/ (empty).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/fs.h>
#include <linux/io_uring.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <mqueue.h>
#include <net/if.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/msg.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/sendfile.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>
#include <utime.h>

#define MUST(x) ({ long r_ = (long)(x); if (r_ == -1) { fprintf(stderr, "%s:%d %s: %m\n", __func__, __LINE__, #x); exit(1); } r_; })
#define W(name) static void name(void)

/* What was opened ahead, by another process or in an earlier turn. */
static struct { const char *name; int fd; } held[] = {{"old", -1}, {"other", -1}, {"big", -1}, {"empty", -1}, {"x", -1}};
#define NHELD (sizeof held / sizeof *held)
static char *mapped;
static int racing;
static void *swap(void *a) { int *f = a; for (;;) { dup2(f[1], f[2]); dup2(f[0], f[2]); } return 0; }
static int raced(int fd)
{
	static int f[8][3], n;
	if (n == 8) return fd;
	int *g = f[n++]; pthread_t t;
	g[0] = fd; g[1] = MUST(open("/dev/null", O_RDWR)); g[2] = dup(fd);
	MUST(-(pthread_create(&t, 0, swap, g) != 0));
	return g[2];
}
static int rw(const char *p)
{
	int fd = -1;
	for (unsigned i = 0; i < NHELD; i++) if (held[i].fd >= 0 && !strcmp(held[i].name, p)) fd = MUST(dup(held[i].fd));
	if (fd < 0) fd = MUST(open(p, O_RDWR));
	return racing ? raced(fd) : fd;
}
static void hold(void)
{
	for (unsigned i = 0; i < NHELD; i++) held[i].fd = MUST(open(held[i].name, O_RDWR));
	mapped = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, held[0].fd, 0);
}

/* ---- content ---- */
W(write_) { MUST(write(rw("old"), "hello", 5)); }
W(pwrite_) { MUST(pwrite(rw("old"), "hello", 5, 100)); }
W(writev_) { struct iovec v = {"hello", 5}; MUST(writev(rw("old"), &v, 1)); }
W(pwritev_) { struct iovec v = {"hello", 5}; MUST(pwritev(rw("old"), &v, 1, 9)); }
W(pwritev2_) { struct iovec v = {"hello", 5}; MUST(pwritev2(rw("old"), &v, 1, 9, RWF_APPEND)); }
W(append) { MUST(write(MUST(open("old", O_WRONLY | O_APPEND)), "x", 1)); }
W(write_same) { MUST(pwrite(rw("old"), "a", 1, 0)); }
W(write_many) { int fd = rw("big"); for (int i = 0; i < 256; i++) MUST(pwrite(fd, "z", 1, i * 4096)); }
W(sendfile_) { MUST(sendfile(rw("old"), rw("other"), 0, 4096)); }
W(splice_) { int p[2]; MUST(pipe(p)); MUST(write(p[1], "hello", 5)); MUST(splice(p[0], 0, rw("old"), 0, 5, 0)); }
W(tee_splice) { int p[2], q[2]; MUST(pipe(p)); MUST(pipe(q)); MUST(write(p[1], "hello", 5)); MUST(tee(p[0], q[1], 5, 0)); MUST(splice(q[0], 0, rw("old"), 0, 5, 0)); }
W(copy_file_range_) { MUST(copy_file_range(rw("other"), 0, rw("old"), 0, 8192, 0)); }
W(ficlone) { MUST(ioctl(rw("old"), FICLONE, rw("other"))); }
W(ficlonerange) { struct file_clone_range r = {rw("other"), 0, 4096, 0}; MUST(ioctl(rw("old"), FICLONERANGE, &r)); }
W(dedupe) { int f = rw("big"); struct { struct file_dedupe_range r; struct file_dedupe_range_info i; } d = {{0, 4096, 1}, {f, 1 << 16}}; MUST(ioctl(f, FIDEDUPERANGE, &d)); if (d.i.status) exit(1); }
W(fallocate_) { MUST(fallocate(rw("old"), 0, 0, 1 << 20)); }
W(fallocate_keep) { MUST(fallocate(rw("old"), FALLOC_FL_KEEP_SIZE, 1 << 16, 1 << 20)); }
W(punch) { MUST(fallocate(rw("big"), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 65536)); }
W(zero_range) { MUST(fallocate(rw("big"), FALLOC_FL_ZERO_RANGE, 0, 65536)); }
W(truncate_) { MUST(truncate("old", 0)); }
W(truncate_grow) { MUST(truncate("old", 1 << 20)); }
W(ftruncate_) { MUST(ftruncate(rw("old"), 4096)); }
W(ftruncate_restore) { struct stat s; int fd = rw("big"); fstat(fd, &s); MUST(ftruncate(fd, 0)); MUST(ftruncate(fd, s.st_size)); struct timespec t[2] = {s.st_atim, s.st_mtim}; MUST(utimensat(AT_FDCWD, "big", t, 0)); }
W(o_trunc) { MUST(open("old", O_WRONLY | O_TRUNC)); }
W(o_trunc_empty) { MUST(open("empty", O_WRONLY | O_TRUNC)); }
W(creat_) { MUST(creat("old", 0600)); }
W(openat2_trunc) { struct { unsigned long long f, m, r; } h = {O_WRONLY | O_TRUNC, 0, 0}; MUST(syscall(437, AT_FDCWD, "old", &h, sizeof h)); }
W(o_direct) { void *b; if (posix_memalign(&b, 4096, 4096)) exit(1); memset(b, 'q', 4096); MUST(write(MUST(open("old", O_WRONLY | O_DIRECT)), b, 4096)); }
W(mmap_store) { char *p = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, rw("old"), 0); p[7]++; }
W(mmap_after_close) { int fd = rw("old"); char *p = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0); close(fd); p[7]++; }
W(mmap_mprotect) { int fd = rw("old"); char *p = mmap(0, 4096, PROT_READ, MAP_SHARED, fd, 0); close(fd); MUST(mprotect(p, 4096, PROT_READ | PROT_WRITE)); p[7]++; MUST(munmap(p, 4096)); }
W(madv_remove) { char *p = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, rw("big"), 0); MUST(madvise(p, 65536, MADV_REMOVE)); }
W(madv_remove_half) { char *p = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, rw("big"), 0); munmap(p + 65536, 4096); if (madvise(p, 1 << 20, MADV_REMOVE) != -1) exit(1); }
W(read_into_map) { char *p = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, rw("old"), 0); MUST(read(rw("other"), p, 100)); }
W(io_submit_) {
	aio_context_t c = 0; MUST(syscall(SYS_io_setup, 1, &c));
	struct iocb io = {.aio_fildes = rw("old"), .aio_lio_opcode = IOCB_CMD_PWRITE, .aio_buf = (long)"hello", .aio_nbytes = 5}, *l = &io;
	MUST(syscall(SYS_io_submit, c, 1, &l)); struct io_event e; MUST(syscall(SYS_io_getevents, c, 1, 1, &e, 0));
}
W(io_uring_) { struct io_uring_params p = {}; MUST(syscall(SYS_io_uring_setup, 4, &p)); }
W(io_uring_write) {
	struct io_uring_params p = {}; int u = MUST(syscall(SYS_io_uring_setup, 4, &p));
	char *sq = mmap(0, p.sq_off.array + 16, PROT_READ | PROT_WRITE, MAP_SHARED, u, IORING_OFF_SQ_RING);
	struct io_uring_sqe *e = mmap(0, 4 * sizeof *e, PROT_READ | PROT_WRITE, MAP_SHARED, u, IORING_OFF_SQES);
	e->opcode = IORING_OP_WRITE; e->fd = rw("old"); e->addr = (long)"uring"; e->len = 5;
	*(unsigned *)(sq + p.sq_off.array) = 0; ++*(volatile unsigned *)(sq + p.sq_off.tail);
	MUST(syscall(SYS_io_uring_enter, u, 1, 1, IORING_ENTER_GETEVENTS, 0, 0));
}
W(int80) {
	int fd = rw("old"); char *low = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0); long r;
	memcpy(low, "hello", 5);
	__asm__ volatile("int $0x80" : "=a"(r) : "a"(4), "b"(fd), "c"(low), "d"(5) : "memory", "r8", "r9", "r10", "r11");
	if (r != 5) exit(1);
}
W(x32) { MUST(syscall(0x40000000 | SYS_write, rw("old"), "hello", 5)); }
W(core) { struct rlimit l = {RLIM_INFINITY, RLIM_INFINITY}; MUST(setrlimit(RLIMIT_CORE, &l)); if (!fork()) abort(); int s; wait(&s); exit(WCOREDUMP(s) ? 0 : 1); }

/* ---- whose descriptor ---- */
W(inherited) { int fd = rw("old"); if (!fork()) { MUST(write(fd, "hello", 5)); _exit(0); } wait(0); }
W(stdout_) { int fd = rw("old"); MUST(dup2(fd, 1)); MUST(write(1, "hello", 5)); }
W(proc_self_fd) { char p[64]; sprintf(p, "/proc/self/fd/%d", (int)MUST(open("old", O_RDONLY))); MUST(write(MUST(open(p, O_WRONLY)), "hello", 5)); }
W(passed) {
	int s[2]; MUST(socketpair(AF_UNIX, SOCK_DGRAM, 0, s));
	char c[CMSG_SPACE(sizeof(int))] = {}, d = 0; struct iovec v = {&d, 1};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = c, .msg_controllen = sizeof c};
	if (!fork()) { MUST(recvmsg(s[1], &m, 0)); MUST(write(*(int *)CMSG_DATA(CMSG_FIRSTHDR(&m)), "hello", 5)); _exit(0); }
	struct cmsghdr *h = CMSG_FIRSTHDR(&m); h->cmsg_level = SOL_SOCKET; h->cmsg_type = SCM_RIGHTS; h->cmsg_len = CMSG_LEN(sizeof(int)); *(int *)CMSG_DATA(h) = rw("old");
	MUST(sendmsg(s[0], &m, 0)); wait(0);
}
W(double_fork) { int p[2]; MUST(pipe(p)); if (!fork()) { setsid(); if (!fork()) { MUST(write(rw("old"), "hello", 5)); } _exit(0); } close(p[1]); char c; read(p[0], &c, 1); }
W(unshared) { int fd = rw("old"); if (unshare(CLONE_NEWNS | CLONE_NEWUTS)) MUST(unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWUTS)); MUST(write(fd, "hullo", 5)); MUST(write(rw("old"), "hello", 5)); }
W(memfd_exec) {
	int m = MUST(memfd_create("m", 0)), s = MUST(open("/proc/self/exe", O_RDONLY)); struct stat st; fstat(s, &st);
	MUST(sendfile(m, s, 0, st.st_size)); char *a[] = {"ways", "write_", 0}; MUST(fexecve(m, a, environ));
}
static void *racer(void *a) { for (;;) { dup2(((int *)a)[0], 200); dup2(((int *)a)[1], 200); } return 0; }
static int *race(void) { static int f[2], p[2]; MUST(pipe2(p, O_NONBLOCK)); f[0] = rw("old"); f[1] = p[1]; pthread_t t; dup2(p[1], 200); pthread_create(&t, 0, racer, f); return f; }
W(race_write) { int *f = race(); char c = 0; while (c != 'h') { write(200, "h", 1); MUST(pread(f[0], &c, 1, 0)); } }
/* The path is rewritten while calls read it. */
static char path[8];
static void *rewriter(void *a) { for (;;) { memcpy(path, "old", 4); memcpy(path, "nah", 4); } return 0; }
static void rewrite(void) { pthread_t t; memcpy(path, "old", 4); pthread_create(&t, 0, rewriter, 0); }
#define UNTIL(done) ({ rewrite(); while (done) MUST(access("old", F_OK)); })
W(race_path_chmod) { UNTIL(chmod(path, 0600)); }
W(race_path_truncate) { UNTIL(truncate(path, 3)); }
W(race_path_unlink) { UNTIL(unlink(path)); }
W(race_close) { int *f = race(); for (int i = 0; i < 200; i++) { int n = dup(f[0]); if (!fork()) _exit(0); write(n, "h", 1); close(n); } while (wait(0) > 0) ; }
W(mapped_store) { if (!mapped) mapped = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, rw("old"), 0); mapped[9]++; }
W(sparse) { int fd = rw("old"); MUST(pwrite(fd, "s", 1, 1 << 22)); MUST(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 1 << 20)); }
W(concurrent) { for (int c = 0; c < 4; c++) if (!fork()) { int fd = rw("big"); for (int i = 0; i < 32; i++) MUST(pwrite(fd, "c", 1, (c + 4 * i) * 1000)); _exit(0); } while (wait(0) > 0) ; }
W(race_fchmod) { int *f = race(); struct stat s; do { fchmod(200, 0600); MUST(fstat(f[0], &s)); } while ((s.st_mode & 0777) != 0600); }

/* ---- names ---- */
W(create) { MUST(open("new", O_CREAT | O_WRONLY, 0644)); }
W(tmpfile_link) { char p[64]; sprintf(p, "/proc/self/fd/%d", (int)MUST(open(".", O_TMPFILE | O_RDWR, 0644))); MUST(linkat(AT_FDCWD, p, AT_FDCWD, "new", AT_SYMLINK_FOLLOW)); }
W(rename_) { MUST(rename("old", "new")); }
W(rename_over) { MUST(close(MUST(open("t", O_CREAT | O_WRONLY, 0644)))); MUST(rename("t", "old")); }
W(rename_dir) { MUST(rename("d", "d2")); }
W(rename_into) { MUST(rename("old", "e/old")); }
W(exchange) { MUST(renameat2(AT_FDCWD, "old", AT_FDCWD, "other", RENAME_EXCHANGE)); }
W(link_) { MUST(link("old", "new")); }
W(symlink_) { MUST(symlink("old", "new")); }
W(mkfifo_) { MUST(mkfifo("new", 0644)); }
W(mknod_) { MUST(mknod("new", S_IFREG | 0644, 0)); }
W(bind_) { struct sockaddr_un a = {AF_UNIX, "new"}; MUST(bind(MUST(socket(AF_UNIX, SOCK_STREAM, 0)), (void *)&a, sizeof a)); }
W(mkdir_) { MUST(mkdir("new", 0755)); }
W(rmdir_) { MUST(rmdir("e")); }
W(unlink_) { MUST(unlink("old")); }
W(unlink_write) { int fd = rw("old"); MUST(unlink("old")); MUST(write(fd, "x", 1)); }
W(replace_same) { MUST(unlink("empty")); MUST(open("empty", O_CREAT | O_WRONLY, 0644)); }
W(lower_unlink) { MUST(unlink("/lw/file")); }
W(lower_write) { MUST(write(MUST(open("/lw/file", O_WRONLY | O_APPEND)), "x", 1)); }
W(lower_chmod) { MUST(chmod("/lw/file", 0600)); }
W(lower_chmod_dir) { MUST(chmod("/lw/tmp", 0700)); }
W(lower_fchmod_dir) { MUST(fchmod(MUST(open("/lw/tmp", O_RDONLY)), 0700)); }
W(lower_truncate) { MUST(truncate("/lw/file", 0)); }
W(lower_create) { MUST(open("/lw/tmp/new", O_CREAT | O_WRONLY, 0644)); }
W(long_name) { char n[256]; memset(n, 'n', 255); n[255] = 0; n[3] = '\n'; n[4] = '\xff'; MUST(open(n, O_CREAT | O_WRONLY, 0644)); }

/* ---- metadata ---- */
W(chmod_) { MUST(chmod("old", 0600)); }
W(chmod_new_and_old) { close(MUST(open("t", O_CREAT | O_RDWR, 0600))); MUST(chmod("t", 0644)); MUST(chmod("old", 0600)); MUST(chmod("t", 0600)); MUST(unlink("t")); }
W(chmod_failed_and_old) { close(MUST(open("t", O_CREAT | O_RDWR, 0600))); MUST(chmod("t", 0644)); chmod("none", 0600); chmod("/proc/self/none", 0600); MUST(chmod("old", 0600)); MUST(unlink("t")); }
W(chmod_by_new_link) { close(MUST(open("t", O_CREAT | O_RDWR, 0600))); MUST(link("old", "u")); MUST(chmod("u", 0600)); MUST(unlink("u")); MUST(unlink("t")); }
W(utimensat_new_and_old) { struct timespec t[2] = {{1, 0}, {1, 0}}; close(MUST(open("t", O_CREAT | O_RDWR, 0600))); MUST(utimensat(AT_FDCWD, "t", t, 0)); MUST(utimensat(AT_FDCWD, "old", t, 0)); MUST(unlink("t")); }
W(fchmod_) { MUST(fchmod(rw("old"), 0600)); }
W(fchmodat2_) { MUST(syscall(452, AT_FDCWD, "old", 0600, 0)); }
W(chmod_root) { MUST(chmod("/", 0700)); }
W(chmod_dir) { MUST(chmod("d", 0700)); }
W(fchmod_dir) { MUST(fchmod(MUST(open("d", O_RDONLY)), 0700)); }
W(chown_) { MUST(chown("old", 5, 5)); }
W(lchown_) { MUST(lchown("old", 5, 5)); }
W(fchown_) { MUST(fchown(rw("old"), 5, 5)); }
W(utimensat_) { struct timespec t[2] = {{1, 0}, {1, 0}}; MUST(utimensat(AT_FDCWD, "old", t, 0)); }
W(utimensat_dir) { struct timespec t[2] = {{1, 0}, {1, 0}}; MUST(utimensat(AT_FDCWD, "d", t, 0)); }
W(lower_utimensat_dir) { struct timespec t[2] = {{1, 0}, {1, 0}}; MUST(utimensat(AT_FDCWD, "/lw/tmp", t, 0)); }
W(futimens_) { struct timespec t[2] = {{1, 0}, {1, 0}}; MUST(futimens(rw("old"), t)); }
W(utimes_) { struct timeval t[2] = {{1, 0}, {1, 0}}; MUST(syscall(SYS_utimes, "old", t)); }
W(utime_) { struct utimbuf t = {1, 1}; MUST(syscall(SYS_utime, "old", &t)); }
W(touch) { MUST(utimensat(AT_FDCWD, "old", 0, 0)); }
W(setxattr_) { MUST(setxattr("old", "user.a", "1", 1, 0)); }
W(lsetxattr_) { MUST(lsetxattr("old", "user.a", "1", 1, 0)); }
W(fsetxattr_) { MUST(fsetxattr(rw("old"), "user.a", "1", 1, 0)); }
W(setxattr_dir) { MUST(setxattr("d", "user.a", "1", 1, 0)); }
W(removexattr_) { MUST(removexattr("x", "user.k")); }
W(fremovexattr_) { MUST(fremovexattr(rw("x"), "user.k")); }
W(setflags) { int f = FS_NODUMP_FL; MUST(ioctl(rw("old"), FS_IOC_SETFLAGS, &f)); }
W(fssetxattr) { struct fsxattr a; int fd = rw("old"); MUST(ioctl(fd, FS_IOC_FSGETXATTR, &a)); a.fsx_xflags |= FS_XFLAG_NODUMP; MUST(ioctl(fd, FS_IOC_FSSETXATTR, &a)); }
W(futimesat_) { struct timeval t[2] = {{1, 0}, {1, 0}}; MUST(syscall(SYS_futimesat, AT_FDCWD, "old", t)); }
W(lremovexattr_) { MUST(lremovexattr("x", "user.k")); }
/* calls that headers may not know yet */
W(setxattrat_) { struct { unsigned long long value; unsigned size, flags; } a = {(long)"1", 1, 0}; MUST(syscall(463, AT_FDCWD, "old", 0, "user.a", &a, sizeof a)); }
W(removexattrat_) { MUST(syscall(466, AT_FDCWD, "x", 0, "user.k")); }
W(file_setattr_) { struct { unsigned long long xflags; unsigned extsize, nextents, projid, cowextsize; } a = {FS_XFLAG_NODUMP}; MUST(syscall(469, AT_FDCWD, "old", &a, sizeof a, 0)); }
W(setflags_dir) { int f = FS_NODUMP_FL; MUST(ioctl(MUST(open("d", O_RDONLY)), FS_IOC_SETFLAGS, &f)); }

/* ---- nothing ---- */
W(quiet) {}
W(reads) { char b[64]; MUST(read(rw("old"), b, 64)); struct stat s; MUST(stat("d", &s)); }
W(open_rdwr) { rw("old"); }
W(open_rdwr_lower) { rw("/lw/file"); }
W(create_unlink) { MUST(write(MUST(open("t", O_CREAT | O_RDWR, 0600)), "x", 1)); MUST(unlink("t")); }
W(mkdtemp_) { char t[] = "tXXXXXX", p[64]; if (!mkdtemp(t)) exit(1); sprintf(p, "%s/a", t); MUST(open(p, O_CREAT | O_RDWR, 0600)); MUST(chmod(p, 0644)); MUST(unlink(p)); MUST(rmdir(t)); }
W(lower_rename) { MUST(rename("/lw/file", "/lw/moved")); }
W(lower_rename_dir) { MUST(rename("/lw/tmp", "/lw/moved")); }
W(lower_rename_back) { MUST(rename("/lw/tmp", "/lw/moved")); MUST(close(MUST(open("/lw/moved/t", O_CREAT | O_RDWR, 0600)))); MUST(rename("/lw/moved", "/lw/tmp")); }
W(lower_temp) { MUST(write(MUST(open("/lw/tmp/t", O_CREAT | O_RDWR, 0600)), "x", 1)); MUST(unlink("/lw/tmp/t")); }
W(lower_temp_chmod) { MUST(open("/lw/tmp/t", O_CREAT | O_RDWR, 0600)); MUST(chmod("/lw/tmp/t", 0700)); MUST(unlink("/lw/tmp/t")); }
W(tmpfile_gone) { MUST(write(MUST(open(".", O_TMPFILE | O_RDWR, 0644)), "x", 1)); }
W(rename_new) { MUST(close(MUST(open("a", O_CREAT | O_RDWR, 0600)))); MUST(rename("a", "b")); MUST(rename("b", "a")); MUST(unlink("a")); }
W(rename_back) { MUST(rename("old", "t")); MUST(rename("t", "old")); }
W(rename_whiteout) { if (renameat2(AT_FDCWD, "old", AT_FDCWD, "t", RENAME_WHITEOUT) != -1) exit(1); } /* overlayfs refuses it */
W(link_unlink) { MUST(link("old", "t")); MUST(unlink("t")); }
W(lock) { MUST(flock(rw("old"), LOCK_EX)); MUST(link("old", "old.lock")); MUST(unlink("old.lock")); }
W(failed) { if (write(99, "x", 1) != -1 || open("none/x", O_CREAT | O_RDWR, 0600) != -1 || chmod("none", 0) != -1 || mkdir("d", 0) != -1 || rmdir("d") != -1 || rename("none", "x") != -1 || write(MUST(open("old", O_RDONLY)), "x", 1) != -1) exit(1); }
W(dev_null) { MUST(write(rw("/dev/null"), "x", 1)); MUST(write(1, "x", 1)); }
W(pipes) { int p[2]; MUST(pipe(p)); MUST(write(p[1], "x", 1)); int s[2]; MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, s)); MUST(write(s[0], "x", 1)); }
W(memfd) { int m = MUST(memfd_create("m", 0)); MUST(ftruncate(m, 4096)); char *p = mmap(0, 4096, PROT_WRITE, MAP_SHARED, m, 0); *p = 1; MUST(write(m, "x", 1)); MUST(fchmod(m, 0600)); }
W(write_nothing) { MUST(write(rw("old"), "", 0)); }
W(private_map) { char *p = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, rw("old"), 0); p[7]++; }
W(shared_map_read) { volatile char *p = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, rw("old"), 0); (void)p[7]; }
W(children) { for (int i = 0; i < 20; i++) if (!fork()) _exit(0); while (wait(0) > 0) ; }
W(fsyncs) { MUST(fsync(rw("old"))); sync(); }
W(bound_gone) { struct sockaddr_un a = {AF_UNIX, "t"}; MUST(bind(MUST(socket(AF_UNIX, SOCK_STREAM, 0)), (void *)&a, sizeof a)); MUST(unlink("t")); }
W(big_temp) { int fd = MUST(open("t", O_CREAT | O_RDWR, 0600)); char b[65536] = {1}; for (int i = 0; i < 64; i++) MUST(write(fd, b, sizeof b)); MUST(ftruncate(fd, 10)); MUST(fsync(fd)); MUST(unlink("t")); }
W(netlink_get) {
	struct { struct nlmsghdr h; struct rtgenmsg g; } m = {{sizeof m, RTM_GETADDR, NLM_F_REQUEST | NLM_F_DUMP}};
	MUST(send(MUST(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE)), &m, sizeof m, 0));
}
W(own_limits) { struct rlimit l; MUST(getrlimit(RLIMIT_NOFILE, &l)); MUST(setrlimit(RLIMIT_NOFILE, &l)); umask(0); MUST(setpriority(PRIO_PROCESS, 0, 5)); cpu_set_t c; MUST(sched_getaffinity(0, sizeof c, &c)); MUST(sched_setaffinity(0, sizeof c, &c)); }
W(loopback) { struct sockaddr_in a = {AF_INET, htons(9), {htonl(INADDR_LOOPBACK)}}; connect(socket(AF_INET, SOCK_STREAM, 0), (void *)&a, sizeof a); }

/* ---- kernel objects and processes ---- */
W(shm) { char *p = shmat(MUST(shmget(IPC_PRIVATE, 4096, 0600 | IPC_CREAT)), 0, 0); *p = 1; }
W(msg) { MUST(msgget(IPC_PRIVATE, 0600)); }
W(sem) { MUST(semget(IPC_PRIVATE, 1, 0600)); }
W(mq) { MUST(mq_open("/boxwood", O_CREAT | O_RDWR, 0600, 0)); }
W(msg_sent) { struct { long t; char c; } m = {1, 'x'}; int q = MUST(msgget(7, 0600 | IPC_CREAT)); MUST(msgsnd(q, &m, 1, 0)); MUST(msgrcv(q, &m, 1, 0, 0)); MUST(msgsnd(q, &m, 1, 0)); }
W(sem_used) { int s = MUST(semget(7, 1, 0600 | IPC_CREAT)); struct sembuf b = {0, 1, 0}; MUST(semop(s, &b, 1)); MUST(semtimedop(s, &b, 1, 0)); MUST(semctl(s, 0, SETVAL, 5)); }
W(mq_sent) { mqd_t q = MUST(mq_open("/boxwood", O_CREAT | O_RDWR, 0600, 0)); char b[8192]; MUST(mq_send(q, "x", 1, 0)); MUST(mq_receive(q, b, sizeof b, 0)); MUST(mq_send(q, "x", 1, 0)); }
W(hostname) { MUST(sethostname("x", 1)); }
W(domainname) { MUST(setdomainname("x", 1)); }
W(mount_) { MUST(mount("t", "e", "tmpfs", 0, 0)); }
W(bind_mount) { MUST(mount("d", "e", 0, MS_BIND, 0)); }
W(keyring) { MUST(syscall(SYS_add_key, "user", "boxwood-test", "x", 1, -3)); }
W(sysctl) { MUST(write(MUST(open("/proc/sys/kernel/hostname", O_WRONLY)), "y", 1)); }
W(lo_ioctl) { struct ifreq r = {}; strcpy(r.ifr_name, "lo"); int s = MUST(socket(AF_INET, SOCK_DGRAM, 0)); r.ifr_mtu = 1400; MUST(ioctl(s, SIOCSIFMTU, &r)); }
W(netlink_set) {
	struct { struct nlmsghdr h; struct ifinfomsg i; } m = {{sizeof m, RTM_NEWLINK, NLM_F_REQUEST}, {.ifi_index = 1, .ifi_flags = IFF_ALLMULTI, .ifi_change = IFF_ALLMULTI}};
	MUST(send(MUST(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE)), &m, sizeof m, 0));
}
W(netlink_write) {
	struct { struct nlmsghdr h; struct ifinfomsg i; } m = {{sizeof m, RTM_NEWLINK, NLM_F_REQUEST}, {.ifi_index = 1, .ifi_flags = IFF_ALLMULTI, .ifi_change = IFF_ALLMULTI}};
	MUST(write(MUST(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE)), &m, sizeof m));
}
W(limits_of_1) { struct rlimit l; MUST(prlimit(1, RLIMIT_MSGQUEUE, 0, &l)); MUST(prlimit(1, RLIMIT_MSGQUEUE, &l, 0)); }
W(batch_of_1) { struct sched_param p = {}; MUST(sched_setscheduler(1, SCHED_BATCH, &p)); MUST(sched_setparam(1, &p)); }
W(affinity_of_1) { cpu_set_t c; CPU_ZERO(&c); CPU_SET(0, &c); MUST(sched_setaffinity(1, sizeof c, &c)); }
W(survivor) { int p[2]; MUST(pipe(p)); if (!fork()) { close(p[0]); setsid(); close(0); close(1); close(2); MUST(write(p[1], "x", 1)); for (;;) pause(); } close(p[1]); char c; MUST(read(p[0], &c, 1)); }
W(survivor_file) { MUST(write(rw("old"), "hello", 5)); survivor(); }
/* A survivor that maps old and stores to it whenever it gets SIGUSR1. */
static volatile char *page;
static void store(int s) { page[9]++; }
W(survivor_mapped) { page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, rw("old"), 0); signal(SIGUSR1, store); survivor(); }

/* The same with a file of the image, whose page it has made dirty and put back, times too. */
W(lower_mapped_survivor) {
	struct stat s; int fd = rw("/lw/file"); fstat(fd, &s);
	page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0); page[0]++; page[0]--;
	struct timespec t[2] = {s.st_atim, s.st_mtim}; MUST(futimens(fd, t)); close(fd);
	page -= 9; signal(SIGUSR1, store); survivor();
}
W(lower_mmap) { char *p = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, rw("/lw/file"), 0); p[0]++; }

/* ---- out of the sandbox ---- */
W(connect_) { struct sockaddr_in a = {AF_INET, htons(9), {htonl(0x0a010203)}}; connect(socket(AF_INET, SOCK_STREAM, 0), (void *)&a, sizeof a); }
W(datagram) { struct sockaddr_in a = {AF_INET, htons(9), {htonl(0x0a010203)}}; sendto(socket(AF_INET, SOCK_DGRAM, 0), "x", 1, 0, (void *)&a, sizeof a); }
W(datagram6) { struct sockaddr_in6 a = {AF_INET6, htons(9)}; inet_pton(AF_INET6, "2001:db8::1", &a.sin6_addr); sendto(socket(AF_INET6, SOCK_DGRAM, 0), "x", 1, 0, (void *)&a, sizeof a); }
W(datagram_mapped) { struct sockaddr_in6 a = {AF_INET6, htons(9)}; inet_pton(AF_INET6, "::ffff:10.1.2.3", &a.sin6_addr); sendto(socket(AF_INET6, SOCK_DGRAM, 0), "x", 1, 0, (void *)&a, sizeof a); }
W(datagram_of_no_family) { struct sockaddr_in a = {AF_UNSPEC, htons(9), {htonl(0x0a010203)}}; sendto(socket(AF_INET, SOCK_DGRAM, 0), "x", 1, 0, (void *)&a, sizeof a); }
W(echo_request) { struct sockaddr_in a = {AF_INET, 0, {htonl(0x0a010203)}}; sendto(socket(AF_INET, SOCK_RAW, IPPROTO_ICMP), "\10\0\0\0\0\0\0\0", 8, 0, (void *)&a, sizeof a); }
static struct sockaddr_in near = {AF_INET, 0x900, {0x0100007f}}, far = {AF_INET, 0x900, {0x0302010a}};
W(second_of_two) {
	struct iovec v = {"x", 1};
	struct mmsghdr m[2] = {{{&near, sizeof near, &v, 1}}, {{&far, sizeof far, &v, 1}}};
	if (sendmmsg(socket(AF_INET, SOCK_DGRAM, 0), m, 2, 0) != 1) exit(1);
}
W(two_here) {
	struct iovec v = {"x", 1};
	struct mmsghdr m[2] = {{{&near, sizeof near, &v, 1}}, {{&near, sizeof near, &v, 1}}};
	if (sendmmsg(socket(AF_INET, SOCK_DGRAM, 0), m, 2, 0) != 2) exit(1);
}
W(int80_connect) { /* calls of 32 bits are known by their outcome alone */
	char *low = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0); long r;
	memcpy(low, &far, sizeof far);
	__asm__ volatile("int $0x80" : "=a"(r) : "a"(362), "b"(socket(AF_INET, SOCK_STREAM, 0)), "c"(low), "d"(sizeof far) : "memory", "r8", "r9", "r10", "r11");
	if (r != -ENETUNREACH) exit(1);
}

W(deep) { for (int i = 0; i < 3000; i++) { MUST(mkdir("n", 0755)); MUST(chdir("n")); } }

/* ---- as many events as it can: 40,000 files made and deleted, 2,000 processes ---- */
W(flood) {
	for (int c = 0; c < 4; c++) if (!fork()) {
		char n[16]; sprintf(n, "flood%d", c);
		for (int i = 0; i < 10000; i++) { int fd = MUST(open(n, O_CREAT | O_RDWR, 0600)); MUST(write(fd, "x", 1)); close(fd); MUST(unlink(n)); if (i % 20 == 0) { int p = fork(); if (!p) _exit(0); waitpid(p, 0, 0); } }
		_exit(0);
	}
	int s; while (wait(&s) > 0) if (s) exit(1);
}

/* ---- attempts at blinding ---- */
/* storm: for STORM seconds, two processes with as many events as they can make. */
W(storm) {
	char *e = getenv("STORM"); double end = e ? atof(e) : 1;
	for (int c = 0; c < 2; c++) if (!fork()) {
		struct timespec t, u; clock_gettime(CLOCK_MONOTONIC, &t);
		char n[16]; sprintf(n, "storm%d", c); int fd = MUST(open(n, O_CREAT | O_RDWR, 0600)), null = rw("/dev/null");
		for (int i = 0;; i++) {
			for (int k = 0; k < 64; k++) { MUST(pwrite(fd, "x", 1, k)); MUST(write(null, "x", 1)); }
			if (i % 16 == 0) { char m[24]; sprintf(m, "%s-%d", n, i); close(MUST(open(m, O_CREAT | O_RDWR, 0600))); MUST(unlink(m)); }
			if (i % 512 == 0) { int p = fork(); if (!p) _exit(0); waitpid(p, 0, 0); }
			clock_gettime(CLOCK_MONOTONIC, &u);
			if (u.tv_sec - t.tv_sec + (u.tv_nsec - t.tv_nsec) / 1e9 > end) break;
		}
		MUST(unlink(n)); _exit(0);
	}
	int s; while (wait(&s) > 0) if (s) exit(1);
}
/* A tree of 2,000 processes that all live at once. */
static void grow(int depth) { for (int i = 0; depth && i < 2; i++) if (!fork()) { grow(depth - 1); while (wait(0) > 0) ; _exit(0); } while (wait(0) > 0) ; }
W(bomb) { grow(10); }
W(short_lives) { for (int i = 0; i < 3000; i++) { int p = vfork(); if (!p) _exit(0); waitpid(p, 0, 0); } }
/* Written by processes that end in the same microsecond. */
W(instant) { int fd = rw("old"); for (int i = 0; i < 50; i++) { int p = vfork(); if (!p) { write(fd, "i", 1); _exit(0); } waitpid(p, 0, 0); } }
W(deep_names) { char n[256]; memset(n, 'p', 255); n[255] = 0; n[9] = '\n'; n[10] = '\xfe'; for (int i = 0; i < 20; i++) { MUST(mkdir(n, 0700)); MUST(chdir(n)); } MUST(open("end", O_CREAT | O_RDWR, 0600)); }
W(deep_names_gone) { deep_names(); char n[256]; memset(n, 'p', 255); n[255] = 0; n[9] = '\n'; n[10] = '\xfe'; MUST(unlink("end")); for (int i = 0; i < 20; i++) { MUST(chdir("..")); MUST(rmdir(n)); } }
/* Goes on writing after its turn, faster than anyone can look. */
W(late_writer) { int p[2]; MUST(pipe(p)); if (!fork()) { close(p[0]); setsid(); close(0); close(1); close(2); int fd = rw("old"); MUST(pwrite(fd, "l", 1, 5)); MUST(write(p[1], "x", 1)); for (;;) pwrite(fd, "l", 1, 5); } close(p[1]); char c; MUST(read(p[0], &c, 1)); }

/* ---- what a call costs: prints ns of getppid, of a write to a file, and to /dev/null ---- */
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e9 + t.tv_nsec; }
#define COST(call) ({ double best_ = 1e18; for (int r_ = 0; r_ < 20; r_++) { double t_ = now(); for (int i_ = 0; i_ < 10000; i_++) call; t_ = (now() - t_) / 10000; if (t_ < best_) best_ = t_; } best_; })
W(costs) { int n = rw("/dev/null"), fd = rw("old"); MUST(pwrite(fd, "x", 1, 0)); printf("%.1f %.1f %.1f\n", COST(syscall(SYS_getppid)), COST(pwrite(fd, "x", 1, 0)), COST(write(n, "x", 1))); fflush(stdout); }

#define ROW(n) {#n, n}
static const struct { const char *name; void (*run)(void); } ways[] = {
	ROW(write_), ROW(pwrite_), ROW(writev_), ROW(pwritev_), ROW(pwritev2_), ROW(append), ROW(write_same), ROW(write_many), ROW(sendfile_), ROW(splice_), ROW(tee_splice),
	ROW(copy_file_range_), ROW(ficlone), ROW(ficlonerange), ROW(dedupe), ROW(fallocate_), ROW(fallocate_keep), ROW(punch), ROW(zero_range), ROW(truncate_), ROW(truncate_grow), ROW(ftruncate_),
	ROW(ftruncate_restore), ROW(o_trunc), ROW(o_trunc_empty), ROW(creat_), ROW(openat2_trunc), ROW(o_direct), ROW(mmap_store), ROW(mmap_after_close), ROW(mmap_mprotect), ROW(madv_remove), ROW(madv_remove_half), ROW(read_into_map), ROW(io_submit_),
	ROW(io_uring_), ROW(io_uring_write), ROW(int80), ROW(x32), ROW(core), ROW(inherited), ROW(stdout_), ROW(proc_self_fd), ROW(passed), ROW(double_fork), ROW(unshared), ROW(memfd_exec), ROW(race_write), ROW(race_fchmod), ROW(race_path_chmod), ROW(race_path_truncate), ROW(race_path_unlink), ROW(race_close), ROW(mapped_store), ROW(sparse), ROW(concurrent),
	ROW(create), ROW(tmpfile_link), ROW(rename_), ROW(rename_over), ROW(rename_dir), ROW(rename_into), ROW(exchange), ROW(link_), ROW(symlink_), ROW(mkfifo_), ROW(mknod_), ROW(bind_),
	ROW(mkdir_), ROW(rmdir_), ROW(unlink_), ROW(unlink_write), ROW(replace_same), ROW(lower_unlink), ROW(lower_write), ROW(lower_mmap), ROW(lower_mapped_survivor), ROW(lower_chmod), ROW(lower_chmod_dir), ROW(lower_fchmod_dir),
	ROW(lower_truncate), ROW(lower_create), ROW(long_name), ROW(chmod_), ROW(chmod_new_and_old), ROW(chmod_failed_and_old), ROW(chmod_by_new_link), ROW(utimensat_new_and_old), ROW(fchmod_), ROW(fchmodat2_), ROW(chmod_root), ROW(chmod_dir), ROW(fchmod_dir), ROW(chown_), ROW(lchown_), ROW(fchown_),
	ROW(utimensat_), ROW(utimensat_dir), ROW(lower_utimensat_dir), ROW(futimens_), ROW(utimes_), ROW(utime_), ROW(touch), ROW(setxattr_), ROW(lsetxattr_), ROW(fsetxattr_), ROW(setxattr_dir), ROW(removexattr_), ROW(fremovexattr_), ROW(setflags),
	ROW(fssetxattr), ROW(setflags_dir), ROW(futimesat_), ROW(lremovexattr_), ROW(setxattrat_), ROW(removexattrat_), ROW(file_setattr_), ROW(msg_sent), ROW(sem_used), ROW(mq_sent), ROW(quiet), ROW(reads), ROW(open_rdwr), ROW(open_rdwr_lower), ROW(create_unlink), ROW(mkdtemp_), ROW(lower_rename), ROW(lower_rename_dir), ROW(lower_rename_back), ROW(lower_temp), ROW(lower_temp_chmod), ROW(tmpfile_gone),
	ROW(rename_new), ROW(rename_back), ROW(rename_whiteout), ROW(link_unlink), ROW(lock), ROW(failed), ROW(dev_null), ROW(pipes), ROW(memfd), ROW(write_nothing), ROW(private_map), ROW(shared_map_read), ROW(children),
	ROW(fsyncs), ROW(bound_gone), ROW(big_temp), ROW(netlink_get), ROW(own_limits), ROW(loopback), ROW(shm), ROW(msg), ROW(sem), ROW(mq), ROW(hostname), ROW(domainname), ROW(mount_), ROW(bind_mount),
	ROW(keyring), ROW(sysctl), ROW(lo_ioctl), ROW(netlink_set), ROW(netlink_write), ROW(limits_of_1), ROW(batch_of_1), ROW(affinity_of_1), ROW(survivor), ROW(survivor_file), ROW(survivor_mapped), ROW(connect_), ROW(datagram), ROW(datagram6), ROW(datagram_mapped), ROW(datagram_of_no_family), ROW(echo_request), ROW(second_of_two), ROW(two_here), ROW(int80_connect), ROW(costs), ROW(flood), ROW(storm), ROW(bomb), ROW(short_lives), ROW(instant), ROW(deep_names), ROW(deep_names_gone), ROW(late_writer), ROW(deep),
};

static void *idle(void *a) { for (;;) pause(); return 0; }

static int run(const char *name)
{
	for (unsigned w = 0; w < sizeof ways / sizeof *ways; w++) if (!strcmp(ways[w].name, name)) return ways[w].run(), 0;
	return fprintf(stderr, "no way %s\n", name), 2;
}

/* The process that stays listens on a socket that has no file. */
static struct sockaddr_un door = {AF_UNIX, "\0ways"};
static int stay(void)
{
	int ready[2]; MUST(pipe(ready));
	if (MUST(fork())) { char c; close(ready[1]); return read(ready[0], &c, 1) == 1 ? 0 : 1; }
	setsid(); close(0); close(1); close(2); hold();
	int s = MUST(socket(AF_UNIX, SOCK_SEQPACKET, 0));
	MUST(bind(s, (void *)&door, sizeof door)); MUST(listen(s, 5)); MUST(write(ready[1], "x", 1)); close(ready[1]);
	for (;;) {
		int c = accept(s, 0, 0); char name[64] = {};
		while (c >= 0 && recv(c, name, sizeof name - 1, 0) > 0) { run(name); send(c, "k", 1, MSG_NOSIGNAL); memset(name, 0, sizeof name); }
		close(c);
	}
}
static int ask(char **names)
{
	int s = MUST(socket(AF_UNIX, SOCK_SEQPACKET, 0)); char c;
	MUST(connect(s, (void *)&door, sizeof door));
	for (; *names; names++) { MUST(send(s, *names, strlen(*names), 0)); if (recv(s, &c, 1, 0) != 1) return 1; }
	return 0;
}

int main(int argc, char **argv)
{
	pthread_t t;
	for (argv++; *argv && **argv == '-'; argv++) switch (argv[0][1]) {
	case 't': if (pthread_create(&t, 0, idle, 0)) return 3; break;
	case 'r': racing = 1; break;
	case 'i': hold(); int p = MUST(fork()), s; if (p) { waitpid(p, &s, 0); return s != 0; } break;
	case 's': return stay();
	case 'S': return ask(argv + 1);
	}
	for (; *argv; argv++) if (run(*argv)) return 2;
	return 0;
}
