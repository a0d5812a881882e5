// Package shell speaks with a bash that lives on between commands: it tells it what
// to run, has it describe itself, and makes another be like it. It only makes and reads text;
// engine/box carries it.
//
// The bash is an interactive one whose stdin is a private channel, so that it reads what it is
// told as it would read what is typed. During a command stdin is something else:
// nothing that a command starts inherits the channel. How a command ended is
// written to the channel by a subshell, together with a token that was drawn
// for this command, so that no output can be taken for it.
//
// A description is taken by builtins in a subshell, which is a copy of everything
// that is described and may be changed at will while it describes: no trap and
// no trace of the shell's own has an effect, and functions that are called like the builtins used
// are in nobody's way. A shell is restored by what the description says, read as
// input by a new one, which then describes itself: only equal descriptions count.
package shell

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// Argv starts the shell. It reads no profile by itself; Greet has it read them.
var Argv = []string{"bash", "--noediting", "--noprofile", "--norc", "--login", "-i"}

// Token is drawn anew for each thing that is said.
func Token() string {
	var b [12]byte
	rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// Greeting is how a shell is greeted.
type Greeting struct {
	TTY bool
	// Profiles: a new session reads what a login shell reads. A restored one had them.
	Profiles bool
	Stdin    string // of commands
	Token    string
}

// Greet is Hello, and has the shell say that it has done it.
func Greet(g Greeting) []byte { return append(Hello(g), report(g.Token)...) }

// Hello is the first that a shell is told. It takes its stderr into use, reads its
// profiles, and loses what makes an interactive shell talk or remember by itself: prompts, history, mail.
func Hello(g Greeting) []byte {
	var b strings.Builder
	if !g.TTY {
		b.WriteString("exec 2>&3 3>&-\n")
	}
	b.WriteString("set +o history +H\nunset HISTFILE MAILCHECK\nenable -n bind\nPS1= PS2=\n")
	if g.Profiles {
		// As bash(1), INVOCATION, has it.
		for _, line := range []string{
			"if [ -r /etc/profile ]; then . /etc/profile; fi",
			`if [ -r ~/.bash_profile ]; then . ~/.bash_profile; elif [ -r ~/.bash_login ]; then . ~/.bash_login; elif [ -r ~/.profile ]; then . ~/.profile; fi`,
		} {
			fmt.Fprintf(&b, "{ %s; } <%s\n", line, g.Stdin)
		}
		b.WriteString("\\builtin set +o history +H +o vi +o emacs; \\builtin unset HISTFILE MAILCHECK; \\builtin enable -n bind; PS1= PS2=\n")
	}
	return []byte(b.String())
}

// Command has a shell run text, whatever is in it. The shell sees it as one argument of
// eval, so that what is wrong in it ends with it. shadowed is what the last Report said.
func Command(text []byte, stdin, token string, shadowed bool) []byte {
	eval := `\builtin eval `
	if shadowed {
		eval = `\eval `
	}
	b := append([]byte(eval), quote(text)...)
	b = append(b, " <"+stdin+"\n"...)
	return append(b, report(token)...)
}

// condition is where a bash shows that it is still in a [[ that an error has cut off: it takes the next one for a part of that, and
// by its failure comes to itself again.
const condition = `\builtin eval '[[ a ]]'`

// report has the shell say how the last command ended. An interrupt drops the line that it
// hits, and this is the next. It opens no file: a shell may be at the limit of those that it may have. What else is
// written to the channel meanwhile is for nobody, and the report begins a line.
func report(token string) []byte {
	return []byte(`( __boxwood_s=$? __boxwood_b=0; if \declare -F builtin; then \unset -f builtin; __boxwood_b=1; fi; ` +
		`\builtin printf '\n%s %d %d\n' ` + token + ` "$__boxwood_s" "$__boxwood_b"; ` + condition + ` ) >&0 2>&0 || ` +
		condition + ` 2>/dev/null || \builtin true` + "\n")
}

// quote makes one word of bytes, in which nothing is left for the shell to find: no end
// of a line, no history reference.
func quote(text []byte) []byte {
	b := make([]byte, 0, len(text)+len(text)/8+3)
	b = append(b, "$'"...)
	for _, c := range text {
		switch {
		case c == '\\' || c == '\'':
			b = append(b, '\\', c)
		case c == '\n':
			b = append(b, `\n`...)
		case c < ' ' || c == '!' || c == 0x7f:
			b = fmt.Appendf(b, `\%03o`, c)
		default:
			b = append(b, c)
		}
	}
	return append(b, '\'')
}

// Report hears how a command ended.
type Report struct {
	Token  string
	Status int
	// Shadowed: there is a function called builtin.
	Shadowed bool
	line     []byte
}

// Hear takes what came over the channel; true at the end. What isn't for this
// token is let go: only a program that looked for the channel could have said it.
func (r *Report) Hear(p []byte) (bool, error) {
	for _, c := range p {
		if c != '\n' {
			if len(r.line) < 256 {
				r.line = append(r.line, c)
			}
			continue
		}
		text, ok := bytes.CutPrefix(r.line, []byte(r.Token+" "))
		r.line = r.line[:0]
		if !ok {
			continue
		}
		status, shadowed, _ := strings.Cut(string(text), " ")
		n, err := strconv.Atoi(status)
		if err != nil || n < 0 || n > 255 {
			continue
		}
		r.Status, r.Shadowed = n, shadowed == "1"
		return true, nil
	}
	return false, nil
}

// CheckText refuses what can't be said to a shell.
func CheckText(text string) error {
	if strings.IndexByte(text, 0) >= 0 {
		return fault.New(fault.Invalid, "bad_command", "the command holds a NUL byte, which no shell can read").
			WithHint("write the bytes into a file, or use printf '\\0'")
	}
	return nil
}
