/* holder MIB: holds that much memory that doesn't compress, and waits.
 *
 * It goes on in the background once the memory is filled. Each SIGUSR1 alters one page
 * in a hundred, at least one, and then makes the empty file /holder.N, N counted from 1. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	size_t words = (argc > 1 ? strtoul(argv[1], NULL, 10) : 1) << 17, page = 4096 / sizeof(uint64_t);
	uint64_t x = 88172645463325252u;
	uint64_t *memory = mmap(NULL, words * sizeof *memory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	sigset_t touch;

	if (memory == MAP_FAILED)
		return perror("holder"), 1;
	for (size_t i = 0; i < words; i++) {
		x ^= x << 13, x ^= x >> 7, x ^= x << 17;
		memory[i] = x;
	}
	sigemptyset(&touch);
	sigaddset(&touch, SIGUSR1);
	sigprocmask(SIG_BLOCK, &touch, NULL);
	pid_t pid = fork();
	if (pid < 0)
		return perror("holder"), 1;
	if (pid > 0)
		return printf("%d\n", pid), 0;
	int null = open("/dev/null", O_RDWR);
	for (int fd = 0; fd < 3; fd++)
		dup2(null, fd);
	close(null);
	for (int n = 1, got;; n++) {
		char name[32];
		sigwait(&touch, &got);
		for (size_t i = 0; i < words; i += 100 * page)
			memory[i] += n;
		snprintf(name, sizeof name, "/holder.%d", n);
		close(open(name, O_CREAT | O_WRONLY, 0644));
	}
}
