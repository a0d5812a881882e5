// Package witness looks at a sandbox's processes from outside and writes down what
// they are: who is there and whose child, in which session and on which terminal,
// with which files, sockets, memory map, signals, rights and limits, and what
// the kernel holds around them. It asks the kernel alone and shares no code with what saves and
// restores processes, whose results it is held against: a restored child that doesn't
// look like its parent did in the freeze is no child (law 5).
//
// What it writes down is the same for two trees that are equal: ids are those inside; inodes of
// sockets and pipes are replaced by numbers in order of appearance, so that who shares one with
// whom is kept; what must differ (host names, mount ids, times) is left out.
//
// It looks into memory only if it is asked to (Remember), and never into pipes and queues of sockets.
package witness

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// State is what was seen.
type State struct {
	// Processes by their pid inside.
	Processes map[int]*Process
	// Around are lines of what no process has to itself: mounts, sockets, IPC.
	Around []string
	// Adrift are the processes, by their pid inside, on whose terminal the foreground is a group that
	// is gone: a shell's command has just ended, and the shell hasn't noticed yet.
	Adrift []int `json:"-"`
	// Traced are the processes, by their pid inside, that another one traces.
	Traced []int `json:"-"`
	// Remembers: it has sums of memory, too. See Remember.
	Remembers bool `json:",omitempty"`

	hosts    map[int]int // pid inside -> host pid, without pid 1
	uid, gid int         // the host's of root inside
}

// Process is one process. pid 1, which is Boxwood's own, has only Facts.
type Process struct {
	Facts []string          // "name: value"
	Files map[string]string // by descriptor
	// Owners are user and group of sockets, by descriptor, where either isn't root of the sandbox. nil, too, in what releases
	// before kept.
	Owners map[string][2]int `json:",omitempty"`
	Maps   []string
	// Blocked are the signals that each thread blocks, by its id inside. Masking are the threads
	// that may wait in a call that blocks others for as long as it lasts.
	Blocked map[int]string
	Masking []int
	// Where each thread stands, by its id inside: registers and system call. It changes when
	// somebody meddles with a frozen thread, and isn't the same in a child.
	Where map[int]string `json:"-"`

	Memory []Piece  `json:",omitempty"` // in the order of their addresses
	Rseq   []uint64 `json:",omitempty"`
}

// Of looks at the tree of pid1, a host pid; pids are its other processes. The tree should be frozen.
func Of(pid1 int, pids []int) (*State, error) {
	l := &look{names: map[string]int{}, inner: map[int]int{}, groups: map[int]bool{}, foreground: map[int]int{}}
	var err error
	if l.uid, err = mapBase(pid1, "uid_map"); err != nil {
		return nil, err
	}
	if l.gid, err = mapBase(pid1, "gid_map"); err != nil {
		return nil, err
	}
	s := &State{Processes: map[int]*Process{}, hosts: map[int]int{}, uid: l.uid, gid: l.gid}
	all := append([]int{pid1}, pids...)
	for _, pid := range all {
		if err := l.number(pid); err != nil {
			return nil, err
		}
	}
	// By inner pid, so that what is numbered is numbered alike.
	sort.Slice(all, func(i, j int) bool { return l.inner[all[i]] < l.inner[all[j]] })
	for _, pid := range all {
		p, err := l.process(pid, pid == pid1)
		if err != nil {
			return nil, fmt.Errorf("looking at process %d: %w", pid, err)
		}
		s.Processes[l.inner[pid]] = p
		if pid != pid1 {
			s.hosts[l.inner[pid]] = pid
		}
	}
	for pid, group := range l.foreground {
		if !l.groups[group] {
			s.Adrift = append(s.Adrift, l.inner[pid])
		}
	}
	slices.Sort(s.Adrift)
	s.Traced = l.traced
	if s.Around, err = l.around(pid1); err != nil {
		return nil, err
	}
	return s, nil
}

// Encode and Decode are for what is kept with a dump.
func (s *State) Encode() ([]byte, error) { return json.Marshal(s) }

// Decode reads what Encode wrote.
func Decode(b []byte) (*State, error) {
	s := &State{}
	if err := json.Unmarshal(b, s); err != nil {
		return nil, fmt.Errorf("reading what was seen of processes: %w", err)
	}
	return s, nil
}

// ErrExiting: a process is on its way out, which no freezing holds up. Look again.
var ErrExiting = errors.New("a process is about to be gone")

const exiting = 0x4 // PF_EXITING

// look is one pass.
type look struct {
	uid, gid int
	names    map[string]int // of sockets, pipes
	inner    map[int]int    // host pid -> pid inside
	// groups are there; foreground is that of each process's terminal. Host numbers.
	groups     map[int]bool
	foreground map[int]int
	traced     []int // pids inside
}

// mapBase is the host id of id 0.
func mapBase(pid int, file string) (int, error) {
	f, err := fields(pid, file)
	if err != nil {
		return 0, err
	}
	if len(f) != 3 {
		return 0, fmt.Errorf("%s of process %d isn't one range", file, pid)
	}
	return strconv.Atoi(f[1])
}

func fields(pid int, file string) ([]string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	return strings.Fields(string(b)), err
}

// status is /proc/PID/status by key.
func status(dir string) (map[string]string, error) {
	b, err := os.ReadFile(dir + "/status")
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok {
			out[k] = strings.Join(strings.Fields(v), " ")
		}
	}
	return out, nil
}

func (l *look) number(pid int) error {
	st, err := status(fmt.Sprintf("/proc/%d", pid))
	if err != nil {
		return err
	}
	f := strings.Fields(st["NSpid"])
	if len(f) < 2 {
		return fmt.Errorf("process %d isn't in a pid namespace of its own", pid)
	}
	l.inner[pid], err = strconv.Atoi(f[1])
	return err
}

// second is the number inside of a line of status like NSsid.
func second(v string) string {
	if f := strings.Fields(v); len(f) > 1 {
		return f[1]
	}
	return v
}

// shift makes host ids inner ones.
func shift(v string, base int) string {
	f := strings.Fields(v)
	for i, s := range f {
		if n, err := strconv.Atoi(s); err == nil {
			f[i] = strconv.Itoa(n - base)
		}
	}
	return strings.Join(f, " ")
}

func (l *look) process(pid int, own bool) (*Process, error) {
	dir := fmt.Sprintf("/proc/%d", pid)
	st, err := status(dir)
	if err != nil {
		return nil, err
	}
	p := &Process{Where: map[int]string{}, Blocked: map[int]string{}}
	fact := func(name, value string) { p.Facts = append(p.Facts, name+": "+value) }
	parent, err := strconv.Atoi(st["PPid"])
	if err != nil {
		return nil, err
	}
	fact("parent", strconv.Itoa(l.inner[parent])) // 0: outside
	fact("name", st["Name"])
	fact("session", second(st["NSsid"]))
	fact("uids", shift(st["Uid"], l.uid))
	fact("gids", shift(st["Gid"], l.gid))
	groups := strings.Fields(shift(st["Groups"], l.gid))
	sort.Strings(groups)
	fact("groups", strings.Join(groups, " "))
	for _, k := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters"} {
		fact(k, st[k])
	}
	for _, name := range []string{"cwd", "root", "exe"} {
		link, err := os.Readlink(dir + "/" + name)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		fact(name, link)
	}
	if own {
		return p, inherited(dir, pid, fact)
	}
	zombie := strings.HasPrefix(st["State"], "Z")
	// A process without a live thread is no longer listed a moment later, here as in a restored child.
	if zombie && st["Threads"] == "1" {
		return nil, ErrExiting
	}
	stat, err := statFields(dir)
	if err != nil {
		return nil, err
	}
	if group, err := strconv.Atoi(stat[2]); err == nil {
		l.groups[group] = true
	}
	if flags, err := strconv.ParseUint(stat[6], 10, 32); err != nil || flags&exiting != 0 && !zombie {
		return nil, ErrExiting
	}
	fact("zombie", strconv.FormatBool(zombie))
	fact("group", second(st["NSpgid"]))
	for _, k := range []string{"Umask", "SigIgn", "SigCgt", "ShdPnd", "Threads"} {
		fact(k, st[k])
	}
	if zombie {
		return p, nil
	}
	if n, err := strconv.Atoi(stat[5]); err == nil && n > 0 {
		l.foreground[pid] = n
	}
	if st["TracerPid"] != "0" {
		l.traced = append(l.traced, l.inner[pid])
	}
	if err := errors.Join(inherited(dir, pid, fact), l.more(dir, fact)); err != nil {
		return nil, err
	}
	if err := l.threads(dir, p, fact); err != nil {
		return nil, err
	}
	if err := l.files(dir, p); err != nil {
		return nil, err
	}
	p.Maps, err = memoryMap(dir)
	return p, err
}

// more reads what has files of its own.
func (l *look) more(dir string, fact func(string, string)) error {
	f, err := statFields(dir)
	if err != nil {
		return err
	}
	fact("terminal", f[4])
	foreground := f[5]
	if n, err := strconv.Atoi(foreground); err == nil && n > 0 {
		// As a number inside: of a process of this tree, or of one that is gone.
		if inner, ok := l.inner[n]; ok {
			foreground = strconv.Itoa(inner)
		} else {
			foreground = "?"
		}
	}
	fact("foreground", foreground)
	for _, name := range []string{"cmdline", "environ", "auxv", "timerslack_ns"} {
		b, err := os.ReadFile(dir + "/" + name)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		fact(name, digest(b))
	}
	return nil
}

// digest is a short text itself, and a sum of a long one.
func digest(b []byte) string {
	if len(b) > 80 {
		sum := sha256.Sum256(b)
		b = []byte("sha256 " + hex.EncodeToString(sum[:8]))
	}
	return strings.TrimSpace(strings.ReplaceAll(string(b), "\x00", " "))
}

// statFields are those of /proc/PID/stat after the name, which may hold anything.
func statFields(dir string) ([]string, error) {
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return nil, err
	}
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(f) < 39 {
		return nil, fmt.Errorf("%s/stat has %d fields", dir, len(f))
	}
	return f, nil
}

func (l *look) threads(dir string, p *Process, fact func(string, string)) error {
	entries, err := os.ReadDir(dir + "/task")
	if err != nil {
		return err
	}
	var lines []string
	for _, e := range entries {
		st, err := status(dir + "/task/" + e.Name())
		if err != nil {
			return err
		}
		tid := second(st["NSpid"])
		lines = append(lines, fmt.Sprintf("thread %s: %s SigPnd %s", tid, st["Name"], st["SigPnd"]))
		n, _ := strconv.Atoi(tid)
		if p.Where[n], err = where(dir + "/task/" + e.Name()); err != nil {
			return err
		}
		p.Blocked[n] = st["SigBlk"]
		if call, _, _ := strings.Cut(p.Where[n], " "); slices.Contains(masking, call) {
			p.Masking = append(p.Masking, n)
		}
	}
	slices.Sort(lines)
	p.Facts = append(p.Facts, lines...)
	return nil
}

// masking are the calls that block other signals while they wait: rt_sigsuspend, pselect6,
// ppoll, epoll_pwait, epoll_pwait2, io_pgetevents. One that is about to be made again shows as none.
var masking = []string{"130", "270", "271", "281", "441", "333", "-1", "running"}

// where a thread stands. One that has only just been frozen may still be on its way there.
func where(task string) (string, error) {
	for patience := 100; ; patience-- {
		b, err := os.ReadFile(task + "/syscall")
		if err != nil {
			return "", err
		}
		at := strings.TrimSpace(string(b))
		if at != "running" || patience == 0 {
			return at, nil
		}
		time.Sleep(100 * time.Microsecond)
	}
}

// ghost is what CRIU adds to the name of a file while it restores it, if it had none any more, or its name is another's by now.
var ghost = regexp.MustCompile(`\.cr\.[0-9a-f]+\.ghost|\.cr_link`)

func (l *look) name(link string) string {
	for _, kind := range []string{"socket:[", "pipe:["} {
		if strings.HasPrefix(link, kind) {
			n, ok := l.names[link]
			if !ok {
				n = len(l.names) + 1
				l.names[link] = n
			}
			return kind + strconv.Itoa(n) + "]"
		}
	}
	return ghost.ReplaceAllString(link, "")
}

func (l *look) files(dir string, p *Process) error {
	entries, err := os.ReadDir(dir + "/fd")
	if err != nil {
		return err
	}
	p.Files = map[string]string{}
	sort.Slice(entries, func(i, j int) bool {
		a, _ := strconv.Atoi(entries[i].Name())
		b, _ := strconv.Atoi(entries[j].Name())
		return a < b
	})
	for _, e := range entries {
		link, err := os.Readlink(dir + "/fd/" + e.Name())
		if err != nil {
			return err
		}
		info, err := os.ReadFile(dir + "/fdinfo/" + e.Name())
		if err != nil {
			return err
		}
		p.Files[e.Name()] = l.name(link) + " " + fdinfo(string(info))
		if !strings.HasPrefix(link, "socket:[") {
			continue
		}
		var st unix.Stat_t
		if err := unix.Stat(dir+"/fd/"+e.Name(), &st); err != nil {
			return err
		}
		if owner := [2]int{int(st.Uid) - l.uid, int(st.Gid) - l.gid}; owner != [2]int{} {
			if p.Owners == nil {
				p.Owners = map[string][2]int{}
			}
			p.Owners[e.Name()] = owner
		}
	}
	return nil
}

var drops = regexp.MustCompile(` (ino|sdev|fhandle-[a-z]+|f_handle):[0-9a-f]+`)

// largeFile is O_LARGEFILE of the kernel, which means nothing on 64 bits.
const largeFile = 0o100000

// fdinfo leaves out what is no state or differs by nature.
func fdinfo(text string) string {
	var out []string
	for line := range strings.Lines(text) {
		key, value, ok := strings.Cut(line, ":")
		value = strings.Join(strings.Fields(value), " ")
		switch key {
		case "flags":
			flags, err := strconv.ParseUint(value, 8, 32)
			if err == nil {
				value = strconv.FormatUint(flags&^largeFile, 8)
			}
			out = append(out, "flags "+value)
		case "mnt_id", "ino", "it_value", "ticks", "scm_fds", "eventfd-id", "lock":
		case "pos":
			if value != "0" {
				out = append(out, "pos "+value)
			}
		case "tfd":
			// "3 events: 19 data: 3 pos:0 ino:1 sdev:2"
			out = append(out, "tfd "+strings.Join(strings.Fields(drops.ReplaceAllString(strings.ReplaceAll(value, ": ", ":"), "")), " "))
		default:
			if ok {
				out = append(out, key+" "+drops.ReplaceAllString(value, ""))
			}
		}
	}
	sort.Strings(out)
	return strings.Join(out, ", ")
}

// area is one line of /proc/PID/maps.
type area struct {
	from, to, offset uint64
	perms, name      string
}

func (a area) String() string {
	return strings.TrimSpace(fmt.Sprintf("%x-%x %s %x %s", a.from, a.to, a.perms, a.offset, a.name))
}

// joins: the kernel may keep two areas apart that are one to everybody else.
func (a area) joins(b area) bool {
	return a.to == b.from && a.perms == b.perms && a.name == b.name && (a.offset+(a.to-a.from) == b.offset || a.offset == 0 && b.offset == 0)
}

// sharedMemory: an area of this name is memory that has no file.
func sharedMemory(name string) bool {
	for _, shared := range []string{"/dev/zero (deleted)", "/memfd:", "/SYSV", "[anon_shmem"} {
		if strings.HasPrefix(name, shared) {
			return true
		}
	}
	return false
}

// areasOf reads the memory map of a process as the kernel has it.
func areasOf(dir string) (areas []area, err error) {
	b, err := os.ReadFile(dir + "/maps")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 5 {
			return nil, fmt.Errorf("a line of maps: %q", line)
		}
		a := area{perms: f[1]}
		if _, err := fmt.Sscanf(f[0]+" "+f[2], "%x-%x %x", &a.from, &a.to, &a.offset); err != nil {
			return nil, fmt.Errorf("a line of maps: %q: %w", line, err)
		}
		if len(f) > 5 {
			a.name = strings.Join(f[5:], " ")
		}
		areas = append(areas, a)
	}
	return areas, nil
}

func memoryMap(dir string) ([]string, error) {
	all, err := areasOf(dir)
	if err != nil {
		return nil, err
	}
	var areas []area
	for _, a := range all {
		a.name = ghost.ReplaceAllString(a.name, "")
		if a.name == "[vvar]" || a.name == "[vvar_vclock]" {
			continue // CRIU may put a part of it elsewhere
		}
		if sharedMemory(a.name) {
			a.name = "shared memory"
		}
		if n := len(areas); n > 0 && areas[n-1].joins(a) {
			areas[n-1].to = a.to
		} else {
			areas = append(areas, a)
		}
	}
	out := make([]string, len(areas))
	for i, a := range areas {
		out[i] = a.String()
	}
	return out, nil
}

// around reads what belongs to the namespaces of pid 1.
func (l *look) around(pid1 int) ([]string, error) {
	lines, err := mounts(pid1)
	if err != nil {
		return nil, err
	}
	used, err := protocols(pid1)
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"tcp", "tcp6", "udp", "udp6", "raw", "raw6"} {
		if n, known := used[name]; known && n == 0 {
			continue
		}
		found, err := l.inet(pid1, name)
		if err != nil {
			return nil, err
		}
		lines = append(lines, found...)
	}
	found, err := unixSockets(pid1)
	if err != nil {
		return nil, err
	}
	lines = append(lines, found...)
	ipc, err := l.sysv(pid1)
	return append(lines, ipc...), err
}

func mounts(pid1 int) ([]string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid1))
	if err != nil {
		return nil, err
	}
	control := regexp.MustCompile(`/[^ ]*`)
	var out []string
	for line := range strings.Lines(string(b)) {
		pre, post, ok := strings.Cut(strings.TrimSpace(line), " - ")
		f, g := strings.Fields(pre), strings.Fields(post)
		if !ok || len(f) < 6 || len(g) < 1 {
			return nil, fmt.Errorf("a line of mountinfo: %q", line)
		}
		root := f[3]
		if at := f[4]; at == "/run/box" || at == "/etc/machine-id" || at == "/dev" {
			root = control.ReplaceAllString(root, "/") // handed in from outside
		}
		out = append(out, "mount "+strings.Join([]string{f[4], root, f[5], g[0]}, " "))
	}
	sort.Strings(out)
	return out, nil
}

// protocols says how many sockets of each there are, as far as the kernel tells. To list those of TCP, also if
// there are none, it goes through a table of the whole host, which takes it 3 ms for either version of IP.
func protocols(pid1 int) (map[string]int, error) {
	used := map[string]int{}
	for _, name := range []string{"sockstat", "sockstat6"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid1, name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		// "TCP: inuse 2 orphan 0 tw 0 alloc 3 mem 1"
		for line := range strings.Lines(string(b)) {
			var protocol string
			var n int
			if _, err := fmt.Sscanf(line, "%s inuse %d", &protocol, &n); err == nil {
				used[strings.ToLower(strings.TrimSuffix(protocol, ":"))] = n
			}
		}
	}
	return used, nil
}

const timeWait = "06"

func (l *look) inet(pid1 int, name string) ([]string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid1, name))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []string
	for i, line := range strings.Split(strings.TrimSpace(string(b)), "\n") {
		f := strings.Fields(line)
		if i == 0 || len(f) < 10 || f[3] == timeWait {
			continue
		}
		_, unread, _ := strings.Cut(f[4], ":")
		if f[3] == "0A" {
			unread = "" // of a listener: connections in its queue
		}
		out = append(out, strings.Join([]string{name, f[1], f[2], f[3], unread, shift(f[7], l.uid)}, " "))
	}
	sort.Strings(out)
	return out, nil
}

func unixSockets(pid1 int) ([]string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/unix", pid1))
	if err != nil {
		return nil, err
	}
	var out []string
	for i, line := range strings.Split(strings.TrimSpace(string(b)), "\n") {
		f := strings.Fields(line)
		if i == 0 || len(f) < 7 {
			continue
		}
		path := ""
		if len(f) > 7 {
			path = f[7]
		}
		if filepath.Base(path) == "init.sock" {
			continue // pid 1's own
		}
		out = append(out, strings.Join([]string{"unix", f[3], f[4], f[5], path}, " "))
	}
	sort.Strings(out)
	return out, nil
}

// columns of /proc/sysvipc that are no times, no pids and no addresses. The creator, whom CRIU
// makes root, may do no more than the owner.
var columns = map[string][]string{
	"shm": {"key", "shmid", "perms", "size", "nattch", "uid", "gid"},
	"msg": {"key", "msqid", "perms", "cbytes", "qnum", "uid", "gid"},
	"sem": {"key", "semid", "perms", "nsems", "uid", "gid"},
}

func (l *look) sysv(pid1 int) (out []string, err error) {
	err = inside(pid1, "ipc", func() error {
		for _, name := range []string{"shm", "msg", "sem"} {
			b, err := os.ReadFile("/proc/sysvipc/" + name)
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			if err != nil {
				return err
			}
			out = append(out, l.table(name, string(b))...)
		}
		return nil
	})
	return out, err
}

func (l *look) table(name, text string) (out []string) {
	rows := strings.Split(strings.TrimSpace(text), "\n")
	head := strings.Fields(rows[0])
	for _, row := range rows[1:] {
		f := strings.Fields(row)
		line := name
		for i, key := range head {
			if i >= len(f) || !slices.Contains(columns[name], key) {
				continue
			}
			value := f[i]
			switch key {
			case "uid":
				value = shift(value, l.uid)
			case "gid":
				value = shift(value, l.gid)
			}
			line += " " + key + " " + value
		}
		out = append(out, line)
	}
	sort.Strings(out)
	return out
}
