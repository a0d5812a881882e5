// Package printable makes text that came out of a sandbox safe to show: nothing
// in it can move the cursor, change colours, retitle a terminal, reorder what
// stands beside it or break a line. It is for terminals, logs and pictures;
// data formats (JSON, Arrow) have rules of their own.
package printable

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/width"
)

// Line gives text as one line: control and format characters and what is not
// UTF-8 are written as escapes, line ends as "\n".
func Line[T ~string | ~[]byte](text T) string { return escape(string(text), false) }

// Text gives text of many lines: like Line, but line ends and tabs stay. "\r\n"
// counts as one line end.
func Text[T ~string | ~[]byte](text T) string {
	return escape(strings.ReplaceAll(string(text), "\r\n", "\n"), true)
}

func escape(s string, lines bool) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case r == '\n' && lines, r == '\t' && lines:
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r == '\r':
			b.WriteString(`\r`)
		case unicode.IsControl(r):
			fmt.Fprintf(&b, `\x%02x`, r)
		case !safe(r):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
		i += n
	}
	return b.String()
}

// safe leaves out what has no shape of its own: bidirectional overrides, zero
// widths, line and paragraph separators, private use, unassigned.
func safe(r rune) bool {
	return r == ' ' || unicode.IsGraphic(r) && !unicode.Is(unicode.Zs, r) || r == '\u00a0' || r == '\u3000'
}

// Width is how many cells of a terminal the text takes.
func Width(s string) (cells int) {
	for _, r := range s {
		cells += runeWidth(r)
	}
	return cells
}

func runeWidth(r rune) int {
	switch {
	case unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf):
		return 0
	case r >= 0x1f300 && r <= 0x1faff:
		return 2
	}
	switch width.LookupRune(r).Kind() {
	case width.EastAsianWide, width.EastAsianFullwidth:
		return 2
	}
	return 1
}

// Cut shortens text to so many cells, the last of them "…" if something is gone.
func Cut(s string, cells int) string {
	if cells <= 0 {
		return ""
	}
	if Width(s) <= cells {
		return s
	}
	used := 0
	for i, r := range s {
		w := runeWidth(r)
		if used+w > cells-1 {
			return s[:i] + "…"
		}
		used += w
	}
	return s
}

// Pad fills text with blanks up to so many cells.
func Pad(s string, cells int) string {
	return s + strings.Repeat(" ", max(0, cells-Width(s)))
}
