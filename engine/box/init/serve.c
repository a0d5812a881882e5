// pid 1 at work: one loop over poll(2), nothing in it blocks.
//
// It holds the inner ends of a command's stdin, stdout and stderr and relays
// them, so that no pipe crosses the border of the box. At most one packet waits
// to be sent; while it does, nothing is read, neither from the command nor from
// the daemon: a slow daemon slows the command, and memory stays bounded.
//
// A command is over when its main process is. What its pipes hold at that moment
// is still relayed; end of file isn't waited for, since survivors may hold the
// other ends for ever. Theirs are drained and dropped.
#include "serve.h"

#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>

enum { DRAINS_MAX = 512, PIPE_WANTED = 1 << 20, DRAIN_CHUNK = 64 << 10 };

static int conn, listener, sigfd;
static int successor = -1; // the next daemon, waiting
static int leaf = -1, leaf_kill = -1;
static uint32_t leaf_number, leaf_state;
static bool attached;
uint64_t commands;

struct packet packet;
size_t pending;

struct running cmd = {.out = {{.fd = -1}, {.fd = -1}}, .in = -1};

static struct {
	char *buf;
	size_t len;
} parts; // a request that comes in parts

static int drains[DRAINS_MAX], ndrains;

void close_fd(int *fd)
{
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

static void hang_up(void);

static void flush(void)
{
	if (!pending)
		return;
	if (conn < 0) {
		pending = 0;
		return;
	}
	ssize_t n = send(conn, &packet, pending, MSG_NOSIGNAL | MSG_DONTWAIT);
	if (n >= 0)
		pending = 0;
	else if (errno != EAGAIN && errno != EINTR && errno != ENOBUFS)
		hang_up();
}

// post sends packet.body; it may only be called while nothing is pending.
void post(uint32_t id, enum kind kind, size_t n)
{
	packet.head = (struct head){id, kind, 0};
	pending = sizeof packet.head + n;
	flush();
}

static void post_error(uint32_t id, const char *text)
{
	size_t n = snprintf(packet.body, 512, "%s", text);
	post(id, R_ERROR, n < 512 ? n : 511);
}

void drop_input(void)
{
	close_fd(&cmd.in);
	if (cmd.input)
		munmap(cmd.input, CHUNK);
	cmd.input = NULL;
	cmd.in_len = cmd.in_off = 0;
	cmd.in_wanted = false;
}

// retire keeps the read end of a pipe whose writers survive their command. When
// there are too many, the oldest is closed: its writers get SIGPIPE.
void retire(int fd)
{
	if (ndrains == DRAINS_MAX) {
		close(drains[0]);
		memmove(drains, drains + 1, sizeof drains - sizeof *drains);
		ndrains--;
	}
	drains[ndrains++] = fd;
}

static void drain(int i)
{
	static char waste[DRAIN_CHUNK];
	ssize_t n = read(drains[i], waste, sizeof waste);
	if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
		close(drains[i]);
		drains[i] = drains[--ndrains];
	}
}

static void end_command(void)
{
	drop_input();
	for (int i = 0; i < 2; i++)
		if (cmd.out[i].fd >= 0) {
			retire(cmd.out[i].fd);
			cmd.out[i].fd = -1;
		}
	if (cmd.session)
		forget_session(cmd.session);
	cmd.session = NULL;
	cmd.pid = 0;
	cmd.dead = false;
}

// relay passes on at most max bytes of a stream; it returns how many.
size_t relay(int i, size_t max)
{
	struct stream *s = &cmd.out[i];
	ssize_t n = read(s->fd, packet.body, max < CHUNK ? max : CHUNK);
	if (n > 0) {
		// A command that fills its pipe gets a larger one: fewer switches per byte.
		if (n >= 64 << 10 && !s->grown) {
			s->grown = true;
			fcntl(s->fd, F_SETPIPE_SZ, PIPE_WANTED);
		}
		post(cmd.id, i ? R_STDERR : R_STDOUT, n);
		return n;
	}
	if (n == 0 || (errno != EAGAIN && errno != EINTR))
		close_fd(&s->fd);
	return 0;
}

// finish relays what is left of a command whose main process is gone, packet by
// packet, then says how it ended.
static void finish(void)
{
	while (cmd.pid && cmd.dead && !pending) {
		relay_fenced();
		if (pending || fencing())
			return;
		bool more = false;
		for (int i = 0; i < 2 && !more; i++) {
			struct stream *s = &cmd.out[i];
			if (s->fd < 0 || !s->left)
				continue;
			size_t n = relay(i, s->left);
			s->left = n ? s->left - n : 0;
			more = n > 0;
		}
		if (more)
			continue;
		struct exit_body e = {
			.code = WIFEXITED(cmd.status) ? WEXITSTATUS(cmd.status) : -1,
			.signal = WIFSIGNALED(cmd.status) ? WTERMSIG(cmd.status) : 0,
			.cpu_us = (uint64_t)(cmd.usage.ru_utime.tv_sec + cmd.usage.ru_stime.tv_sec) * 1000000 + cmd.usage.ru_utime.tv_usec + cmd.usage.ru_stime.tv_usec,
			.commands = commands,
		};
		memcpy(packet.body, &e, sizeof e);
		uint32_t id = cmd.id;
		// End of file tells those whose writers are gone from those to drain.
		for (int i = 0; i < 2; i++) {
			struct pollfd p = {cmd.out[i].fd, POLLIN, 0};
			if (p.fd >= 0 && poll(&p, 1, 0) == 1 && !(p.revents & POLLIN))
				close_fd(&cmd.out[i].fd);
		}
		end_command();
		post(id, R_EXIT, sizeof e);
	}
}

static void reap(void)
{
	struct signalfd_siginfo info;
	while (read(sigfd, &info, sizeof info) > 0)
		;
	for (;;) {
		int status;
		struct rusage usage;
		pid_t pid = wait4(-1, &status, WNOHANG, &usage);
		if (pid <= 0)
			return;
		if (pid != cmd.pid || cmd.dead) {
			session_ended(pid);
			continue;
		}
		cmd.dead = true;
		cmd.status = status;
		cmd.usage = usage;
		drop_input();
		fence_last();
		for (int i = 0; i < 2; i++) {
			int n = 0;
			if (cmd.out[i].fd >= 0)
				ioctl(cmd.out[i].fd, FIONREAD, &n);
			cmd.out[i].left = fencing() ? 0 : n;
		}
	}
}

// hang_up is for a daemon that went away: what its running command started is
// killed, survivors of earlier turns go on.
static void hang_up(void)
{
	if (!attached)
		_exit(0); // a zygote lives no longer than its daemon
	close_fd(&conn);
	pending = 0;
	parts.len = 0;
	if (!cmd.pid)
		return;
	if (cmd.session) {
		kill(cmd.pid, SIGKILL);
		return;
	}
	leaf_state = LEAF_KILLED;
	if (write(leaf_kill, "1", 1) < 0)
		kill(cmd.pid, SIGKILL);
}

static void feed(void)
{
	ssize_t n = write(cmd.in, cmd.input + cmd.in_off, cmd.in_len - cmd.in_off);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n < 0) { // nobody reads any more; the rest is taken and dropped
		bool last = cmd.in_last;
		drop_input();
		cmd.in_last = last;
		return;
	}
	cmd.in_off += n;
	if (cmd.in_off < cmd.in_len)
		return;
	cmd.in_len = cmd.in_off = 0;
	if (cmd.in_last)
		drop_input();
	else
		cmd.in_wanted = true;
}

static int make_pipes(int *in, int *out, int *err, bool input)
{
	int p[2];
	if (input) {
		if (pipe2(p, O_CLOEXEC))
			return -1;
		*in = p[0];
		cmd.in = p[1];
		cmd.input = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (cmd.input == MAP_FAILED) {
			cmd.input = NULL;
			return -1;
		}
		if (fcntl(cmd.in, F_SETFL, O_NONBLOCK))
			return -1;
	} else if ((*in = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0) {
		return -1;
	}
	int *ends[] = {out, err};
	for (int i = 0; i < 2; i++) {
		if (pipe2(p, O_CLOEXEC))
			return -1;
		cmd.out[i] = (struct stream){.fd = p[0]};
		*ends[i] = p[1];
		if (fcntl(p[0], F_SETFL, O_NONBLOCK))
			return -1;
	}
	return 0;
}

static const char *exec_request(uint32_t id, char *body, size_t n)
{
	struct exec_head h;
	struct command c;
	if (!attached || leaf < 0)
		return "this box has no root yet";
	if (cmd.pid)
		return "a command is running";
	if (n < sizeof h)
		return "malformed request";
	memcpy(&h, body, sizeof h);
	body += sizeof h;
	n -= sizeof h;
	if (!h.argc || h.argc > 1 << 18 || h.envc > 1 << 18 || h.what > PACK || h.input > MORE_INPUT || h.strings > n || n - h.strings > CHUNK)
		return "malformed request";
	static char *usual[512]; // enough for nearly every command, without a mapping of its own
	size_t vector_size = (h.argc + h.envc + 2) * sizeof(char *);
	char **vector = usual;
	if (vector_size > sizeof usual)
		vector = mmap(NULL, vector_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (vector == MAP_FAILED)
		return "out of memory";
	c.what = h.what;
	if (!split(body, h.strings, &c, vector, h.argc, h.envc)) {
		if (vector != usual)
			munmap(vector, vector_size);
		return "malformed request";
	}
	int in = -1, out = -1, err = -1;
	const char *why = NULL;
	if (make_pipes(&in, &out, &err, h.input != NO_INPUT)) {
		why = strerror(errno);
	} else {
		cmd.pid = start_command(&c, leaf, in, out, err);
		if (cmd.pid < 0) {
			cmd.pid = 0;
			why = strerror(errno);
		}
	}
	if (vector != usual)
		munmap(vector, vector_size);
	close_fd(&in);
	close_fd(&out);
	close_fd(&err);
	if (why) {
		drop_input();
		close_fd(&cmd.out[0].fd);
		close_fd(&cmd.out[1].fd);
		return why;
	}
	if (c.what != READ_FILE && c.what != PACK) // they change nothing
		commands++;
	cmd.id = id;
	cmd.dead = false;
	cmd.in_last = h.input != MORE_INPUT;
	if (cmd.in >= 0) {
		cmd.in_len = n - h.strings;
		memcpy(cmd.input, body + h.strings, cmd.in_len);
		feed();
	}
	return NULL;
}

static const char *stdin_request(const char *body, size_t n, bool last)
{
	if (cmd.in < 0)
		return NULL; // the command doesn't read any more
	if (cmd.in_len || n > CHUNK)
		return "stdin came unasked";
	memcpy(cmd.input, body, n);
	cmd.in_len = n;
	cmd.in_last = last;
	feed();
	return NULL;
}

// take_leaf makes two descriptors, a cgroup and its cgroup.kill, the running turn's.
static void take_leaf(int *fds)
{
	close_fd(&leaf);
	close_fd(&leaf_kill);
	leaf = fds[0];
	leaf_kill = fds[1];
	fds[0] = fds[1] = -1;
}

static void handle(struct head h, char *body, size_t n, int *fds, int nfds)
{
	const char *why = NULL;
	switch (h.op) {
	case OP_ATTACH:
		if (attached || nfds != 3) {
			why = "malformed request to attach";
			break;
		}
		uint64_t start = now_us();
		if (attach(conn, h.id, body, n, fds[0], start))
			_exit(1);
		take_leaf(fds + 1);
		attached = true;
		return;
	case OP_EXEC:
		why = exec_request(h.id, body, n);
		break;
	case OP_STDIN:
		said();
		why = stdin_request(body, n, !(h.flags & MORE));
		break;
	case OP_LEAF:
		if (nfds != 2 || n != sizeof leaf_number || cmd.pid) {
			why = cmd.pid ? "a command is running" : "malformed leaf";
			break;
		}
		take_leaf(fds);
		memcpy(&leaf_number, body, sizeof leaf_number);
		leaf_state = LEAF_WHOLE;
		post(h.id, R_DONE, 0);
		return;
	case OP_HELLO:
		memcpy(packet.body, &commands, 8);
		memcpy(packet.body + 8, &leaf_number, 4);
		memcpy(packet.body + 12, &leaf_state, 4);
		post(h.id, R_HELLO, 16);
		return;
	case OP_OPEN:
		why = !attached ? "this box has no root yet" : open_session(h.id, body, n, fds, nfds);
		break;
	case OP_ATTEND:
		why = attend(h.id, body, n);
		break;
	case OP_LEAVE:
		why = leave(h.id);
		break;
	case OP_TYPE:
		why = type_keys(body, n);
		break;
	case OP_SESSIONS:
		list_sessions(h.id);
		return;
	case OP_LISTEN:
		if (nfds != 1 || dup3(fds[0], listener, O_CLOEXEC) < 0) {
			why = "malformed socket";
			break;
		}
		post(h.id, R_DONE, 0);
		return;
	case OP_PART:
		if (!attached || cmd.pid) {
			why = cmd.pid ? "a command is running" : "this box has no root yet";
			break;
		}
		post(h.id, R_DONE, 0);
		if (pending) // nobody reads: this isn't one who waits for an answer
			hang_up();
		close_fd(&leaf);
		close_fd(&leaf_kill);
		leaf_state = LEAF_GONE;
		// CRIU asks for our namespaces from inside our user namespace. Until the next
		// daemon comes, it is our ids that keep others off (see limit_own_capabilities).
		prctl(PR_SET_DUMPABLE, 1);
		close_fd(&conn); // last, as it says that all this is done
		return;
	default:
		why = "unknown request";
	}
	if (why)
		post_error(h.id, why);
}

// assemble collects the parts of a large EXEC; true when it is whole.
static bool assemble(struct head h, const char *body, size_t n)
{
	if (!parts.buf) {
		parts.buf = mmap(NULL, REQUEST_MAX, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (parts.buf == MAP_FAILED)
			parts.buf = NULL;
	}
	if (!parts.buf || n > REQUEST_MAX - parts.len) {
		hang_up(); // a daemon of ours doesn't do that
		return false;
	}
	memcpy(parts.buf + parts.len, body, n);
	parts.len += n;
	return !(h.flags & MORE);
}

static void request(void)
{
	static struct {
		struct head head;
		char body[CHUNK];
	} in;
	int fds[FDS_MAX], nfds;
	int n = receive(conn, &in, sizeof in, fds, &nfds, MSG_DONTWAIT);
	if (n < 0 && errno == EAGAIN)
		return;
	if (n < (int)sizeof in.head) {
		hang_up();
		return;
	}
	char *body = in.body;
	size_t len = n - sizeof in.head;
	if ((in.head.op != OP_EXEC && in.head.op != OP_OPEN) || (!parts.len && !(in.head.flags & MORE))) {
		handle(in.head, body, len, fds, nfds);
	} else if (assemble(in.head, body, len)) {
		handle(in.head, parts.buf, parts.len, fds, nfds); // the last part brings descriptors
		munmap(parts.buf, REQUEST_MAX);
		parts.buf = NULL;
		parts.len = 0;
	}
	for (int i = 0; i < nfds; i++)
		close_fd(&fds[i]);
}

// greet takes in a daemon: one that isn't in our pid namespace has pid 0 for us.
// Whoever else got at the socket is turned away. There is one daemon at a time: the
// next one waits until the end of the last has been noticed and what that ran is dead.
static void greet(void)
{
	int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	struct ucred peer;
	socklen_t n = sizeof peer;
	if (fd < 0)
		return;
	if (successor >= 0 || !attached || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) || peer.pid != 0)
		close(fd);
	else
		successor = fd;
}

static void succeed(void)
{
	if (successor >= 0 && conn < 0 && !cmd.pid) {
		conn = successor;
		successor = -1;
		prctl(PR_SET_DUMPABLE, 0);
	}
}

static void turn_of_loop(void)
{
	if (cmd.in_wanted && !pending) {
		cmd.in_wanted = false;
		post(cmd.id, R_WANT, 0);
	}
	struct pollfd p[6 + DRAINS_MAX + SESSION_POLLS] = {
		{sigfd, POLLIN, 0},
		{listener, POLLIN, 0},
		{conn, pending ? POLLOUT : POLLIN, 0},
		{cmd.in_len || (cmd.session && !pending && !cmd.dead && !fencing()) ? cmd.in : -1, (cmd.in_len ? POLLOUT : 0) | (cmd.session ? POLLIN : 0), 0},
		{pending || (cmd.dead && !fencing()) ? -1 : cmd.out[0].fd, POLLIN, 0},
		{pending || cmd.dead ? -1 : cmd.out[1].fd, POLLIN, 0},
	};
	int had = ndrains;
	for (int i = 0; i < had; i++)
		p[6 + i] = (struct pollfd){drains[i], POLLIN, 0};
	int quiet = session_polls(p + 6 + had);
	if (poll(p, 6 + had + quiet, -1) < 0)
		return;
	session_events(p + 6 + had, quiet);
	for (int i = had - 1; i >= 0; i--) // from the end: drain() moves the last one
		if (p[6 + i].revents)
			drain(i);
	if (p[2].revents & (POLLHUP | POLLERR))
		if (!(p[2].revents & POLLIN))
			hang_up();
	if (p[2].revents & POLLOUT)
		flush();
	for (int i = 0; i < 2; i++)
		if (fencing())
			relay_fenced();
		else if (p[4 + i].revents && !pending && cmd.out[i].fd >= 0 && !cmd.dead)
			relay(i, CHUNK);
	if (p[3].revents & (POLLIN | POLLHUP) && cmd.session)
		hear();
	if (p[3].revents & ~POLLIN && cmd.in >= 0 && cmd.in_len)
		feed();
	if (p[0].revents)
		reap();
	finish();
	if (p[2].revents & POLLIN && conn >= 0 && !pending)
		request();
	if (p[1].revents)
		greet();
	succeed();
}

void serve(int sock, int l)
{
	sigset_t child;
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	conn = sock;
	listener = l;
	sigfd = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
	if (sigfd < 0)
		_exit(1);
	for (;;)
		turn_of_loop();
}
