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
	dropping := func(program string) ([]byte, error) {
		c := exec.Command(program)
		c.Env = append(os.Environ(), "BOXWOOD_TEST_DROP=1")
		return c.Output()
	}
	if underRace {
		// The race detector needs cgo, with which there is no changing all threads: Drop says so, and a program without it is looked at.
		_, err := dropping(self)
		if failed := (&exec.ExitError{}); !errors.As(err, &failed) || !strings.Contains(string(failed.Stderr), ErrCgo.Error()) {
			t.Fatalf("with cgo: %v", err)
		}
		self = filepath.Join(t.TempDir(), "without-cgo")
		build := exec.Command("go", "test", "-c", "-o", self, ".")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	out, err := dropping(self)
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
