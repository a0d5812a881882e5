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
	var (
		input    = bufio.NewReader(os.Stdin)
		output   = map[string][]string{} // by package and test, until it ends
		packages []string
		counts   = map[string]int{}
	)
	for {
		line, err := input.ReadBytes('\n')
		if len(line) == 0 {
			break
		}
		if err == nil || len(line) > 0 {
			if _, err := file.Write(line); err != nil {
				return err
			}
		}
		var e acceptance.Event
		if json.Unmarshal(line, &e) != nil {
			fmt.Print(string(line)) // go's own complaint, such as a build error
			continue
		}
		key := e.Package + " " + e.Test
		switch e.Action {
		case "output", "build-output":
			if e.Action == "build-output" {
				fmt.Print(e.Output)
			}
			output[key] = append(output[key], e.Output)
			if e.Test == "" && packageLine(e.Output) {
				packages = append(packages, e.Output)
				fmt.Print(e.Output)
			}
		case "fail":
			fmt.Print(strings.Join(output[key], ""))
			delete(output, key)
		case "skip":
			if e.Test != "" {
				fmt.Print(strings.Join(output[key], ""))
			}
			delete(output, key)
		case "pass":
			delete(output, key)
		}
		if e.Test != "" && !strings.Contains(e.Test, "/") {
			counts[e.Action]++
		}
	}
	fmt.Printf("\n%s", strings.Join(packages, ""))
	fmt.Printf("go: %d passed, %d failed, %d skipped\n", counts["pass"], counts["fail"], counts["skip"])
	return file.Close()
}

// packageLine reports the line that go test ends a package with.
func packageLine(s string) bool {
	return strings.HasPrefix(s, "ok  \t") || strings.HasPrefix(s, "FAIL\t") || strings.HasPrefix(s, "---\t")
}
