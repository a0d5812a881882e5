// Namespaces inside a box. A filter of system calls can't see what clone3(2) is asked for. The
// kernel counts the user namespaces below each one, and nobody in a box has the capability to make another namespace
// without one: a limit of 0 forbids all. Only root of the box could raise it, through /proc/sys, which is read-only to him.
#include "wire.h"

#include <sched.h>

// open_nesting opens the limit of the user namespace that this process is in.
int open_nesting(const char *proc)
{
	char path[64];
	snprintf(path, sizeof path, "%s/sys/user/max_user_namespaces", proc);
	return open(path, O_WRONLY | O_CLOEXEC);
}

int forbid_nesting(int fd) { return write(fd, "0", 1) == 1 ? 0 : -1; }

// forbid_nesting_of does it from outside, for a box that CRIU has made: in a process of its own,
// which can't come back from where it goes.
void forbid_nesting_of(uint32_t id, int daemon, int userns)
{
	long pid = syscall(SYS_clone, 17 /* SIGCHLD */, 0, 0, 0, 0);
	if (pid > 0)
		return; // it answers itself
	int fd;
	if (pid < 0 || setns(userns, CLONE_NEWUSER) || (fd = open_nesting("/hostproc")) < 0 || forbid_nesting(fd))
		reply_error(daemon, id, "forbidding namespaces: %s", strerror(errno));
	else
		reply(daemon, id, R_DONE, NULL, 0, NULL, 0);
	if (pid == 0)
		_exit(0);
}
