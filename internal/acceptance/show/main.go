// Command show FILE copies `go test -json` from standard input to FILE and
// prints what a person wants of it: the line of each package, the output of what
// failed, why tests were skipped. At its end come all package lines once more.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/acceptance"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: go test -json ./... | show FILE")
		os.Exit(2)
	}
	if err := show(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "show:", err)
		os.Exit(1)
	}
}

func show(path string) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer file.Close()
	input := bufio.NewReader(os.Stdin)
	v := view{output: map[string][]string{}, counts: map[string]int{}}
	for {
		line, readErr := input.ReadBytes('\n')
		if _, err := file.Write(line); err != nil {
			return err
		}
		var e acceptance.Event
		switch {
		case len(line) == 0:
		case json.Unmarshal(line, &e) != nil:
			fmt.Print(string(line)) // the go command's own complaint
		default:
			v.take(e)
		}
		if readErr != nil {
			break
		}
	}
	fmt.Printf("\n%s", strings.Join(v.packages, ""))
	fmt.Printf("go: %d passed, %d failed, %d skipped\n", v.counts["pass"], v.counts["fail"], v.counts["skip"])
	return file.Close()
}

// view is what was seen so far.
type view struct {
	output   map[string][]string // by package and test, until that ends
	packages []string            // the line that ends each package
	counts   map[string]int      // of top-level tests, by action
}

func (v *view) take(e acceptance.Event) {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "build-output":
		fmt.Print(e.Output)
	case "output":
		if e.Test == "" && packageLine(e.Output) {
			v.packages = append(v.packages, e.Output)
			fmt.Print(e.Output)
			break
		}
		v.output[key] = append(v.output[key], e.Output)
	case "fail", "skip", "pass":
		// A package without tests is "skipped", too.
		if e.Action == "fail" || e.Action == "skip" && e.Test != "" {
			fmt.Print(strings.Join(v.output[key], ""))
		}
		delete(v.output, key)
		if e.Test != "" && !strings.Contains(e.Test, "/") {
			v.counts[e.Action]++
		}
	}
}

// packageLine reports the line that go test ends a package with.
func packageLine(s string) bool {
	return strings.HasPrefix(s, "ok  \t") || strings.HasPrefix(s, "FAIL\t")
}
