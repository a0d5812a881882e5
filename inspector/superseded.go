package inspector

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Superseded is told in the contract.
func (w *watch) Superseded() ([]string, error) {
	now, err := w.survivors()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, p := range now {
		paths, err := w.superseded(p.HostPID)
		if os.IsNotExist(err) { // it has ended
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("looking at what process %d maps: %w", p.PID, err)
		}
		out = append(out, paths...)
	}
	return out, nil
}

// superseded goes by inodes. A mapping that was made before the file was copied up is of the inode
// in the layer below, whatever its name leads to now.
func (w *watch) superseded(pid int) (out []string, err error) {
	paths, err := mappedPaths(pid)
	if err != nil {
		return nil, err
	}
	var above, below map[uint64]bool
	for path, link := range paths {
		fd, err := beneath(w.subject.Upper, path, unix.O_RDONLY)
		unnamed := strings.HasSuffix(path, deleted)
		if (err == unix.ENOENT || err == unix.ENOTDIR) && !unnamed {
			continue // it is the image's
		}
		if err == nil {
			defer unix.Close(fd)
		} else if !unnamed {
			return nil, err
		}
		if above == nil {
			if above, below, err = w.mappedInodes(pid); err != nil {
				return nil, err
			}
		}
		older := false
		if fd >= 0 {
			older = w.mapsOlder(fd, path, above, below)
		} else if older, err = w.mapsOlderUnnamed(link, above); err != nil {
			return nil, err
		}
		if older {
			out = append(out, path)
		}
	}
	slices.Sort(out)
	return out, nil
}

// mapsOlderUnnamed is mapsOlder of a file that has no name any more, which is opened by a link of
// /proc: what a dump saves of it is what it reads there.
func (w *watch) mapsOlderUnnamed(link string, above map[uint64]bool) (bool, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(link, &fs); err != nil || fs.Type != unix.OVERLAYFS_SUPER_MAGIC {
		return false, err // memory without a file, and the like
	}
	f, err := os.Open(link)
	if err != nil {
		return false, err
	}
	defer f.Close()
	own, err := w.k.heldBy(os.Getpid())
	if err != nil {
		return false, err
	}
	for i := range own {
		if h := &own[i]; h.Fd == uint32(f.Fd()) {
			return h.Root == w.box.Root && h.Ino != 0 && !above[h.Ino], nil
		}
	}
	return true, nil
}

// mapsOlder says that a process with these mappings has at least one at path that is not of
// the file that is there, which is open as fd, and that has other bytes than it.
func (w *watch) mapsOlder(fd int, path string, above, below map[uint64]bool) bool {
	var is unix.Stat_t
	if unix.Fstat(fd, &is) != nil || is.Mode&unix.S_IFMT != unix.S_IFREG {
		return true
	}
	for i := len(w.subject.Lower) - 1; i >= 0; i-- {
		was, err := beneath(w.subject.Lower[i], path, unix.O_RDONLY)
		if err == unix.ENOENT || err == unix.ENOTDIR {
			continue
		}
		if err != nil {
			return true
		}
		defer unix.Close(was)
		var st unix.Stat_t
		if unix.Fstat(was, &st) != nil {
			return true
		}
		if above[is.Ino] && !below[st.Ino] {
			return false
		}
		limit := int64(math.MaxInt64)
		return !sameContent(was, fd, &limit)
	}
	return !above[is.Ino]
}

// mappedInodes are those of regular files on btrfs: of the sandbox's own subvolume, and of others.
func (w *watch) mappedInodes(pid int) (above, below map[uint64]bool, err error) {
	held, err := w.k.heldBy(pid)
	if err != nil {
		return nil, nil, err
	}
	above, below = map[uint64]bool{}, map[uint64]bool{}
	for i := range held {
		switch h := &held[i]; {
		case h.Fd != mapping || h.Ino == 0:
		case h.Root == w.box.Root:
			above[h.Ino] = true
		default:
			below[h.Ino] = true
		}
	}
	return above, below, nil
}

// mappedPaths are the places of what a process maps, each with a link to it.
func mappedPaths(pid int) (map[string]string, error) {
	dir := fmt.Sprintf("/proc/%d/map_files/", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	root, err := os.Readlink(fmt.Sprintf("/proc/%d/root", pid))
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, e := range entries {
		path, err := os.Readlink(dir + e.Name())
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, place := range placesOf(path, root) {
			out[place] = dir + e.Name()
		}
	}
	return out, nil
}
