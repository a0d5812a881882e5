package printable

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

func TestLine(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"plain", "ls -la", "ls -la"},
		{"letters of the world", "grüße 日本 🙂", "grüße 日本 🙂"},
		{"colour", "\x1b[31mred", `\x1b[31mred`},
		{"title", "\x1b]0;owned\x07", `\x1b]0;owned\x07`},
		{"eight-bit control sequence", "\u009b31m", `\x9b31m`},
		{"lines", "a\r\nb\tc", `a\r\nb\tc`},
		{"nul and delete", "\x00\x7f", `\x00\x7f`},
		{"not UTF-8", "a\xffb", `a\xffb`},
		{"right to left override", "txt\u202eexe", `txt\u202eexe`},
		{"zero width", "a\u200bb\ufeff", `a\u200bb\ufeff`},
		{"line separator", "a\u2028b", `a\u2028b`},
	} {
		if got := Line(c.in); got != c.want {
			t.Errorf("%s: got %q, want %q", c.name, got, c.want)
		}
	}
	if got := Text("a\r\n\tb\rc\n"); got != "a\n\tb\\rc\n" {
		t.Errorf("Text gave %q", got)
	}
}

func FuzzLine(f *testing.F) {
	f.Add("\x1b[2J\u202e\xff")
	f.Fuzz(func(t *testing.T, s string) {
		got := Line(s)
		if !utf8.ValidString(got) {
			t.Errorf("%q became %q, which is not UTF-8", s, got)
		}
		if strings.ContainsFunc(got, func(r rune) bool { return unicode.IsControl(r) || unicode.Is(unicode.Cf, r) }) {
			t.Errorf("%q became %q, which still has a control", s, got)
		}
		if cut := Cut(got, 10); Width(cut) > 10 {
			t.Errorf("Cut(%q, 10) takes %d cells", got, Width(cut))
		}
	})
}

func TestCut(t *testing.T) {
	for _, c := range []struct {
		in   string
		n    int
		want string
	}{{"abcdef", 6, "abcdef"}, {"abcdefg", 6, "abcde…"}, {"日本語", 5, "日本…"}, {"日本語", 4, "日…"}, {"x", 0, ""}} {
		if got := Cut(c.in, c.n); got != c.want || Width(got) > c.n {
			t.Errorf("Cut(%q, %d) = %q", c.in, c.n, got)
		}
	}
}
