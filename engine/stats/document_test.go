package stats

import (
	goflag "flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = goflag.Bool("update", false, "write the tables of the document anew")

// words are the vocabularies of a table's columns.
func words[R any](d *definition[R]) map[string][]string {
	all := map[string][]string{}
	for _, c := range d.columns {
		all[c.name] = c.vocabulary
	}
	return all
}

var vocabularies = map[string]map[string][]string{
	Turns: words(turnsTable), Nodes: words(nodesTable), Forks: words(forksTable), Captures: words(capturesTable), Audits: words(auditsTable), Scheduler: words(schedulerTable),
	Host: words(hostTable), Restores: words(restoresTable), Replays: words(replaysTable), Sandboxes: words(sandboxesTable),
}

// described is what docs/STATS.md says of the tables.
func described(tables []Table) string {
	var b strings.Builder
	for _, t := range tables {
		fmt.Fprintf(&b, "\n### %s\n\n%s\n\n| column | type | unit | meaning | null |\n|---|---|---|---|---|\n", t.Name, t.Description)
		for _, c := range t.Columns {
			doc := c.Description
			if list := vocabularies[t.Name][c.Name]; list != nil {
				doc += " `" + strings.Join(list, "`, `") + "`"
			}
			fmt.Fprintf(&b, "| `%s` | `%s` | %s | %s | %s |\n", c.Name, c.Type, c.Unit, doc, c.Null)
		}
	}
	return b.String()
}

// A column that the document doesn't have, or has otherwise, is one that an analyst has to guess the meaning of.
func TestTheDocumentSaysWhatTheTablesAre(t *testing.T) {
	const file, from, to = "../../docs/STATS.md", "<!-- tables -->\n", "<!-- end of tables -->\n"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, began := strings.Cut(string(text), from)
	got, tail, ended := strings.Cut(rest, to)
	if !began || !ended {
		t.Fatalf("%s lacks %q or %q", file, from, to)
	}
	tables := mustNew(t, Options{}).Tables()
	for _, table := range tables {
		for _, c := range table.Columns {
			if table.Description == "" || c.Description == "" {
				t.Errorf("%s.%s: what does it mean?", table.Name, c.Name)
			}
			if strings.HasSuffix(c.Name, "_ns") && c.Unit != "ns" {
				t.Errorf("%s.%s is in %q", table.Name, c.Name, c.Unit)
			}
		}
	}
	want := described(tables)
	if *update {
		if err := os.WriteFile(file, []byte(head+from+want+to+tail), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if got == want {
		return
	}
	have := map[string]bool{}
	for _, line := range strings.Split(got, "\n") {
		have[line] = true
	}
	for _, line := range strings.Split(want, "\n") {
		if !have[line] {
			t.Errorf("%s lacks: %s", file, line)
		}
	}
	t.Errorf("%s says something else of the tables than their schemas: go test ./engine/stats -run TestTheDocument -update", file)
}
