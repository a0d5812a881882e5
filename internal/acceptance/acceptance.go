// Package acceptance holds docs/ACCEPTANCE.md against what really ran: every
// claim names the tests, benchmarks or CI steps that show it, and each of those
// must exist and must have passed, unskipped, in the last run of the tests.
//
// A claim is a row of a table:
//
//	| 4.2 | a clone of a clone keeps inode numbers | `engine/pool TestClone`; `python test_fork.py::test_fork` |
//
// What shows it is one of these, in backquotes, separated by anything:
//
//	engine/pool TestClone/deep     a Go test: package below the module, test, subtest
//	python test_fork.py::test_fork a test of the Python package
//	bench fork empty.ready_ms.p50  a benchmark, and a metric it prints
//	ci leaks                       a step of .ci/run
package acceptance

import (
	"bufio"
	"fmt"
	"io"
	"regexp"
	"strings"
)

// Row is one claim.
type Row struct {
	Line    int
	Item    string
	Claim   string
	ShownBy []string
}

var (
	rowItem = regexp.MustCompile(`^\d+(\.\d+)?[a-z]?$`)
	quoted  = regexp.MustCompile("`([^`]+)`")
)

// Parse reads the claims: the rows whose first cell is an item's number.
func Parse(r io.Reader) ([]Row, error) {
	var rows []Row
	lines := bufio.NewScanner(r)
	for number := 1; lines.Scan(); number++ {
		text := strings.TrimSpace(lines.Text())
		if !strings.HasPrefix(text, "|") {
			continue
		}
		cells := strings.Split(strings.Trim(text, "|"), "|")
		item := strings.TrimSpace(cells[0])
		if !rowItem.MatchString(item) {
			continue
		}
		if len(cells) != 3 {
			return nil, fmt.Errorf("line %d: %d cells, want item, claim and what shows it", number, len(cells))
		}
		row := Row{Line: number, Item: item, Claim: strings.TrimSpace(cells[1])}
		for _, match := range quoted.FindAllStringSubmatch(cells[2], -1) {
			row.ShownBy = append(row.ShownBy, match[1])
		}
		rows = append(rows, row)
	}
	return rows, lines.Err()
}

// Evidence is what there is to hold claims against.
type Evidence struct {
	// Go and Python are results by "package Test/sub" and "file.py::test".
	Go, Python map[string]Outcome
	// Benchmark reports whether a benchmark exists and prints the metric; the
	// metric may be empty.
	Benchmark func(name, metric string) bool
	// Step reports whether .ci/run has the step.
	Step func(name string) bool
}

// Check gives one line per claim that isn't shown, and per item from 1 to items
// that has no claim at all.
func Check(rows []Row, e Evidence, items int) []string {
	var problems []string
	claimed := map[string]bool{}
	for _, row := range rows {
		number, _, _ := strings.Cut(row.Item, ".")
		claimed[number] = true
		say := func(format string, args ...any) {
			problems = append(problems, fmt.Sprintf("line %d, item %s: ", row.Line, row.Item)+fmt.Sprintf(format, args...))
		}
		if len(row.ShownBy) == 0 {
			say("nothing shows %q", row.Claim)
		}
		for _, reference := range row.ShownBy {
			if why := e.lacks(reference); why != "" {
				say("%s: %s", reference, why)
			}
		}
	}
	for i := 1; i <= items; i++ {
		if !claimed[fmt.Sprint(i)] {
			problems = append(problems, fmt.Sprintf("item %d has no claim", i))
		}
	}
	return problems
}

// lacks says why a reference shows nothing, or "".
func (e Evidence) lacks(reference string) string {
	words := strings.Fields(reference)
	if len(words) < 2 || len(words) > 3 {
		return "not understood: see the comment of internal/acceptance"
	}
	kind, name, rest := words[0], words[1], strings.Join(words[2:], " ")
	if rest != "" && kind != "bench" {
		return "one word too many"
	}
	switch kind {
	case "bench":
		if !e.Benchmark(name, rest) {
			return "no such benchmark or metric"
		}
	case "ci":
		if !e.Step(name) {
			return "no such step in .ci/run"
		}
	case "python":
		return missing(e.Python, name)
	default:
		if !strings.HasPrefix(name, "Test") && !strings.HasPrefix(name, "Fuzz") && !strings.HasPrefix(name, "Example") {
			return "not the name of a Go test"
		}
		return missing(e.Go, kind+" "+name)
	}
	return ""
}

func missing(results map[string]Outcome, name string) string {
	outcome, ran := results[name]
	switch {
	case !ran:
		return "no such test in the last run"
	case outcome != Passed:
		return "it " + outcome.String()
	}
	return ""
}
