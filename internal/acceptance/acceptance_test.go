package acceptance

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
)

const page = `# Acceptance
| item | claim | shown by |
|---|---|---|
| 1 | it builds | ` + "`ci build`" + ` |
| 2.1 | a clone keeps numbers | ` + "`engine/pool TestClone/deep`; `python test_fork.py::test_fork`" + ` |
| 2.2 | forks are fast | ` + "`bench fork empty.ready_ms.p50`" + ` |
| 2.3 | nobody showed this | |
`

func TestParse(t *testing.T) {
	rows, err := Parse(strings.NewReader(page))
	if err != nil {
		t.Fatal(err)
	}
	want := []Row{
		{4, "1", "it builds", []string{"ci build"}},
		{5, "2.1", "a clone keeps numbers", []string{"engine/pool TestClone/deep", "python test_fork.py::test_fork"}},
		{6, "2.2", "forks are fast", []string{"bench fork empty.ready_ms.p50"}},
		{7, "2.3", "nobody showed this", nil},
	}
	if !reflect.DeepEqual(rows, want) {
		t.Errorf("got %+v", rows)
	}
	if _, err := Parse(strings.NewReader("| 3.1 | only two cells |\n")); err == nil {
		t.Error("a row without evidence was accepted")
	}
}

// Each way in which a claim can be hollow must be a problem; if one slips
// through, CI stays green over a claim that nothing shows.
func TestCheck(t *testing.T) {
	good := Evidence{
		Go:        map[string]Outcome{"engine/pool TestClone/deep": Passed},
		Python:    map[string]Outcome{"test_fork.py::test_fork": Passed},
		Benchmark: func(name, metric string) bool { return name == "fork" && metric == "empty.ready_ms.p50" },
		Step:      func(name string) bool { return name == "build" },
	}
	goIs := func(o Outcome) Evidence {
		e := good
		e.Go = map[string]Outcome{"engine/pool TestClone/deep": o}
		return e
	}
	without := func(change func(*Evidence)) Evidence {
		e := good
		change(&e)
		return e
	}
	row := func(references ...string) []Row { return []Row{{1, "1", "claim", references}} }
	clone := "engine/pool TestClone/deep"
	tests := []struct {
		name     string
		rows     []Row
		evidence Evidence
		want     string // empty: no problem
	}{
		{"all shown", row(clone, "python test_fork.py::test_fork", "bench fork empty.ready_ms.p50", "ci build"), good, ""},
		{"nothing", row(), good, "nothing shows"},
		{"go test missing", row("engine/pool TestNone"), good, "no such test"},
		{"go test of another package", row("tree TestClone/deep"), good, "no such test"},
		{"go test skipped", row(clone), goIs(Skipped), "was skipped"},
		{"go test failed", row(clone), goIs(Failed), "failed"},
		{"python missing", row("python test_fork.py::test_other"), good, "no such test"},
		{"python skipped", row("python test_fork.py::test_fork"), without(func(e *Evidence) {
			e.Python = map[string]Outcome{"test_fork.py::test_fork": Skipped}
		}), "was skipped"},
		{"no such benchmark", row("bench turn"), good, "no such benchmark"},
		{"no such step", row("ci dance"), good, "no such step"},
		{"prose", row("see the code"), good, "one word too many"},
		{"one word", row("TestClone"), good, "not understood"},
		{"item left out", nil, good, "item 1 has no claim"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			problems := Check(tt.rows, tt.evidence, 1)
			got := strings.Join(problems, "\n")
			if tt.want == "" && got != "" || !strings.Contains(got, tt.want) || tt.want != "" && got == "" {
				t.Errorf("got %q, want ...%q", got, tt.want)
			}
		})
	}
}

func TestReadGo(t *testing.T) {
	const run = `{"Action":"run","Package":"m/tree","Test":"TestA"}
{"Action":"pass","Package":"m/tree","Test":"TestA/x"}
{"Action":"skip","Package":"m/tree","Test":"TestA/y"}
{"Action":"pass","Package":"m/tree","Test":"TestA"}
{"Action":"fail","Package":"m","Test":"TestB"}
{"Action":"fail","Package":"m"}
`
	got, err := ReadGo(strings.NewReader(run), "m")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]Outcome{"tree TestA": Skipped, "tree TestA/x": Passed, "tree TestA/y": Skipped, ". TestB": Failed}
	if !maps.Equal(got, want) {
		t.Errorf("got %v", got)
	}
	if _, err := ReadGo(strings.NewReader(run+`{"Action":`), "m"); err == nil {
		t.Error("a cut file was accepted")
	}
}

func TestReadJUnit(t *testing.T) {
	const run = `<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.test_a" name="test_one[1]"/>
<testcase classname="tests.test_a" name="test_one[2]"><skipped message="no"/></testcase>
<testcase classname="tests.integration.test_b.TestC" name="test_two"/>
<testcase classname="tests.test_a" name="test_bad"><failure/></testcase>
<testcase classname="tests.test_a" name="test_worse"><error/></testcase>
</testsuite></testsuites>`
	got, err := ReadJUnit(strings.NewReader(run))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]Outcome{"test_a.py::test_one": Skipped, "test_b.py::TestC::test_two": Passed,
		"test_a.py::test_bad": Failed, "test_a.py::test_worse": Failed}
	if !maps.Equal(got, want) {
		t.Errorf("got %v of %v", got, slices.Sorted(maps.Keys(got)))
	}
}
