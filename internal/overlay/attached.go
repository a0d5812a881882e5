package overlay

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// mountAttached is for kernels that refuse detached layers: it shows them in a
// private tmpfs, mounts the overlay beside them, takes a detached copy of that
// and unmounts the rest. overlayfs holds private copies of its layers' mounts.
// mount(2) takes 4 KiB of options where fsconfig takes 256 bytes, so short names
// matter: /x/12 for each of up to 500 layers.
func mountAttached(l *layers, o Options) (int, error) {
	dir, err := os.MkdirTemp("/tmp", "bwo")
	if err != nil {
		return -1, err
	}
	defer os.Remove(dir)
	if err := unix.Mount("boxwood", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=700,size=1m"); err != nil {
		return -1, fmt.Errorf("mounting a tmpfs for layers: %w", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil {
		return -1, fmt.Errorf("making the tmpfs for layers private: %w", err)
	}
	for i, m := range l.mounts {
		path := filepath.Join(dir, strconv.Itoa(i))
		if err := os.Mkdir(path, 0o700); err != nil {
			return -1, err
		}
		if err := unix.MoveMount(m, "", unix.AT_FDCWD, path, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return -1, fmt.Errorf("showing a layer: %w", err)
		}
	}
	// The path descriptors lie inside these mounts, which are attached now.
	option := func(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }
	lower := make([]string, 0, len(l.lower))
	for i := len(l.lower) - 1; i >= 0; i-- {
		lower = append(lower, option(l.lower[i]))
	}
	data := "lowerdir=" + strings.Join(lower, ":") + ",upperdir=" + option(l.upper) + ",workdir=" + option(l.work) + ",volatile"
	for _, s := range settings {
		data += "," + s.key + "=" + s.value
	}
	if len(data) >= os.Getpagesize() {
		return -1, fmt.Errorf("%d layers don't fit the options of mount(2): %w", len(l.lower), unix.E2BIG)
	}
	root := filepath.Join(dir, "root")
	if err := os.Mkdir(root, 0o700); err != nil {
		return -1, err
	}
	err = asMounter(o, func() error { return unix.Mount("overlay", root, "overlay", unix.MS_NOATIME, data) })
	if err != nil {
		return -1, fmt.Errorf("mount: %w", err)
	}
	defer unix.Unmount(root, unix.MNT_DETACH)
	fd, err := unix.OpenTree(unix.AT_FDCWD, root, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("detaching the overlay: %w", err)
	}
	return fd, nil
}

// probe mounts overlays of folders on a fresh tmpfs, by each method.
func probe() (Method, error) {
	var errs []error
	for _, method := range []Method{Detached, Attached} {
		err := tryMount(method)
		if err == nil {
			return method, nil
		}
		errs = append(errs, fmt.Errorf("%s layers: %w", method, err))
	}
	return Unknown, fmt.Errorf("this kernel mounts no overlay for us: %w", errors.Join(errs...))
}

func tryMount(method Method) error {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return fmt.Errorf("opening tmpfs: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return fmt.Errorf("making a tmpfs: %w", err)
	}
	tree, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("mounting a tmpfs: %w", err)
	}
	l := &layers{upper: -1, work: -1, mounts: []int{tree}}
	defer l.close()
	fds := map[string]int{}
	for _, name := range []string{"lower", "upper", "work"} {
		if err := unix.Mkdirat(tree, name, 0o755); err != nil {
			return err
		}
		if fds[name], err = unix.Openat(tree, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
			return err
		}
	}
	l.lower, l.upper, l.work = []int{fds["lower"]}, fds["upper"], fds["work"]
	var fd int
	if method == Attached {
		fd, err = mountAttached(l, Options{})
	} else {
		fd, err = mountDetached(l, Options{})
	}
	if err != nil {
		return err
	}
	return unix.Close(fd)
}
