package shell

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// MaxDescription bounds what one shell may say of itself. A larger one isn't kept as text.
const MaxDescription = 64 << 20

// The sections of a description, in the order in which they are taken: what a later one
// changes in the subshell is told by an earlier one.
const (
	secDisabled = "disabled" // builtins; before they are all put on again
	secBuiltin  = "builtin"  // a function of that name
	secTraps    = "traps"    // before anything sets one: until then a subshell shows its parent's
	secOptions  = "options"  // set -o
	secShopt    = "shopt"    //
	secVars     = "vars"     // declare -p
	secAttrs    = "attrs"    // of functions: declare -F
	secFuncs    = "funcs"    // declare -f
	secAliases  = "aliases"  //
	secDirs     = "dirs"     // the directory stack, quoted, its top first
	secHash     = "hash"     //
	secComplete = "complete" //
	secArgs     = "args"     // $0, $1 ..., quoted
	secUmask    = "umask"    //
	secJob      = "job"      // $!
	secGetopts  = "getopts"  // how far into a word getopts has come
	secEnd      = "end"
)

// Describe has a shell describe itself. One that can't, since it may open no more files, only says that this was all.
func Describe(token string) []byte {
	var b strings.Builder
	say := func(section, do string) {
		fmt.Fprintf(&b, `\builtin printf '\n%%s %%s\n' %s %s >&0; { %s; } >&0; `, token, section, do)
	}
	b.WriteString(`( `)
	b.WriteString(`if \declare -F builtin; then __boxwood_b=$(\declare -f builtin); \unset -f builtin; fi; ` +
		`\builtin printf '\n%s %s\n' ` + token + ` ` + secDisabled + ` >&0; \builtin enable -n >&0 && { \builtin enable ` + used + `; `)
	say(secTraps, `\builtin trap -p`)
	say(secOptions, `\builtin set +o`)
	say(secShopt, `\builtin shopt -p`)
	b.WriteString(`\builtin set +eux; \builtin trap - DEBUG ERR RETURN EXIT; `)
	say(secBuiltin, `\builtin printf %s "$__boxwood_b"; \builtin unset -v __boxwood_b`)
	say(secVars, `\builtin declare -p`)
	say(secAttrs, `\builtin declare -F`)
	say(secFuncs, `\builtin declare -f`)
	say(secAliases, `\builtin alias -p`)
	say(secDirs, `\builtin printf '%q\n' "${DIRSTACK[@]}"`)
	say(secHash, `\builtin hash -l`)
	say(secComplete, `\builtin complete -p`)
	say(secArgs, `\builtin printf '%q\n' "$0" "$@"`)
	say(secUmask, `\builtin umask -p`)
	say(secJob, `\builtin printf %s "${!-}"`)
	say(secGetopts, getoptsProbe)
	fmt.Fprintf(&b, `}; \builtin printf '\n%%s end\n' %[1]s >&0 ) >/dev/null 2>&1 || ( \builtin printf '\n%%s end\n' %[1]s ) >&0 2>&0`+"\n", token)
	return []byte(b.String())
}

// used are the builtins that describe.
const used = `alias complete declare dirs getopts hash printf set shopt trap umask unset`

// getoptsProbe finds what getopts keeps to itself: which letter of a word it is at.
// It asks for the next option of words that have every letter. A [[ here could be taken for a part of another: see condition.
const getoptsProbe = `if (( ${OPTIND:-1} < 1000 )); then __boxwood_a=(); ` +
	`while (( ${#__boxwood_a[@]} <= ${OPTIND:-1} )); do __boxwood_a+=(-abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ); done; ` +
	`\builtin getopts abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ __boxwood_o "${__boxwood_a[@]}"; \builtin printf %s "$__boxwood_o"; ` +
	`else \builtin printf far; fi`

// Listener hears a description.
type Listener struct {
	Token string
	raw   []byte
}

// Hear takes what came over the channel; true at the end.
func (l *Listener) Hear(p []byte) (bool, error) {
	end := []byte("\n" + l.Token + " " + secEnd + "\n")
	from := max(0, len(l.raw)-len(end))
	l.raw = append(l.raw, p...)
	if len(l.raw) > MaxDescription {
		return true, fault.New(fault.Exhausted, "description_too_large", "the shell's description has more than %d bytes", MaxDescription)
	}
	return bytes.Contains(l.raw[from:], end), nil
}

// Own are the values that belong to the sandbox and not to what ran in it. A variable
// that has one is described as having its own, BOXWOOD_SEED not at all.
type Own map[string]string

// Description is the state of a shell. Equal states have equal ones.
type Description struct {
	Sections map[string][]byte
	// Kernel has facts about the process that no builtin tells, Limits those of its
	// resource limits that aren't a new process's.
	Kernel []byte
	Limits map[string][2]string
}

// HadJobs: the shell has ever had a job in the background. What it remembers of those isn't described.
func (d *Description) HadJobs() bool { return len(bytes.TrimSpace(d.Sections[secJob])) > 0 }

// Volatile variables have a value of the moment: that they are there is state, what they
// hold isn't. Those of the second line are told in a section of their own.
var volatile = set(`_ BASHPID BASH_ARGC BASH_ARGV BASH_COMMAND BASH_EXECUTION_STRING BASH_LINENO BASH_MONOSECONDS BASH_SOURCE BASH_SUBSHELL
	BASH_TRAPSIG EPOCHREALTIME EPOCHSECONDS FUNCNAME HISTCMD LINENO PIPESTATUS RANDOM SECONDS SRANDOM GROUPS
	BASHOPTS SHELLOPTS BASH_ALIASES BASH_ARGV0 BASH_CMDS DIRSTACK`)

// Volatile reports whether a variable's value is of the moment and no state, or belongs to the sandbox and not to what ran in it.
func Volatile(name string) bool {
	return volatile[name] || strings.HasPrefix(name, "__boxwood_") || name == "BOXWOOD_GENERATION" || name == "BOXWOOD_SEED" || name == "HOSTNAME"
}

func set(words string) map[string]bool {
	m := map[string]bool{}
	for w := range strings.FieldsSeq(words) {
		m[w] = true
	}
	return m
}

// Parse reads what was heard.
func (l *Listener) Parse(own Own) (*Description, error) {
	d := &Description{Sections: map[string][]byte{}}
	mark := []byte("\n" + l.Token + " ")
	parts := bytes.Split(l.raw, mark)
	for _, part := range parts[1:] { // what is before them is for nobody
		name, text, ok := bytes.Cut(part, []byte{'\n'})
		if !ok {
			return nil, fault.New(fault.Internal, "bad_description", "the shell's description can't be read")
		}
		d.Sections[string(name)] = text
	}
	for _, name := range []string{secDisabled, secTraps, secOptions, secVars, secFuncs, secGetopts, secEnd} {
		if _, ok := d.Sections[name]; !ok {
			return nil, fault.New(fault.Internal, "bad_description", "the shell's description lacks its %s", name)
		}
	}
	delete(d.Sections, secEnd)
	d.Sections[secVars] = normalVars(d.Sections[secVars], own)
	return d, nil
}

// normalVars leaves out what isn't state, and sorts: the order of declare -p is the same
// for the same names, but not promised.
func normalVars(text []byte, own Own) []byte {
	var lines []string
	for line := range strings.Lines(string(text)) {
		v, ok := parseVar(strings.TrimSuffix(line, "\n"))
		switch {
		case !ok || strings.HasPrefix(v.name, "__boxwood_"):
			continue
		case v.name == "BOXWOOD_SEED" && v.set && v.value == `"`+own[v.name]+`"`:
			continue // not every sandbox has one
		case volatile[v.name]:
			v.value, v.set = "", false
			if v.flags = "--"; isExported(line) {
				v.flags = "-x"
			} // the other attributes come with the first use
		case own[v.name] != "" && v.set && v.value == `"`+own[v.name]+`"`:
			v.flags, v.value, v.set = "own "+v.flags, "", false
		}
		lines = append(lines, v.String())
	}
	slices.SortFunc(lines, func(a, b string) int { return cmp.Compare(nameOf(a), nameOf(b)) })
	return []byte(strings.Join(lines, "\n"))
}

// isExported reads the attributes of a line of declare -p.
func isExported(line string) bool {
	attributes, _, _ := strings.Cut(strings.TrimPrefix(line, "declare "), " ")
	return strings.Contains(attributes, "x")
}

// variable is one line of declare -p: declare FLAGS NAME[=VALUE].
type variable struct {
	flags, name, value string
	set                bool
}

func parseVar(line string) (v variable, ok bool) {
	rest, ok := strings.CutPrefix(line, "declare ")
	if !ok {
		return v, false
	}
	if rest, v.set = strings.CutPrefix(rest, "own "); v.set {
		v.flags, v.set = "own ", false
	}
	flags, rest, ok := strings.Cut(rest, " ")
	v.flags += flags
	v.name, v.value, v.set = strings.Cut(rest, "=")
	return v, ok && v.name != ""
}

func (v variable) String() string {
	s := "declare " + v.flags + " " + v.name
	if v.set {
		s += "=" + v.value
	}
	return s
}

func (v variable) isOwn() bool { return strings.HasPrefix(v.flags, "own ") }

func nameOf(line string) string {
	v, _ := parseVar(line)
	return v.name
}

// Bytes is the description as it is kept and compared.
func (d *Description) Bytes() []byte {
	b, err := json.Marshal(d)
	if err != nil {
		panic(err) // of bytes and strings
	}
	return b
}

// Read is the inverse of Bytes.
func Read(b []byte) (*Description, error) {
	d := &Description{}
	if err := json.Unmarshal(b, d); err != nil {
		return nil, fault.New(fault.DataLoss, "bad_description", "a kept description can't be read: %w", err)
	}
	return d, nil
}

// Diff names what differs between two descriptions, for a person, "cwd" and "variable X"
// and the like. Nothing: they are equal.
func Diff(a, b *Description) (names []string) {
	if bytes.Equal(a.Bytes(), b.Bytes()) {
		return nil
	}
	add := func(what string, names2 []string) {
		for _, n := range names2 {
			names = append(names, what+" "+n)
		}
	}
	for _, s := range []struct{ section, what string }{
		{secVars, "variable"}, {secFuncs, "function"}, {secAliases, "alias"}, {secOptions, "option"}, {secShopt, "option"},
		{secTraps, "trap"}, {secDisabled, "builtin"}, {secComplete, "completion"}, {secHash, "hashed command"}, {secAttrs, "function"},
	} {
		changed := differing(itemsOf(s.section, a.Sections[s.section]), itemsOf(s.section, b.Sections[s.section]))
		if len(changed) == 0 && !bytes.Equal(a.Sections[s.section], b.Sections[s.section]) {
			changed = []string{"order"}
		}
		add(s.what, changed)
	}
	for _, s := range []struct{ section, what string }{
		{secDirs, "directory stack"}, {secArgs, "positional parameters"}, {secUmask, "umask"}, {secJob, "last background job"},
		{secGetopts, "getopts"}, {secBuiltin, "function builtin"},
	} {
		if !bytes.Equal(a.Sections[s.section], b.Sections[s.section]) {
			names = append(names, s.what)
		}
	}
	for name := range a.Limits {
		if a.Limits[name] != b.Limits[name] {
			names = append(names, "limit "+name)
		}
	}
	for name := range b.Limits {
		if _, ok := a.Limits[name]; !ok {
			names = append(names, "limit "+name)
		}
	}
	add("process", differing(lineItems(a.Kernel), lineItems(b.Kernel)))
	slices.Sort(names)
	return slices.Compact(names)
}

func differing(a, b map[string]string) (names []string) {
	for k, v := range a {
		if w, ok := b[k]; !ok || v != w {
			names = append(names, k)
		}
	}
	for k := range b {
		if _, ok := a[k]; !ok {
			names = append(names, k)
		}
	}
	return names
}

func lineItems(text []byte) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(string(text)) {
		key, _, _ := strings.Cut(line, " ")
		m[key] = strings.TrimSuffix(line, "\n")
	}
	return m
}

// itemsOf takes a section apart by name, for people: equal sections are told by their bytes.
func itemsOf(section string, text []byte) map[string]string {
	m := map[string]string{}
	name := ""
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		switch section {
		case secVars:
			name = nameOf(line)
		case secFuncs:
			if n, ok := strings.CutSuffix(line, " () "); ok && !strings.HasPrefix(line, " ") {
				name = strings.TrimPrefix(n, "function ")
			}
		case secAliases:
			n, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(line, "alias "), "-- "), "=")
			name = n
		default:
			name = words[len(words)-1]
		}
		m[name] += line + "\n"
	}
	return m
}
