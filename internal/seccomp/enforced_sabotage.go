//go:build sabotage_seccomp

package seccomp

const enforced = false
