package shell

import (
	"bytes"
	"strings"
	"testing"
)

// A shell says of itself what it likes: it is refused, or kept as it is and read back the same. What another is told
// to become like it is lines without NUL bytes.
func FuzzDescription(f *testing.F) {
	const token = "0123456789abcdef01234567"
	section := func(name, text string) string { return "\n" + token + " " + name + "\n" + text }
	whole := section("traps", "trap -- 'echo $x' DEBUG\n") + section("options", "set +o allexport\n") + section("shopt", "shopt -u autocd\n") +
		section("vars", "declare -- A=\"1 \\\"2\"\ndeclare -A M=([k]=\"v\" [\"a b\"]=$'c\\nd' )\ndeclare -x PWD=\"/\"\ndeclare -n R=\"A\"") +
		section("funcs", "f () \n{ \n    echo hi\n}\n") + section("aliases", "alias ll='ls -l'\n") + section("dirs", "/\n/tmp\n") + section("args", "bash\n") +
		section("umask", "umask 0022\n") + section("getopts", "a") + section("end", "")
	f.Add([]byte(whole))
	f.Add([]byte(strings.ReplaceAll(whole, "\"", "'")))
	f.Add([]byte("\n" + token + " vars\ndeclare -a X=([0]=\"\\"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		l := &Listener{Token: token}
		if _, err := l.Hear(raw); err != nil {
			return
		}
		d, err := l.Parse(Own{"BOXWOOD_GENERATION": "g", "HOSTNAME": "h", "BOXWOOD_SEED": "1"})
		if err != nil {
			return
		}
		kept := d.Bytes()
		back, err := Read(kept)
		if err != nil || !bytes.Equal(back.Bytes(), kept) {
			t.Fatalf("a description isn't read as it was written: %v", err)
		}
		if names := Diff(d, back); len(names) > 0 {
			t.Errorf("a description differs from itself in %q", names)
		}
		Shadowed(d)
		Environment(d)
		if bytes.Contains(raw, []byte{0}) {
			return // nothing that bash prints has any
		}
		if told := Restore(d); bytes.IndexByte(told, 0) >= 0 || len(told) > 0 && told[len(told)-1] != '\n' {
			t.Errorf("a shell would be told %q", told)
		}
	})
}

// A kept description comes from a disk or an archive.
func FuzzKeptDescription(f *testing.F) {
	f.Add([]byte(`{"Sections":{"vars":"ZGVjbGFyZSAtLSBBPSIxIg=="},"Kernel":"","Limits":{"Max open files":["1024","4096"]}}`))
	f.Add([]byte(`{"Sections":null}`))
	f.Fuzz(func(t *testing.T, kept []byte) {
		d, err := Read(kept)
		if err != nil {
			return
		}
		Restore(d)
		Environment(d)
		Diff(d, &Description{})
	})
}
