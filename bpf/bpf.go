// Package bpf holds the programs that watch sandboxes from inside the kernel,
// compiled, and the layout of the memory they share with package inspector.
//
// The generated files are committed, so that building Boxwood needs no clang.
package bpf

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -go-package bpf -target amd64 -cc clang -strip llvm-strip -type box -type sleeper -type thread -type held Inspector inspector.bpf.c -- -O2 -mcpu=v3 -Wall -Werror
