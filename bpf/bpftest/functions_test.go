package bpftest

import (
	"encoding/binary"
	"math"
	"net"
	"os"
	"runtime"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/testenv"
)

func load(t *testing.T) *FunctionsObjects {
	t.Helper()
	testenv.Require(t, testenv.Root, testenv.BPF)
	spec, err := LoadFunctions()
	if err != nil {
		t.Fatal(err)
	}
	var classes [512]uint16
	for i := range classes {
		classes[i] = uint16(i)
	}
	if err := spec.Variables["calls"].Set(classes); err != nil {
		t.Fatal(err)
	}
	var o FunctionsObjects
	if err := spec.LoadAndAssign(&o, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.Close() })
	return &o
}

// call runs one function in the kernel, in this thread.
func call(t *testing.T, p *ebpf.Program, args ...uint64) int32 {
	t.Helper()
	var context [4]uint64
	copy(context[:], args)
	r, err := p.Run(&ebpf.RunOptions{Context: context})
	if err != nil {
		t.Fatal(err)
	}
	return int32(r)
}

func TestHarmlessIoctls(t *testing.T) {
	o := load(t)
	for request, want := range map[uint64]int32{
		unix.TCGETS: 1, 0x541b: 1, unix.SIOCGIFFLAGS: 1, unix.FS_IOC_GETFLAGS: 1, unix.TIOCGPTN: 1,
		unix.TCSETS: 0, unix.TIOCSTI: 0, unix.SIOCSIFFLAGS: 0, unix.SIOCSIFMTU: 0, unix.SIOCADDRT: 0,
		unix.FS_IOC_SETFLAGS: 0, unix.FICLONE: 0, unix.FICLONERANGE: 0, 0xdeadbeef: 0,
	} {
		if got := call(t, o.RunHarmless, request); got != want {
			t.Errorf("%#x: harmless %d, want %d", request, got, want)
		}
	}
}

func TestIPCReads(t *testing.T) {
	o := load(t)
	for _, c := range []struct {
		call, cmd uint64
		want      int32
	}{
		{31, unix.IPC_STAT, 1}, {31, unix.IPC_RMID, 0}, {31, unix.IPC_SET, 0}, {31, 11 /* SHM_LOCK */, 0}, {31, 13 /* SHM_STAT */, 1},
		{66, 16 /* SETVAL */, 0}, {66, 17 /* SETALL */, 0}, {66, 12 /* GETVAL */, 1}, {66, unix.IPC_RMID, 0},
		{71, unix.IPC_RMID, 0}, {71, 12 /* MSG_INFO */, 1}, {31, unix.IPC_STAT | 0x100, 1},
	} {
		if got := call(t, o.RunIpcReads, c.call, c.cmd); got != c.want {
			t.Errorf("call %d, command %d: reads %d, want %d", c.call, c.cmd, got, c.want)
		}
	}
}

func TestCallsThatMayBeHalfDone(t *testing.T) {
	o := load(t)
	for errno, want := range map[unix.Errno]int32{
		unix.ENOSPC: 1, unix.EINTR: 1, unix.EDQUOT: 1, unix.EIO: 1, 512: 1, 516: 1,
		unix.ENOENT: 0, unix.EPERM: 0, unix.EBADF: 0, unix.EEXIST: 0,
	} {
		if got := call(t, o.RunHalfDone, uint64(-int64(errno))); got != want {
			t.Errorf("%v: %d, want %d", errno, got, want)
		}
	}
}

func TestAddressesThatLeave(t *testing.T) {
	o := load(t)
	for ip, want := range map[string]int32{
		"127.0.0.1": 0, "127.9.9.9": 0, "0.0.0.0": 0, "10.1.2.3": 1, "169.254.169.254": 1,
		"::1": 0, "::": 0, "2001:db8::1": 1, "fe80::1": 1,
	} {
		raw := make([]byte, 28)
		if v4 := net.ParseIP(ip).To4(); v4 != nil {
			binary.NativeEndian.PutUint16(raw, unix.AF_INET)
			copy(raw[4:], v4)
		} else {
			binary.NativeEndian.PutUint16(raw, unix.AF_INET6)
			copy(raw[8:], net.ParseIP(ip))
		}
		got := call(t, o.RunLeaves, uint64(uintptr(unsafe.Pointer(&raw[0]))), uint64(len(raw)))
		if got != want {
			t.Errorf("%s: leaves %d, want %d", ip, got, want)
		}
		// A datagram may go to an address of no family, which is one of IPv4; to connect there is to disconnect.
		if net.ParseIP(ip).To4() != nil {
			binary.NativeEndian.PutUint16(raw, unix.AF_UNSPEC)
			for datagram, want := range []int32{0, want} {
				if got := call(t, o.RunLeaves, uint64(uintptr(unsafe.Pointer(&raw[0]))), uint64(len(raw)), uint64(datagram)); got != want {
					t.Errorf("%s of no family, a datagram %d: leaves %d, want %d", ip, datagram, got, want)
				}
			}
		}
		runtime.KeepAlive(raw)
	}
}

// As in enum kind of bpf/files.h.
const (
	nothing = iota
	own
	outside
	control
	terminal
	socket
	none = 100
)

func TestPlacesOfDescriptors(t *testing.T) {
	o := load(t)
	open := func(path string) int {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	var pipe [2]int
	if err := unix.Pipe(pipe[:]); err != nil {
		t.Fatal(err)
	}
	sock, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	memory, err := unix.MemfdCreate("x", 0)
	if err != nil {
		t.Fatal(err)
	}
	event, err := unix.Eventfd(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		fd   int
		want int32
	}{
		{"a pipe", pipe[1], nothing}, {"a socket", sock, socket}, {"a memfd", memory, nothing}, {"an eventfd", event, nothing},
		{"/dev/null", open("/dev/null"), nothing}, {"/proc", open("/proc/self/comm"), control}, {"/sys", open("/sys/kernel/btf/vmlinux"), control},
		{"a file of the host", int(file.Fd()), outside}, {"no descriptor", 9999, none},
	} {
		if got := call(t, o.RunPlace, uint64(c.fd)); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
		if c.fd != 9999 && c.fd != int(file.Fd()) {
			unix.Close(c.fd)
		}
	}
	if got := call(t, o.RunShared); got != 1 {
		t.Errorf("a Go program's threads share their descriptors; got %d", got)
	}
}

func TestInodesAreNoted(t *testing.T) {
	o := load(t)
	read := func() (b FunctionsBox) {
		t.Helper()
		if err := o.Boxes.Lookup(uint32(0), &b); err != nil {
			t.Fatal(err)
		}
		return b
	}
	if err := o.Boxes.Put(uint32(0), FunctionsBox{FirstNew: 1000}); err != nil {
		t.Fatal(err)
	}
	call(t, o.RunNoteInode, 1000, 1)
	if b := read(); b.Epoch != 0 {
		t.Errorf("content of a new inode sets %#x", b.Epoch)
	}
	call(t, o.RunNoteInode, 1000, 0)
	if b := read(); b.Epoch != 1<<11 || b.Turn != b.Epoch {
		t.Errorf("metadata of a new inode sets %#x", b.Epoch)
	}
	for ino := range uint64(300) {
		call(t, o.RunNoteInode, ino, 1)
		call(t, o.RunNoteInode, ino, 1) // the same again needs no room
	}
	b := read()
	if b.Epoch != 1<<11|1<<2 || b.Ninodes < 300 {
		t.Errorf("flags %#x, %d inodes", b.Epoch, b.Ninodes)
	}
	for i, ino := range b.Inodes {
		if ino != uint64(i) {
			t.Fatalf("inode %d is noted as %d", i, ino)
		}
	}
}

func TestCallsOutOfTheTable(t *testing.T) {
	o := load(t)
	for nr, want := range map[uint64]int32{0: 0, 511: 511, 512: 0, math.MaxUint64: 0} {
		if got := call(t, o.RunClassOf, nr); got != want {
			t.Errorf("class of call %d is %d, want %d", nr, got, want)
		}
	}
}

// As in enum class of bpf/box.h.
const (
	names   = 1 << 0
	fd      = 1 << 2
	content = 1 << 3
	opens   = 1 << 4
	special = 1 << 7
	named   = 1 << 10
	evicts  = 1 << 11
)

func TestCallsThatChangeNothing(t *testing.T) {
	o := load(t)
	failed := func(e unix.Errno) uint64 { return uint64(-int64(e)) }
	for _, c := range []struct {
		what   string
		class  uint64
		nr     uint64
		result uint64
		want   int32
	}{
		{"a read", named, unix.SYS_READ, 5, 1},
		{"a close", named | evicts, unix.SYS_CLOSE, 0, 1},
		{"a call that isn't in the table", 0, 500, 0, 0},
		{"one that failed", 0, 500, failed(unix.EPERM), 0},
		{"a write", named | fd | content, unix.SYS_WRITE, 1, 0},
		{"a write of nothing", named | fd | content, unix.SYS_WRITE, 0, 1},
		{"a write that failed", named | fd | content, unix.SYS_WRITE, failed(unix.EBADF), 1},
		{"a write that ran out of space", named | fd | content, unix.SYS_WRITE, failed(unix.ENOSPC), 0},
		{"an fchmod, which gives 0", named | fd, unix.SYS_FCHMOD, 0, 0},
		{"a rename", named | names, unix.SYS_RENAME, 0, 0},
		{"a rename that failed", named | names, unix.SYS_RENAME, failed(unix.ENOENT), 1},
		{"a rename that was interrupted", named | names, unix.SYS_RENAME, failed(unix.EINTR), 0},
		{"an openat2, whose flags lie in memory", named | opens, unix.SYS_OPENAT2, 3, 0},
		{"a creat", named | opens, unix.SYS_CREAT, 3, 0},
		{"a connect that failed", named | special, unix.SYS_CONNECT, failed(unix.ENETUNREACH), 0},
		{"an ioctl that failed", named | special, unix.SYS_IOCTL, failed(unix.ENOTTY), 1},
	} {
		if got := call(t, o.RunChangesNothing, c.class, c.nr, c.result); got != c.want {
			t.Errorf("%s: %d, want %d", c.what, got, c.want)
		}
	}
}
