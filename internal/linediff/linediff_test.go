package linediff

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/testenv"
)

func TestUnified(t *testing.T) {
	for _, c := range []struct{ name, a, b, want string }{
		{"equal", "x\ny\n", "x\ny\n", ""},
		{"both empty", "", "", ""},
		{"made", "", "x\n", "@@ -0,0 +1 @@\n+x"},
		{"emptied", "x\ny\n", "", "@@ -1,2 +0,0 @@\n-x\n-y"},
		{"in the middle", "1\n2\n3\n4\n5\n6\n7\n8\n9\n", "1\n2\n3\n4\nfive\n6\n7\n8\n9\n", "@@ -2,7 +2,7 @@\n 2\n 3\n 4\n-5\n+five\n 6\n 7\n 8"},
		{"an end of line", "x", "x\n", "@@ -1 +1 @@\n-x\n\\ No newline at end of file\n+x"},
	} {
		if got := strings.Join(Unified(c.a, c.b, 3), "\n"); got != c.want {
			t.Errorf("%s: got\n%s\nwant\n%s", c.name, got, c.want)
		}
	}
	// More than is searched through is told as replaced.
	a, b := strings.Repeat("a\n", 20000), strings.Repeat("b\n", 20000)
	if got := Unified(a, b, 3); len(got) != 40001 {
		t.Errorf("%d lines", len(got))
	}
}

// What is said must be what patch(1) can do: then it is true.
func TestPatchUnderstandsIt(t *testing.T) {
	testenv.Require(t, testenv.Program("patch"))
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	text := func() string {
		var b strings.Builder
		for range r.IntN(30) {
			b.WriteByte("abc"[r.IntN(3)])
			b.WriteByte('\n')
		}
		return strings.TrimSuffix(b.String(), strings.Repeat("\n", r.IntN(2)))
	}
	dir := t.TempDir()
	for i := range 100 {
		a, b := text(), text()
		hunks := Unified(a, b, r.IntN(4))
		if len(hunks) == 0 {
			if a != b {
				t.Fatalf("%q and %q are called equal", a, b)
			}
			continue
		}
		from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
		if err := os.WriteFile(from, []byte(a), 0o600); err != nil {
			t.Fatal(err)
		}
		c := exec.Command("patch", "-s", "-u", "--posix", "-o", to, from)
		c.Stdin = strings.NewReader("--- a\n+++ b\n" + strings.Join(hunks, "\n") + "\n")
		out, err := c.CombinedOutput()
		got, _ := os.ReadFile(to)
		if err != nil || string(got) != b {
			t.Fatalf("%d: %v %s\nfrom %q\nto %q\ngot %q by\n%s", i, err, out, a, b, got, strings.Join(hunks, "\n"))
		}
	}
}
