package box

import (
	"errors"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// HooksDir is the folder of a root whose programs are run in each box that is made of it, before it is handed out. It
// can't be in /run/box, which is a mount from outside.
const HooksDir = "/etc/boxwood/on-fork.d"

// hooksMax is how many there may be.
const hooksMax = 64

// hooksOf lists the programs in HooksDir of a root that nothing runs in yet, by name: regular files
// that are executable. Names that begin with a dot are left out.
func hooksOf(root *os.File) ([]string, error) {
	how := &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
	fd, err := unix.Openat2(int(root.Fd()), HooksDir, how)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil, nil
	}
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: HooksDir, Err: err}
	}
	dir := os.NewFile(uintptr(fd), HooksDir)
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	var hooks []string
	for _, name := range names {
		var st unix.Stat_t
		if err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return nil, &os.PathError{Op: "stat", Path: HooksDir + "/" + name, Err: err}
		}
		if strings.HasPrefix(name, ".") || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o111 == 0 {
			continue
		}
		if hooks = append(hooks, HooksDir+"/"+name); len(hooks) > hooksMax {
			return nil, fault.New(fault.Precondition, "too_many_hooks", "%s has more than %d programs", HooksDir, hooksMax)
		}
	}
	return hooks, nil
}
