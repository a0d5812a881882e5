// Command show FILE copies `go test -json` from standard input to FILE and
// prints what a person wants of it: the line of each package, the output of what
// failed, why tests were skipped, and which tests a test binary that died took
// with it. At its end come all package lines once more.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/acceptance"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: go test -json ./... | show FILE")
		os.Exit(2)
	}
	if err := show(os.Stdin, os.Stdout, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "show:", err)
		os.Exit(1)
	}
}

func show(from io.Reader, to io.Writer, path string) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer file.Close()
	input := bufio.NewReader(from)
	v := view{to: to, output: map[string][]string{}, counts: map[string]int{}}
	for {
		line, readErr := input.ReadBytes('\n')
		if _, err := file.Write(line); err != nil {
			return err
		}
		var e acceptance.Event
		switch {
		case len(line) == 0:
		case json.Unmarshal(line, &e) != nil:
			fmt.Fprint(to, string(line)) // the go command's own complaint
		default:
			v.take(e)
		}
		if readErr != nil {
			break
		}
	}
	fmt.Fprintf(to, "\n%s", strings.Join(v.packages, ""))
	fmt.Fprintf(to, "go: %d passed, %d failed, %d skipped\n", v.counts["pass"], v.counts["fail"], v.counts["skip"])
	if n := v.counts["died"]; n > 0 {
		fmt.Fprintf(to, "go: %d never ended\n", n)
	}
	return file.Close()
}

// view is what was seen so far.
type view struct {
	to       io.Writer
	output   map[string][]string // by package and test, until that ends
	open     []string            // what has begun and not ended, in that order: the keys of output
	packages []string            // the line that ends each package
	counts   map[string]int      // of top-level tests, by action, and of those that died
}

func (v *view) take(e acceptance.Event) {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "build-output":
		fmt.Fprint(v.to, e.Output)
	case "run":
		v.open = append(v.open, key)
	case "output":
		if e.Test == "" && packageLine(e.Output) {
			v.packages = append(v.packages, e.Output)
			fmt.Fprint(v.to, e.Output)
			break
		}
		v.output[key] = append(v.output[key], e.Output)
	case "fail", "skip", "pass":
		// A package without tests is "skipped", too.
		if e.Action == "fail" || e.Action == "skip" && e.Test != "" {
			fmt.Fprint(v.to, strings.Join(v.output[key], ""))
		}
		delete(v.output, key)
		v.open = slices.DeleteFunc(v.open, func(k string) bool { return k == key })
		if e.Test == "" {
			v.died(e.Package)
		}
		if e.Test != "" && !strings.Contains(e.Test, "/") {
			v.counts[e.Action]++
		}
	}
}

// died prints the tests of an ended package that never ended themselves: go test
// ends none of those that run when the binary panics, times out or is killed. The
// panic stands in the output of whichever began last.
func (v *view) died(pkg string) {
	v.open = slices.DeleteFunc(v.open, func(key string) bool {
		if !strings.HasPrefix(key, pkg+" ") {
			return false
		}
		fmt.Fprintf(v.to, "=== NEVER ENDED: %s\n%s", key, strings.Join(lastWords(v.output[key]), ""))
		delete(v.output, key)
		if !strings.Contains(strings.TrimPrefix(key, pkg), "/") {
			v.counts["died"]++
		}
		return true
	})
}

const (
	wordsBefore = 50  // lines of what a test said before its binary died
	wordsOfEnd  = 150 // lines of the panic
)

// lastWords shortens what a test said that never ended to the last lines before
// the panic, the panic's reason with the tests that ran, and the goroutines, those
// first that are inside a test. A dump of a whole daemon has thousands of lines.
func lastWords(lines []string) []string {
	end := slices.IndexFunc(lines, func(line string) bool {
		return strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ") || strings.HasPrefix(line, "SIG")
	})
	if end < 0 {
		end = len(lines)
	}
	said := lines[max(end-wordsBefore, 0):end]
	var reason, inTests, others []string
	for rest := lines[end:]; len(rest) > 0; {
		n := slices.Index(rest, "\n") + 1
		if n == 0 {
			n = len(rest)
		}
		part := rest[:n]
		rest = rest[n:]
		switch within := strings.Join(part, ""); {
		case !strings.HasPrefix(within, "goroutine "):
			reason = append(reason, part...)
		case strings.Contains(within, "_test.go:") && !strings.Contains(within, "testing.(*T).Parallel("):
			inTests = append(inTests, part...)
		default:
			others = append(others, part...)
		}
	}
	panicked := slices.Concat(reason, inTests, others)
	if cut := len(panicked) - wordsOfEnd; cut > 0 {
		panicked = append(panicked[:wordsOfEnd], fmt.Sprintf("... and %d lines more\n", cut))
	}
	return slices.Concat(said, panicked)
}

// packageLine reports the line that go test ends a package with.
func packageLine(s string) bool {
	return strings.HasPrefix(s, "ok  \t") || strings.HasPrefix(s, "FAIL\t")
}
