package report

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
)

// A repository that isn't there makes every turn look as if it changed nothing: counted, it would be the best of savings.
func TestWhatIsNoEvidenceCountsForNothing(t *testing.T) {
	d := Data{nodes: map[string]*node{}}
	add := func(id, tree, verdict string) {
		d.nodes[id] = &node{id: id, tree: tree, parent: "root of " + tree, verdict: verdict, policy: "sparse"}
	}
	var printed strings.Builder
	for i := range 4 {
		for _, tree := range []string{"good", "bad", "cut off"} {
			different := ""
			if tree == "bad" || i == 3 {
				different = "the output differs"
			}
			id := fmt.Sprintf("%s %d", tree, i)
			add(id, tree, "none")
			fmt.Fprintf(&printed, `{"tree": %q, "step": %d, "node": %q, "different": %q}`+"\n", tree, i+1, id, different)
		}
	}
	add("a session", "good", "process")
	add("elsewhere", "of somebody else", "both")
	printed.WriteString(`{"tree": "good", "step": 5, "node": "a session", "skipped": "its tool isn't there"}
{"file": "good.traj", "tree": "good", "turns": 4, "matched_pct": 80, "evidence": true, "skipped": {"its tool isn't there": 1}}
{"file": "bad.traj", "tree": "bad", "turns": 4, "matched_pct": 0, "evidence": false}
{"trajectories": 2}`)
	if err := d.addReplay(strings.NewReader(printed.String())); err != nil {
		t.Fatal(err)
	}
	for _, f := range d.Figures(nil) {
		if strings.HasPrefix(f.Name, "verdicts") && f.N != 3 {
			t.Errorf("%s counts %d turns, and 3 are evidence: %v", f.Name, f.N, f.Rows)
		}
		if f.Name == "trajectories" && (len(f.Rows) != 2 || f.Rows[0][6] != "not evidence" || f.Rows[1][6] != "yes" || !strings.Contains(fmt.Sprint(f.Notes), "1 more have no end")) {
			t.Errorf("trajectories: %v %v", f.Rows, f.Notes)
		}
	}
}

func TestProgram(t *testing.T) {
	for line, want := range map[string]string{
		"":                                     "",
		"ls":                                   "ls",
		"cd /src && FOO=1 sudo make -j2":       "make",
		"cd /src":                              "cd",
		"export A=b; source x; ./configure":    "configure",
		"cat <<EOF > a.py\nimport os\nEOF":     "cat",
		"\n  # what is here?\n/usr/bin/find .": "find",
		"(for f in *; do wc $f; done)":         "wc",
		"'a b'":                                "a",
		"=x":                                   "=x",
		"&&":                                   "",
	} {
		if got := program(line); got != want {
			t.Errorf("%q runs %q, not %q", line, got, want)
		}
	}
}

// Whatever a table says of parents, a tree is drawn, and ends.
func TestTreesThatAreNone(t *testing.T) {
	for name, nodes := range map[string][]*node{
		"a node alone":            {{id: "a"}},
		"its own parent":          {{id: "a", parent: "a"}, {id: "b", parent: "a", depth: 1}},
		"a ring":                  {{id: "a", parent: "b"}, {id: "b", parent: "a"}},
		"without its root":        {{id: "b", parent: "a", depth: 7}, {id: "c", parent: "a", depth: 7}},
		"depths that can't be so": {{id: "a", depth: 1 << 40}, {id: "b", parent: "a", depth: -1 << 40}},
	} {
		svg, err := drawTree(nodes).svg(name)
		if err != nil || !strings.Contains(svg, "</svg>") || strings.Contains(svg, "NaN") {
			t.Errorf("%s: %v\n%s", name, err, svg)
		}
		if err := drawTree(nodes).writePNG(&bytes.Buffer{}, name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Names are cut, and files of two trajectories may end alike; a replay that went on is in its output twice.
func TestTrajectoriesAreToldApart(t *testing.T) {
	d := Data{nodes: map[string]*node{}}
	var printed strings.Builder
	for i := range 3 {
		tree, id := fmt.Sprintf("tr_%d", i), fmt.Sprintf("nd_%d", i)
		d.nodes[id] = &node{id: id, tree: tree, parent: "root", verdict: "files"}
		for _, pct := range []int{10, 100} {
			fmt.Fprintf(&printed, `{"tree": %q, "step": 1, "node": %q}{"file": "jobs/one-and-the-same/%d/and-more-of-it/trajectory.json", "tree": %[1]q, "matched_pct": %[4]d, "evidence": %[5]v}`, tree, id, i, pct, pct > 80)
		}
	}
	if err := d.addReplay(strings.NewReader(printed.String())); err != nil {
		t.Fatal(err)
	}
	rows := d.choose(nil).verdicts("verdicts_by_trajectory").Rows
	if len(d.Trees()) != 3 || len(rows) != 3 || rows[0][0] == rows[1][0] || rows[1][0] == rows[2][0] {
		t.Errorf("%v", rows)
	}
}
