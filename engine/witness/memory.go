package witness

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Piece is some memory of a process: what it wrote itself, at these addresses.
type Piece struct {
	From, To uint64
	Sum      string // the first half of a sha256
}

// pieceMax is the most that one sum is of.
const pieceMax = 1 << 20

// written is how many bytes the kernel may write at an address of rseq(2).
const written = 32

// Remember writes down sums of the memory of each process but pid 1: all pages of its own, wherever they are
// mapped, and those of memory that it shares with others. What is mapped of files isn't memory but
// files. rseq are the places by the pid inside where the kernel writes at will; they are left out. The
// tree has to be as Of has seen it, and frozen.
func (s *State) Remember(rseq map[int][]uint64) error {
	for _, pid := range slices.Sorted(maps.Keys(s.hosts)) {
		p := s.Processes[pid]
		p.Rseq = rseq[pid]
		m, err := openMemory(s.hosts[pid])
		if err != nil {
			return err
		}
		p.Memory, err = m.pieces(p.Rseq)
		if err = errors.Join(err, m.Close()); err != nil {
			return fmt.Errorf("reading the memory of process %d: %w", pid, err)
		}
	}
	s.Remembers = true
	return nil
}

// MemoryDiff says where the memory of is, which Of has just seen and which is frozen, isn't what was remembers, a line for each
// piece. Memory that was has no sum of has to hold nothing, where it is neither shared nor a file's.
func MemoryDiff(was, is *State) ([]string, error) {
	var d []string
	for _, pid := range slices.Sorted(maps.Keys(is.hosts)) {
		p := was.Processes[pid]
		if p == nil {
			continue // Diff says so
		}
		m, err := openMemory(is.hosts[pid])
		if err != nil {
			return nil, err
		}
		found, err := m.differs(p)
		if err = errors.Join(err, m.Close()); err != nil {
			return nil, fmt.Errorf("reading the memory of process %d: %w", pid, err)
		}
		for _, line := range found {
			d = append(d, fmt.Sprintf("process %d: %s", pid, line))
		}
	}
	return d, nil
}

// memory is that of one process, by its host pid.
type memory struct {
	dir          string
	mem, pagemap *os.File
	buf          []byte
}

func openMemory(pid int) (*memory, error) {
	m := &memory{dir: fmt.Sprintf("/proc/%d", pid), buf: make([]byte, pieceMax)}
	var err error
	if m.mem, err = os.Open(m.dir + "/mem"); err != nil {
		return nil, err
	}
	if m.pagemap, err = os.Open(m.dir + "/pagemap"); err != nil {
		m.mem.Close()
		return nil, err
	}
	return m, nil
}

func (m *memory) Close() error { return errors.Join(m.mem.Close(), m.pagemap.Close()) }

// pieces sums all that there is.
func (m *memory) pieces(rseq []uint64) (out []Piece, err error) {
	err = m.walk(func(_ area, from, to uint64) error {
		sum, _ := m.sum(from, to, rseq)
		out = append(out, Piece{from, to, sum})
		return nil
	})
	return out, err
}

// differs says where this isn't the memory of was.
func (m *memory) differs(was *Process) (d []string, err error) {
	for _, p := range was.Memory {
		if sum, _ := m.sum(p.From, p.To, was.Rseq); sum != p.Sum {
			d = append(d, fmt.Sprintf("memory at %x-%x has another sum", p.From, p.To))
		}
	}
	err = m.walk(func(a area, from, to uint64) error {
		if a.perms[3] != 'p' || strings.HasPrefix(a.name, "/") {
			return nil // others may have put it there; a page may be equal to the file's, and isn't kept apart then
		}
		for _, gap := range without(from, to, was.Memory) {
			if _, holds := m.sum(gap[0], gap[1], was.Rseq); holds {
				d = append(d, fmt.Sprintf("memory at %x-%x holds something, and held nothing", gap[0], gap[1]))
			}
		}
		return nil
	})
	return d, err
}

// without is what of a range no piece covers. Pieces are in the order of their addresses.
func without(from, to uint64, pieces []Piece) (gaps [][2]uint64) {
	i, _ := slices.BinarySearchFunc(pieces, from, func(p Piece, at uint64) int {
		if p.To <= at {
			return -1
		}
		return 1
	})
	for ; from < to; i++ {
		if i == len(pieces) || pieces[i].From >= to {
			return append(gaps, [2]uint64{from, to})
		}
		if pieces[i].From > from {
			gaps = append(gaps, [2]uint64{from, pieces[i].From})
		}
		from = pieces[i].To
	}
	return gaps
}

// sum of the bytes at some addresses, and whether any is not 0. Pages that can't be read, as guards, count as zeros.
func (m *memory) sum(from, to uint64, rseq []uint64) (sum string, holds bool) {
	b := m.buf[:to-from]
	if _, err := m.mem.ReadAt(b, int64(from)); err != nil {
		size := os.Getpagesize()
		for at := 0; at < len(b); at += size {
			page := b[at:min(at+size, len(b))]
			if _, err := m.mem.ReadAt(page, int64(from)+int64(at)); err != nil {
				clear(page)
			}
		}
	}
	for _, at := range rseq {
		if at < to && at+written > from {
			clear(b[max(at, from)-from : min(at+written, to)-from])
		}
	}
	for _, c := range b {
		if c != 0 {
			holds = true
			break
		}
	}
	of := sha256.Sum256(b)
	return hex.EncodeToString(of[:16]), holds
}

// walk calls do with each range of pages that the process has in memory and that no file has, pieceMax at most.
func (m *memory) walk(do func(a area, from, to uint64) error) error {
	areas, err := areasOf(m.dir)
	if err != nil {
		return err
	}
	for _, a := range areas {
		scan := pageScan{start: a.from, end: a.to, anyOf: present | swapped}
		switch {
		case slices.Contains([]string{"[vvar]", "[vvar_vclock]", "[vdso]", "[vsyscall]"}, a.name) || strings.HasPrefix(a.name, "/[aio]"):
			continue // the kernel's
		case a.perms[3] == 'p':
			scan.inverted, scan.all = file|zero, file|zero // neither
		case sharedMemory(a.name):
		default:
			continue // a file
		}
		err := m.scan(scan, func(from, to uint64) error {
			for ; from < to; from += pieceMax {
				if err := do(a, from, min(to, from+pieceMax)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("%s: %w", a, err)
		}
	}
	return nil
}

// The categories of PAGEMAP_SCAN in linux/fs.h.
const (
	file    = 1 << 2
	present = 1 << 3
	swapped = 1 << 4
	zero    = 1 << 5
)

// pageScan is struct pm_scan_arg of linux/fs.h.
type pageScan struct {
	size, flags, start, end, walkEnd, vec, vecLen, maxPages, inverted, all, anyOf, returned uint64
}

const pagemapScan = 0xc0606610 // _IOWR('f', 16, struct pm_scan_arg)

// CanRemember says why this kernel can't tell which pages a process has; nil: it can.
func CanRemember() error {
	m, err := openMemory(os.Getpid())
	if err != nil {
		return err
	}
	defer m.Close()
	at := uint64(uintptr(unsafe.Pointer(&m.buf[0]))) &^ 4095
	err = m.scan(pageScan{start: at, end: at + 4096, anyOf: present}, func(uint64, uint64) error { return nil })
	if err == unix.ENOTTY || err == unix.EINVAL {
		return errors.New("the kernel can't list the pages of a process (PAGEMAP_SCAN, since Linux 6.7)")
	}
	return err
}

func (m *memory) scan(s pageScan, do func(from, to uint64) error) error {
	var regions [512]struct{ from, to, categories uint64 }
	s.size = uint64(unsafe.Sizeof(s))
	for s.start < s.end {
		s.vec, s.vecLen, s.walkEnd = uint64(uintptr(unsafe.Pointer(&regions))), uint64(len(regions)), 0
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, m.pagemap.Fd(), pagemapScan, uintptr(unsafe.Pointer(&s)))
		runtime.KeepAlive(&regions)
		if errno != 0 {
			return errno
		}
		for _, r := range regions[:n] {
			if err := do(r.from, r.to); err != nil {
				return err
			}
		}
		if s.walkEnd <= s.start {
			break
		}
		s.start = s.walkEnd
	}
	return nil
}

// WithoutMemory is s without what some of its processes, by their pid inside, have in memory and where.
func (s *State) WithoutMemory(pids []int) *State {
	out := *s
	out.Processes, out.hosts = maps.Clone(s.Processes), maps.Clone(s.hosts)
	for _, pid := range pids {
		delete(out.hosts, pid)
		if p := s.Processes[pid]; p != nil {
			bare := *p
			bare.Maps, bare.Memory = nil, nil
			out.Processes[pid] = &bare
		}
	}
	return &out
}
