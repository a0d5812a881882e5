package overlay

import (
	"bufio"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/thread"
)

// Settings are the options that an overlay really has, by name: "redirect_dir",
// "metacopy", "index", "xino", "uuid" with their values, "volatile" and "noatime" with
// "on" or "off".
type Settings map[string]string

// Wrong lists the options that aren't as Mount promises, "key=got, want value".
func (s Settings) Wrong() []string {
	want := append(settings[:len(settings):len(settings)],
		struct{ key, value string }{"volatile", "on"}, struct{ key, value string }{"noatime", "on"})
	var wrong []string
	for _, w := range want {
		null := w.key == "uuid" && s[w.key] == "null" // what off becomes over two file systems; it writes nothing either
		if s[w.key] != w.value && !null {
			wrong = append(wrong, fmt.Sprintf("%s=%s, want %s", w.key, s[w.key], w.value))
		}
	}
	return wrong
}

// ReadBack reads the options of a mount back from the kernel. A detached mount
// is in no list, so a copy of it is shown in a throwaway mount namespace, which
// ends with the thread that made it. The copy is made by the caller's thread: a
// namespace copies only what came from itself.
func ReadBack(mount *os.File) (Settings, error) {
	clone, err := unix.OpenTree(int(mount.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, fault.New(fault.Unsupported, "no_readback", "this kernel copies no detached mount: %w", err).
			WithHint("attach the mount first")
	}
	defer unix.Close(clone)
	var s Settings
	err = thread.Discard(func() (err error) {
		s, err = readBack(clone)
		return err
	})
	return s, err
}

func readBack(clone int) (Settings, error) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("making a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("making mounts private: %w", err)
	}
	if err := unix.MoveMount(clone, "", unix.AT_FDCWD, "/tmp", unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return nil, fmt.Errorf("showing the mount: %w", err)
	}
	var st unix.Statx_t
	if err := unix.Statx(clone, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return nil, fmt.Errorf("reading the mount's id: %w", err)
	}
	f, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	id := fmt.Sprintf("%d ", st.Mnt_id)
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20) // a hundred layers make long lines
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), id) {
			return parseMountinfo(lines.Text())
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("reading mounts: %w", err)
	}
	return nil, fault.New(fault.Internal, "no_readback", "mount %d isn't in the kernel's list", st.Mnt_id)
}

// parseMountinfo reads one line of mountinfo(5). overlayfs leaves out what is
// as the module's parameters say.
func parseMountinfo(line string) (Settings, error) {
	head, tail, ok := strings.Cut(line, " - ")
	h, t := strings.Fields(head), strings.Fields(tail)
	if !ok || len(h) < 6 || len(t) < 3 || t[0] != "overlay" {
		return nil, fault.New(fault.Invalid, "not_overlay", "not an overlay: %q", line)
	}
	s := Settings{"volatile": "off", "noatime": "off"}
	for key, param := range map[string]string{"redirect_dir": "redirect_dir", "metacopy": "metacopy", "index": "index", "xino": "xino_auto"} {
		b, err := os.ReadFile("/sys/module/overlay/parameters/" + param)
		if err != nil {
			continue // stays empty, which Wrong reports unless the mount says it
		}
		switch strings.TrimSpace(string(b)) {
		case "Y":
			s[key] = map[bool]string{true: "auto", false: "on"}[key == "xino"]
		case "N":
			s[key] = "off"
		}
	}
	for _, option := range strings.Split(h[5]+","+t[2], ",") {
		key, value, has := strings.Cut(option, "=")
		switch {
		case key == "noatime" || key == "volatile":
			s[key] = "on"
		case option == "fsync=volatile": // how newer kernels spell it
			s["volatile"] = "on"
		case has && slices.Contains([]string{"redirect_dir", "metacopy", "index", "xino", "uuid"}, key):
			s[key] = value
		}
	}
	return s, nil
}
