// What serve.c and session.c share: the one command at work, and the one packet on its way.
#ifndef BOXWOOD_SERVE_H
#define BOXWOOD_SERVE_H

#include "wire.h"

#include <poll.h>
#include <sys/resource.h>

// packet is the one message that is being built or waits to be sent.
struct packet {
	struct head head;
	char body[CHUNK];
};
extern struct packet packet;
extern size_t pending; // bytes of packet that wait; 0: none

struct session;

struct running {
	uint32_t id;
	long pid; // 0: no command
	bool dead;
	int status;
	struct rusage usage;
	struct stream {
		int fd; // -1: closed
		size_t left; // to relay after death, or before a session is heard
		bool grown;
	} out[2];
	int in;
	char *input; // CHUNK bytes, allocated while a command has stdin
	size_t in_len, in_off;
	bool in_last, in_wanted;
	struct session *session; // that is attended to, its descriptors in out and in
};
extern struct running cmd;
extern uint64_t commands; // started, that can have changed anything

void post(uint32_t id, enum kind kind, size_t n);
size_t relay(int i, size_t max);
void retire(int fd);
void close_fd(int *fd);
void drop_input(void);

// session.c
const char *open_session(uint32_t id, char *body, size_t n, const int *fds, int nfds);
const char *attend(uint32_t id, const char *body, size_t n);
const char *leave(uint32_t id);
const char *type_keys(const char *body, size_t n);
void list_sessions(uint32_t id);
void said(void);
bool fencing(void);
void fence_last(void);
void relay_fenced(void);
void hear(void);
void session_ended(pid_t pid);
void forget_session(struct session *s);
int session_polls(struct pollfd *p);
void session_events(const struct pollfd *p, int n);

enum { SESSIONS_MAX = 32, SESSION_POLLS = 4 * SESSIONS_MAX };

#endif
