package inspector

import (
	"fmt"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// clock tells whether the host's clock was set. Times of change are compared with
// the beginning of the epoch, which means something only while the clock counts
// up. Two things notice a setting: a timer that the kernel cancels then, also if the clock
// is set back to where it was, and the distance to a clock that nobody can set, which a leap second
// moves, too.
type clock struct {
	mu    sync.Mutex
	timer int
	sets  uint64
}

// clockMark is a state of the clock, to ask setSince about.
type clockMark struct {
	sets     uint64
	distance time.Duration
	known    bool
}

// A setting by less than clockNoise isn't seen in the distance. clockSlack is more, so
// what happened after a mark has a time of at least the mark's, less clockSlack.
const (
	clockNoise = 5 * time.Millisecond
	clockSlack = 2 * clockNoise
)

func openClock() (*clock, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_REALTIME, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watching the clock: %w", err)
	}
	never := unix.ItimerSpec{Value: unix.Timespec{Sec: 1 << 33}}
	if err := unix.TimerfdSettime(fd, unix.TFD_TIMER_ABSTIME|unix.TFD_TIMER_CANCEL_ON_SET, &never, nil); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("watching the clock: %w", err)
	}
	return &clock{timer: fd}, nil
}

// mark never fails; what can't be found out is a mark after which the clock counts as set.
func (c *clock) mark() clockMark {
	c.mu.Lock()
	defer c.mu.Unlock()
	var n uint64
	_, err := unix.Read(c.timer, (*[8]byte)(unsafe.Pointer(&n))[:])
	if err != unix.EAGAIN {
		c.sets++ // ECANCELED
	}
	d, ok := clockDistance()
	return clockMark{c.sets, d, ok && (err == unix.EAGAIN || err == unix.ECANCELED)}
}

// setSince says that the clock was, or may have been, set after the mark.
func (c *clock) setSince(m clockMark) bool {
	now := c.mark()
	return !m.known || !now.known || now.sets != m.sets || (now.distance-m.distance).Abs() > clockNoise
}

func (c *clock) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	fd := c.timer
	c.timer = -1 // from now on every mark is unknown
	return unix.Close(fd)
}

// clockDistance is how far the clock is ahead of the time since boot. It fails if it is
// interrupted too often to be measured well.
func clockDistance() (time.Duration, bool) {
	var before, now, after unix.Timespec
	for range 8 {
		if unix.ClockGettime(unix.CLOCK_BOOTTIME, &before) != nil ||
			unix.ClockGettime(unix.CLOCK_REALTIME, &now) != nil ||
			unix.ClockGettime(unix.CLOCK_BOOTTIME, &after) != nil {
			return 0, false
		}
		if after.Nano()-before.Nano() < int64(clockNoise)/4 {
			return time.Duration(now.Nano() - before.Nano()), true
		}
	}
	return 0, false
}
