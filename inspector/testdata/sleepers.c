/* Processes that stay behind asleep, and what others do to them.
 *
 *   sleepers stay WHAT     leaves a process that sleeps in the way WHAT
 *   sleepers do WHAT PID   does something beside the process PID, or to it
 *
 * Who stays writes a count to its memory whenever it runs, so that a test that looks
 * at its memory knows. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <pty.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MUST(x) ({ __auto_type r_ = (x); if ((long)r_ == -1) { perror(#x); exit(1); } r_; })

static int ready[2];
static volatile unsigned long count; /* of times that it ran */

/* From here on it only waits. */
static void is_ready(void) { MUST(write(ready[1], "x", 1)); close(ready[1]); }

static void for_ever(void)
{
	struct timespec t = {1000000, 0};
	for (;; count++)
		nanosleep(&t, &t);
}

static int unix_socket(int type, const char *path)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	strcpy(a.sun_path, path);
	int fd = MUST(socket(AF_UNIX, type, 0));
	MUST(bind(fd, (void *)&a, sizeof a));
	return fd;
}

static void lo_up(void)
{
	struct ifreq r = {.ifr_name = "lo", .ifr_flags = IFF_UP};
	int fd = MUST(socket(AF_INET, SOCK_DGRAM, 0));
	MUST(ioctl(fd, SIOCSIFFLAGS, &r));
	close(fd);
}

static int tcp_listener(void)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(8000), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	lo_up();
	int fd = MUST(socket(AF_INET, SOCK_STREAM, 0));
	MUST(bind(fd, (void *)&a, sizeof a));
	MUST(listen(fd, 8));
	return fd;
}

static void *sleeps(void *a) { (void)a; for_ever(); return 0; }

static void stay_sleep(void) { is_ready(); for_ever(); }
static void stay_pause(void) { is_ready(); for (;; count++) pause(); }
static void stay_read(void) { int p[2]; char c; MUST(pipe(p)); is_ready(); for (;; count++) read(p[0], &c, 1); }
static void stay_accept(void) { int fd = unix_socket(SOCK_STREAM, "/w/socket"); MUST(listen(fd, 8)); is_ready(); for (;; count++) accept(fd, 0, 0); }
static void stay_accept_tcp(void) { int fd = tcp_listener(); is_ready(); for (;; count++) accept(fd, 0, 0); }
static void stay_listener_asleep(void) { tcp_listener(); is_ready(); for_ever(); }
static void stay_epoll(void)
{
	int fd = tcp_listener(), e = MUST(epoll_create1(0));
	struct epoll_event ev = {.events = EPOLLIN, .data.fd = fd};
	MUST(epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
	is_ready();
	for (;;) {
		while (epoll_wait(e, &ev, 1, -1) < 0 && errno == EINTR)
			;
		count++;
		close(accept(fd, 0, 0));
	}
}
static void stay_poll(void) { struct pollfd p = {tcp_listener(), POLLIN, 0}; is_ready(); for (;; count++) poll(&p, 1, -1); }
static void stay_select(void) { int fd = tcp_listener(); is_ready(); for (;; count++) { fd_set s; FD_ZERO(&s); FD_SET(fd, &s); select(fd + 1, &s, 0, 0, 0); } }
static void stay_wait(void) { if (!fork()) { close(ready[1]); for_ever(); } is_ready(); for (;; count++) wait(0); }
static void stay_futex(void) { uint32_t w = 1; is_ready(); for (;; count++) syscall(SYS_futex, &w, FUTEX_WAIT, 1, 0, 0, 0); }
static void stay_threads(void) { pthread_t t[3]; for (int i = 0; i < 3; i++) pthread_create(&t[i], 0, sleeps, 0); is_ready(); pthread_join(t[0], 0); }
static void stay_leader_gone(void) { pthread_t t; pthread_create(&t, 0, sleeps, 0); is_ready(); pthread_exit(0); }
static void stay_vfork(void) { if (!vfork()) { is_ready(); for (;;) pause(); } for_ever(); }
static void stay_sigwait(void) { sigset_t s; sigemptyset(&s); sigaddset(&s, SIGUSR1); sigprocmask(SIG_BLOCK, &s, 0); is_ready(); for (;;) { while (sigwaitinfo(&s, 0) < 0 && errno == EINTR) ; count++; } }
static void stay_ignores(void) { signal(SIGUSR1, SIG_IGN); is_ready(); for_ever(); }
static void stay_handles(void) { struct sigaction a = {.sa_handler = (void (*)(int))abs, .sa_flags = SA_RESTART}; sigaction(SIGUSR1, &a, 0); int p[2]; char c; MUST(pipe(p)); is_ready(); for (;; count++) read(p[0], &c, 1); }
static void stay_fifo(void) { MUST(mkfifo("/w/fifo", 0600)); MUST(open("/w/fifo", O_RDWR)); is_ready(); for_ever(); }
static void stay_pipe(void) { int p[2]; MUST(pipe(p)); MUST(dup2(p[1], 9)); is_ready(); for_ever(); }
static void stay_memfd(void) { int fd = MUST(memfd_create("m", 0)); MUST(ftruncate(fd, 4096)); MUST(mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)); MUST(dup2(fd, 9)); is_ready(); for_ever(); }
static void stay_terminal(void) { int m, s; if (openpty(&m, &s, 0, 0, 0)) exit(1); MUST(dup2(s, 9)); is_ready(); for_ever(); }
static void stay_datagrams(void) { unix_socket(SOCK_DGRAM, "/w/socket"); is_ready(); for_ever(); }
static void stay_eventfd(void) { MUST(dup2(eventfd(0, 0), 9)); is_ready(); for_ever(); }
static void stay_reader(void) { MUST(dup2(open("/w/old", O_RDONLY), 9)); is_ready(); for_ever(); }
static void stay_mapper(void) { MUST(mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, open("/w/old", O_RDWR), 0)); is_ready(); for_ever(); }
static void stay_in_folder(void) { MUST(chdir("/w/d")); is_ready(); for_ever(); }
static void stay_of_the_image(void) { MUST(dup2(open("/lw/file", O_RDONLY), 9)); is_ready(); for_ever(); }
static void stay_locked(void) { MUST(dup2(open("/w/other", O_RDONLY), 9)); is_ready(); for_ever(); }
static void stay_inotify(void) { int fd = inotify_init1(0); MUST(inotify_add_watch(fd, "/w", IN_ALL_EVENTS)); is_ready(); for_ever(); }
static void stay_timer(void) { struct timespec t = {0, 1000000}; is_ready(); for (;; count++) nanosleep(&t, 0); }
static void stay_alarm(void) { signal(SIGALRM, (void (*)(int))abs); struct itimerval t = {{0, 1000}, {0, 1000}}; setitimer(ITIMER_REAL, &t, 0); is_ready(); for (;; count++) pause(); }
static void stay_timerfd(void) { int fd = timerfd_create(CLOCK_MONOTONIC, 0); struct itimerspec t = {{0, 1000000}, {0, 1000000}}; timerfd_settime(fd, 0, &t, 0); uint64_t n; is_ready(); for (;; count++) read(fd, &n, 8); }
static void stay_busy(void) { is_ready(); for (;;) count++; }
static void stay_busy_thread(void) { pthread_t t; pthread_create(&t, 0, (void *(*)(void *))stay_busy, 0); pthread_join(t, 0); }
static void stay_ends(void) { struct timespec t = {0, 300000000}; is_ready(); nanosleep(&t, 0); _exit(0); }
static void stay_forks(void) { struct timespec t = {0, 1000000}; is_ready(); for (;; count++) { if (!fork()) _exit(0); wait(0); nanosleep(&t, 0); } }
static void stay_stores(void) { volatile char *p = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, open("/w/old", O_RDWR), 0); struct timespec t = {0, 1000000}; is_ready(); for (;; count++) { p[7]++; nanosleep(&t, 0); } }
static void stay_double_fork(void) { if (fork()) { close(ready[1]); _exit(0); } setsid(); if (fork()) { close(ready[1]); _exit(0); } is_ready(); for_ever(); }
static void stay_stopped(void) { is_ready(); for (;;) raise(SIGSTOP); }

/* ---- what a later turn does ---- */

static int pid;
static char name[64];
static const char *theirs(const char *what) { sprintf(name, "/proc/%d/%s", pid, what); return name; }

static void join_net(void) { MUST(setns(open(theirs("ns/net"), O_RDONLY), CLONE_NEWNET)); }
static void dial(int type, int to)
{
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(to), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = MUST(socket(AF_INET, type, 0));
	MUST(connect(fd, (void *)&a, sizeof a));
}

static void do_nothing(void) {}
static void do_kill(void) { MUST(kill(pid, SIGUSR1)); }
static void do_cont(void) { MUST(kill(pid, SIGCONT)); }
static void do_probe(void) { MUST(kill(pid, 0)); }
static void do_tgkill(void) { MUST(syscall(SYS_tgkill, pid, pid, SIGUSR1)); }
static void do_pidfd_signal(void) { MUST(syscall(SYS_pidfd_send_signal, MUST(syscall(SYS_pidfd_open, pid, 0)), SIGUSR1, 0, 0)); }
static void do_queue(void) { union sigval v = {0}; MUST(sigqueue(pid, SIGUSR1, v)); }
static void do_ptrace(void) { MUST(ptrace(PTRACE_SEIZE, pid, 0, 0)); }
static void do_vm_write(void) { /* its stack lies where the image of this static program doesn't */
	char path[64], line[256]; unsigned long at = 0; sprintf(path, "/proc/%d/maps", pid);
	for (FILE *f = fopen(path, "r"); fgets(line, sizeof line, f);) if (strstr(line, "[stack]")) sscanf(line, "%lx", &at);
	char c = 1; struct iovec l = {&c, 1}, r = {(void *)at, 1};
	MUST(process_vm_writev(pid, &l, 1, &r, 1, 0)); }
static void do_limits(void) { struct rlimit r = {0, 0}; MUST(prlimit(pid, RLIMIT_CORE, &r, 0)); }
static void do_own_limits(void) { struct rlimit r = {0, 0}; MUST(prlimit(0, RLIMIT_CORE, &r, 0)); }
static void do_affinity(void) { cpu_set_t s; CPU_ZERO(&s); CPU_SET(0, &s); MUST(sched_setaffinity(pid, sizeof s, &s)); }
static void do_own_affinity(void) { cpu_set_t s; CPU_ZERO(&s); CPU_SET(0, &s); MUST(sched_setaffinity(0, sizeof s, &s)); }
static void do_batch(void) { struct sched_param p = {0}; MUST(sched_setscheduler(pid, SCHED_BATCH, &p)); }
static void do_nice(void) { MUST(setpriority(PRIO_PROCESS, pid, 5)); }
static void do_ioprio(void) { MUST(syscall(SYS_ioprio_set, 1, pid, 3 << 13)); }
static void do_madvise(void) { struct iovec v = {0, 0}; MUST(syscall(SYS_process_madvise, MUST(syscall(SYS_pidfd_open, pid, 0)), &v, 1, MADV_COLD, 0)); }
static void do_oom_score(void) { MUST(write(open(theirs("oom_score_adj"), O_WRONLY), "5", 1)); }
static void do_their_mem(void) { MUST(open(theirs("mem"), O_RDWR)); }
static void do_their_fd(void) { MUST(write(MUST(open(theirs("fd/9"), O_RDWR)), "y", 1)); }
static void do_read_their_fd(void) { MUST(open(theirs("fd/9"), O_RDONLY)); }
static void do_take_fd(void) { uint64_t n = 1; int fd = MUST(syscall(SYS_pidfd_getfd, MUST(syscall(SYS_pidfd_open, pid, 0)), 9, 0)); if (write(fd, &n, 8) < 0) MUST(lseek(fd, 5, SEEK_SET)); }
static void do_fifo(void) { MUST(write(MUST(open("/w/fifo", O_RDWR)), "y", 1)); }
static void do_tcp(void) { join_net(); dial(SOCK_STREAM, 8000); }
static void do_unix(void) { struct sockaddr_un a = {AF_UNIX, "/w/socket"}; MUST(connect(MUST(socket(AF_UNIX, SOCK_STREAM, 0)), (void *)&a, sizeof a)); }
static void do_datagram(void) { struct sockaddr_un a = {AF_UNIX, "/w/socket"}; MUST(sendto(MUST(socket(AF_UNIX, SOCK_DGRAM, 0)), "y", 1, 0, (void *)&a, sizeof a)); }
static void do_refused(void) { struct sockaddr_un a = {AF_UNIX, "/w/none"}; if (connect(MUST(socket(AF_UNIX, SOCK_STREAM, 0)), (void *)&a, sizeof a) == 0) exit(1); }
static void do_pipes(void) { int p[2]; char c; MUST(pipe(p)); MUST(write(p[1], "x", 1)); MUST(read(p[0], &c, 1)); sprintf(name, "/proc/self/fd/%d", p[0]); MUST(open(name, O_RDONLY)); }
static void do_socketpair(void) { int p[2]; MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, p)); MUST(write(p[1], "x", 1)); }
static void do_own_terminal(void) { int m, s; if (openpty(&m, &s, 0, 0, 0)) exit(1); MUST(write(s, "x", 1)); }
static void do_temp(void) { MUST(open("/w/temp", O_CREAT | O_RDWR, 0600)); MUST(unlink("/w/temp")); }
static void do_children(void) { if (!fork()) { if (!fork()) _exit(0); _exit(0); } while (wait(0) > 0) ; }
static void do_write_other(void) { MUST(write(MUST(open("/w/empty", O_WRONLY)), "y", 1)); }
static void do_write_old(void) { MUST(write(MUST(open("/w/old", O_WRONLY)), "y", 1)); }
static void do_map_old(void) { char *p = MUST(mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, MUST(open("/w/old", O_RDWR)), 0)); p[9] = 'y'; }
static void do_by_link(void) { MUST(link("/w/old", "/w/name")); MUST(rename("/w/old", "/w/e/hidden")); MUST(write(MUST(open("/w/name", O_WRONLY)), "y", 1)); MUST(rename("/w/e/hidden", "/w/old")); }
static void do_replace(void) { MUST(rename("/w/other", "/w/old")); }
static void do_move_folder(void) { MUST(rename("/w/d", "/w/moved")); }
static void do_chmod_folder(void) { MUST(chmod("/w/d", 0700)); }
static void do_write_image(void) { MUST(write(MUST(open("/lw/file", O_WRONLY)), "y", 1)); }
static void do_drop_socket(void) { MUST(unlink("/w/socket")); }
static void do_chmod_socket(void) { MUST(chmod("/w/socket", 0600)); }
static void do_file_in_folder(void) { MUST(open("/w/d/new", O_CREAT | O_RDWR, 0600)); }

#define S(f) {#f, stay_##f}
#define D(f) {#f, do_##f}
static struct { const char *name; void (*f)(void); } stays[] = {
	S(sleep), S(pause), S(read), S(accept), S(accept_tcp), S(listener_asleep), S(epoll), S(poll), S(select), S(wait), S(futex), S(threads),
	S(leader_gone), S(vfork), S(sigwait), S(ignores), S(handles), S(fifo), S(pipe), S(memfd), S(terminal), S(datagrams), S(eventfd), S(reader), S(mapper),
	S(in_folder), S(of_the_image), S(locked), S(inotify), S(timer), S(alarm), S(timerfd), S(busy), S(busy_thread), S(ends), S(forks), S(stores), S(double_fork), S(stopped),
}, does[] = {
	D(nothing), D(kill), D(cont), D(probe), D(tgkill), D(pidfd_signal), D(queue), D(ptrace), D(vm_write), D(limits), D(own_limits), D(affinity), D(own_affinity),
	D(batch), D(nice), D(ioprio), D(madvise), D(oom_score), D(their_mem), D(their_fd), D(read_their_fd), D(take_fd), D(fifo), D(tcp), D(unix), D(datagram), D(refused),
	D(pipes), D(socketpair), D(own_terminal), D(temp), D(children), D(write_other), D(write_old), D(map_old), D(by_link), D(replace), D(move_folder), D(chmod_folder),
	D(write_image), D(drop_socket), D(chmod_socket), D(file_in_folder),
};

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "stay"))
		for (unsigned i = 0; i < sizeof stays / sizeof *stays; i++)
			if (!strcmp(stays[i].name, argv[2])) {
				MUST(pipe2(ready, O_CLOEXEC));
				if (!fork()) {
					close(ready[0]);
					setsid();
					for (int fd = 0; fd < 3; fd++)
						close(fd);
					stays[i].f();
				}
				close(ready[1]);
				char c;
				return read(ready[0], &c, 1) != 1;
			}
	if (argc == 4 && !strcmp(argv[1], "do"))
		for (unsigned i = 0; i < sizeof does / sizeof *does; i++)
			if (!strcmp(does[i].name, argv[2])) {
				pid = atoi(argv[3]);
				does[i].f();
				return 0;
			}
	fprintf(stderr, "no way %s\n", argv[argc > 2 ? 2 : 0]);
	return 2;
}
