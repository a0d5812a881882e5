package engine

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// What is masked doesn't depend on the pieces in which it comes, and a text without secrets comes as it is.
func TestMaskedStreams(t *testing.T) {
	v := newVeil([]secret{{"1", "LONG", "abcabcabcabd"}, {"2", "SHORT", "abcabcab"}, {"3", "QUOTED", `a"b$c'd e` + "\nf"}})
	r := rand.New(rand.NewPCG(1, 2))
	for _, text := range []string{
		"", "nothing", "abcabcab", "abcabcabcabd", "xabcabcabcabcabcabdx", "abcabca", "abcabcabcab", strings.Repeat("abcab", 50),
		`a"b$c'd e` + "\nf", "a\"b$c'd e\r\nf", `a\"b\$c'd e` + "\nf",
	} {
		whole := string(v.mask([]byte(text)))
		for range 50 {
			var got strings.Builder
			write, flush := v.masked(func(p []byte) { got.Write(p) })
			for rest := []byte(text); len(rest) > 0; {
				n := 1 + r.IntN(len(rest))
				write(rest[:n])
				rest = rest[n:]
			}
			flush()
			if got.String() != whole {
				t.Fatalf("%q is masked as %q in pieces, and as %q at once", text, got.String(), whole)
			}
		}
		for _, one := range v.list {
			if strings.Contains(whole, one.Value) {
				t.Errorf("%q shows %s as %q", text, one.Name, whole)
			}
		}
	}
}

// A value is found in whatever a shell says of it, and comes back from there as it was.
func TestSecretsInAShellsWords(t *testing.T) {
	for i, value := range []string{
		"plain-value-1234", `with "double" and 'single' quotes`, "dollars $HOME `id` \\ back", "two\nlines of it\t\x1b[0m", "ünï-cödé-välue", "~tilde#hash!bang", "\x01\x02\x03control\x7f\x07",
	} {
		v := newVeil([]secret{{fmt.Sprintf("%032d", i), "S", value}})
		out, err := exec.Command("bash", "-c", `S=$1; A=(x "$S"); declare -A M=([k]="$S"); f() { :; }; trap ": '$S'" USR1 2>/dev/null; declare -p S A M; printf '%q\n' "$S"; printf '%s\n' "${S@Q}"`, "bash", value).Output()
		if err != nil {
			t.Fatal(err)
		}
		hidden := v.conceal(out)
		if n := len(referencePattern.FindAll(hidden, -1)); n != 5 {
			t.Errorf("%q shows in %q, of which %d are concealed", value, out, n)
		}
		if back := v.reveal(hidden); string(back) != string(out) {
			t.Errorf("%q comes back as %q", out, back)
		}
	}
}

// What CRIU and the comparisons say of processes has command lines and environments in it.
func TestFailuresHideSecrets(t *testing.T) {
	e := &Engine{secrets: &secrets{trees: map[ids.Tree]*veil{}, byRef: map[string]secret{}}}
	if err := e.secrets.give("tr_a", map[string]string{"TOKEN": `quoted "value" of it`}); err != nil {
		t.Fatal(err)
	}
	was := fault.New(fault.DataLoss, "restored_differs", "process 5 has another environ: TOKEN=quoted \"value\" of it")
	if err := e.hideIn("tr_b", was); err != error(was) {
		t.Errorf("another tree's failure becomes %v", err)
	}
	err := e.hideIn("tr_a", fmt.Errorf("starting a box: %w", was))
	if f := fault.As(err); f.Reason != "restored_differs" || f.Message != "starting a box: process 5 has another environ: TOKEN=[secret TOKEN]" {
		t.Errorf("it becomes %v", err)
	}
	e.cfg.StateDir = t.TempDir()
	kept := e.keepCase("case", []string{"TOKEN=quoted \"value\" of it"})
	if text, err := os.ReadFile(kept); err != nil || strings.Contains(string(text), "value") {
		t.Errorf("the case is %s, %v", text, err)
	}
}
