// Starting one command: identity, folder, PATH, exec.
#include "wire.h"

#include <ctype.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>

// What root of a box may have: the usual default of containers.
#define CAP(c) (1ULL << (c))
static const uint64_t allowed_caps =
	CAP(CAP_CHOWN) | CAP(CAP_DAC_OVERRIDE) | CAP(CAP_FSETID) | CAP(CAP_FOWNER) | CAP(CAP_MKNOD) | CAP(CAP_NET_RAW) |
	CAP(CAP_SETGID) | CAP(CAP_SETUID) | CAP(CAP_SETFCAP) | CAP(CAP_SETPCAP) | CAP(CAP_NET_BIND_SERVICE) |
	CAP(CAP_SYS_CHROOT) | CAP(CAP_KILL) | CAP(CAP_AUDIT_WRITE);

// The bounding set counts at exec, so that dropping it takes nothing from pid 1.
void drop_bounding_set(void)
{
#ifdef WITHOUT_CAPABILITIES // as wherever WITHOUT_ is: to measure what a measure costs, see BenchmarkMeasures
	return;
#endif
	for (int c = 0; c < 64; c++)
		if (!(allowed_caps & CAP(c)) && prctl(PR_CAPBSET_DROP, c, 0, 0, 0) && errno == EINVAL)
			break; // past the last one this kernel has
}

// pid 1 keeps one more than what it starts gets at its exec: a restored session has the
// pid that it had.
void limit_own_capabilities(void)
{
#ifdef WITHOUT_CAPABILITIES
	return;
#endif
	struct __user_cap_header_struct h = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct d[2] = {{0}};
	for (int i = 0; i < 2; i++)
		d[i].effective = d[i].permitted = (uint32_t)((allowed_caps | CAP(CAP_CHECKPOINT_RESTORE)) >> (32 * i));
	// A saved id that root of the box doesn't have keeps it from changing our
	// resource limits (prlimit(2) compares all three).
	syscall(SYS_setresgid, -1, -1, 65535);
	syscall(SYS_setresuid, -1, -1, 65535);
	syscall(SYS_capset, &h, d);
}

static void complain(const char *what, const char *why)
{
	char line[512];
	int n = snprintf(line, sizeof line, "boxwood: %.300s: %s\n", what, why);
	if (write(2, line, n) < 0)
		return;
}

static __attribute__((noreturn)) void give_up(int code, const char *what, const char *why)
{
	complain(what, why);
	_exit(code);
}

// read_file reads a text file of the box, which is hostile: it may be a pipe, a
// device, endless. At most 1 MiB of a regular file; the rest reads as missing. What
// nearly every box has fits into a buffer that is there already: a mapping of its own,
// made and taken down for each command, costs more than the reading.
static char usual[8 << 10];

static char *read_file(const char *path, size_t *len)
{
	enum { MAX = 1 << 20 };
	struct stat st;
	*len = 0;
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (fd < 0)
		return NULL;
	char *p = MAP_FAILED;
	if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
		close(fd);
		return NULL;
	}
	if (st.st_size > 0 && st.st_size < (off_t)sizeof usual) { // 0 in procfs says nothing
		ssize_t n = read(fd, usual, sizeof usual - 1);
		close(fd);
		*len = n > 0 ? n : 0;
		return usual;
	}
	p = mmap(NULL, MAX + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p != MAP_FAILED)
		for (ssize_t n; *len < MAX && (n = read(fd, p + *len, MAX - *len)) > 0; *len += n)
			;
	close(fd);
	return p == MAP_FAILED ? NULL : p;
}

// fields splits one line of a passwd or group file; it returns how many.
static int fields(char *line, char **f, int max)
{
	int n = 0;
	for (char *p = line; n < max; p++) {
		f[n++] = p;
		p = strchr(p, ':');
		if (!p)
			break;
		*p = 0;
	}
	return n;
}

static bool number(const char *s, uint32_t *out)
{
	uint64_t v = 0;
	if (!*s)
		return false;
	for (; *s; s++) {
		if (!isdigit((unsigned char)*s) || (v = v * 10 + (*s - '0')) > UINT32_MAX - 1)
			return false;
	}
	*out = v;
	return true;
}

struct identity {
	uint32_t uid, gid;
	gid_t groups[256];
	int ngroups;
	char name[256];
};

// each_line calls fn with the fields of each line until it returns true.
static bool each_line(const char *path, int want, bool (*fn)(char **, void *, const char *), void *to, const char *key)
{
	size_t len;
	char *text = read_file(path, &len), *f[8];
	bool found = false;
	for (char *p = text; text && !found && p < text + len;) {
		char *end = memchr(p, '\n', text + len - p);
		if (!end)
			end = text + len; // the mapping is one byte longer
		*end = 0;
		found = fields(p, f, 8) >= want && fn(f, to, key);
		p = end + 1;
	}
	if (text && text != usual)
		munmap(text, (1 << 20) + 1);
	return found;
}

static bool match_user(char **f, void *to, const char *key)
{
	struct identity *id = to;
	uint32_t uid, gid, wanted;
	if (!number(f[2], &uid) || !number(f[3], &gid))
		return false;
	if (strcmp(f[0], key) && !(number(key, &wanted) && wanted == uid))
		return false;
	id->uid = uid;
	id->gid = gid;
	snprintf(id->name, sizeof id->name, "%s", f[0]);
	return true;
}

static bool match_group(char **f, void *to, const char *key)
{
	return !strcmp(f[0], key) && number(f[2], to);
}

static bool add_group(char **f, void *to, const char *key)
{
	struct identity *id = to;
	uint32_t gid;
	size_t n = strlen(key);
	if (id->ngroups == 256 || !number(f[2], &gid) || gid == id->gid)
		return false;
	for (char *m = f[3]; m && *m; m = strchr(m, ',') ? strchr(m, ',') + 1 : NULL)
		if (!strncmp(m, key, n) && (m[n] == 0 || m[n] == ',')) {
			id->groups[id->ngroups++] = gid;
			return false;
		}
	return false;
}

// become takes the identity "name", "uid", "name:group" or "uid:gid"; empty is
// root. A uid that has no entry gets gid 0 and no other groups.
// A terminal is handed over with it.
static void become(const char *user, int terminal)
{
	static struct identity id; // shared with pid 1, which waits
	char who[256];
	memset(&id, 0, sizeof id);
	snprintf(who, sizeof who, "%s", *user ? user : "0");
	char *group = strchr(who, ':');
	if (group)
		*group++ = 0;
	bool known = each_line("/etc/passwd", 4, match_user, &id, who);
	if (!known && !strcmp(who, "root"))
		known = true;
	if (!known && !number(who, &id.uid))
		give_up(127, user, "no such user");
	if (*id.name)
		each_line("/etc/group", 4, add_group, &id, id.name);
	if (group && !number(group, &id.gid) && !each_line("/etc/group", 3, match_group, &id.gid, group))
		give_up(127, user, "no such group");
	if (terminal >= 0 && fchown(terminal, id.uid, 5))
		give_up(126, "the terminal", strerror(errno));
	if (syscall(SYS_setgroups, id.ngroups, id.groups) || syscall(SYS_setresgid, id.gid, id.gid, id.gid) ||
	    syscall(SYS_setresuid, id.uid, id.uid, id.uid))
		give_up(126, user, "this user or group id is outside the box's 65,536");
}

static const char *get_env(char **envp, const char *key)
{
	size_t n = strlen(key);
	for (; *envp; envp++)
		if (!strncmp(*envp, key, n) && (*envp)[n] == '=')
			return *envp + n + 1;
	return NULL;
}

// look_up execs along PATH like a shell: a file that may not be run is
// remembered, the search goes on.
static void look_up(struct command *c)
{
	const char *name = c->argv[0], *path = get_env(c->envp, "PATH");
	char full[4096];
	int denied = 0;
	if (!*name)
		give_up(127, "\"\"", "command not found");
	if (strchr(name, '/')) {
		execve(name, c->argv, c->envp);
		give_up(errno == ENOENT || errno == ENOTDIR ? 127 : 126, name, strerror(errno));
	}
	if (!path)
		path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
	for (const char *end; path; path = *end ? end + 1 : NULL) {
		end = strchrnul(path, ':');
		int n = snprintf(full, sizeof full, "%.*s%s%s", (int)(end - path), path, end == path ? "./" : "/", name);
		if (n >= (int)sizeof full)
			continue;
		execve(full, c->argv, c->envp);
		struct stat st;
		if (errno != ENOENT && errno != ENOTDIR && !(errno == EACCES && (stat(full, &st) || S_ISDIR(st.st_mode)))) {
			if (errno != EACCES)
				give_up(126, full, strerror(errno));
			denied = EACCES;
		}
	}
	if (denied)
		give_up(126, name, strerror(denied));
	give_up(127, name, "command not found");
}

static int child(void *arg)
{
	struct start *s = arg;
	sigset_t none;
	bool beside = s->terminal >= 0 && !s->controls;
	if (beside && (s->in < 4 || s->out < 4 || s->err < 4 || s->terminal < 4)) // pid 1 has more open than that
		_exit(126);
	if (dup2(s->in, 0) < 0 || dup2(s->out, 1) < 0 || dup2(beside ? s->terminal : s->err, 2) < 0 || (beside && dup2(s->err, 3) < 0) ||
	    syscall(SYS_close_range, beside ? 4 : 3, ~0U, s->c->what == RUN ? 1 << 2 /* CLOSE_RANGE_CLOEXEC */ : 0))
		_exit(126);
	syscall(SYS_setsid);
	if (s->controls && ioctl(2, TIOCSCTTY, 0))
		give_up(126, "the terminal", strerror(errno));
	umask(s->umask);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	if (s->c->what != RUN)
		_exit(syscall(SYS_setresgid, 0, 0, 0) || syscall(SYS_setresuid, 0, 0, 0) ? 1 : file_helper(s->c));
	become(s->c->user, s->controls ? 2 : -1);
	const char *cwd = *s->c->cwd ? s->c->cwd : "/";
	if (chdir(cwd))
		give_up(errno == EACCES ? 126 : 127, cwd, strerror(errno));
	look_up(s->c);
	return 127;
}

#ifdef __x86_64__
// A clone that shares memory needs a stack of its own and may not return.
static long clone_shared(struct clone_args *args, int (*fn)(void *), void *arg)
{
	register int (*f)(void *) __asm__("r12") = fn;
	register void *a __asm__("r13") = arg;
	long ret;
	__asm__ volatile("syscall\n\t"
			 "test %%rax, %%rax\n\t"
			 "jnz 1f\n\t"
			 "xor %%ebp, %%ebp\n\t"
			 "mov %%r13, %%rdi\n\t"
			 "call *%%r12\n\t"
			 "mov %%eax, %%edi\n\t"
			 "mov $60, %%eax\n\t" // exit
			 "syscall\n\t"
			 "1:"
			 : "=a"(ret)
			 : "0"(SYS_clone3), "D"(args), "S"(sizeof *args), "r"(f), "r"(a)
			 : "rcx", "r11", "memory");
	if (ret < 0) {
		errno = -ret;
		return -1;
	}
	return ret;
}
#endif

// start_command clones into the leaf. A command's child shares pid 1's memory
// until it execs: no page tables are copied, and pid 1 waits. What could hold
// that up (a slow file system named by the command) ends with the deadline,
// which kills the leaf. A file helper never execs, so that it gets a copy.
long start_command(struct command *c, int leaf, int in, int out, int err)
{
	struct start s = {.c = c, .in = in, .out = out, .err = err, .terminal = -1, .umask = 022};
	return start_in(&s, leaf);
}

long start_in(struct start *s, int leaf)
{
	struct command *c = s->c;
	pid_t pid = s->pid;
	struct clone_args args = {.flags = CLONE_INTO_CGROUP, .exit_signal = SIGCHLD, .cgroup = leaf};
	if (pid) {
		args.set_tid = (uintptr_t)&pid;
		args.set_tid_size = 1;
	}
#ifdef __x86_64__
	if (c->what == RUN) {
		static char stack[64 << 10] __attribute__((aligned(16)));
		args.flags |= CLONE_VM | CLONE_VFORK;
		args.stack = (uintptr_t)stack;
		args.stack_size = sizeof stack;
		return clone_shared(&args, child, s);
	}
#endif
	long got = syscall(SYS_clone3, &args, sizeof args);
	if (got == 0)
		_exit(child(s));
	return got;
}
