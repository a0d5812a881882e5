package engine

import (
	"strings"
)

func containsAny(s, chars string) bool { return strings.ContainsAny(s, chars) }

func joinReasons(r []string) string {
	if len(r) == 0 {
		return "its processes changed"
	}
	return strings.Join(r, "; ")
}

// quoteArgv writes an argv as a shell would read it.
func quoteArgv(argv []string) string {
	var b strings.Builder
	for i, a := range argv {
		if i > 0 {
			b.WriteByte(' ')
		}
		if a != "" && strings.IndexFunc(a, unsafe) < 0 {
			b.WriteString(a)
			continue
		}
		b.WriteString("'" + strings.ReplaceAll(a, "'", `'\''`) + "'")
	}
	return b.String()
}

func unsafe(r rune) bool {
	return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("_-./=:,@%+", r))
}

// brief is hostile text cut to n bytes on one line.
func brief(p []byte, n int) string {
	cut := ""
	if len(p) > n {
		p, cut = p[:n], "..."
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(string(p), "?")) + cut
}
