// The wire between the daemon, the nursery, zygotes and pid 1: one message is
// one packet of a unix SOCK_SEQPACKET socket, little-endian, a header of 8 bytes
// and a body. engine/box/wire.go is the other side.
//
//	request  u32 id, u16 op,   u16 flags, body   daemon -> nursery or pid 1
//	reply    u32 id, u16 kind, u16 flags, body   the id is that of its request
//
// A request larger than a packet comes in parts, all but the last with MORE.
#ifndef BOXWOOD_WIRE_H
#define BOXWOOD_WIRE_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
	CHUNK = 128 << 10,      // the largest body; fits the default send buffer
	REQUEST_MAX = 4 << 20,  // the largest request over all its parts
	FDS_MAX = 8,
};

enum op {
	OP_SPAWN = 1,  // nursery: u32 slot, u32 idbase; fds: v2 cgroup, v1 "tasks"...
	OP_ATTACH = 2, // u32 what is allowed beyond the usual (MAY_...), hostname\0 machine-id\0 struct sock_filter...; fds: overlay, leaf, leaf's cgroup.kill
	OP_EXEC = 3,   // struct exec_head, strings, first bytes of stdin
	OP_STDIN = 4,  // bytes; without MORE these are the last
	OP_LEAF = 5,   // u32 number; fds: leaf, leaf's cgroup.kill
	OP_HELLO = 6,
	OP_OPEN = 7,     // struct session_head, struct exec_head, strings; fds: leaf
	OP_ATTEND = 8,   // u32 number, u32 whether it counts as a command; then OP_STDIN says things to it
	OP_LEAVE = 9,
	OP_TYPE = 10,    // keys for the terminal of the session that is attended to; R_WANT asks for more. Without any, output that a key has stopped goes on
	OP_SESSIONS = 12,
	OP_PART = 13,   // let go of all that is outside: the leaf, and after R_DONE the connection
	OP_GUARD = 15,  // nursery: see guard.c; fds: cgroup.freeze, pipe, lock
	OP_LISTEN = 14, // fd: the socket to listen on from now on
	OP_LIMIT = 16,  // nursery: u32 whether namespaces may be made; fd: user namespace of a restored box
};
enum { MORE = 1 };

enum kind {
	R_SPAWNED = 1, // nursery: u32 pid; fds: pidfd, connection, user namespace
	R_STAGED = 2,  // zygote: u32 microseconds that staging took
	R_READY = 3,   // u32 microseconds from the request to here
	R_ERROR = 4,   // text
	R_STDOUT = 5,
	R_STDERR = 6,
	R_WANT = 7,    // the next OP_STDIN or OP_TYPE may come
	R_EXIT = 8,    // struct exit_body
	R_HELLO = 9,   // u64 commands started, u32 leaf's number (0: the first), u32 enum leaf_state
	R_DONE = 10,
	R_OPENED = 11,   // struct session_body
	R_HEARD = 12,    // what a session says on its channel
	R_LEFT = 13,     // struct exit_body
	R_SESSIONS = 14, // struct session_body...
};

enum leaf_state { LEAF_WHOLE = 0, LEAF_KILLED = 1, LEAF_GONE = 2 }; // of the running turn

struct head {
	uint32_t id;
	uint16_t op, flags;
};

// cwd\0 user\0 argv\0... env\0... follow, `strings` bytes in all, then stdin.
struct exec_head {
	uint32_t argc, envc, what, input, strings;
};
enum what { RUN = 0, READ_FILE = 1, WRITE_FILE = 2, UNPACK = 3, PACK = 4 };
enum input { NO_INPUT = 0, ALL_INPUT = 1, MORE_INPUT = 2 }; // what follows the strings

struct exit_body {
	int32_t code, signal; // code -1 if a signal ended it
	uint64_t cpu_us, commands;
};

// A session; see session.c.
enum { SESSION_NAME = 64, TERMIOS = 44 }; // struct termios2
#define ANY_PTS UINT32_MAX
struct session_head {
	uint32_t number, pid, tty, pts; // pid 0: any; pts: of a terminal
	uint32_t rows, cols, umask, has_termios;
	char termios[TERMIOS];
	char name[SESSION_NAME]; // ends with a NUL
};
struct session_body {
	uint64_t inodes[3]; // of its stdin, stdout and stderr; of pipes and sockets only
	uint32_t number, pid, tty, pts;
	char name[SESSION_NAME];
	uint32_t rows, cols, has_termios;
	int32_t unread; // keys that nobody has read yet
	char termios[TERMIOS];
	uint32_t unused;
};

struct command {
	enum what what;
	const char *cwd, *user;
	char **argv, **envp;
	int argc;
};

// serve.c
void serve(int conn, int listener) __attribute__((noreturn));

// wire.c
int receive(int sock, void *buf, size_t size, int *fds, int *nfds, int flags);
int reply(int sock, uint32_t id, enum kind kind, const void *body, size_t n, const int *fds, int nfds);
int reply_error(int sock, uint32_t id, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
uint64_t now_us(void);
bool split(char *strings, size_t n, struct command *c, char **vector, uint32_t argc, uint32_t envc);

// nesting.c
int open_nesting(const char *proc);
int forbid_nesting(int fd);
int limit_inotify(const char *proc);
void limit_from_outside(uint32_t id, int daemon, bool nests, int userns);

// guard.c
bool guard(const int *fds);
void wait_guarded(int daemon);

// zygote.c
void stage(uint32_t slot); // comes back only if it failed
void pid1(void) __attribute__((noreturn));
enum { MAY_NEST = 1, MAY_GAIN = 2 }; // namespaces; rights, by a program's setuid bit or capabilities

int attach(int sock, uint32_t id, const char *body, size_t n, int overlay, uint64_t start);

// spawn.c
struct start {
	struct command *c;
	int in, out, err;
	int terminal;  // -1: none. That of a session: its stderr while it starts, the real one beside it as 3
	bool controls; // it is the controlling terminal, and stdout and stderr as well
	uint32_t umask;
	uint32_t pid; // 0: any
};
long start_command(struct command *c, int leaf, int in, int out, int err);
long start_in(struct start *s, int leaf);
void drop_bounding_set(void);
void limit_own_capabilities(void);

// files.c
int file_helper(const struct command *c);

#endif
