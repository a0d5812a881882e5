// Guards: while a box is frozen so that its processes can be saved, the nursery stands
// by to thaw it. If the daemon dies then, nobody else would.
//
// Who freezes hands over three descriptors: the box's cgroup.freeze, the read end of a
// pipe and a lock. The daemon writes a byte into the pipe when all is over. It and CRIU hold
// the other end: its end of file says that both are gone, and only then is the box
// thawed, since CRIU needs it frozen and leaves it so. The next daemon waits for the lock, which goes with
// the guard, before it takes the box over: a thaw from here never falls into a freeze of its own.
#include "wire.h"

#include <poll.h>
#include <time.h>

enum { GUARDS_MAX = 256, PATIENCE_MS = 120 * 1000 };

static struct guard {
	int freeze, pipe, lock;
} guards[GUARDS_MAX];
static int count;

// guard takes one on; false: there are too many.
bool guard(const int *fds)
{
	if (count == GUARDS_MAX)
		return false;
	guards[count++] = (struct guard){fds[0], fds[1], fds[2]};
	return true;
}

static void thaw(const struct guard *g)
{
	if (write(g->freeze, "0", 1) < 0)
		return; // the group is gone
}

static void end(int i)
{
	close(guards[i].freeze);
	close(guards[i].pipe);
	close(guards[i].lock);
	guards[i] = guards[--count];
}

// wait_guarded returns when the daemon has something to say. When the daemon is gone
// (-1), it returns when no guard is left, or after a patience that no CRIU needs.
void wait_guarded(int daemon)
{
	uint64_t began = now_us();
	while (daemon >= 0 || (count && now_us() - began < PATIENCE_MS * 1000ULL)) {
		struct pollfd p[1 + GUARDS_MAX];
		p[0] = (struct pollfd){daemon, POLLIN, 0};
		for (int i = 0; i < count; i++)
			p[1 + i] = (struct pollfd){guards[i].pipe, POLLIN, 0};
		int n = count;
		if (poll(p, 1 + n, daemon < 0 ? PATIENCE_MS : -1) < 0 && errno != EINTR)
			return;
		for (int i = n - 1; i >= 0; i--) { // from the end: end() moves the last one
			char over;
			if (!p[1 + i].revents)
				continue;
			if (read(guards[i].pipe, &over, 1) != 1)
				thaw(&guards[i]);
			end(i);
		}
		if (p[0].revents)
			return;
	}
	while (count) {
		thaw(&guards[count - 1]);
		end(count - 1);
	}
}
