package cgroup

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/internal/testenv"
)

func TestParseCores(t *testing.T) {
	for list, want := range map[string]int{"0": 1, "0-3,8": 5, "1, 2": 2} {
		set, err := ParseCores(list)
		if err != nil || set.Count() != want {
			t.Errorf("%q: %d cores, %v", list, set.Count(), err)
		}
	}
	for _, list := range []string{"", "a", "3-1", "-1", "0-", "0,,1", "99999999"} {
		if _, err := ParseCores(list); err == nil {
			t.Errorf("%q passed", list)
		}
	}
}

// A sandbox's processes stay on the share's cores even if they ask for others, and
// within its memory even if none of them has a bound of its own.
func TestConfine(t *testing.T) {
	testenv.Require(t, testenv.Root)
	var before unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		t.Fatal(err)
	}
	core := -1
	for i := range 1024 {
		if before.IsSet(i) {
			core = i
			break
		}
	}
	r, err := OpenRoot(fmt.Sprintf("boxwood-test-confine-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Remove(); err != nil {
			t.Error(err)
		}
		if r.cpuset == "" || sabotage.On("cores") {
			if err := setAffinity(&before); err != nil {
				t.Error(err)
			}
		}
		var after unix.CPUSet
		if err := unix.SchedGetaffinity(0, &after); err != nil || after != before {
			t.Errorf("left on %d cores of %d, %v", after.Count(), before.Count(), err)
		}
	})
	if err := r.Confine(Share{Cores: "1020-1023"}); !fault.Is(err, fault.Invalid) {
		t.Errorf("cores that aren't there: %v", err)
	}
	if err := r.Confine(Share{Cores: fmt.Sprint(core), MemoryBytes: 48 << 20}); err != nil {
		t.Fatal(err)
	}
	g, err := r.Make("5", 123456, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Remove()
	defer g.KillAll(context.Background())
	leaf, kill, err := OpenLeaf(g.Run)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(leaf)
	defer unix.Close(kill)
	inside := func(script string) (string, error) {
		var join strings.Builder
		for _, dir := range g.v1() {
			fmt.Fprintf(&join, "echo $$ > %s/tasks || exit 9\n", dir)
		}
		cmd := exec.Command("sh", "-c", join.String()+script)
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: leaf}
		out, err := cmd.CombinedOutput()
		return strings.TrimSpace(string(out)), err
	}
	const ask = "grep Cpus_allowed_list: /proc/self/status"
	want := fmt.Sprintf("Cpus_allowed_list:\t%d", core)
	if out, err := inside(ask); err != nil || out != want {
		t.Errorf("%q, %v, want %q", out, err, want)
	}
	// Asking for all cores is refused or granted within the share; either way nothing widens.
	if out, _ := inside("taskset -p ffff $$ >/dev/null 2>&1; " + ask); out != want {
		t.Errorf("after asking for more: %q, want %q", out, want)
	}
	// tail keeps what it may have to print: more than the share.
	if out, err := inside("head -c 200000000 /dev/zero | tail -c 200000000 > /dev/null && echo whole"); err == nil || strings.Contains(out, "whole") {
		t.Errorf("200 MB were had within 48 MiB: %q, %v", out, err)
	}
}
