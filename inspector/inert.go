package inspector

import "github.com/cilium/ebpf/asm"

// inert is a program that returns at once.
func inert() asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}
}
