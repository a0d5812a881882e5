package seccomp

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// interpret runs a program as the kernel does.
func interpret(t *testing.T, p []instruction, arch, nr, arg0 uint32) uint32 {
	t.Helper()
	var a uint32
	for pc := 0; ; pc++ {
		if pc >= len(p) {
			t.Fatalf("the program runs out at %d", pc)
		}
		switch i := p[pc]; i.op {
		case load:
			a = map[uint32]uint32{dataNumber: nr, dataArch: arch, dataArg0: arg0}[i.k]
		case jump:
			pc += int(i.k)
		case ret:
			return i.k
		case equal, above, anyBit:
			if (i.op == equal && a == i.k) || (i.op == above && a > i.k) || (i.op == anyBit && a&i.k != 0) {
				pc += int(i.jt)
			} else {
				pc += int(i.jf)
			}
		default:
			t.Fatalf("instruction %#v", i)
		}
	}
}

// Every number of both interfaces, whatever is allowed beside the usual, is decided as the list says.
func TestProgramDecidesAsTheListSays(t *testing.T) {
	names := [2]map[int]string{{}, {}}
	for name, of := range numbers {
		for abi, n := range of {
			if n >= 0 {
				names[abi][n] = name
			}
		}
	}
	for g := range last {
		p := assemble(g)
		if len(p) > unix.BPF_MAXINSNS {
			t.Fatalf("%d instructions", len(p))
		}
		r := rules(g)
		for abi, arch := range []uint32{unix.AUDIT_ARCH_X86_64, unix.AUDIT_ARCH_I386} {
			for n := range newest(abi) + 50 {
				want := rule{ret: errno(unix.EPERM)}
				if name, ok := names[abi][n]; ok {
					if one, ok := r[name]; ok {
						want = one
					}
				} else if n > newest(abi) {
					want.ret = errno(unix.ENOSYS)
				}
				args := map[uint32]uint32{0: want.ret}
				if want.without != 0 {
					args = map[uint32]uint32{0: retAllow, unix.CLONE_THREAD | unix.CLONE_VM: retAllow, unix.CLONE_NEWUSER | 17: want.ret, unix.CLONE_NEWNET: want.ret}
				}
				if want.oneOf != nil {
					args[12345] = want.ret
					for _, v := range want.oneOf {
						args[v] = retAllow
					}
				}
				for arg, want := range args {
					if got := interpret(t, p, arch, uint32(n), arg); got != want {
						t.Fatalf("groups %q, call %d (%s) of interface %d with %#x: %#x, not %#x", g, n, names[abi][n], abi, arg, got, want)
					}
				}
			}
			for _, n := range []uint32{x32 - 1, ^uint32(0)} {
				if got := interpret(t, p, arch, n, 0); got != errno(unix.ENOSYS) {
					t.Errorf("call %#x: %#x", n, got)
				}
			}
		}
		for _, n := range []uint32{x32, x32 + unix.SYS_WRITE, x32 + 512, x32 + 600} {
			if got := interpret(t, p, unix.AUDIT_ARCH_X86_64, n, 0); got != errno(unix.ENOSYS) {
				t.Errorf("x32 call %#x: %#x", n, got)
			}
		}
		if got := interpret(t, p, unix.AUDIT_ARCH_AARCH64, 0, 0); got != retKill {
			t.Errorf("another machine's call: %#x", got)
		}
	}
}

// The lists name calls that are there, each once.
func TestListsNameCalls(t *testing.T) {
	seen := map[string]bool{}
	lists := []string{usual, absent}
	for _, names := range groupCalls {
		lists = append(lists, names)
	}
	for _, list := range lists {
		for _, name := range strings.Fields(list) {
			if _, ok := numbers[name]; !ok {
				t.Errorf("no call is named %s", name)
			}
			if seen[name] {
				t.Errorf("%s is there twice", name)
			}
			seen[name] = true
		}
	}
}

func TestGroups(t *testing.T) {
	g, err := Parse(All.Names())
	if err != nil || g != All || !g.Valid() {
		t.Errorf("%v, %v", g, err)
	}
	if _, err := Parse([]string{"io_uring", "bpf"}); err == nil || !strings.Contains(err.Error(), `"bpf"`) || !strings.Contains(fault.As(err).Hint, "io_uring, keyring") {
		t.Errorf("bpf: %v", err)
	}
	if last.Valid() {
		t.Error("a group that nobody knows is valid")
	}
	for group := range groupCalls {
		if len(group.Names()) != 1 {
			t.Errorf("group %#x has the names %q", uint64(group), group.Names())
		}
	}
}
