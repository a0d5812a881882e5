// Sessions: programs that are told what to do on a private channel, and that live on
// between commands. pid 1 knows nothing of what is said; it passes it on.
//
// A session's stdin is one end of a socket pair, its channel; what the daemon says is
// written to the other end, and what comes back goes to the daemon as R_HEARD. Its
// output is a pipe each for stdout and stderr, or a terminal. At most one session is
// attended to at a time, in place of a command: then its descriptors lie in cmd. Of
// the others everything that comes is read and dropped.
//
// What is heard never overtakes output: all that the streams held when the channel
// became readable is relayed first. A terminal passes its output on in a kernel thread of its own,
// some time after the write, so that a fence is written behind it, random for each use, and waited
// for. It never reaches the daemon.
//
// The session's side of a terminal blocks, as programs expect: a write that finds it full waits. Ours doesn't, and is
// opened apart for that: O_NONBLOCK belongs to an open file, not to a descriptor.
#include "serve.h"

#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <termios.h>
#include <time.h>

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif
#define GET_TERMIOS 0x802c542a // TCGETS2
#define SET_TERMIOS 0x402c542b // TCSETS2

enum { FENCE = 24 };

struct session {
	uint32_t number, pid, tty, pts; // pid 0: free
	char name[SESSION_NAME];
	int channel, out[2]; // of a terminal, out[0] is its master
	uint64_t inodes[3];
	int held;            // the other side of the terminal, kept open or it would hang up
};

static struct session sessions[SESSIONS_MAX];

static struct {
	bool wanted, up; // up: bytes of fence are on their way through the terminal
	char bytes[FENCE];
	size_t size, seen; // of the bytes: how many were written, and came
	size_t passed;     // bytes relayed since it was wanted and couldn't be written
	int idle;          // times that there was nothing to relay, either
} fence;

// TERMINAL_HOLDS is more than a terminal holds. IDLE_MAX times a millisecond its kernel thread has to show what there is.
enum { TERMINAL_HOLDS = 1 << 20, IDLE_MAX = 20 };

static void want_fence(void)
{
	fence.wanted = true;
	fence.passed = 0;
	fence.idle = 0;
}

static struct session *find(uint32_t number)
{
	for (int i = 0; i < SESSIONS_MAX; i++)
		if (sessions[i].pid && sessions[i].number == number)
			return &sessions[i];
	return NULL;
}

// open_terminal opens a fresh terminal; *slave too, which is nobody's controlling terminal yet.
static int open_terminal(int *slave, uint32_t *pts)
{
	int unlock = 0;
	int master = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
	if (master < 0)
		return -1;
	if (ioctl(master, TIOCSPTLCK, &unlock) || ioctl(master, TIOCGPTN, pts) ||
	    (*slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0) {
		close(master);
		return -1;
	}
	return master;
}

// terminal_at opens the terminal with a number, which a restored session has to have again.
static int terminal_at(uint32_t want, int *slave, uint32_t *pts)
{
	int masters[SESSIONS_MAX], slaves[SESSIONS_MAX], n = 0, found = -1;
	while (n < SESSIONS_MAX && (masters[n] = open_terminal(&slaves[n], pts)) >= 0) {
		if (want == ANY_PTS || *pts == want) {
			found = n;
			break;
		}
		n++;
	}
	int master = found < 0 ? -1 : masters[found];
	*slave = found < 0 ? -1 : slaves[found];
	if (found < 0)
		errno = EBUSY;
	for (int i = 0; i < n; i++) {
		close(masters[i]);
		close(slaves[i]);
	}
	return master;
}

static uint64_t inode(int fd)
{
	struct stat st;
	return fstat(fd, &st) ? 0 : st.st_ino;
}

// resume has a terminal's output go on that a key has stopped: TCOON alone takes back no more than TCOOFF.
static void resume(const struct session *s)
{
	ioctl(s->held, TCXONC, TCOOFF);
	ioctl(s->held, TCXONC, TCOON);
}

static int make_streams(struct session *s, const struct session_head *h, struct start *st)
{
	int pair[2], p[2];
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
		return -1;
	s->channel = pair[0];
	st->in = pair[1];
	s->inodes[0] = inode(pair[1]);
	if (fcntl(s->channel, F_SETFL, O_NONBLOCK))
		return -1;
	int master = terminal_at(h->pts, &st->terminal, &s->pts);
	if (master < 0)
		return -1;
	if (h->tty) {
		s->held = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
		struct winsize w = {.ws_row = h->rows, .ws_col = h->cols};
		s->out[0] = master;
		if (s->held < 0 || ioctl(master, TIOCSWINSZ, &w) || (h->has_termios && ioctl(master, SET_TERMIOS, h->termios)))
			return -1;
		st->out = st->err = st->terminal;
		st->controls = true;
		return 0;
	}
	// A shell without a terminal still takes one for what it sets and resets after each
	// program that a signal ended; without one it complains. It is nobody's
	// controlling terminal, and nothing is ever written to it.
	s->held = master;
	int *ends[] = {&st->out, &st->err};
	for (int i = 0; i < 2; i++) {
		if (pipe2(p, O_CLOEXEC))
			return -1;
		s->out[i] = p[0];
		*ends[i] = p[1];
		s->inodes[1 + i] = inode(p[1]);
		if (fcntl(p[0], F_SETFL, O_NONBLOCK))
			return -1;
	}
	return 0;
}

static void close_session(struct session *s)
{
	close_fd(&s->channel);
	close_fd(&s->out[0]);
	close_fd(&s->out[1]);
	close_fd(&s->held);
	s->pid = 0;
}

static void describe(struct session *s, struct session_body *b)
{
	struct winsize w = {0};
	*b = (struct session_body){.number = s->number, .pid = s->pid, .tty = s->tty, .pts = s->pts};
	memcpy(b->inodes, s->inodes, sizeof b->inodes);
	memcpy(b->name, s->name, sizeof b->name);
	if (!s->tty || s->held < 0)
		return;
	ioctl(s->held, TIOCGWINSZ, &w);
	b->rows = w.ws_row;
	b->cols = w.ws_col;
	b->has_termios = !ioctl(s->held, GET_TERMIOS, b->termios);
	ioctl(s->held, FIONREAD, &b->unread);
}

// open_session starts a session; body is a session_head and an exec request's.
const char *open_session(uint32_t id, char *body, size_t n, const int *fds, int nfds)
{
	struct session_head h;
	struct exec_head x;
	struct command c;
	struct session *s = NULL;
	if (cmd.pid)
		return "a command is running";
	if (nfds != 1 || n < sizeof h + sizeof x)
		return "malformed session";
	memcpy(&h, body, sizeof h);
	memcpy(&x, body + sizeof h, sizeof x);
	body += sizeof h + sizeof x;
	n -= sizeof h + sizeof x;
	if (!x.argc || x.argc > 1 << 10 || x.envc > 1 << 16 || x.what != RUN || x.strings != n || h.name[sizeof h.name - 1] || find(h.number))
		return "malformed session";
	for (int i = 0; i < SESSIONS_MAX && !s; i++)
		if (!sessions[i].pid)
			s = &sessions[i];
	if (!s)
		return "too many sessions";
	size_t vector_size = (x.argc + x.envc + 2) * sizeof(char *);
	char **vector = mmap(NULL, vector_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (vector == MAP_FAILED)
		return "out of memory";
	c.what = RUN;
	const char *why = NULL;
	long pid = -1;
	*s = (struct session){.number = h.number, .tty = h.tty, .channel = -1, .out = {-1, -1}, .held = -1};
	memcpy(s->name, h.name, sizeof s->name);
	struct start st = {.c = &c, .in = -1, .out = -1, .err = -1, .terminal = -1, .umask = h.umask, .pid = h.pid};
	if (!split(body, n, &c, vector, x.argc, x.envc))
		why = "malformed session";
	else if (make_streams(s, &h, &st) || (pid = start_in(&st, fds[0])) < 0)
		why = strerror(errno);
	munmap(vector, vector_size);
	close_fd(&st.in);
	close_fd(&st.terminal);
	if (!h.tty) { // else they are the terminal
		close_fd(&st.out);
		close_fd(&st.err);
	}
	if (why) {
		close_session(s);
		return why;
	}
	s->pid = pid;
	struct session_body b;
	describe(s, &b);
	memcpy(packet.body, &b, sizeof b);
	post(id, R_OPENED, sizeof b);
	return NULL;
}

// attend makes a session what is at work: u32 number, u32 whether it counts as a command.
const char *attend(uint32_t id, const char *body, size_t n)
{
	uint32_t v[2];
	if (cmd.pid)
		return "a command is running";
	if (n != sizeof v)
		return "malformed request";
	memcpy(v, body, sizeof v);
	struct session *s = find(v[0]);
	if (!s)
		return "no such session";
	char *input = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (input == MAP_FAILED)
		return "out of memory";
	cmd = (struct running){
		.id = id, .pid = s->pid, .out = {{.fd = s->out[0]}, {.fd = s->out[1]}}, .in = s->channel, .input = input, .in_wanted = true, .session = s,
	};
	s->channel = s->out[0] = s->out[1] = -1;
	// What is there was written since the last command; it is nobody's.
	static char waste[64 << 10];
	for (int i = 0; i < 2; i++)
		for (int left = 1 << 20; cmd.out[i].fd >= 0 && left > 0;) {
			ssize_t got = read(cmd.out[i].fd, waste, sizeof waste);
			if (got <= 0)
				break;
			left -= got;
		}
	if (v[1])
		commands++;
	if (s->tty)
		resume(s); // nobody is there to press another key
	fence.up = false;
	want_fence();
	return NULL;
}

// said: the answer to what was just said comes behind output that is still to be written.
void said(void)
{
	if (!fence.up)
		want_fence();
	else
		fence.wanted = false;
}

// leave is the end of attending; the session goes on.
const char *leave(uint32_t id)
{
	struct session *s = cmd.session;
	if (!s)
		return "no session is attended to";
	if (cmd.dead)
		return NULL; // R_EXIT is on its way
	s->channel = cmd.in;
	cmd.in = -1;
	for (int i = 0; i < 2; i++) {
		s->out[i] = cmd.out[i].fd;
		cmd.out[i].fd = -1;
	}
	drop_input();
	cmd.pid = 0;
	cmd.session = NULL;
	struct exit_body e = {.commands = commands};
	memcpy(packet.body, &e, sizeof e);
	post(id, R_LEFT, sizeof e);
	return NULL;
}

void forget_session(struct session *s) { close_session(s); }

// session_ended is for one that nobody attended to.
void session_ended(pid_t pid)
{
	for (int i = 0; i < SESSIONS_MAX; i++) {
		struct session *s = &sessions[i];
		if (s->pid != (uint32_t)pid)
			continue;
		for (int k = 0; k < 2; k++)
			if (s->out[k] >= 0) { // survivors may hold the other end
				retire(s->out[k]);
				s->out[k] = -1;
			}
		close_session(s);
	}
}

const char *type_keys(const char *body, size_t n)
{
	if (!cmd.session || !cmd.session->tty || cmd.dead)
		return NULL; // too late
	if (!n) {
		resume(cmd.session);
		return NULL;
	}
	for (ssize_t got; n > 0; body += got, n -= got)
		if ((got = write(cmd.out[0].fd, body, n)) <= 0)
			break; // the terminal is full: nobody reads
	cmd.in_wanted = true;
	return NULL;
}

void list_sessions(uint32_t id)
{
	size_t n = 0;
	for (int i = 0; i < SESSIONS_MAX; i++) {
		struct session_body b;
		if (!sessions[i].pid)
			continue;
		describe(&sessions[i], &b);
		memcpy(packet.body + n, &b, sizeof b);
		n += sizeof b;
	}
	post(id, R_SESSIONS, n);
}

// raise_fence writes a fence. One of which only a part fits is one, too, and another has to follow.
static bool raise_fence(void)
{
	static const char digits[] = "0123456789abcdef";
	unsigned char r[FENCE - 1];
	if (getrandom(r, sizeof r, 0) != sizeof r)
		return false;
	fence.bytes[0] = 0; // nowhere else in it, so that a false start is told at once
	for (size_t i = 0; i < sizeof r; i++)
		fence.bytes[1 + i] = digits[r[i] & 9]; // digits pass a terminal as they are
	fence.seen = 0;
	ssize_t put = write(cmd.session->held, fence.bytes, FENCE);
	fence.size = put > 0 ? put : 0;
	return put > 0;
}

// outpour relays what a terminal holds that takes no fence now: it is full or stopped, or another writes, who may be waiting
// for room. Once as much as it can hold has gone by, or nothing comes, it returns false: no fence is needed any more.
static bool outpour(void)
{
	size_t n = cmd.out[0].fd < 0 ? 0 : relay(0, CHUNK);
	fence.passed += n;
	if (!n) {
		fence.idle++;
		nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
	}
	return cmd.out[0].fd >= 0 && fence.passed < TERMINAL_HOLDS && fence.idle < IDLE_MAX;
}

// fencing: the terminal hasn't passed the fence on yet.
bool fencing(void) { return fence.up; }

// fence_last is for a session that has ended: what it wrote is still on its way.
void fence_last(void)
{
	if (cmd.session && cmd.session->tty && !fence.up)
		fence.up = raise_fence();
}

// relay_fenced relays a terminal's output up to the fence, until nothing comes or a
// packet waits.
void relay_fenced(void)
{
	static char in[CHUNK / 2];
	while (fence.up && !pending) {
		ssize_t n = read(cmd.out[0].fd, in, sizeof in);
		if (n < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (n <= 0) {
			fence.up = false; // the terminal is gone
			return;
		}
		size_t out = 0;
		for (ssize_t i = 0; i < n; i++) {
			if (fence.up && in[i] == fence.bytes[fence.seen]) {
				if (++fence.seen == fence.size) {
					fence.up = false;
					fence.seen = 0;
				}
				continue;
			}
			memcpy(packet.body + out, fence.bytes, fence.seen);
			out += fence.seen;
			fence.seen = fence.up && in[i] == fence.bytes[0];
			if (!fence.seen)
				packet.body[out++] = in[i];
		}
		if (out)
			post(cmd.id, R_STDOUT, out);
	}
}

// hear passes on what the channel says, behind the output that was there before it.
void hear(void)
{
	if (!cmd.session || cmd.dead || pending)
		return;
	if (fence.wanted && cmd.session->tty && !fence.up) {
		fence.up = raise_fence();
		if (!fence.up && outpour())
			return;
		fence.wanted = fence.up && fence.size < FENCE;
	} else if (fence.wanted && !cmd.session->tty) {
		fence.wanted = false;
		for (int i = 0; i < 2; i++) {
			int n = 0;
			if (cmd.out[i].fd >= 0)
				ioctl(cmd.out[i].fd, FIONREAD, &n);
			cmd.out[i].left = n;
		}
	}
	relay_fenced();
	for (int i = 0; i < 2; i++)
		while (cmd.out[i].left && cmd.out[i].fd >= 0 && !pending) {
			size_t n = relay(i, cmd.out[i].left);
			cmd.out[i].left = n ? cmd.out[i].left - n : 0;
		}
	if (pending || fence.up || (fence.wanted && cmd.session->tty))
		return;
	ssize_t n = read(cmd.in, packet.body, CHUNK);
	if (n > 0)
		post(cmd.id, R_HEARD, n);
	else if (n == 0 || (errno != EAGAIN && errno != EINTR))
		close_fd(&cmd.in); // its end is near
}

// session_polls fills in what is polled of sessions that nobody attends to.
int session_polls(struct pollfd *p)
{
	int n = 0;
	for (int i = 0; i < SESSIONS_MAX; i++) {
		struct session *s = &sessions[i];
		const int fds[] = {s->tty ? -1 : s->held, s->channel, s->out[0], s->out[1]};
		for (int k = 0; k < (cmd.session == s ? 1 : 4) && s->pid; k++) // attended to, it is polled elsewhere
			if (fds[k] >= 0)
				p[n++] = (struct pollfd){fds[k], POLLIN, 0};
	}
	return n;
}

// session_events drops what came unasked.
void session_events(const struct pollfd *p, int n)
{
	static char waste[64 << 10];
	for (int i = 0; i < n; i++) {
		if (!p[i].revents)
			continue;
		ssize_t got = read(p[i].fd, waste, sizeof waste);
		if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR)))
			continue;
		for (int k = 0; k < SESSIONS_MAX; k++) { // closed by the other side: nothing will come
			int *fds[] = {&sessions[k].held, &sessions[k].channel, &sessions[k].out[0], &sessions[k].out[1]};
			for (int j = 0; j < 4; j++)
				if (sessions[k].pid && *fds[j] == p[i].fd)
					close_fd(fds[j]);
		}
	}
}
