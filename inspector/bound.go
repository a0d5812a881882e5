package inspector

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/bpf"
)

// findBound notes where the unix sockets of a sleeper are bound. A restore binds them
// again, so that what happened to such a name, or to a folder on the way to it, since then counts. The
// names are those that programs gave, through links that may be others by the time they are compared, so they are
// resolved now.
func (s *sleeper) findBound(held []bpf.InspectorHeld) {
	if !slices.ContainsFunc(held, func(h bpf.InspectorHeld) bool {
		return h.Mode&unix.S_IFMT == unix.S_IFSOCK && h.Family == unix.AF_UNIX
	}) {
		return
	}
	names, err := boundNames(s.HostPID)
	if err != nil {
		s.unbound = true
		return
	}
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", s.HostPID), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		s.unbound = true
		return
	}
	defer unix.Close(root)
	for _, name := range names {
		at, err := resolve(root, name)
		if err != nil {
			s.unbound = true
			return
		}
		s.bound = append(s.bound, at...)
	}
}

// boundNames are those of a process's unix sockets that have one in the file system. One that was given
// relative to a folder can't be told.
func boundNames(pid int) (names []string, err error) {
	dir := fmt.Sprintf("/proc/%d/fd/", pid)
	fds, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	own := map[string]bool{}
	for _, fd := range fds {
		link, err := os.Readlink(dir + fd.Name())
		if err != nil {
			return nil, err
		}
		if number, ok := strings.CutPrefix(link, "socket:["); ok {
			own[strings.TrimSuffix(number, "]")] = true
		}
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/unix", pid))
	if err != nil {
		return nil, err
	}
	lines := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	for _, line := range lines[1:] {
		// Num: RefCount Protocol Flags Type St Inode Path
		f := strings.Fields(line)
		if len(f) < 7 || !strings.HasSuffix(f[0], ":") {
			return nil, fmt.Errorf("a line of unix: %q", line) // a name with a line break in it
		}
		if !own[f[6]] || len(f) == 7 {
			continue
		}
		switch _, name, _ := strings.Cut(line, " "+f[6]+" "); {
		case strings.HasPrefix(name, "/"):
			names = append(names, name)
		case !strings.HasPrefix(name, "@"):
			return nil, fmt.Errorf("a socket is bound at %q", name)
		}
	}
	return names, nil
}

// resolve gives the places that a name below root may mean, without links on the way.
func resolve(root int, name string) ([]string, error) {
	dir, base := path.Split(name)
	in, err := unix.Openat2(root, dir, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, err
	}
	defer unix.Close(in)
	at, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", in))
	if err != nil {
		return nil, err
	}
	top, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", root))
	return placesOf(path.Join(at, base), top), err
}
