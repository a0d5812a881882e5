package witness

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Diff says what differs, a line each; none if both look the same.
func Diff(was, is *State) []string {
	var d []string
	say := func(format string, args ...any) { d = append(d, fmt.Sprintf(format, args...)) }
	for _, pid := range slices.Sorted(maps.Keys(was.Processes)) {
		a, b := was.Processes[pid], is.Processes[pid]
		if b == nil {
			say("process %d is missing (%s)", pid, a.name())
			continue
		}
		lines(fmt.Sprintf("process %d", pid), a.Facts, b.Facts, say)
		lines(fmt.Sprintf("memory map of process %d", pid), a.Maps, b.Maps, say)
		for _, tid := range slices.Sorted(maps.Keys(a.Blocked)) {
			if x, y := a.Blocked[tid], b.Blocked[tid]; x != y && !slices.Contains(a.Masking, tid) {
				say("thread %d of process %d: blocks signals %s, and blocked %s", tid, pid, y, x)
			}
		}
		for _, fd := range slices.Sorted(maps.Keys(a.Files)) {
			if x, ok := b.Files[fd]; !ok {
				say("process %d: descriptor %s is missing: %s", pid, fd, a.Files[fd])
			} else if x != a.Files[fd] {
				say("process %d: descriptor %s: %q became %q", pid, fd, a.Files[fd], x)
			}
		}
		for _, fd := range slices.Sorted(maps.Keys(a.Owners)) {
			if x := b.Owners[fd]; x != a.Owners[fd] {
				say("process %d: the socket of descriptor %s belongs to %d:%d, and belonged to %d:%d", pid, fd, x[0], x[1], a.Owners[fd][0], a.Owners[fd][1])
			}
		}
		for _, fd := range slices.Sorted(maps.Keys(b.Files)) {
			if _, ok := a.Files[fd]; !ok {
				say("process %d: descriptor %s is new: %s", pid, fd, b.Files[fd])
			}
		}
	}
	for _, pid := range slices.Sorted(maps.Keys(is.Processes)) {
		if was.Processes[pid] == nil {
			say("process %d is new (%s)", pid, is.Processes[pid].name())
		}
	}
	lines("around the processes", was.Around, is.Around, say)
	return d
}

// Moved says which threads of a tree that was frozen all the time don't stand where they
// stood. That a call which the freeze interrupted is about to be made anew, two bytes
// back, counts as standing there: CRIU does that much, and so does the kernel.
func Moved(was, is *State) []string {
	var d []string
	for _, pid := range slices.Sorted(maps.Keys(was.Processes)) {
		a, b := was.Processes[pid], is.Processes[pid]
		if b == nil {
			continue // Diff says so
		}
		for _, tid := range slices.Sorted(maps.Keys(a.Where)) {
			if a.Where[tid] != b.Where[tid] && !again(a.Where[tid], b.Where[tid]) {
				d = append(d, fmt.Sprintf("thread %d of process %d stood at %q and stands at %q", tid, pid, a.Where[tid], b.Where[tid]))
			}
		}
	}
	return d
}

// again compares two lines of /proc/PID/syscall, which end with the program counter.
func again(was, is string) bool {
	a, b := strings.LastIndexByte(was, ' '), strings.LastIndexByte(is, ' ')
	if a < 0 || b < 0 || was[:a] != is[:b] {
		return false
	}
	x, err := strconv.ParseUint(was[a+1:], 0, 64)
	y, err2 := strconv.ParseUint(is[b+1:], 0, 64)
	return err == nil && err2 == nil && x == y+uint64(len("\x0f\x05")) // syscall
}

func (p *Process) name() string {
	if len(p.Facts) > 1 {
		return p.Facts[1]
	}
	return "?"
}

// lines compares lists in which order counts for nothing.
func lines(of string, was, is []string, say func(string, ...any)) {
	count := map[string]int{}
	for _, l := range is {
		count[l]++
	}
	var gone []string
	for _, l := range was {
		if count[l]--; count[l] < 0 {
			gone = append(gone, l)
			count[l] = 0
		}
	}
	for _, l := range gone {
		say("%s: was %q", of, l)
	}
	for _, l := range slices.Sorted(maps.Keys(count)) {
		for range count[l] {
			say("%s: is %q", of, l)
		}
	}
}
