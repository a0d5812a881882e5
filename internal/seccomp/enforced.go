//go:build !sabotage_seccomp

package seccomp

// enforced: a sandbox makes the system calls that its policy allows. The build tag
// sabotage_seccomp breaks this on purpose; TestEverySystemCall must then fail.
const enforced = true
