// Timers of every kind that are armed for an hour. Each line on /in is answered on /out by how many milliseconds each has left.
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

static const struct itimerspec hour = {.it_value.tv_sec = 3600};
static long ms(struct timespec t) { return t.tv_sec * 1000 + t.tv_nsec / 1000000; }

int main(void)
{
	timer_t posix, wall;
	struct itimerspec at = {.it_value.tv_sec = time(NULL) + 3600}, left;
	struct itimerval was = {.it_value.tv_sec = 3600};
	int relative = timerfd_create(CLOCK_MONOTONIC, 0), absolute = timerfd_create(CLOCK_REALTIME, 0), boot = timerfd_create(CLOCK_BOOTTIME, 0);
	if (timer_create(CLOCK_MONOTONIC, NULL, &posix) || timer_create(CLOCK_REALTIME, NULL, &wall) || timer_settime(posix, 0, &hour, NULL) ||
	    timer_settime(wall, TIMER_ABSTIME, &at, NULL) || setitimer(ITIMER_REAL, &was, NULL) || timerfd_settime(relative, 0, &hour, NULL) ||
	    timerfd_settime(absolute, TFD_TIMER_ABSTIME, &at, NULL) || timerfd_settime(boot, 0, &hour, NULL))
		return 1;
	int in = open("/in", O_RDWR), out = open("/out", O_RDWR);
	for (char line[64]; read(in, line, sizeof line) > 0;) {
		char text[512];
		int n = 0;
		getitimer(ITIMER_REAL, &was);
		n += sprintf(text + n, "itimer %ld\n", was.it_value.tv_sec * 1000L + was.it_value.tv_usec / 1000);
		timer_gettime(posix, &left);
		n += sprintf(text + n, "timer %ld\n", ms(left.it_value));
		timer_gettime(wall, &left);
		n += sprintf(text + n, "timer_absolute %ld\n", ms(left.it_value));
		timerfd_gettime(relative, &left);
		n += sprintf(text + n, "timerfd %ld\n", ms(left.it_value));
		timerfd_gettime(boot, &left);
		n += sprintf(text + n, "timerfd_boottime %ld\n", ms(left.it_value));
		timerfd_gettime(absolute, &left);
		n += sprintf(text + n, "timerfd_absolute %ld\nend\n", ms(left.it_value));
		if (write(out, text, n) != n)
			return 1;
	}
	return 0;
}
