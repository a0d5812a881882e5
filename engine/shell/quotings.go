package shell

import (
	"fmt"
	"strings"
)

// Quotings are the ways in which a value may be written in what a shell says: as it is, within double quotes, as one
// word with backslashes, within $”, within single quotes, and as it is on a terminal. Some may be equal. The order is part of
// the format of what is kept.
func Quotings(value string) []string {
	var double, bare, ansi strings.Builder
	for i := 0; i < len(value); i++ {
		c := value[i]
		if strings.IndexByte("\"\\$`", c) >= 0 {
			double.WriteByte('\\')
		}
		double.WriteByte(c)
		if strings.IndexByte(" \t'\"\\|&;()<>!{}*[]?^$`,", c) >= 0 || i == 0 && (c == '~' || c == '#') {
			bare.WriteByte('\\')
		}
		bare.WriteByte(c)
		switch at := strings.IndexByte("\a\b\t\n\v\f\r\x1b\\'", c); {
		case at >= 0:
			ansi.WriteByte('\\')
			ansi.WriteByte("abtnvfrE\\'"[at])
		case c < ' ' || c == 0x7f:
			fmt.Fprintf(&ansi, `\%03o`, c)
		default:
			ansi.WriteByte(c)
		}
	}
	return []string{
		value, double.String(), bare.String(), ansi.String(),
		strings.ReplaceAll(value, "'", `'\''`), strings.ReplaceAll(value, "\n", "\r\n"),
	}
}

// Change has what was heard go through f before it is parsed.
func (l *Listener) Change(f func([]byte) []byte) { l.raw = f(l.raw) }
