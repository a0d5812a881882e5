// Packets in and out, and the strings of a command.
#include "wire.h"

#include <stdarg.h>
#include <time.h>

uint64_t now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

// receive returns the packet's size, 0 at the end, -1 with errno. Too large a
// packet, or too many descriptors, is EPROTO.
int receive(int sock, void *buf, size_t size, int *fds, int *nfds, int flags)
{
	struct iovec io = {buf, size};
	union {
		struct cmsghdr h;
		char b[CMSG_SPACE(sizeof(int) * FDS_MAX)];
	} control;
	struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control.b, .msg_controllen = sizeof control.b};
	ssize_t n;
	*nfds = 0;
	do
		n = recvmsg(sock, &m, flags | MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return -1;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
			*nfds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
			memcpy(fds, CMSG_DATA(c), *nfds * sizeof(int));
		}
	if (m.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
		for (int i = 0; i < *nfds; i++)
			close(fds[i]);
		*nfds = 0;
		errno = EPROTO;
		return -1;
	}
	return n;
}

int reply(int sock, uint32_t id, enum kind kind, const void *body, size_t n, const int *fds, int nfds)
{
	struct head h = {id, kind, 0};
	struct iovec io[] = {{&h, sizeof h}, {(void *)body, n}};
	union {
		struct cmsghdr h;
		char b[CMSG_SPACE(sizeof(int) * FDS_MAX)];
	} control;
	struct msghdr m = {.msg_iov = io, .msg_iovlen = 2};
	if (nfds) {
		m.msg_control = control.b;
		m.msg_controllen = CMSG_SPACE(sizeof(int) * nfds);
		struct cmsghdr *c = CMSG_FIRSTHDR(&m);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int) * nfds);
		memcpy(CMSG_DATA(c), fds, sizeof(int) * nfds);
	}
	return sendmsg(sock, &m, MSG_NOSIGNAL) < 0 ? -1 : 0;
}

int reply_error(int sock, uint32_t id, const char *fmt, ...)
{
	char text[512];
	va_list ap;
	va_start(ap, fmt);
	int n = vsnprintf(text, sizeof text, fmt, ap);
	va_end(ap);
	return reply(sock, id, R_ERROR, text, n < (int)sizeof text ? n : (int)sizeof text - 1, NULL, 0);
}

// split finds the strings of a request; false if they aren't as many as it says.
bool split(char *p, size_t n, struct command *c, char **vector, uint32_t argc, uint32_t envc)
{
	char *end = p + n;
	if (!n || end[-1])
		return false;
	for (uint32_t i = 0; i < argc + envc + 2; i++) {
		if (p >= end)
			return false;
		if (i == 0)
			c->cwd = p;
		else if (i == 1)
			c->user = p;
		else
			vector[i - 2 + (i - 2 >= argc)] = p; // one NULL between argv and env
		p += strlen(p) + 1;
	}
	vector[argc] = vector[argc + envc + 1] = NULL;
	c->argv = vector;
	c->envp = vector + argc + 1;
	c->argc = argc;
	return p == end;
}
