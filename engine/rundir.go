package engine

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// chooseRunDir picks the folder for what lasts as long as sandboxes do: control
// sockets, births. It is on a tmpfs that the whole host has, where making a few
// files for each child costs a twentieth of what it costs on a disk, and
// which outlives the daemon, so that the next one on the same state folder finds it.
// Without such a tmpfs it lies in the state folder.
func chooseRunDir(state string) string {
	places := runDirs(state)
	for _, dir := range places[:len(places)-1] {
		if onTmpfs(filepath.Dir(dir)) && ownFolder(dir) {
			return dir
		}
	}
	return places[len(places)-1]
}

// runDirs are the places for it, best first.
func runDirs(state string) []string {
	if real, err := filepath.EvalSymlinks(state); err == nil {
		state = real
	}
	sum := sha256.Sum256([]byte(state))
	name := "boxwood-" + hex.EncodeToString(sum[:6])
	return []string{filepath.Join("/run", name), filepath.Join("/dev/shm", name), filepath.Join(state, "run")}
}

// FindRunDir is the run folder that a daemon on this state folder has left, or the
// one that it would make; it makes none.
func FindRunDir(state string) string {
	places := runDirs(state)
	for i, dir := range places {
		if _, err := os.Lstat(filepath.Join(dir, "boxes")); err == nil && (i == len(places)-1 || ours(dir)) {
			return dir
		}
	}
	return places[0]
}

// onTmpfs goes by what is mounted, so that each daemon on a host chooses alike.
// (The daemon mounts nothing of its own in these places, which would end with it.)
func onTmpfs(path string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(path, &fs) == nil && fs.Type == unix.TMPFS_MAGIC
}

// ownFolder makes a folder that only we can look into. Others may write to
// /dev/shm: one that somebody else has put there is left alone.
func ownFolder(dir string) bool {
	if err := os.Mkdir(dir, 0o700); err != nil && !os.IsExist(err) {
		return false
	}
	return ours(dir)
}

func ours(dir string) bool {
	var st syscall.Stat_t
	return syscall.Lstat(dir, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFDIR &&
		st.Mode&0o077 == 0 && int(st.Uid) == os.Geteuid()
}

// leaveRunDir removes the run folder if no sandbox lives on and no dump is in it that isn't on the disk. Else it stays as it is:
// it is known by its folder of boxes (FindRunDir).
func leaveRunDir(dir string) {
	if sabotage.On("rundir") {
		return
	}
	own := []string{"births", "boxes"}
	entries, err := os.ReadDir(dir)
	if err != nil || slices.ContainsFunc(entries, func(e os.DirEntry) bool { return !slices.Contains(own, e.Name()) }) {
		return
	}
	for _, path := range []string{filepath.Join(dir, own[0]), filepath.Join(dir, own[1]), dir} {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			return
		}
	}
}
