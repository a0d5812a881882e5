package inspector

import (
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/bpf"
)

// ask runs an iterator of the kernel over one process and returns what it wrote, a
// row of type T for each thread, descriptor or mapping. A process that is gone has
// none.
//
// The library has no iterators over one process, so the two calls are made here; all
// that ask passes on are numbers.
func ask[T any](p *ebpf.Program, pid int) ([]T, error) {
	// union bpf_iter_link_info, its part "task".
	info := struct{ tid, pid, pidFD uint32 }{pid: uint32(pid)}
	// union bpf_attr for BPF_LINK_CREATE, its parts for iterators.
	create := struct {
		prog, target, kind, flags uint32
		info                      unsafe.Pointer // 64 bits on every host that we run on
		size, _                   uint32
	}{prog: uint32(p.FD()), kind: bpfTraceIter, info: unsafe.Pointer(&info), size: uint32(unsafe.Sizeof(info))}
	link, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_LINK_CREATE, uintptr(unsafe.Pointer(&create)), unsafe.Sizeof(create))
	runtime.KeepAlive(p)
	if errno != 0 {
		return nil, fmt.Errorf("asking the kernel about process %d: %w", pid, errno)
	}
	defer unix.Close(int(link))
	open := struct{ link, flags uint32 }{link: uint32(link)}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_ITER_CREATE, uintptr(unsafe.Pointer(&open)), unsafe.Sizeof(open))
	if errno != 0 {
		return nil, fmt.Errorf("asking the kernel about process %d: %w", pid, errno)
	}
	f := os.NewFile(fd, "bpf_iter")
	defer f.Close()
	data, err := io.ReadAll(f)
	if err != nil {
		return nil, fmt.Errorf("asking the kernel about process %d: %w", pid, err)
	}
	rows, err := rowsOf[T](data)
	if err != nil {
		return nil, fmt.Errorf("asking the kernel about process %d: %w", pid, err)
	}
	return rows, nil
}

// rowsOf takes what an iterator wrote apart.
func rowsOf[T any](data []byte) ([]T, error) {
	var row T
	size := int(unsafe.Sizeof(row))
	if len(data)%size != 0 {
		return nil, fmt.Errorf("%d bytes are no whole rows of %d", len(data), size)
	}
	rows := make([]T, len(data)/size)
	for i := range rows {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&rows[i])), size), data[i*size:])
	}
	return rows, nil
}

const bpfTraceIter = 28 // BPF_TRACE_ITER

// survivors is what the Kernel has for processes that were saved asleep.
type survivors struct {
	drowsy []byte // how many have ids with the same last 16 bits, 64 bits each

	mu     sync.Mutex
	closed bool
	links  []link.Link
}

func (s *survivors) open(m *ebpf.Map) (err error) {
	s.drowsy, err = unix.Mmap(m.FD(), 0, 8<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mapping the table of sleepers: %w", err)
	}
	return nil
}

// watchSurvivors attaches the programs that look at every call on the host for the
// sake of processes that sleep: none before there is the first.
func (k *Kernel) watchSurvivors() (err error) {
	s := &k.survivors
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errClosed
	}
	if len(s.links) == 0 {
		var links []link.Link
		if links, err = attach(k.objs.Beside, k.objs.Signalled); err != nil {
			for _, l := range links {
				_ = l.Close()
			}
			return err
		}
		s.links = links
	}
	return nil
}

// close gives back what is attached.
func (s *survivors) close() []link.Link {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return s.links
}

// asleep makes a process one of those that the programs look for.
func (k *Kernel) asleep(pid uint32) error {
	if err := k.objs.Sleepers.Put(&pid, &bpf.InspectorSleeper{}); err != nil {
		return err
	}
	atomic.AddUint64(k.drowsy(pid), 1)
	return nil
}

// awake undoes asleep.
func (k *Kernel) awake(pid uint32) {
	atomic.AddUint64(k.drowsy(pid), ^uint64(0))
	_ = k.objs.Sleepers.Delete(&pid)
}

func (k *Kernel) drowsy(pid uint32) *uint64 {
	return (*uint64)(unsafe.Pointer(&k.survivors.drowsy[8*(pid&0xffff)]))
}

func (k *Kernel) threadsOf(pid int) ([]bpf.InspectorThread, error) {
	return ask[bpf.InspectorThread](k.objs.ThreadsOf, pid)
}

// heldBy returns the descriptors and file mappings of a process.
func (k *Kernel) heldBy(pid int) ([]bpf.InspectorHeld, error) {
	files, err := ask[bpf.InspectorHeld](k.objs.FilesOf, pid)
	if err != nil {
		return nil, err
	}
	mapped, err := ask[bpf.InspectorHeld](k.objs.MappingsOf, pid)
	return append(files, mapped...), err
}

func nameOf(h *bpf.InspectorHeld) string {
	b := unsafe.Slice((*byte)(unsafe.Pointer(&h.Name[0])), len(h.Name))
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}
