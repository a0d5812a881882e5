package inspector

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// lookAt describes a process to somebody who knows nothing of the inspector, by what
// /proc shows and its memory holds: a line for each thing that a dump would have to
// save. Two descriptions of a process that nothing has happened to are equal.
func lookAt(pid int) (lines []string, err error) {
	say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	proc := fmt.Sprintf("/proc/%d/", pid)
	tasks, err := os.ReadDir(proc + "task")
	if err != nil {
		return nil, err
	}
	var stacks []uint64
	runs := false
	for _, t := range tasks {
		dir := proc + "task/" + t.Name() + "/"
		status, err := os.ReadFile(dir + "status")
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(status)) {
			name, _, _ := strings.Cut(line, ":")
			if slices.Contains(strings.Fields("Umask Uid Gid Groups NSpgid NSsid Threads SigPnd ShdPnd SigBlk SigIgn SigCgt CapInh CapPrm CapEff NoNewPrivs Seccomp Cpus_allowed Mems_allowed"), name) {
				say("%s %s", t.Name(), strings.Join(strings.Fields(line), " "))
			}
		}
		stat, err := os.ReadFile(dir + "stat")
		if err != nil {
			return nil, err
		}
		f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+2:]))
		// From proc_pid_stat(5), less 3: priority, nice, start, real-time priority, policy.
		say("%s scheduled %s %s %s %s %s", t.Name(), f[15], f[16], f[19], f[37], f[38])
		say("%s zombie %v, stopped %v", t.Name(), f[0] == "Z", f[0] == "T" || f[0] == "t")
		tid, _ := strconv.Atoi(t.Name())
		const who = 1 // IOPRIO_WHO_PROCESS
		io, _, _ := unix.Syscall(unix.SYS_IOPRIO_GET, who, uintptr(tid), 0)
		say("%s io %#x", t.Name(), io)
		if call, err := os.ReadFile(dir + "syscall"); err == nil {
			if f := strings.Fields(string(call)); len(f) > 2 { // ... stack pointer, program counter
				sp, _ := strconv.ParseUint(f[len(f)-2], 0, 64)
				stacks = append(stacks, sp)
			} else if len(f) > 0 && f[0] == "running" {
				runs = true
			}
		}
	}
	for _, name := range []string{"limits", "oom_score_adj", "personality", "maps"} {
		data, err := os.ReadFile(proc + name)
		if err != nil {
			return nil, err
		}
		say("%s %x", name, sha256.Sum256(data))
	}
	for _, name := range []string{"cwd", "root", "exe"} {
		to, _ := os.Readlink(proc + name)
		say("%s %s", name, to)
	}
	if runs {
		return append(lines, onItsWay), nil
	}
	if err := memory(proc, stacks, say); err != nil {
		return nil, err
	}
	return lines, descriptors(pid, proc, say)
}

// onItsWay is in the description of a process that ran while it was looked at, so that
// nothing can be said of its memory; maybe it had no chance to run since it was thawed.
const onItsWay = "on its way"

var region = regexp.MustCompile(`^([0-9a-f]+)-([0-9a-f]+) (....) \S+ \S+ \d+ *(.*)$`)

// memory digests what a process can write, but for what lies below a stack pointer,
// which no program may lean on.
func memory(proc string, stacks []uint64, say func(string, ...any)) error {
	mem, err := os.Open(proc + "mem")
	if err != nil {
		return err
	}
	defer mem.Close()
	maps, err := os.Open(proc + "maps")
	if err != nil {
		return err
	}
	defer maps.Close()
	for s := bufio.NewScanner(maps); s.Scan(); {
		m := region.FindStringSubmatch(s.Text())
		if m == nil || m[3][1] != 'w' || strings.HasPrefix(m[4], "/w/") || strings.Contains(m[4], "/w/old") {
			continue // a file's content is the file half's
		}
		from, _ := strconv.ParseUint(m[1], 16, 64)
		to, _ := strconv.ParseUint(m[2], 16, 64)
		for _, sp := range stacks {
			if from <= sp && sp < to {
				from = sp
			}
		}
		h := sha256.New()
		buf := make([]byte, 64<<10)
		for at := from; at < to; {
			n, err := mem.ReadAt(buf[:min(uint64(len(buf)), to-at)], int64(at))
			if n == 0 {
				say("memory at %x: %v", at, err)
				break
			}
			h.Write(buf[:n])
			at += uint64(n)
		}
		say("memory %s from %x %x", m[1], from, h.Sum(nil))
	}
	return nil
}

// descriptors tells of each where it stands and what waits in it.
func descriptors(pid int, proc string, say func(string, ...any)) error {
	fds, err := os.ReadDir(proc + "fd")
	if err != nil {
		return err
	}
	self, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	defer unix.Close(self)
	for _, e := range fds {
		to, err := os.Readlink(proc + "fd/" + e.Name())
		if err != nil {
			continue
		}
		info, _ := os.ReadFile(proc + "fdinfo/" + e.Name())
		var kept []string
		for line := range strings.Lines(string(info)) {
			// A timer's time passes by itself.
			if !strings.HasPrefix(line, "it_value") && !strings.HasPrefix(line, "ticks") {
				kept = append(kept, strings.Join(strings.Fields(line), " "))
			}
		}
		waits := ""
		n, _ := strconv.Atoi(e.Name())
		if fd, err := unix.PidfdGetfd(self, n, 0); err == nil {
			if in, err := unix.IoctlGetInt(fd, unix.TIOCINQ); err == nil {
				waits = fmt.Sprintf(", %d bytes wait", in)
			}
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			if _, err := unix.Poll(p, 0); err == nil {
				waits += fmt.Sprintf(", events %#x", p[0].Revents)
			}
			unix.Close(fd)
		}
		say("fd %s %s %s%s", e.Name(), filepath.Base(to), strings.Join(kept, ";"), waits)
	}
	return nil
}
