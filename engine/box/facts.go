package box

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/fault"
)

// SessionFacts is what the kernel knows of a session's program, seen from outside.
type SessionFacts struct {
	// Text is everything that a new program in the session's place would have to
	// have in common with it, one fact a line; none of it names a host id.
	Text []byte
	// Limits of resources that differ from those of a new process, by the name that
	// /proc/PID/limits gives them: soft and hard.
	Limits map[string][2]string
	// Busy says why the program isn't alone with its channel, waiting to be told
	// something; empty: it is.
	Busy string
	// Cwd is the folder it is in, without symlinks; User its "uid:gid"; Umask its mask.
	Cwd, User string
	Umask     uint32
}

// factsOf are the lines of /proc/PID/status that are state and not told otherwise.
var factsOf = []string{
	"Groups", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb",
	"Cpus_allowed", "Mems_allowed", "Umask",
}

// idlePatience is how long a shell may take to be back at its channel after it has
// answered: it waits for the subshell that did, and runs what it runs before a prompt.
const idlePatience = 250 * time.Millisecond

// Idle is Facts once the session waits to be told something. One that doesn't come to
// that is Busy.
func (b *box) Idle(name string) (SessionFacts, error) {
	s, err := b.session(name)
	if err != nil {
		return SessionFacts{}, err
	}
	for began := time.Now(); !listening(s.HostPID); time.Sleep(50 * time.Microsecond) {
		if time.Since(began) > idlePatience {
			f, err := b.Facts(name)
			if f.Busy == "" {
				f.Busy = "it doesn't wait at its channel"
			}
			return f, err
		}
	}
	return b.Facts(name)
}

// Resting is what can be asked of a frozen box in no time: whether its sessions, all of which
// waited at their channels before it was frozen, are alone in it, and nothing has come that
// will wake one. It says why not; "" if so. Processes that are ignored count for nothing.
func (b *box) Resting(ignored func(Proc) bool) (string, error) {
	pids, err := cgroup.Pids(b.group.Run)
	if err != nil {
		return "", b.orGone(err)
	}
	list := b.Sessions()
	if len(pids) != len(list) {
		pids = slices.DeleteFunc(pids, func(pid int) bool {
			p, ok := readProc(pid)
			return ok && ignored(p)
		})
	}
	if len(pids) != len(list) {
		return fmt.Sprintf("%d processes are there, and %d sessions", len(pids), len(list)), nil
	}
	for _, s := range list {
		if !slices.Contains(pids, s.HostPID) {
			return "session " + s.Name + " has ended", nil
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.HostPID))
		if err != nil {
			return "", b.orGone(err)
		}
		seen := 0
		for line := range strings.Lines(string(status)) {
			key, value, _ := strings.Cut(line, ":")
			value = strings.TrimSpace(value)
			switch key {
			case "SigPnd", "ShdPnd":
				if seen++; strings.Trim(value, "0") != "" {
					return "a signal waits for session " + s.Name, nil
				}
			case "Threads":
				if seen++; value != "1" {
					return "session " + s.Name + " has threads", nil
				}
			}
		}
		if seen != 3 {
			return "the kernel doesn't tell of signals", nil
		}
	}
	return "", nil
}

// listening: the process is blocked in read(0, ...), call number 0 of x86-64.
func listening(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", pid))
	return err == nil && strings.HasPrefix(string(text), "0 0x0 ")
}

// Facts reads what the kernel knows of a session. It works on a frozen box, too, in
// which a program that waited may be seen on its way to its call again.
func (b *box) Facts(name string) (SessionFacts, error) {
	s, err := b.session(name)
	if err != nil {
		return SessionFacts{}, err
	}
	r := factReader{dir: fmt.Sprintf("/proc/%d", s.HostPID), base: idBase(b.rec.Slot)}
	f := r.facts(s)
	if r.err == nil {
		f.Limits = r.limits(fmt.Sprintf("/proc/%d", b.rec.PID))
	}
	if r.err != nil {
		return SessionFacts{}, b.orGone(fault.New(fault.NotFound, "session_gone", "session %q has ended: %w", name, r.err))
	}
	return f, nil
}

type factReader struct {
	dir  string
	base int
	err  error
}

func (r *factReader) read(name string) string {
	text, err := os.ReadFile(filepath.Join(r.dir, name))
	if err != nil && r.err == nil {
		r.err = err
	}
	return string(text)
}

func (r *factReader) facts(s Session) (f SessionFacts) {
	var out bytes.Buffer
	status := map[string]string{}
	for line := range strings.Lines(r.read("status")) {
		key, value, _ := strings.Cut(line, ":")
		status[key] = strings.Join(strings.Fields(value), " ")
	}
	busy := func(format string, args ...any) {
		if f.Busy == "" {
			f.Busy = fmt.Sprintf(format, args...)
		}
	}
	if pid := strconv.Itoa(s.PID); !strings.HasSuffix(" "+status["NSpid"], " "+pid) {
		busy("its process is another")
	}
	for _, key := range []string{"Uid", "Gid", "Groups"} {
		fmt.Fprintf(&out, "%s %s\n", key, r.relative(status[key]))
	}
	for _, key := range factsOf[1:] {
		fmt.Fprintf(&out, "%s %s\n", key, status[key])
	}
	if status["Threads"] != "1" {
		busy("it has threads")
	}
	if status["TracerPid"] != "0" {
		busy("it is traced")
	}
	for _, key := range []string{"SigPnd", "ShdPnd"} {
		if strings.Trim(status[key], "0") != "" {
			busy("a signal waits for it")
		}
	}
	fields := statFields([]byte(r.read("stat")))
	if len(fields) < 40 {
		r.err = errNoProcess
		return f
	}
	if fields[0] == "T" || fields[0] == "t" || fields[0] == "Z" || fields[0] == "X" {
		busy("it is stopped or dead")
	}
	host := strconv.Itoa(s.HostPID)
	fmt.Fprintf(&out, "leads its group %t and session %t\n", fields[2] == host, fields[3] == host)
	fmt.Fprintf(&out, "nice %s policy %s rt %s\n", fields[16], fields[38], fields[37])
	for _, name := range []string{"oom_score_adj", "personality", "coredump_filter", "timerslack_ns"} {
		fmt.Fprintf(&out, "%s %s\n", name, strings.TrimSpace(r.read(name)))
	}
	if s.TTY && fields[5] != host {
		busy("something else is in the foreground of its terminal")
	}
	if timers := r.read("timers"); timers != "" {
		busy("it has timers")
	}
	if kids := strings.Fields(r.read("task/" + host + "/children")); len(kids) > 0 {
		busy("it has %d children", len(kids))
	}
	exe, err := os.Readlink(filepath.Join(r.dir, "exe"))
	if err != nil {
		r.err = err
		return f
	}
	fmt.Fprintf(&out, "program %q\n", exe)
	if strings.HasSuffix(exe, " (deleted)") {
		busy("its program was replaced")
	}
	if f.Cwd, err = os.Readlink(filepath.Join(r.dir, "cwd")); err != nil {
		r.err = err
		return f
	}
	if strings.HasSuffix(f.Cwd, " (deleted)") {
		busy("the folder it is in was removed")
	}
	fmt.Fprintf(&out, "cwd %q\n", f.Cwd)
	uid, _, _ := strings.Cut(r.relative(status["Uid"]), " ")
	gid, _, _ := strings.Cut(r.relative(status["Gid"]), " ")
	f.User = uid + ":" + gid
	mask, err := strconv.ParseUint(status["Umask"], 8, 32)
	if err != nil {
		r.err = err
	}
	f.Umask = uint32(mask)
	if why := r.files(s); why != "" {
		busy("%s", why)
	}
	f.Text = out.Bytes()
	return f
}

// relative makes host ids those of the box.
func (r *factReader) relative(ids string) string {
	words := strings.Fields(ids)
	for i, w := range words {
		if n, err := strconv.Atoi(w); err == nil {
			words[i] = strconv.Itoa(n - r.base)
		}
	}
	return strings.Join(words, " ")
}

// files says which open files a session has that it didn't have from the start.
func (r *factReader) files(s Session) string {
	entries, err := os.ReadDir(filepath.Join(r.dir, "fd"))
	if err != nil {
		r.err = err
		return ""
	}
	pts := fmt.Sprintf("/dev/pts/%d", s.PTS)
	want := map[string][]string{
		"0": {fmt.Sprintf("socket:[%d]", s.inodes[0])},
		"1": {fmt.Sprintf("pipe:[%d]", s.inodes[1])}, "2": {fmt.Sprintf("pipe:[%d]", s.inodes[2])},
		"255": {pts, "/dev/tty"}, // what a shell keeps of the terminal
	}
	if s.TTY {
		want["1"], want["2"] = []string{pts}, []string{pts}
	}
	seen := 0
	for _, e := range entries {
		at, err := os.Readlink(filepath.Join(r.dir, "fd", e.Name()))
		if err != nil {
			r.err = err
			return ""
		}
		if !slices.Contains(want[e.Name()], at) {
			return fmt.Sprintf("its descriptor %s is open on %s", e.Name(), printable(at))
		}
		if e.Name() != "255" {
			seen++
		}
	}
	if seen != 3 {
		return "its stdin, stdout or stderr is closed"
	}
	return ""
}

// limits of the process that aren't those of pid 1, from which it has them.
func (r *factReader) limits(pid1 string) map[string][2]string {
	own := parseLimits(r.read("limits"))
	r.dir = pid1
	first := parseLimits(r.read("limits"))
	for name, v := range first {
		if own[name] == v {
			delete(own, name)
		}
	}
	return own
}

// parseLimits reads "Max cpu time             unlimited            unlimited            seconds".
func parseLimits(text string) map[string][2]string {
	out := map[string][2]string{}
	for line := range strings.Lines(text) {
		if len(line) < 68 || !strings.HasPrefix(line, "Max ") {
			continue
		}
		out[strings.TrimSpace(line[:26])] = [2]string{strings.TrimSpace(line[26:47]), strings.TrimSpace(line[47:68])}
	}
	return out
}
