package trajectory

import (
	"fmt"
	"regexp"
	"strings"
)

// Observed is what running an event again gave.
type Observed struct {
	ExitCode       int // -1: a signal
	Stdout, Stderr string
	// Cut says that the output is incomplete, so that it can't be compared.
	Cut bool
	// Complained says that it is what a tool of the agent complained of. Only how
	// that begins is compared: it goes on differently in each version.
	Complained bool
	// TimedOut: its deadline ended it.
	TimedOut bool
}

// clipped begins the note below what an agent's tool cut.
const clipped = "<response clipped>"

// Compare says how an event run again differs from its record; "" if in nothing
// that the record tells.
func (e Event) Compare(o Observed) string {
	if o.TimedOut {
		if e.Hung {
			return ""
		}
		return "it did not end in time"
	}
	if e.ExitCode != nil && *e.ExitCode != o.ExitCode {
		return fmt.Sprintf("exit %d, recorded %d", o.ExitCode, *e.ExitCode)
	}
	if e.Output == nil || o.Cut {
		return ""
	}
	got := o.Stdout
	if e.Merged {
		got += o.Stderr // the order of the two is lost; lines are compared as a set below
	}
	recorded := *e.Output
	if e.Call != nil {
		recorded = strings.TrimPrefix(recorded, "ERROR:\n")
	}
	if at := strings.Index(recorded, clipped); at >= 0 {
		recorded, got = recorded[:at], got[:min(at, len(got))]
	}
	if begin := got[:min(18, len(got))]; o.Complained && strings.HasPrefix(recorded, begin) {
		return ""
	}
	want, have := lines(recorded), lines(got)
	if e.Merged && sameLines(want, have) {
		return ""
	}
	for i := range max(len(want), len(have)) {
		switch {
		case i >= len(want):
			return fmt.Sprintf("line %d of the output is new: %q", i+1, have[i])
		case i >= len(have):
			return fmt.Sprintf("line %d of the output is missing: %q", i+1, want[i])
		case want[i] != have[i]:
			return fmt.Sprintf("line %d of the output is %q, recorded %q", i+1, have[i], want[i])
		}
	}
	return ""
}

func sameLines(a, b []string) bool {
	if len(a) != len(b) {
		return false
	}
	count := map[string]int{}
	for _, l := range a {
		count[l]++
	}
	for _, l := range b {
		if count[l]--; count[l] < 0 {
			return false
		}
	}
	return true
}

// volatile is what differs between two runs that did the same.
var volatile = []struct {
	pattern *regexp.Regexp
	instead string
}{
	{regexp.MustCompile(`\x1b\[[0-9;?]*[A-Za-z]`), ""},
	{regexp.MustCompile(`\b0x[0-9a-fA-F]{4,}\b`), "<address>"},
	{regexp.MustCompile(`\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?( ?(Z|[+-]\d\d:?\d\d))?\b`), "<time>"},
	{regexp.MustCompile(`\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun) (Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +\d+ [\d:]+ \d{4}( [+-]\d{4})?`), "<time>"},
	{regexp.MustCompile(`\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +\d+ +(\d\d:\d\d|\d{4})\b`), "<time>"},
	{regexp.MustCompile(`\b\d\d:\d\d:\d\d(\.\d+)?\b`), "<time>"},
	{regexp.MustCompile(`\b\d+(\.\d+)? ?(s|ms|us|seconds?|secs?)\b`), "<duration>"},
	{regexp.MustCompile(`/tmp/(tmp\.?)[A-Za-z0-9_.]{4,}`), "/tmp/<name>"},
	{regexp.MustCompile(`(?i)\bpid[ =:]+\d+`), "pid <n>"},
	{regexp.MustCompile(`(?m)^\[(\d+)\] \d+$`), "[$1] <pid>"},
	{regexp.MustCompile(`(?m)^total \d+$`), "total <n>"},
	{regexp.MustCompile(`\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b`), "<uuid>"},
}

var hash = regexp.MustCompile(`\b[0-9a-f]{7,40}\b`)

func lines(output string) []string {
	output = strings.ReplaceAll(output, "\r\n", "\n")
	for _, v := range volatile {
		output = v.pattern.ReplaceAllString(output, v.instead)
	}
	output = hash.ReplaceAllStringFunc(output, func(word string) string {
		if strings.ContainsAny(word, "abcdef") && strings.ContainsAny(word, "0123456789") {
			return "<hash>"
		}
		return word // a number, or a word like "defaced"
	})
	all := strings.Split(strings.TrimRight(output, "\n \t"), "\n")
	for i := range all {
		all[i] = strings.TrimRight(all[i], " \t\r")
	}
	return all
}
