// Package bpftest holds the functions of the inspector's programs, each wrapped so
// that a test can call it in the kernel. Only tests use it.
package bpftest

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -go-package bpftest -target amd64 -cc clang -strip llvm-strip -type box Functions functions.bpf.c -- -O2 -mcpu=v3 -Wall -Werror
