// Command check holds docs/ACCEPTANCE.md against the last run of the tests
// (.cache/test/go.json and python.xml). It runs from the top of the checkout.
package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/acceptance"
)

const (
	module = "github.com/boxwood-rl/boxwood"
	// items of the slice that the page covers.
	items = 16
)

func main() {
	problems, claims, err := check()
	if err != nil {
		fmt.Fprintln(os.Stderr, "acceptance:", err)
		os.Exit(2)
	}
	for _, p := range problems {
		fmt.Println("docs/ACCEPTANCE.md:", p)
	}
	if len(problems) > 0 {
		fmt.Printf("acceptance: %d problems in %d claims\n", len(problems), claims)
		os.Exit(1)
	}
	fmt.Printf("acceptance: %d claims, each shown by what ran\n", claims)
}

func check() (problems []string, claims int, err error) {
	page, err := os.Open("docs/ACCEPTANCE.md")
	if err != nil {
		return nil, 0, err
	}
	defer page.Close()
	rows, err := acceptance.Parse(page)
	if err != nil {
		return nil, 0, err
	}
	goResults, err := os.Open(".cache/test/go.json")
	if err != nil {
		return nil, 0, fmt.Errorf("no results (run make test first): %w", err)
	}
	defer goResults.Close()
	pythonResults, err := os.Open(".cache/test/python.xml")
	if err != nil {
		return nil, 0, fmt.Errorf("no results (run make test first): %w", err)
	}
	defer pythonResults.Close()
	e := acceptance.Evidence{Benchmark: benchmark, Step: step}
	if e.Go, err = acceptance.ReadGo(goResults, module); err != nil {
		return nil, 0, fmt.Errorf("reading .cache/test/go.json: %w", err)
	}
	if e.Python, err = acceptance.ReadJUnit(pythonResults); err != nil {
		return nil, 0, fmt.Errorf("reading .cache/test/python.xml: %w", err)
	}
	return acceptance.Check(rows, e, items), len(rows), nil
}

// benchmark looks for the metric's name in the sources of benchmarks/NAME*, or in those of the
// name in a program that measures several.
func benchmark(name, metric string) bool {
	found := false
	roots, _ := filepath.Glob(filepath.Join("benchmarks", name+"*"))
	within, _ := filepath.Glob(filepath.Join("benchmarks", "*", name+"*"))
	roots = append(roots, within...)
	for _, root := range roots {
		_ = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && !entry.IsDir() && (metric == "" || strings.Contains(read(path), metric)) {
				found = true
			}
			return nil
		})
	}
	return found
}

func step(name string) bool {
	return regexp.MustCompile(`(?m)^step ` + regexp.QuoteMeta(name) + ` `).MatchString(read(".ci/run"))
}

// read gives a file's content, or nothing, which then contains no name.
func read(path string) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return string(content)
}
