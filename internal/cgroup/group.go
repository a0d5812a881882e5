package cgroup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// Limits of one sandbox; 0: none.
type Limits struct {
	MemoryBytes, Pids, CPUMillis int64
}

// Group is the groups of one sandbox.
type Group struct {
	root *Root
	name string
	// Dir and Run are folders of the v2 hierarchy.
	Dir, Run string
	// RunID is the v2 id of Run, as BPF programs see it.
	RunID uint64
}

// Make makes the groups of a sandbox whose root has the host id owner: owner may
// put processes of its own into Run, which is what CLONE_INTO_CGROUP asks for. It
// can see no cgroup file system, so this is all it can do.
func (r *Root) Make(name string, owner int, l Limits) (*Group, error) {
	g := r.group(name)
	for _, dir := range g.Dirs() {
		if err := unix.Mkdir(dir, 0o755); err != nil {
			g.Remove()
			return nil, fmt.Errorf("making the cgroup %s: %w", dir, err)
		}
	}
	err := errors.Join(delegate(g.Dir, owner), delegate(g.Run, owner), g.SetLimits(l))
	if err == nil {
		g.RunID, err = ID(g.Run)
	}
	if err != nil {
		g.Remove()
		return nil, err
	}
	return g, nil
}

// Find gives the groups of a sandbox that exist already.
func (r *Root) Find(name string) (*Group, error) {
	g := r.group(name)
	var err error
	if g.RunID, err = ID(g.Run); err != nil {
		return nil, err
	}
	return g, nil
}

// Leftover gives groups that may be there in part, to be killed and removed.
func (r *Root) Leftover(name string) *Group { return r.group(name) }

func (r *Root) group(name string) *Group {
	dir := filepath.Join(r.V2, name)
	return &Group{root: r, name: name, Dir: dir, Run: dir + "/run"}
}

// Dirs are the folders of a sandbox in all hierarchies.
func (g *Group) Dirs() []string { return append([]string{g.Dir, g.Run}, g.v1()...) }

func (g *Group) v1() []string {
	dirs := make([]string, len(g.root.v1dirs))
	for i, dir := range g.root.v1dirs {
		dirs[i] = dir + "/" + g.name
	}
	return dirs
}

// ID is the id of a v2 group: the inode number of its folder.
func ID(dir string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return 0, fmt.Errorf("finding the cgroup %s: %w", dir, err)
	}
	return st.Ino, nil
}

func delegate(dir string, owner int) error {
	if err := unix.Chown(dir+"/cgroup.procs", owner, owner); err != nil {
		return fmt.Errorf("giving %s to id %d: %w", dir, owner, err)
	}
	return nil
}

// MakeLeaf makes a group below Run for a turn beside which older processes live.
func MakeLeaf(dir string, owner int) error {
	if err := unix.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("making the cgroup %s: %w", dir, err)
	}
	return delegate(dir, owner)
}

// OpenLeaf opens a group for CLONE_INTO_CGROUP, and its cgroup.kill.
func OpenLeaf(dir string) (leaf, kill int, err error) {
	leaf, err = unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, -1, fmt.Errorf("opening the cgroup %s: %w", dir, err)
	}
	kill, err = unix.Openat(leaf, "cgroup.kill", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		unix.Close(leaf)
		return -1, -1, fmt.Errorf("opening cgroup.kill of %s: %w", dir, err)
	}
	return leaf, kill, nil
}

// OpenTasks opens what a process of ours writes "0" into to join the v1 groups.
func (g *Group) OpenTasks() ([]int, error) {
	var fds []int
	for _, dir := range g.v1() {
		fd, err := unix.Open(dir+"/tasks", unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			for _, fd := range fds {
				unix.Close(fd)
			}
			return nil, fmt.Errorf("opening the tasks of %s: %w", dir, err)
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

// SetLimits writes the limits that are set. Swap is off for a sandbox with a
// memory limit, or the limit would only say when it starts to thrash.
func (g *Group) SetLimits(l Limits) error {
	var errs []error
	set := func(controller, v1, v2, text string, optional bool) {
		dir, file := g.Dir, v2
		if v1root, ok := g.root.v1[controller]; ok {
			dir, file = v1root+"/"+g.name, v1
		} else if !g.root.inV2[controller] {
			return
		}
		if file == "" {
			return
		}
		if err := write(dir+"/"+file, text); err != nil && !(optional && errors.Is(err, os.ErrNotExist)) {
			errs = append(errs, err)
		}
	}
	if l.MemoryBytes > 0 {
		text := strconv.FormatInt(l.MemoryBytes, 10)
		set("memory", "memory.limit_in_bytes", "memory.max", text, false)
		set("memory", "memory.swappiness", "", "0", true)
		set("memory", "", "memory.swap.max", "0", true)
	}
	if l.Pids > 0 {
		// pid 1 isn't the sandbox's own.
		set("pids", "pids.max", "pids.max", strconv.FormatInt(l.Pids+1, 10), false)
	}
	if l.CPUMillis > 0 {
		const period = 100_000
		quota := max(l.CPUMillis*period/1000, 1000)
		set("cpu", "cpu.cfs_period_us", "", strconv.Itoa(period), false)
		set("cpu", "cpu.cfs_quota_us", "cpu.max", strconv.FormatInt(quota, 10), false)
	}
	return errors.Join(errs...)
}

// OOMKills counts processes of the sandbox that the kernel killed for memory.
func (g *Group) OOMKills() uint64 {
	path := g.Dir + "/memory.events"
	if dir, ok := g.root.v1["memory"]; ok {
		path = dir + "/" + g.name + "/memory.oom_control"
	}
	return field(path, "oom_kill")
}

// field reads the number after key in a file of "key number" lines; 0 if none.
func field(path, key string) uint64 {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	return fieldOf(fd, key)
}

func fieldOf(fd int, key string) uint64 {
	var buf [1024]byte
	n, err := unix.Pread(fd, buf[:], 0)
	if err != nil {
		return 0
	}
	for line := range bytes.Lines(buf[:n]) {
		if k, v, ok := strings.Cut(strings.TrimSpace(string(line)), " "); ok && k == key {
			u, _ := strconv.ParseUint(v, 10, 64)
			return u
		}
	}
	return 0
}

// Populated reports whether a v2 group or one below holds a process. A group that
// can't be read, for example since it is gone, holds none.
func Populated(dir string) bool {
	populated, err := IsPopulated(dir)
	return populated && err == nil
}

// IsPopulated is Populated for who has to know. A process that has just ended may
// still count.
func IsPopulated(dir string) (bool, error) {
	var buf [128]byte
	n, err := readFile(dir+"/cgroup.events", buf[:])
	if err != nil {
		return false, err
	}
	for line := range bytes.Lines(buf[:n]) {
		if v, ok := bytes.CutPrefix(line, []byte("populated ")); ok {
			return string(bytes.TrimSpace(v)) != "0", nil
		}
	}
	return false, fmt.Errorf("cgroup.events of %s has no line of populated: %q", dir, buf[:n])
}

// readFile reads the beginning of a small file.
func readFile(path string, buf []byte) (int, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("opening %s: %w", path, err)
	}
	n, err := unix.Read(fd, buf)
	unix.Close(fd)
	if err != nil {
		return 0, fmt.Errorf("reading %s: %w", path, err)
	}
	return n, nil
}

// killRounds bounds how often Kill looks for processes that cgroup.kill has spared. Each
// round ends all that were there, so that the next finds only what these had just started.
const killRounds = 8

// Kill kills every process in a v2 group and below, forks included. cgroup.kill alone
// signals first threads only: a process whose first thread has exited while others
// go on doesn't notice, and is killed by its pid.
func Kill(dir string) error {
	for range killRounds {
		if err := write(dir+"/cgroup.kill", "1"); err != nil {
			return err
		}
		if !killHeadless(dir) {
			return nil
		}
	}
	return nil
}

// killHeadless kills the processes of a group whose first thread has exited, and says whether
// there were any.
func killHeadless(dir string) (any bool) {
	pids, _ := Pids(dir)
	for _, pid := range pids {
		if !headless(pid) {
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		// What fd stands for is this group's if the pid still is.
		if now, _ := Pids(dir); slices.Contains(now, pid) && unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) == nil {
			any = true
		}
		unix.Close(fd)
	}
	return any
}

// headless: the first thread has exited. A group doesn't list a process that has no thread left.
func headless(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	name := bytes.LastIndexByte(stat, ')') // which may have any character in it
	return err == nil && name >= 0 && bytes.HasPrefix(stat[name:], []byte(") Z"))
}

// Freeze stops every process in a v2 group and below, and returns when they are. If they aren't in time, none stays stopped.
//
// Of a group that has processes as well as groups below it, the kernel says that it is frozen as soon as either are (Linux
// 5.2 to 6.18 at least: it looks at the one when the last of the other stops, and never at both). What it says is true if
// all below was frozen before: so the leaves come first, and then what holds them.
func Freeze(ctx context.Context, dir string) error {
	told, err := freezeBelow(ctx, dir)
	if err == nil {
		if err = BeginFreeze(dir); err == nil {
			err = Await(ctx, dir, "frozen", 1)
		}
		if err != nil {
			told = append(told, dir)
		}
	}
	for _, d := range told { // dir holds them now, so that to thaw it is enough
		err = errors.Join(err, Thaw(d))
	}
	return err
}

// freezeBelow freezes the groups below one, but not that one, and returns those that it has told to.
func freezeBelow(ctx context.Context, dir string) (told []string, err error) {
	if sabotage.On("frozen") {
		return nil, nil
	}
	dirs, err := below(dir)
	if err != nil {
		return nil, err
	}
	for _, d := range dirs {
		more, err := freezeBelow(ctx, d)
		told = append(told, more...)
		if err != nil {
			return told, err
		}
		var set [2]byte
		if _, err := readFile(d+"/cgroup.freeze", set[:]); err != nil {
			return told, err
		}
		if set[0] == '1' {
			continue // by somebody else, who thaws it
		}
		if err := BeginFreeze(d); err != nil {
			return told, err
		}
		told = append(told, d)
	}
	for _, d := range dirs {
		if err := Await(ctx, d, "frozen", 1); err != nil {
			return told, err
		}
	}
	return told, nil
}

// below lists the groups right below one.
func below(dir string) (dirs []string, err error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return nil, fmt.Errorf("looking into the cgroup %s: %w", dir, err)
	}
	if st.Nlink == 2 {
		return nil, nil
	}
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			dirs = append(dirs, dir+"/"+e.Name())
		}
	}
	return dirs, err
}

// BeginFreeze is Freeze without the waiting.
func BeginFreeze(dir string) error { return write(dir+"/cgroup.freeze", "1") }

// Warm makes a Move that comes some milliseconds later a quick one. The first one for a while waits until each processor
// has passed a quiet point (measured: 13 ms; 0.2 behind a Warm 8 to 16 ms before), and so does Warm, by moving this
// process to where it is.
func (r *Root) Warm() {
	own, err := ownGroup("")
	if err != nil {
		return
	}
	_ = write(filepath.Join(r.mount, own, "cgroup.procs"), "0") // a refusal comes after the wait, too
}

// Move puts a process into a v2 group.
func Move(dir string, pid int) error { return write(dir+"/cgroup.procs", strconv.Itoa(pid)) }

// Thaw lets them go on.
func Thaw(dir string) error { return write(dir+"/cgroup.freeze", "0") }

// ThawAll thaws a group and all below it, whoever has frozen them.
func ThawAll(dir string) error {
	err := Thaw(dir)
	dirs, lerr := below(dir)
	err = errors.Join(err, lerr)
	for _, d := range dirs {
		err = errors.Join(err, ThawAll(d))
	}
	return err
}

// Await waits until a field of cgroup.events has a value. The file's poll(2)
// tells of changes.
func Await(ctx context.Context, dir, key string, want uint64) error {
	fd, err := unix.Open(dir+"/cgroup.events", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening cgroup.events of %s: %w", dir, err)
	}
	defer unix.Close(fd)
	for {
		if fieldOf(fd, key) == want {
			return nil
		}
		if err := ctx.Err(); err != nil {
			kind, reason := fault.Cancelled, "cancelled"
			if errors.Is(err, context.DeadlineExceeded) {
				kind, reason = fault.Deadline, "deadline"
			}
			return fault.New(kind, reason, "waiting until cgroup %s is %s %d: %w", dir, key, want, err)
		}
		// A context can't wake poll(2); it is looked at between short waits.
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}
		if _, err := unix.Poll(p, int(20*time.Millisecond/time.Millisecond)); err != nil && err != unix.EINTR {
			return fmt.Errorf("waiting for cgroup %s: %w", dir, err)
		}
	}
}

// Pids lists the processes in a v2 group and below, by host pid.
func Pids(dir string) ([]int, error) {
	var pids []int
	text, err := os.ReadFile(dir + "/cgroup.procs")
	if err != nil {
		return nil, err
	}
	for f := range strings.FieldsSeq(string(text)) {
		if pid, err := strconv.Atoi(f); err == nil {
			pids = append(pids, pid)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if e.IsDir() {
			below, err := Pids(filepath.Join(dir, e.Name()))
			if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ENODEV) {
				return nil, err
			}
			pids = append(pids, below...)
		}
	}
	return pids, nil
}

// RemoveLeaves removes the empty groups below Run, but for one.
func (g *Group) RemoveLeaves(keep string) {
	entries, err := os.ReadDir(g.Run)
	if err != nil {
		return
	}
	for _, e := range entries {
		if dir := g.Run + "/" + e.Name(); e.IsDir() && dir != keep {
			unix.Rmdir(dir)
		}
	}
}

// Remove removes the groups, whose processes must be gone. A thread of ours that joined those of v1 to start something
// there may end a moment later, which the v2 group doesn't tell. Idempotent.
func (g *Group) Remove() error {
	for wait := time.Millisecond; ; wait *= 2 {
		if err := g.remove(); !errors.Is(err, unix.EBUSY) || wait > time.Second {
			return err
		}
		time.Sleep(wait)
	}
}

func (g *Group) remove() error {
	var errs []error
	for _, dir := range append([]string{g.Run, g.Dir}, g.v1()...) {
		err := unix.Rmdir(dir)
		if err == unix.EBUSY && dir == g.Run {
			g.RemoveLeaves("")
			err = unix.Rmdir(dir)
		}
		if err != nil && err != unix.ENOENT {
			errs = append(errs, fmt.Errorf("removing the cgroup %s: %w", dir, err))
		}
	}
	return errors.Join(errs...)
}

// KillAll kills what is left in the groups and waits for its end.
func (g *Group) KillAll(ctx context.Context) error {
	if err := Kill(g.Dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := Await(ctx, g.Dir, "populated", 0); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
