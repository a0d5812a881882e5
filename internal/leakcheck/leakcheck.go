// Package leakcheck finds what a package's tests leave behind on the host: open
// files, goroutines, child processes, mounts, loop devices, control groups.
//
//	func TestMain(m *testing.M) { os.Exit(leakcheck.Main(m, tag)) }
//
// Other tests run on the same host at the same time, so that mounts, loop
// devices, groups and processes in them count only if their line holds one of
// the tags: a name with the pid of the test process in it, for example.
package leakcheck

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"testing"
	"time"
)

// Main runs the tests, then reports what is there that wasn't before. It returns
// the exit status: 1 if anything is.
func Main(m *testing.M, tags ...string) int {
	before := Take(tags...)
	code := m.Run()
	if code != 0 {
		return code // leftovers of a failed test say nothing new
	}
	left := before.Await(5 * time.Second)
	for _, line := range left {
		fmt.Fprintln(os.Stderr, "left behind:", line)
	}
	if len(left) > 0 {
		return 1
	}
	return 0
}

// Snapshot is what was there at one moment.
type Snapshot struct {
	tags []string
	seen map[string]int
}

// Take looks at the host.
func Take(tags ...string) Snapshot { return Snapshot{tags, look(tags)} }

// Await looks until nothing is left that isn't in s, at most for limit: kernel
// and runtime finish some things behind the caller's back. It returns the rest.
func (s Snapshot) Await(limit time.Duration) []string {
	deadline := time.Now().Add(limit)
	for {
		left := s.Left()
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
		runtime.GC() // files are closed by finalizers at the latest
		time.Sleep(10 * time.Millisecond)
	}
}

// Left returns what is there now and isn't in s.
func (s Snapshot) Left() []string {
	var left []string
	for what, n := range look(s.tags) {
		if n > s.seen[what] {
			left = append(left, fmt.Sprintf("%s (%d, before %d)", what, n, s.seen[what]))
		}
	}
	sort.Strings(left)
	return left
}

// Require fails the test if it leaves anything behind.
func Require(t testing.TB, tags ...string) {
	t.Helper()
	before := Take(tags...)
	t.Cleanup(func() {
		for _, line := range before.Await(5 * time.Second) {
			t.Errorf("left behind: %s", line)
		}
	})
}

func look(tags []string) map[string]int {
	seen := map[string]int{}
	tagged := func(what, line string) {
		for _, tag := range tags {
			if strings.Contains(line, tag) {
				seen[what+" "+line]++
				return
			}
		}
	}
	lookFiles(seen)
	lookGoroutines(seen)
	lookChildren(seen)
	if text, err := os.ReadFile("/proc/self/mountinfo"); err == nil {
		for line := range strings.Lines(string(text)) {
			tagged("mount", strings.TrimSpace(line))
		}
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, path := range loops {
		if text, err := os.ReadFile(path); err == nil {
			tagged("loop device", strings.TrimSpace(string(text)))
		}
	}
	filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			tagged("cgroup", path)
		}
		return nil
	})
	procs, _ := filepath.Glob("/proc/[0-9]*/cgroup")
	for _, path := range procs {
		if text, err := os.ReadFile(path); err == nil {
			tagged("process", strings.ReplaceAll(path+" "+string(text), "\n", " "))
		}
	}
	return seen
}

// lookFiles counts open files by what they are; the poller's own stay open.
func lookFiles(seen map[string]int) {
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil || to == "anon_inode:[eventpoll]" || to == "anon_inode:[eventfd]" || strings.HasSuffix(to, "/fd") {
			continue
		}
		kind, _, _ := strings.Cut(to, "[")
		seen["file "+kind]++
	}
}

// lookGoroutines counts goroutines by where they were started.
func lookGoroutines(seen map[string]int) {
	buf := make([]byte, 4<<20)
	buf = buf[:runtime.Stack(buf, true)]
	for g := range strings.SplitSeq(string(buf), "\n\n") {
		_, by, ok := strings.Cut(g, "created by ")
		if !ok || strings.HasPrefix(by, "testing.") || strings.HasPrefix(by, "runtime") || strings.HasPrefix(by, "os/signal") {
			continue
		}
		by, _, _ = strings.Cut(by, " in goroutine")
		by, _, _ = strings.Cut(by, "\n")
		seen["goroutine of "+by]++
	}
}

func lookChildren(seen map[string]int) {
	tasks, _ := filepath.Glob("/proc/self/task/*/children")
	for _, path := range tasks {
		text, _ := os.ReadFile(path)
		for pid := range strings.FieldsSeq(string(text)) {
			comm, _ := os.ReadFile("/proc/" + pid + "/comm")
			seen["child process "+strings.TrimSpace(string(comm))]++
		}
	}
}
