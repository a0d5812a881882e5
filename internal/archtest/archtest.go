// Package archtest holds the rule who may import whom:
//
//	cmd -> engine -> {inspector, sched, tree} -> internal
//
// with these on top: tree imports neither engine, inspector nor sched; sched
// imports neither engine, inspector nor tree; bpf is the inspector's alone; the
// wire format is known to the service, its clients and what drives it.
//
// The rule is a table, so that a new folder at the top must be put into it.
package archtest

import (
	"fmt"
	"slices"
	"strings"
)

// Import is one import of a package by another, as folders below the module.
// Tests says that only tests of From import To.
type Import struct {
	From, To string
	Tests    bool
}

// allowed is what each top folder may import of this module, itself excepted.
// A test may use more: see allowedInTests.
var allowed = map[string][]string{
	"cmd":        {"engine", "inspector", "sched", "tree", "proto", "internal"},
	"engine":     {"inspector", "sched", "tree", "proto", "internal"},
	"inspector":  {"tree", "bpf", "internal"},
	"sched":      {"internal"},
	"tree":       {"internal"},
	"bpf":        {},
	"proto":      {},
	"internal":   {},
	"benchmarks": {"engine", "inspector", "sched", "tree", "proto", "internal"},
	"examples":   {"proto", "internal"},
}

// allowedInTests adds to allowed: an end-to-end test of the command line or a
// benchmark speaks to the service as a client does.
var allowedInTests = map[string][]string{
	"cmd":       {"benchmarks"},
	"inspector": {"engine"},
	"bpf":       {"internal"},
}

// Broken lists the imports that break the rule, one line each.
func Broken(imports []Import) []string {
	var broken []string
	for _, i := range imports {
		from, to := top(i.From), top(i.To)
		if from == to {
			continue
		}
		may, known := allowed[from]
		switch {
		case !known:
			broken = append(broken, fmt.Sprintf("%s: folder %s is not in the table of internal/archtest", i.From, from))
		case slices.Contains(may, to):
		case i.Tests && slices.Contains(allowedInTests[from], to):
		default:
			broken = append(broken, fmt.Sprintf("%s imports %s: %s may import %s", i.From, i.To, from, list(may)))
		}
	}
	return broken
}

func top(folder string) string {
	name, _, _ := strings.Cut(folder, "/")
	return name
}

func list(names []string) string {
	if len(names) == 0 {
		return "nothing of this module"
	}
	return "only " + strings.Join(names, ", ")
}
