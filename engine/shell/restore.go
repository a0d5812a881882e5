package shell

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Preset are the variables that a new shell sets by itself. Those that aren't described are unset.
var preset = strings.Fields(`COLUMNS COMP_WORDBREAKS HISTCONTROL HISTFILE HISTFILESIZE HISTSIZE HOSTNAME HOSTTYPE IFS LINES MACHTYPE MAILCHECK
	OLDPWD OPTERR OPTIND OSTYPE PATH PS1 PS2 PS4 PWD SHELL SHLVL TERM BASH BASH_LOADABLES_PATH BOXWOOD_GENERATION`)

// fixed can't be set. They are what they are in every shell of an image, or a comparison tells.
var fixed = set(`BASHOPTS BASH_VERSINFO BASH_VERSION EUID PPID SHELLOPTS UID`)

// late change how what comes after them is read, or have a shell do something before
// each line: they are set when nothing else is to come.
var late = set(`PROMPT_COMMAND PS0 PS1 PS2 PS4 TMOUT BASH_COMPAT POSIXLY_CORRECT BASH_XTRACEFD IGNOREEOF`)

// Restore is what a new shell is told, after Hello, to become as d says. It was
// started with Environment, in the folder that it is to be in.
func Restore(d *Description) []byte {
	r := restorer{d: d}
	r.locale()
	r.options()
	r.limits()
	r.variables()
	r.functions()
	r.tables()
	r.last()
	return r.out.Bytes()
}

type restorer struct {
	d   *Description
	out bytes.Buffer
}

func (r *restorer) line(format string, args ...any) { fmt.Fprintf(&r.out, format+"\n", args...) }

func (r *restorer) section(name string) (lines []string) {
	for line := range strings.Lines(string(r.d.Sections[name])) {
		if line = strings.TrimSuffix(line, "\n"); line != "" {
			lines = append(lines, line)
		}
	}
	return lines
}

func (r *restorer) vars() (vars []variable) {
	for _, line := range r.section(secVars) {
		if v, ok := parseVar(line); ok {
			vars = append(vars, v)
		}
	}
	return vars
}

func isLocale(name string) bool {
	return name == "LANG" || name == "LANGUAGE" || strings.HasPrefix(name, "LC_")
}

// locale comes first: the rest is read in it.
func (r *restorer) locale() {
	for _, v := range r.vars() {
		if isLocale(v.name) {
			r.line("%s", v)
		}
	}
}

// options that decide how text is read; the others come last.
func (r *restorer) options() {
	for _, line := range r.section(secShopt) {
		if !strings.HasSuffix(line, " login_shell") && !strings.HasSuffix(line, " restricted_shell") &&
			!strings.HasPrefix(line, "shopt -u compat") && // off already, and to say so sets BASH_COMPAT
			!strings.HasSuffix(line, " extdebug") && !strings.HasSuffix(line, " expand_aliases") {
			r.line("%s", line)
		}
	}
}

// ulimits by the kernel's name: the builtin's option, and its unit in bytes or 1.
var ulimits = map[string]struct {
	option byte
	unit   uint64
}{
	"Max cpu time": {'t', 1}, "Max file size": {'f', 1024}, "Max data size": {'d', 1024}, "Max stack size": {'s', 1024},
	"Max core file size": {'c', 1024}, "Max resident set": {'m', 1024}, "Max processes": {'u', 1}, "Max open files": {'n', 1},
	"Max locked memory": {'l', 1024}, "Max address space": {'v', 1024}, "Max file locks": {'x', 1}, "Max pending signals": {'i', 1},
	"Max msgqueue size": {'q', 1}, "Max nice priority": {'e', 1}, "Max realtime priority": {'r', 1}, "Max realtime timeout": {'R', 1},
}

func (r *restorer) limits() {
	var names []string
	for name := range r.d.Limits {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		u, ok := ulimits[name]
		if !ok {
			continue
		}
		for i, side := range []byte{'S', 'H'} {
			value := r.d.Limits[name][i]
			if n, err := strconv.ParseUint(value, 10, 64); err == nil {
				if n%u.unit != 0 {
					continue // no ulimit sets that; the comparison tells
				}
				value = strconv.FormatUint(n/u.unit, 10)
			}
			r.line("ulimit -%c -%c %s", side, u.option, value)
		}
	}
}

func (r *restorer) variables() {
	described := map[string]bool{}
	var refs []variable
	for _, v := range r.vars() {
		described[v.name] = true
		switch {
		case isLocale(v.name) || fixed[v.name] || late[v.name] || v.isOwn() || volatile[v.name]:
		case v.name == "COMP_WORDBREAKS" && !v.set: // as nobody has touched it
		case strings.Contains(v.flags, "n"):
			refs = append(refs, v)
		default:
			r.assign(v)
		}
	}
	for _, v := range refs { // an assignment to one would go to what it stands for
		r.line("%s", v)
	}
	for _, name := range preset {
		if !described[name] {
			r.line("unset -v %s", name)
		}
	}
	for _, name := range []string{"PS1", "PS2"} { // what is set late is empty until then
		if late[name] && described[name] {
			r.line("%s=", name)
		}
	}
}

// assign declares a variable. The order of an associative array's keys is that in which they lie in a
// table whose chains grow at their heads: inserted backwards, they lie as before.
func (r *restorer) assign(v variable) {
	if strings.Contains(v.flags, "A") && v.set {
		if words, ok := splitWords(v.value); ok {
			slices.Reverse(words)
			v.value = "(" + strings.Join(words, " ") + ")"
		}
	}
	r.line("%s", v)
}

// splitWords takes a compound value, as declare -p prints one, apart: (["a b"]="c" [d]=$'e' ).
func splitWords(value string) (words []string, ok bool) {
	body, opens := strings.CutPrefix(value, "(")
	body, closes := strings.CutSuffix(body, ")")
	if !opens || !closes {
		return nil, false
	}
	for i := 0; i < len(body); {
		if body[i] == ' ' {
			i++
			continue
		}
		start := i
		for i < len(body) && body[i] != ' ' {
			i = skipQuoted(body, i)
		}
		words = append(words, body[start:i])
	}
	return words, true
}

// skipQuoted is the index behind what begins at i: one character, or a string in quotes.
func skipQuoted(s string, i int) int {
	end := byte(0)
	switch {
	case s[i] == '"':
		end = '"'
	case s[i] == '\'':
		end = '\''
	case s[i] == '\\':
		return min(i+2, len(s))
	case strings.HasPrefix(s[i:], "$'"):
		end = '\''
		i++
	default:
		return i + 1
	}
	single := s[i] == '\'' && (i == 0 || s[i-1] != '$')
	for i++; i < len(s) && s[i] != end; i++ {
		if s[i] == '\\' && !single {
			i++
		}
	}
	return min(i+1, len(s))
}

func (r *restorer) functions() {
	r.out.Write(r.d.Sections[secFuncs])
	r.out.WriteByte('\n')
}

// do is line for what comes after functions, which may be called like a builtin.
func (r *restorer) do(line string) { r.line(`\builtin %s`, strings.TrimPrefix(line, "builtin ")) }

func (r *restorer) tables() {
	for _, line := range r.section(secAttrs) {
		if !strings.HasPrefix(line, "declare -f ") {
			r.do(line)
		}
	}
	dirs := r.section(secDirs)
	for i := len(dirs) - 1; i > 0; i-- {
		r.do("pushd -n " + dirs[i])
	}
	args := r.section(secArgs)
	if len(args) > 0 {
		r.line("BASH_ARGV0=%s", args[0])
		r.do("set -- " + strings.Join(args[1:], " "))
	}
	r.do("hash -r")
	for _, section := range []string{secHash, secComplete} { // tables with chains, as in assign
		lines := r.section(section)
		slices.Reverse(lines)
		for _, line := range lines {
			if strings.HasPrefix(line, "builtin hash ") || strings.HasPrefix(line, "complete ") {
				r.do(line)
			}
		}
	}
	r.do(strings.TrimSpace(string(r.d.Sections[secUmask])))
}

// last is one compound command, so that nothing of the shell's own runs between its parts. In it
// nothing comes after a debug trap that would set it off.
func (r *restorer) last() {
	r.line("{")
	for _, line := range r.section(secAliases) {
		r.do(line)
	}
	for _, line := range r.section(secShopt) {
		if strings.HasSuffix(line, " extdebug") || strings.HasSuffix(line, " expand_aliases") {
			r.do(line)
		}
	}
	var final []string
	for _, line := range r.section(secOptions) {
		switch name := line[strings.LastIndexByte(line, ' ')+1:]; name {
		case "monitor", "restricted": // as the shell was started
		case "xtrace", "verbose", "errexit", "posix", "noexec", "onecmd":
			if strings.HasPrefix(line, "set -o") {
				final = append(final, line)
			}
		default:
			r.do(line)
		}
	}
	for _, v := range r.vars() {
		if late[v.name] && v.name != "POSIXLY_CORRECT" {
			r.do(v.String())
		}
	}
	for _, line := range final {
		r.do(line)
	}
	for _, v := range r.vars() {
		if v.name == "POSIXLY_CORRECT" {
			r.do(v.String())
		}
	}
	debug := ""
	for _, trap := range splitTraps(string(r.d.Sections[secTraps])) {
		if strings.HasSuffix(trap, " DEBUG") {
			debug = trap
			continue
		}
		r.do(trap)
	}
	for _, line := range r.section(secDisabled) {
		r.do(line)
	}
	if debug != "" {
		r.do(debug)
	}
	if b := r.d.Sections[secBuiltin]; len(bytes.TrimSpace(b)) > 0 {
		r.out.Write(b)
		r.out.WriteByte('\n')
	}
	r.line("}")
}

// splitTraps takes the output of trap -p apart; a trap's text may have several lines.
func splitTraps(text string) (traps []string) {
	for i := 0; i < len(text); {
		start := i
		for i < len(text) && text[i] != '\n' {
			i = skipQuoted(text, i)
		}
		if i > start {
			traps = append(traps, text[start:i])
		}
		i++
	}
	return traps
}

// Environment is what a shell is started with to be restored as d says: the name
// of the folder that it is started in, which may lead there over symlinks.
func Environment(d *Description) []string {
	for line := range strings.Lines(string(d.Sections[secVars])) {
		if v, ok := parseVar(strings.TrimSuffix(line, "\n")); ok && v.name == "PWD" {
			if path, ok := strings.CutPrefix(v.value, `"`); ok {
				return []string{"PWD=" + unescape(strings.TrimSuffix(path, `"`))}
			}
		}
	}
	return nil
}

// unescape undoes the backslashes of a string in double quotes.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+1 < len(s) {
			i++
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// Shadowed: there is a function called builtin in a described shell.
func Shadowed(d *Description) bool { return len(bytes.TrimSpace(d.Sections[secBuiltin])) > 0 }
