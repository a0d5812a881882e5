// Package overlay mounts the root of a sandbox: read-only layers below, one
// writable folder of changes above, all of them seen through the id range of
// the sandbox's user namespace while the ids on disk stay 0-based.
//
// What it promises of a mount:
//
//   - redirect_dir=on, or rename(2) of a folder of the image fails with EXDEV;
//   - metacopy=off and index=off: an upper must be whole by itself, because it
//     is cloned and mounted again beside the original;
//   - xino=off: inode numbers are those on disk, so they survive a remount; that
//     they are unique over the layers is the pool's doing;
//   - uuid=off: the default writes an id of the mount into the upper;
//   - volatile: neither sync(2) inside nor the unmount flushes the file system
//     that all uppers share (beside a neighbour with 300 MB dirty: 25 ms instead
//     of 820). What must be durable is flushed below the mount, by the pool;
//   - noatime on the overlay, which doesn't inherit it from the layers.
//
// The mount is detached: it is in no namespace until the caller moves it into
// one, and it is gone when its last descriptor is closed.
package overlay

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// Options say what to mount.
type Options struct {
	// Lower are the folders of the layers, lowest first; at least one.
	Lower []string
	// Upper and Work are folders of one file system; Work is empty.
	Upper, Work string
	// UserNS maps 0-based ids on disk to those of the sandbox; nil: not mapped.
	UserNS *os.File
	// IDBase is what UserNS maps id 0 to. overlayfs acts on the layers with the
	// ids of whoever mounted it, so these must be inside the map.
	IDBase uint32
}

// Method is how layers are handed to the kernel.
type Method int

const (
	Unknown Method = iota
	// Detached hands over descriptors of detached mounts (kernels >= 6.15).
	Detached
	// Attached puts the layers into a private folder for as long as mount(2)
	// takes, and names them by path (kernels >= 5.19).
	Attached
)

func (m Method) String() string {
	switch m {
	case Detached:
		return "detached"
	case Attached:
		return "attached"
	}
	return "unknown"
}

// settings are the options of every overlay that we mount.
var settings = []struct{ key, value string }{
	{"redirect_dir", "on"}, {"metacopy", "off"}, {"index", "off"}, {"xino", "off"}, {"uuid", "off"},
}

// Mount makes the overlay and returns the detached mount, which is writable.
func Mount(o Options) (*os.File, error) {
	method, err := Probe()
	if err != nil {
		return nil, err
	}
	return MountBy(method, o)
}

// MountBy is Mount by a given method.
func MountBy(method Method, o Options) (*os.File, error) {
	if len(o.Lower) == 0 || o.Upper == "" || o.Work == "" {
		return nil, fault.New(fault.Invalid, "bad_overlay", "an overlay needs at least one layer, an upper and a work folder")
	}
	l, err := openLayers(o)
	if err != nil {
		return nil, err
	}
	defer l.close()
	var fd int
	if method == Attached {
		fd, err = mountAttached(l, o)
	} else {
		fd, err = mountDetached(l, o)
	}
	if err != nil {
		return nil, fmt.Errorf("mounting an overlay on %s: %w", o.Upper, err)
	}
	// overlayfs turns to read-only, and says so only in the kernel log, if it
	// can't make its work folder.
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil || fs.Flags&unix.ST_RDONLY != 0 {
		unix.Close(fd)
		return nil, fault.New(fault.Internal, "overlay_read_only", "the overlay on %s came up read-only", o.Upper).
			WithHint("the kernel log says why; often ids outside the user namespace's map, or a work folder in use")
	}
	return os.NewFile(uintptr(fd), "overlay:"+o.Upper), nil
}

// layers are path descriptors of the folders, inside detached mounts that have
// the idmap.
type layers struct {
	lower       []int // lowest first
	upper, work int
	mounts      []int
}

func (l *layers) close() {
	for _, fd := range append(append(l.mounts, l.lower...), l.upper, l.work) {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// openLayers clones the mount that holds all folders once, if there is one, and
// else one for the upper and one for each layer: a clone with its idmap takes
// about 10 us, and an image may have a hundred layers.
func openLayers(o Options) (*layers, error) {
	if filepath.Dir(o.Upper) != filepath.Dir(o.Work) {
		return nil, fault.New(fault.Invalid, "bad_overlay", "upper %s and work %s must lie in one folder", o.Upper, o.Work)
	}
	l := &layers{upper: -1, work: -1}
	if err := l.open(o); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *layers) open(o Options) error {
	top, shared := commonMount(append([]string{filepath.Dir(o.Upper)}, o.Lower...))
	if !shared {
		top = filepath.Dir(o.Upper)
	}
	tree, err := l.clone(top, o.UserNS)
	if err != nil {
		return err
	}
	if l.upper, err = openBelow(tree, top, o.Upper); shared && errors.Is(err, unix.EXDEV) {
		top, shared = filepath.Dir(o.Upper), false
		if tree, err = l.clone(top, o.UserNS); err != nil {
			return err
		}
		l.upper, err = openBelow(tree, top, o.Upper)
	}
	if err != nil {
		return err
	}
	if l.work, err = openBelow(tree, top, o.Work); err != nil {
		return err
	}
	for _, path := range o.Lower {
		fd, err := -1, error(unix.EXDEV)
		if shared {
			fd, err = openBelow(tree, top, path)
		}
		if errors.Is(err, unix.EXDEV) {
			own, cerr := l.clone(path, o.UserNS)
			if cerr != nil {
				return cerr
			}
			fd, err = openBelow(own, path, path)
		}
		if err != nil {
			return err
		}
		l.lower = append(l.lower, fd)
	}
	return nil
}

// openBelow opens path by its name below top, whose mount was cloned as tree. It never leaves that clone, whose ids are mapped: a
// path that a symbolic link leads out of it is EXDEV.
func openBelow(tree int, top, path string) (int, error) {
	name := strings.TrimPrefix(strings.TrimPrefix(path, top), "/")
	if name == "" {
		name = "."
	}
	fd, err := unix.Openat2(tree, name, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return -1, fmt.Errorf("opening layer %s: %w", path, err)
	}
	return fd, nil
}

// clone makes a detached, private, idmapped mount of the tree at path.
func (l *layers) clone(path string, userns *os.File) (int, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("cloning the mount of %s: %w", path, err)
	}
	l.mounts = append(l.mounts, fd)
	attr := unix.MountAttr{Propagation: unix.MS_PRIVATE}
	if userns != nil {
		attr.Attr_set, attr.Userns_fd = unix.MOUNT_ATTR_IDMAP, uint64(userns.Fd())
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return -1, fmt.Errorf("mapping ids of the mount of %s: %w", path, err)
	}
	return fd, nil
}

// commonMount finds the deepest folder above all paths, and whether all of
// them are reached from it without crossing into another mount.
func commonMount(paths []string) (string, bool) {
	top := paths[0]
	for _, p := range paths {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p {
			return "", false
		}
		for top != "/" && p != top && !strings.HasPrefix(p, top+"/") {
			top = filepath.Dir(top)
		}
	}
	want, ok := mountOf(top)
	if !ok {
		return "", false
	}
	for _, p := range paths {
		if got, ok := mountOf(p); !ok || got != want {
			return "", false
		}
	}
	return top, true
}

func mountOf(path string) (uint64, bool) {
	var st unix.Statx_t
	if unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_MNT_ID, &st) != nil {
		return 0, false
	}
	return st.Mnt_id, st.Mask&unix.STATX_MNT_ID != 0
}

func mountDetached(l *layers, o Options) (int, error) {
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("opening overlayfs: %w", err)
	}
	defer unix.Close(fs)
	for i := len(l.lower) - 1; i >= 0; i-- { // the kernel takes the top one first
		if err := unix.FsconfigSetFd(fs, "lowerdir+", l.lower[i]); err != nil {
			return -1, fsError(fs, "lowerdir+", err)
		}
	}
	if err := unix.FsconfigSetFd(fs, "upperdir", l.upper); err != nil {
		return -1, fsError(fs, "upperdir", err)
	}
	if err := unix.FsconfigSetFd(fs, "workdir", l.work); err != nil {
		return -1, fsError(fs, "workdir", err)
	}
	for _, s := range settings {
		if err := unix.FsconfigSetString(fs, s.key, s.value); err != nil {
			return -1, fsError(fs, s.key, err)
		}
	}
	if err := unix.FsconfigSetFlag(fs, "volatile"); err != nil {
		return -1, fsError(fs, "volatile", err)
	}
	if err := asMounter(o, func() error { return unix.FsconfigCreate(fs) }); err != nil {
		return -1, fsError(fs, "create", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOATIME)
	if err != nil {
		return -1, fsError(fs, "fsmount", err)
	}
	return fd, nil
}

// fsError adds what the kernel wrote into the log of the file-system context.
func fsError(fs int, step string, err error) error {
	buf := make([]byte, 512)
	if n, rerr := unix.Read(fs, buf); rerr == nil && n > 0 {
		return fmt.Errorf("%s: %w (%s)", step, err, strings.TrimSpace(string(buf[:n])))
	}
	return fmt.Errorf("%s: %w", step, err)
}

// asMounter runs fn with the file-system ids that the mapped layers know, and
// with all capabilities: setfsuid(2) to a user other than root takes those for
// files away, capset(2) brings them back. Both count for this thread alone. If
// the thread can't be put back, it stays locked and dies with its goroutine.
func asMounter(o Options, fn func() error) error {
	if o.UserNS == nil || o.IDBase == 0 {
		return fn()
	}
	runtime.LockOSThread()
	gid, err := unix.SetfsgidRetGid(int(o.IDBase))
	if err != nil {
		return err
	}
	uid, err := unix.SetfsuidRetUid(int(o.IDBase))
	if err != nil {
		return err
	}
	err = raiseEffective()
	if err == nil {
		err = fn()
	}
	unix.SetfsuidRetUid(uid)
	unix.SetfsgidRetGid(gid)
	nowUID, _ := unix.SetfsuidRetUid(-1) // -1 changes nothing and tells the present id
	nowGID, _ := unix.SetfsgidRetGid(-1)
	if nowUID != uid || nowGID != gid {
		return errors.Join(err, fmt.Errorf("putting file-system ids back to %d:%d: they are %d:%d", uid, gid, nowUID, nowGID))
	}
	runtime.UnlockOSThread()
	return err
}

func raiseEffective() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("reading capabilities: %w", err)
	}
	data[0].Effective, data[1].Effective = data[0].Permitted, data[1].Permitted
	if err := unix.Capset(&header, &data[0]); err != nil {
		return fmt.Errorf("raising capabilities: %w", err)
	}
	return nil
}

var probed = sync.OnceValues(probe)

// Probe finds the method that this kernel supports by real mounts, once a
// process. They lie on a tmpfs of their own: no path of the host is touched.
func Probe() (Method, error) { return probed() }
