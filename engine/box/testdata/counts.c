// counts takes of what the kernel counts by user as often as it is told, says how often it got it, and holds it until
// its standard input ends.
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	int most = argc > 1 ? atoi(argv[1]) : 0, watchers = 0, timers = 0;
	timer_t t;
	while (watchers < most && inotify_init1(0) >= 0)
		watchers++;
	while (timers < most && !timer_create(CLOCK_MONOTONIC, NULL, &t))
		timers++;
	printf("%d instances, %d timers\n", watchers, timers);
	fflush(stdout);
	for (char c; read(0, &c, 1) > 0;)
		;
	return 0;
}
