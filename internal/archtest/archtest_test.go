package archtest

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/boxwood-rl/boxwood"

// imports asks the go command for every import inside the module.
func imports(t *testing.T) []Import {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Imports,TestImports,XTestImports", module+"/...")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []Import
	packages := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p struct {
			ImportPath                         string
			Imports, TestImports, XTestImports []string
		}
		err := packages.Decode(&p)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range p.Imports {
			all = add(all, p.ImportPath, path, false)
		}
		for _, path := range append(p.TestImports, p.XTestImports...) {
			all = add(all, p.ImportPath, path, true)
		}
	}
}

func add(all []Import, from, to string, tests bool) []Import {
	from, ok := strings.CutPrefix(from, module+"/")
	to, inside := strings.CutPrefix(to, module+"/")
	if ok && inside {
		all = append(all, Import{from, to, tests})
	}
	return all
}

// One wrong import and the tree store can't be tested without root any more, or
// the scheduler knows what a sandbox is.
func TestImportRule(t *testing.T) {
	all := imports(t)
	if !slices.Contains(all, Import{From: "engine/pool", To: "tree"}) {
		t.Fatalf("the list of imports lacks a known one; the test would hold nothing: %v", all)
	}
	for _, line := range Broken(all) {
		t.Error(line)
	}
}

// The rule must be able to fail.
func TestBrokenImportsAreFound(t *testing.T) {
	tests := []struct {
		name string
		i    Import
		ok   bool
	}{
		{"engine uses the tree", Import{"engine", "tree", false}, true},
		{"the command line uses the engine", Import{"cmd/boxwood", "engine", false}, true},
		{"the inspector uses records", Import{"inspector", "tree", false}, true},
		{"inside one folder", Import{"engine", "engine/pool", false}, true},
		{"tree reaches up", Import{"tree", "engine/pool", false}, false},
		{"tree reaches aside", Import{"tree", "inspector", false}, false},
		{"tree reaches the scheduler", Import{"tree", "sched", false}, false},
		{"the scheduler reaches up", Import{"sched", "engine", false}, false},
		{"the scheduler reaches aside", Import{"sched", "inspector", false}, false},
		{"the engine loads BPF", Import{"engine/box", "bpf", false}, false},
		{"the tree knows the wire", Import{"tree", "proto/boxwood/v1", false}, false},
		{"internal reaches up", Import{"internal/doctor", "engine/box", false}, false},
		{"somebody imports the command", Import{"engine", "cmd/boxwood", false}, false},
		{"a test of tree reaches up", Import{"tree", "engine", true}, false},
		{"a folder nobody ruled on", Import{"util", "tree", false}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if broken := Broken([]Import{tt.i}); (len(broken) == 0) != tt.ok {
				t.Errorf("%+v: %v", tt.i, broken)
			}
		})
	}
}
