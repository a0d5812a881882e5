// Makes system calls with arguments that are none (-1 each), every one in a process of its own, and says what came
// of them, a line each: the number and the errno, 0, or "signal" and its number.
//
//	calls FIRST LAST [-SKIPPED...]      by the 64-bit interface
//	calls i386 FIRST LAST [-SKIPPED...]
//	calls clone3 FLAGS                  says the errno, or 0
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static long call(int compat, long nr)
{
	long r;
	if (compat)
		__asm__ volatile("push %%rbp; mov $-1, %%ebp; int $0x80; pop %%rbp"
				 : "=a"(r)
				 : "0"(nr), "b"(-1), "c"(-1), "d"(-1), "S"(-1), "D"(-1)
				 : "memory", "r8", "r9", "r10", "r11");
	else
		r = syscall(nr, -1, -1, -1, -1, -1, -1) < 0 ? -errno : 0;
	return compat ? (long)(int)r : r;
}

int main(int argc, char **argv)
{
	int compat = argc > 1 && !strcmp(argv[1], "i386");
	argc -= compat;
	argv += compat;
	if (argc == 3 && !strcmp(argv[1], "clone3")) {
		uint64_t args[11] = {strtoull(argv[2], NULL, 0), [4] = SIGCHLD};
		long pid = syscall(SYS_clone3, args, sizeof args);
		if (pid == 0)
			_exit(0);
		printf("%d\n", pid < 0 ? errno : 0);
		return 0;
	}
	if (argc < 3)
		return 2;
	for (long nr = atol(argv[1]); nr <= atol(argv[2]); nr++) {
		int p[2], status, skipped = 0, result = 0;
		for (int i = 3; i < argc; i++)
			skipped |= atol(argv[i]) == -nr;
		if (skipped)
			continue;
		if (pipe(p))
			return 1;
		pid_t pid = fork();
		if (pid < 0)
			return 1;
		if (pid == 0) {
			setpgid(0, 0);
			close(p[0]);
			long r = call(compat, nr);
			result = r < 0 ? -r : 0;
			if (write(p[1], &result, sizeof result) < 0)
				_exit(1);
			_exit(0);
		}
		close(p[1]);
		struct pollfd wait = {p[0], POLLIN, 0};
		if (poll(&wait, 1, 5000) == 0)
			kill(pid, SIGKILL); // it waits for something
		waitpid(pid, &status, 0);
		if (read(p[0], &result, sizeof result) == sizeof result)
			printf("%ld %d\n", nr, result);
		else
			printf("%ld signal %d\n", nr, WIFSIGNALED(status) ? WTERMSIG(status) : 0);
		close(p[0]);
		fflush(stdout);
	}
	return 0;
}
