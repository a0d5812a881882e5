package privileges

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/testenv"
)

func TestMain(m *testing.M) {
	if os.Getenv("BOXWOOD_TEST_DROP") == "" {
		os.Exit(m.Run())
	}
	// Threads that were there before, and one that comes after.
	done := make(chan struct{})
	for range 4 {
		go func() { <-done }()
	}
	if err := Drop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	all, _ := filepath.Glob("/proc/self/task/*/status")
	for _, file := range all {
		text, _ := os.ReadFile(file)
		os.Stdout.Write(text)
		fmt.Println("--")
	}
	child := exec.Command("cat", "/proc/self/status")
	child.Stdout = os.Stdout
	if err := child.Run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	os.Exit(0)
}

// Every thread, and whatever is started, has what is kept and nothing else.
func TestDrop(t *testing.T) {
	testenv.Require(t, testenv.Root)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(self)
	c.Env = append(os.Environ(), "BOXWOOD_TEST_DROP=1")
	out, err := c.Output()
	if failed := (&exec.ExitError{}); underRace && errors.As(err, &failed) {
		if !strings.Contains(string(failed.Stderr), ErrCgo.Error()) {
			t.Fatalf("%v: %s", err, failed.Stderr)
		}
		t.Skip("the race detector needs cgo, and a program that has it can't change all its threads, which Drop says")
	}
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for part := range strings.SplitSeq(string(out), "--\n") {
		n++
		held, err := Held(part)
		if err != nil {
			t.Fatal(err)
		}
		if more := held &^ Mask(); more != 0 || held == 0 {
			t.Errorf("a thread or child holds %#x, of which %#x was to be given up", held, more)
		}
	}
	if n < 3 {
		t.Errorf("%d threads and children", n)
	}
}
