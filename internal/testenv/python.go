package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Interpreter is a Python that has certain modules.
type Interpreter struct {
	Path    string
	modules []string
}

// Python finds the interpreter that `make setup` made, or the one that
// BOXWOOD_PYTHON names. Tests run it by Path after Require(t, p.Need).
func Python(modules ...string) Interpreter {
	p := Interpreter{Path: os.Getenv("BOXWOOD_PYTHON"), modules: modules}
	if p.Path != "" {
		return p
	}
	for dir, err := os.Getwd(); err == nil && dir != "/"; dir = filepath.Dir(dir) {
		if path := filepath.Join(dir, ".venv", "bin", "python"); exec.Command(path, "-V").Run() == nil {
			p.Path = path
			break
		}
	}
	return p
}

// Need is met if the interpreter is there and has the modules.
func (p Interpreter) Need() string {
	if p.Path == "" {
		return "needs .venv with Python (make setup) or BOXWOOD_PYTHON"
	}
	if out, err := exec.Command(p.Path, "-c", "import "+strings.Join(p.modules, ", ")).CombinedOutput(); err != nil {
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		return "needs Python modules " + strings.Join(p.modules, ", ") + ": " + lines[len(lines)-1]
	}
	return ""
}
