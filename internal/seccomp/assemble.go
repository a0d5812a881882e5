package seccomp

import (
	"crypto/sha256"
	"encoding/binary"
	"reflect"
	"sync"

	"golang.org/x/sys/unix"
)

// instruction is struct sock_filter.
type instruction struct {
	op     uint16
	jt, jf uint8
	k      uint32
}

const (
	load   = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
	equal  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
	above  = unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K
	anyBit = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
	jump   = unix.BPF_JMP | unix.BPF_JA
	ret    = unix.BPF_RET | unix.BPF_K
)

// Offsets in struct seccomp_data.
const (
	dataNumber = 0
	dataArch   = 4
	dataArg0   = 16 // its lower half, all that the kernel reads of those that are looked at
)

// x32 calls have this bit in their numbers.
const x32 = 0x40000000

var (
	programs = func() (p [last]func() []byte) {
		for g := range p {
			p[g] = sync.OnceValue(func() []byte { return encode(assemble(Groups(g))) })
		}
		return p
	}()
	digest = sync.OnceValue(func() []byte {
		h := sha256.New()
		for g := range last {
			h.Write(Program(g))
		}
		return h.Sum(nil)
	})
)

func encode(p []instruction) []byte {
	var b []byte
	for _, i := range p {
		b = binary.NativeEndian.AppendUint16(b, i.op)
		b = append(b, i.jt, i.jf)
		b = binary.NativeEndian.AppendUint32(b, i.k)
	}
	return b
}

// assemble makes the program: the interface, then a search for the call's number among runs of calls that fare alike.
func assemble(g Groups) []instruction {
	r := rules(g)
	native := append([]instruction{{load, 0, 0, dataNumber}}, search(append(runs(byNumber(r, 0)), run{x32, rule{ret: errno(unix.ENOSYS)}}))...)
	compat := append([]instruction{{load, 0, 0, dataNumber}}, search(runs(byNumber(r, 1)))...)
	p := []instruction{
		{load, 0, 0, dataArch},
		{equal, 0, 1, unix.AUDIT_ARCH_X86_64},
		{jump, 0, 0, 3},
		{equal, 1, 0, unix.AUDIT_ARCH_I386},
		{ret, 0, 0, retKill},
		{jump, 0, 0, uint32(len(native))},
	}
	return append(append(p, native...), compat...)
}

// run is a run of numbers, up to the next one's first.
type run struct {
	first uint32
	rule
}

func runs(table []rule) (out []run) {
	for n, r := range table {
		if n == 0 || !reflect.DeepEqual(r, table[n-1]) {
			out = append(out, run{uint32(n), r})
		}
	}
	return out
}

func search(r []run) []instruction {
	if len(r) == 1 {
		return r[0].decide()
	}
	half := len(r) / 2
	low, high := search(r[:half]), search(r[half:])
	last := r[half].first - 1
	p := []instruction{{above, uint8(len(low)), 0, last}}
	if len(low) > 255 { // further than a condition can jump
		p = []instruction{{above, 0, 1, last}, {jump, 0, 0, uint32(len(low))}}
	}
	return append(append(p, low...), high...)
}

func (r rule) decide() []instruction {
	if r.without != 0 {
		return []instruction{{load, 0, 0, dataArg0}, {anyBit, 0, 1, r.without}, {ret, 0, 0, r.ret}, {ret, 0, 0, retAllow}}
	}
	if r.oneOf == nil {
		return []instruction{{ret, 0, 0, r.ret}}
	}
	p := []instruction{{load, 0, 0, dataArg0}}
	for i, v := range r.oneOf {
		p = append(p, instruction{equal, uint8(len(r.oneOf) - i), 0, v})
	}
	return append(p, instruction{ret, 0, 0, r.ret}, instruction{ret, 0, 0, retAllow})
}
