package engine

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
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
	e := &Engine{secrets: &secrets{trees: map[ids.Tree]*veil{}}}
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

// No line of a log and no case shows a secret, wherever in it and however it is written there.
func TestLogsAndCasesHideSecrets(t *testing.T) {
	const value = "key=<a>&b\x01\u2028c" // all of which JSON writes otherwise
	e := &Engine{secrets: &secrets{trees: map[ids.Tree]*veil{}}}
	var out bytes.Buffer
	text, js := e.Veiled(slog.New(slog.NewTextHandler(&out, nil))), e.Veiled(slog.New(slog.NewJSONHandler(&out, nil)))
	say := func() (said string) {
		for _, log := range []*slog.Logger{text, js} {
			out.Reset()
			log.With("early", "before "+value).WithGroup("g").Error("message "+value, "error", fmt.Errorf("wrapped: %w", errors.New(value)), "list", []string{"a", value},
				"bytes", []byte(value), "number", 5, slog.Group("inner", "deep", value), "any", struct{ A string }{value})
			said += out.String()
		}
		return said
	}
	if n := strings.Count(say(), "key="); n != 13 {
		t.Fatalf("what is known to be no secret shows %d times", n)
	}
	if err := e.secrets.give("tr_a", map[string]string{"TOKEN": value}); err != nil {
		t.Fatal(err)
	}
	said := say()
	if strings.Contains(said, "key=") || strings.Count(said, "[secret TOKEN]") != 14 || strings.Count(said, "number") != 2 {
		t.Errorf("the log says %s", said)
	}
	e.cfg.StateDir = t.TempDir()
	kept := e.keepCase("case", map[string]any{"a " + value: []any{1, value, nil, struct{ B []string }{[]string{value}}}})
	if content, err := os.ReadFile(kept); err != nil || strings.Contains(string(content), "key=") || strings.Count(string(content), "[secret TOKEN]") != 3 {
		t.Errorf("the case is %s, %v", content, err)
	}
	if err := e.secrets.retain(func(ids.Tree) bool { return false }); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(say(), "key="); n != 13 {
		t.Errorf("what is forgotten with its tree shows %d times", n)
	}
}
