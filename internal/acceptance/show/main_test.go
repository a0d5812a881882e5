package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/acceptance"
)

// A binary that dies leaves tests without an end; were they not printed, a CI run
// would say no more than that a package failed.
func TestDeadBinaryIsTold(t *testing.T) {
	var input strings.Builder
	event := func(pkg, test, action, output string) {
		line, err := json.Marshal(acceptance.Event{Action: action, Package: pkg, Test: test, Output: output})
		if err != nil {
			t.Fatal(err)
		}
		input.Write(append(line, '\n'))
	}
	event("m/a", "TestFine", "run", "")
	event("m/a", "TestFine", "output", "fine says this\n")
	event("m/a", "TestFine", "pass", "")
	event("m/a", "TestStuck", "run", "")
	event("m/b", "TestOfAnother", "run", "") // packages run side by side
	event("m/b", "TestOfAnother", "output", "another says this\n")
	for i := range 2 * wordsBefore {
		event("m/a", "TestStuck", "output", fmt.Sprintf("stuck says %d.\n", i))
	}
	event("m/a", "TestStuck/sub", "run", "")
	died := []string{
		"panic: test timed out after 1s\n", "\trunning tests:\n", "\t\tTestStuck/sub (1s)\n", "\n",
		"goroutine 9 [running]:\n", "testing.(*M).startAlarm.func1()\n", "\n",
	}
	for i := range 3 * wordsOfEnd {
		died = append(died, "goroutine 10 [select]:\n", fmt.Sprintf("daemon.loop%d.()\n", i), "\n")
	}
	died = append(died,
		"goroutine 11 [chan receive]:\n", "m/a.waitsItsTurn()\n", "testing.(*T).Parallel(0x1)\n", "\t/m/a/a_test.go:4 +0x1\n", "\n",
		"goroutine 12 [select]:\n", "m/a.stuckHere()\n", "\t/m/a/a_test.go:5 +0x2\n")
	for _, line := range died {
		event("m/a", "TestStuck/sub", "output", line)
	}
	event("m/a", "", "output", "FAIL\tm/a\t1.0s\n")
	event("m/a", "", "fail", "")
	event("m/b", "TestOfAnother", "pass", "")
	event("m/b", "", "output", "ok  \tm/b\t1.0s\n")
	event("m/b", "", "pass", "")

	var printed strings.Builder
	path := filepath.Join(t.TempDir(), "go.json")
	if err := show(strings.NewReader(input.String()), &printed, path); err != nil {
		t.Fatal(err)
	}
	got := printed.String()
	for _, want := range []string{
		"=== NEVER ENDED: m/a TestStuck\n", fmt.Sprintf("stuck says %d.\n", 2*wordsBefore-1),
		"=== NEVER ENDED: m/a TestStuck/sub\npanic: test timed out after 1s\n", "\t\tTestStuck/sub (1s)\n",
		"m/a.stuckHere()\n", "daemon.loop0.()\n", "lines more\n", "go: 2 passed, 0 failed, 0 skipped\ngo: 1 never ended\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing", want)
		}
	}
	for _, unwanted := range []string{
		"fine says", "another says", "TestOfAnother", "stuck says 0.\n", "waitsItsTurn", fmt.Sprintf("daemon.loop%d.", 3*wordsOfEnd-1),
	} {
		if strings.Contains(got, unwanted) {
			t.Errorf("%q was printed", unwanted)
		}
	}
	if kept, err := os.ReadFile(path); err != nil || string(kept) != input.String() {
		t.Errorf("the copy differs from what came (%v)", err)
	}
	if t.Failed() {
		t.Log(got)
	}
}

func TestLastWordsAreKeptWhole(t *testing.T) {
	for _, lines := range [][]string{
		nil,
		{"killed at once\n", "signal: killed\n"},
		{"panic: x\n", "\n", "goroutine 1 [running]:\n", "main()\n"},
		{"said\n", "fatal error: all goroutines are asleep\n"},
	} {
		if got := lastWords(lines); !slices.Equal(got, lines) {
			t.Errorf("%q became %q", lines, got)
		}
	}
}
