// What a box's user namespace bounds.
//
// Namespaces inside it. A filter of system calls can't see what clone3(2) is asked for. The
// kernel counts the user namespaces below each one, and nobody in a box has the capability to make another namespace
// without one: a limit of 0 forbids all. Only root of the box could raise it, through /proc/sys, which is read-only to him.
//
// Inotify. The kernel counts instances and watches for each user of a namespace, and for the maker of that namespace,
// who is root for all boxes: fs.inotify bounds them all together. A user of a box gets a quarter of that, so that no
// program takes what other boxes need. Memory of both is the box's own.
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

// limit_inotify needs the host's /proc at /hostproc. A kernel that has no inotify has nothing to limit.
int limit_inotify(const char *proc)
{
	static const char *const limits[][2] = {
		{"/hostproc/sys/fs/inotify/max_user_instances", "max_inotify_instances"},
		{"/hostproc/sys/fs/inotify/max_user_watches", "max_inotify_watches"},
	};
	for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
		char path[64], text[24] = "";
		int fd = open(limits[i][0], O_RDONLY | O_CLOEXEC);
		if (fd < 0 && errno == ENOENT)
			continue;
		if (fd < 0 || read(fd, text, sizeof text - 1) <= 0)
			return -1;
		close(fd);
		int n = snprintf(text, sizeof text, "%d", (atoi(text) + 3) / 4);
		snprintf(path, sizeof path, "%s/sys/user/%s", proc, limits[i][1]);
		if ((fd = open(path, O_WRONLY | O_CLOEXEC)) < 0 || write(fd, text, n) != n)
			return -1;
		close(fd);
	}
	return 0;
}

// limit_from_outside does both for a box that CRIU has made: in a process of its own, which can't come back
// from where it goes.
void limit_from_outside(uint32_t id, int daemon, bool nests, int userns)
{
	long pid = syscall(SYS_clone, 17 /* SIGCHLD */, 0, 0, 0, 0);
	if (pid > 0)
		return; // it answers itself
	int fd;
	if (pid < 0 || setns(userns, CLONE_NEWUSER) || limit_inotify("/hostproc") ||
	    (!nests && ((fd = open_nesting("/hostproc")) < 0 || forbid_nesting(fd))))
		reply_error(daemon, id, "limiting a user namespace: %s", strerror(errno));
	else
		reply(daemon, id, R_DONE, NULL, 0, NULL, 0);
	if (pid == 0)
		_exit(0);
}
