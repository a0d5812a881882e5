// Package hostload reads how much a host and this process have to do.
package hostload

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Sample is one reading. What is a sum grows from some start on; the difference of two readings counts.
type Sample struct {
	At time.Time
	// Stalls is the time in which tasks waited for something that there was too little of (PSI); nil on a kernel that
	// doesn't tell.
	Stalls *Stalls
	// MemoryAvailable is what could be had without swapping, of MemoryTotal bytes.
	MemoryTotal, MemoryAvailable int64
	// Processor time of this process so far, and how many bytes of it are in memory.
	Processor time.Duration
	Resident  int64
}

// Stalls are times in which some task, or (Full) all that had something to do, waited.
type Stalls struct {
	CPU, IO, IOFull, Memory, MemoryFull time.Duration
}

// Since is what came after an earlier reading.
func (s Stalls) Since(e Stalls) Stalls {
	return Stalls{s.CPU - e.CPU, s.IO - e.IO, s.IOFull - e.IOFull, s.Memory - e.Memory, s.MemoryFull - e.MemoryFull}
}

// Read takes one.
func Read() (Sample, error) { return read("/proc") }

// ReadStalls reads these alone.
func ReadStalls() (*Stalls, error) { return readStalls("/proc/pressure") }

func read(proc string) (s Sample, err error) {
	s.At = time.Now()
	if s.Stalls, err = readStalls(proc + "/pressure"); err != nil {
		return s, err
	}
	text, err := os.ReadFile(proc + "/meminfo")
	if err != nil {
		return s, fmt.Errorf("reading how much memory there is: %w", err)
	}
	for name, to := range map[string]*int64{"MemTotal:": &s.MemoryTotal, "MemAvailable:": &s.MemoryAvailable} {
		if *to, err = kibibytes(text, name); err != nil {
			return s, fmt.Errorf("reading %s/meminfo: %w", proc, err)
		}
	}
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		return s, fmt.Errorf("reading this process's times: %w", err)
	}
	s.Processor = time.Duration(used.Utime.Nano() + used.Stime.Nano())
	if text, err = os.ReadFile(proc + "/self/statm"); err != nil {
		return s, fmt.Errorf("reading this process's size: %w", err)
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return s, fmt.Errorf("reading %s/self/statm: it has %d fields", proc, len(fields))
	}
	pages, err := strconv.ParseInt(fields[1], 10, 64)
	if err != nil {
		return s, fmt.Errorf("reading %s/self/statm: %w", proc, err)
	}
	s.Resident = pages * int64(os.Getpagesize())
	return s, nil
}

func kibibytes(text []byte, name string) (int64, error) {
	for line := range bytes.Lines(text) {
		if f := strings.Fields(string(line)); len(f) >= 2 && f[0] == name {
			n, err := strconv.ParseInt(f[1], 10, 64)
			return n << 10, err
		}
	}
	return 0, fmt.Errorf("there is no %s", name)
}

// readStalls reads lines such as
//
//	some avg10=48.85 avg60=47.00 avg300=28.58 total=30229548735
//
// whose total is in microseconds.
func readStalls(dir string) (*Stalls, error) {
	var s Stalls
	for file, to := range map[string]map[string]*time.Duration{
		"cpu": {"some": &s.CPU}, "io": {"some": &s.IO, "full": &s.IOFull}, "memory": {"some": &s.Memory, "full": &s.MemoryFull},
	} {
		text, err := os.ReadFile(dir + "/" + file)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EOPNOTSUPP) { // not built in, or switched off
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("reading the pressure on %s: %w", file, err)
		}
		for line := range strings.Lines(string(text)) {
			words := strings.Fields(line)
			if len(words) == 0 || to[words[0]] == nil {
				continue
			}
			total, ok := strings.CutPrefix(words[len(words)-1], "total=")
			us, err := strconv.ParseInt(total, 10, 64)
			if !ok || err != nil {
				return nil, fmt.Errorf("reading the pressure on %s: %q has no total", file, line)
			}
			*to[words[0]] = time.Duration(us) * time.Microsecond
			delete(to, words[0])
		}
		if len(to) > 0 {
			return nil, fmt.Errorf("reading the pressure on %s: %q lacks a line", file, text)
		}
	}
	return &s, nil
}
