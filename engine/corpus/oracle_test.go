package corpus

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/kernelobjects"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
)

// state is a sandbox as someone sees it who knows nothing of the inspector: it is
// read from outside, through pid 1's root folder and its namespaces.
type state struct {
	at       time.Time
	files    []string             // treewalk's lines, without the times of folders
	dirTimes map[string]time.Time // which count only if they were set by hand
	kernel   []string             // objects without a process
	tasks    []string             // other than pid 1
}

// look reads a sandbox that stands still. upper tells which parts of the image,
// to which no program of the corpus writes, need not be read again.
func look(t testing.TB, pid1 int, upper string) state {
	t.Helper()
	s := state{at: time.Now(), dirTimes: map[string]time.Time{}}
	if err := s.lookAtFiles(fmt.Sprintf("/proc/%d/root", pid1), upper); err != nil {
		t.Fatal("the oracle can't read the files: ", err)
	}
	var err error
	if s.kernel, err = kernelobjects.Of(pid1); err != nil {
		t.Fatal("the oracle can't read the kernel's objects: ", err)
	}
	if s.tasks, err = tasksBeside(pid1); err != nil {
		t.Fatal("the oracle can't list the tasks: ", err)
	}
	return s
}

var dirLine = regexp.MustCompile(`^("(?:[^"\\]|\\.)*" dir [^=]*) mtime=(\d+)\.(\d+)(.*)$`)

func (s *state) lookAtFiles(root, upper string) error {
	for _, top := range []string{"/", "/dev/shm"} {
		lines, _, err := treewalk.Digest(root+top, treewalk.Options{Skip: func(path string) bool {
			if !slices.Contains([]string{"bin", "lib", "lib64", "usr", "opt", "root"}, path) || top != "/" {
				return false
			}
			_, err := os.Lstat(filepath.Join(upper, path))
			return errors.Is(err, os.ErrNotExist)
		}})
		if err != nil {
			return err
		}
		for _, l := range lines {
			if m := dirLine.FindStringSubmatch(l); m != nil {
				sec, _ := strconv.ParseInt(m[2], 10, 64)
				nsec, _ := strconv.ParseInt(m[3], 10, 64)
				s.dirTimes[top+" "+m[1]] = time.Unix(sec, nsec)
				l = m[1] + m[4]
			}
			s.files = append(s.files, top+" "+l)
		}
	}
	return chattrs(s, root)
}

// chattrs adds the flags of chattr, which treewalk doesn't show.
func chattrs(s *state, root string) error {
	for _, top := range []string{"/w", "/u"} {
		err := filepath.WalkDir(root+top, func(path string, d os.DirEntry, err error) error {
			if errors.Is(err, os.ErrNotExist) && path == root+top {
				return filepath.SkipDir
			}
			if err != nil || !d.IsDir() && !d.Type().IsRegular() {
				return err
			}
			f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOATIME, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
			if err != nil {
				return err
			}
			if flags &= 0xff; flags != 0 {
				s.files = append(s.files, fmt.Sprintf("%q chattr %#x", path[len(root):], flags))
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// tasksBeside lists the processes of pid 1's pid namespace, and of those below it, but pid 1
// itself: the sandbox's own /proc shows those and no others.
func tasksBeside(pid1 int) (out []string, err error) {
	proc := fmt.Sprintf("/proc/%d/root/proc", pid1)
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil, err
	}
	itself := false
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if pid == 1 {
			itself = true
			continue
		}
		stat, err := os.ReadFile(fmt.Sprintf("%s/%d/stat", proc, pid))
		if err != nil {
			continue // it has just ended
		}
		after := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if after[0] == "Z" {
			continue
		}
		out = append(out, fmt.Sprintf("task %d started %s", pid, after[19]))
	}
	if !itself {
		return nil, fmt.Errorf("%s doesn't show pid 1, so it isn't that of the sandbox", proc)
	}
	slices.Sort(out)
	return out, nil
}

// slack is how far a folder's time may lie from the clock if an entry moved it.
const slack = 1100 * time.Millisecond

// changed says what differs between two states, in words; empty: nothing.
func changed(was, is state) (files, process []string) {
	files = treewalk.Diff(was.files, is.files, 5)
	if len(files) == 0 && !slices.Equal(was.files, is.files) {
		files = append(files, "another order or number of lines")
	}
	for path, now := range is.dirTimes {
		before, there := was.dirTimes[path]
		if there && !before.Equal(now) && (now.Before(was.at.Add(-slack)) || now.After(is.at.Add(slack))) {
			files = append(files, fmt.Sprintf("%s: its time was set from %v to %v", path, before, now))
		}
	}
	process = append(treewalk.Diff(was.kernel, is.kernel, 5), treewalk.Diff(was.tasks, is.tasks, 5)...)
	return files, process
}
