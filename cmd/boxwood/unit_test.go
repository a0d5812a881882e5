package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/privileges"
)

// The unit that is shipped is one, names this program's flags, and leaves the daemon the capabilities that it keeps.
func TestUnit(t *testing.T) {
	text, err := os.ReadFile("../../scripts/systemd/boxwood.service")
	if err != nil {
		t.Fatal(err)
	}
	set := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(line, "#") {
			set[key] = value
		}
	}
	if got, want := set["CapabilityBoundingSet"], strings.Join(privileges.Kept(), " "); got != want {
		t.Errorf("the unit's capabilities are\n%s\nand the daemon keeps\n%s", got, want)
	}
	words := strings.Fields(set["ExecStart"])
	if len(words) < 2 || filepath.Base(words[0]) != "boxwood" {
		t.Fatalf("the unit starts %q", words)
	}
	c, rest, err := newRoot(&app{getenv: os.Getenv}).Find(words[1:])
	if err == nil {
		err = c.ParseFlags(rest)
	}
	if err != nil || c.Name() != "serve" {
		t.Errorf("the unit's command line %q: %v", words, err)
	}
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Log("no systemd-analyze here: the unit isn't verified")
		return
	}
	unit := filepath.Join(t.TempDir(), "boxwood.service")
	if err := os.WriteFile(unit, []byte(strings.ReplaceAll(string(text), words[0], "/bin/true")), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"verify", "--man=no"}, {"security", "--offline=true", "--threshold=90"}} {
		if out, err := exec.Command(analyze, append(args, unit)...).CombinedOutput(); err != nil {
			t.Errorf("systemd-analyze %s: %v\n%s", args[0], err, out)
		}
	}
}
