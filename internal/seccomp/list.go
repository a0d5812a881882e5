package seccomp

import "golang.org/x/sys/unix"

// Fate is what becomes of a call.
type Fate uint8

const (
	Allowed Fate = iota
	ByArgument
	Refused // EPERM
	Absent  // ENOSYS
	Ignored // it returns 0
)

// Call is one system call of an interface.
type Call struct {
	Name   string
	Number int
	Fate   Fate
}

// Calls lists what becomes of every call of the 64-bit interface, or the 32-bit one.
func Calls(g Groups, compat bool) (calls []Call) {
	abi := 0
	if compat {
		abi = 1
	}
	of := rules(g)
	for name, n := range numbers {
		if n[abi] < 0 {
			continue
		}
		c := Call{Name: name, Number: n[abi], Fate: Refused}
		switch r, ok := of[name]; {
		case !ok:
		case r.without != 0 || r.oneOf != nil:
			c.Fate = ByArgument
		default:
			c.Fate = map[uint32]Fate{retAllow: Allowed, errno(unix.ENOSYS): Absent, errno(0): Ignored}[r.ret]
		}
		calls = append(calls, c)
	}
	return calls
}
