// Package testenv says what a test needs of the host. Without it the test is
// skipped with the reason; with BOXWOOD_REQUIRE=all, which CI sets, it fails
// instead, so that no capability is lost silently.
package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// Need is one capability; it returns why it is missing, or "".
type Need func() string

// Require skips or fails the test unless all needs are met.
func Require(t testing.TB, needs ...Need) {
	t.Helper()
	for _, need := range needs {
		why := need()
		if why == "" {
			continue
		}
		if os.Getenv("BOXWOOD_REQUIRE") == "all" {
			t.Fatalf("this host must have it (BOXWOOD_REQUIRE=all): %s", why)
		}
		t.Skip(why)
	}
}

// Reach tries with more and more time, from first on, until try says that what it
// ran got as far as the test is about. How far a command gets by a deadline is up to
// the machine; that it got there isn't.
func Reach(t testing.TB, first time.Duration, try func(within time.Duration) bool) {
	t.Helper()
	for within := first; !try(within); within *= 3 {
		if within > 20*time.Second {
			t.Fatalf("not even within %v did it get so far", within)
		}
	}
}

// Root is an effective user id of 0 with mount rights.
func Root() string {
	if os.Geteuid() != 0 {
		return "needs root"
	}
	return ""
}

// BPF is a kernel that carries its own type information.
func BPF() string {
	if _, err := os.Stat("/sys/kernel/btf/vmlinux"); err != nil {
		return "needs a kernel with BTF: " + err.Error()
	}
	return Root()
}

// Program is a program in PATH.
func Program(name string) Need {
	return func() string {
		if _, err := exec.LookPath(name); err != nil {
			return "needs " + name + " in PATH"
		}
		return ""
	}
}

// Btrfs is root with mkfs.btrfs and loop devices.
func Btrfs() string {
	if why := Program("mkfs.btrfs")(); why != "" {
		return why
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		return "needs loop devices: " + err.Error()
	}
	return Root()
}

// CRIU is root with a CRIU that set-up verified.
func CRIU() string {
	if CRIUPath() == "" {
		return "needs a verified CRIU: make setup"
	}
	return Root()
}

// CRIUPath is the CRIU that tests use: $BOXWOOD_CRIU, or the one of make setup
// in the checkout that the test runs in. Empty: none.
func CRIUPath() string {
	if path := os.Getenv("BOXWOOD_CRIU"); path != "" {
		return path
	}
	dir, err := os.Getwd()
	if err != nil {
		return ""
	}
	for ; dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		path := filepath.Join(dir, ".cache", "criu", "criu")
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return ""
}
