package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"image/png"
	"iter"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// hostile is what an agent might run so that whoever looks at a report runs it, too.
const hostile = `<script>window.stolen=1</script><img src=x onerror="window.stolen=1">'"&{{.}}` + "\x1b[31m\u202e"

// rollouts make up what a daemon would have of trees that were grown.
type rollouts struct {
	recorder *stats.Recorder
	nodes    []stats.NodeRow
	random   *rand.Rand
	clock    time.Time
	replay   bytes.Buffer
}

func (r *rollouts) Count() int { return len(r.nodes) }

func (r *rollouts) Each(of ids.Tree) iter.Seq2[stats.NodeRow, error] {
	return func(yield func(stats.NodeRow, error) bool) {
		for _, n := range r.nodes {
			if (of == "" || n.Tree == of) && !yield(n, nil) {
				return
			}
		}
	}
}

func newRollouts(t *testing.T) (*rollouts, *cli) {
	r := &rollouts{random: rand.New(rand.NewPCG(1, 2)), clock: time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)}
	c := newCLI(t)
	var err error
	if r.recorder, err = stats.New(stats.Options{Nodes: r}); err != nil {
		t.Fatal(err)
	}
	c.recorder = r.recorder
	return r, c
}

func (r *rollouts) newTree(policy tree.CapturePolicy) *tree.Node {
	id := fmt.Sprintf("%026d", len(r.nodes)+1)
	n := &tree.Node{ID: ids.Node("nd_" + id), Tree: ids.Tree("tr_" + id), Capture: tree.Proven, Checkpoint: "ck_0"}
	r.nodes = append(r.nodes, stats.NodeRow{Node: n, Restores: &tree.Checkpoint{ID: "ck_0", Node: n.ID, Process: tree.Empty}, Policy: policy})
	return n
}

var commands = []struct {
	line    string
	verdict tree.Verdict
}{
	{"cd /testbed && git status", tree.None}, {"grep -rn separable . | head", tree.None}, {"cat astropy/modeling/separable.py", tree.None}, {"ls -la", tree.None},
	{"sed -i s/1/2/ astropy/modeling/separable.py", tree.Files}, {"python -m pytest -x astropy/modeling", tree.Files}, {"pip install -e .", tree.Files},
	{"X=1 nohup python server.py &", tree.Process}, {"make -j2", tree.Both}, {hostile, tree.Files},
}

// turn adds a child of a node, as a daemon records it.
func (r *rollouts) turn(parent *tree.Node, box string) *tree.Node {
	row := stats.NodeRow{Policy: r.policy(parent.Tree)}
	what := commands[min(r.random.IntN(len(commands)), r.random.IntN(len(commands)))]
	took := time.Duration(r.random.ExpFloat64() * float64(800*time.Millisecond))
	id := fmt.Sprintf("%026d", len(r.nodes)+1)
	siblings := int32(0)
	for _, n := range r.nodes[max(0, len(r.nodes)-500):] {
		if n.Parent == parent.ID {
			siblings++
		}
	}
	n := &tree.Node{ID: ids.Node("nd_" + id), Tree: parent.Tree, Parent: parent.ID, Depth: parent.Depth + 1, Ordinal: siblings, Verdict: what.verdict, Sandbox: ids.Sandbox(box),
		StartedAt: r.clock, EndedAt: r.clock.Add(took), TurnStatus: tree.Completed, Capture: tree.Captured, Checkpoint: parent.Checkpoint}
	n.Action.Text = []byte(what.line)
	row.Node = n
	captured := what.verdict != tree.None || row.Policy == tree.Full
	switch {
	case row.Policy == tree.Uncaptured && captured:
		n.Capture, n.Checkpoint, n.WithheldReason, captured = tree.Withheld, "", "uncaptured", false
	case row.Policy == tree.FilesOnly && what.verdict >= tree.Process, r.random.IntN(40) == 0:
		n.Capture, n.Checkpoint, n.WithheldReason, captured = tree.Withheld, "", hostile, false
	case captured:
		n.Checkpoint = ids.Checkpoint("ck_" + id)
		row.Restores = &tree.Checkpoint{ID: n.Checkpoint, Node: n.ID, Process: tree.Empty, Bytes: int64(20e3 * r.random.ExpFloat64())}
		if what.verdict >= tree.Process || row.Policy == tree.Full {
			row.Restores.Process, row.Restores.Bytes = tree.Dump, row.Restores.Bytes+1<<20
		}
		r.recorder.Capture(stats.CaptureRow{Node: n.ID, Tree: n.Tree, StartedAt: n.EndedAt.Add(time.Millisecond), Freeze: 20 * time.Millisecond, Finish: time.Duration(r.random.IntN(300)) * time.Millisecond, Outcome: stats.OK})
	}
	var wait time.Duration
	if r.random.IntN(6) == 0 {
		wait = time.Duration(r.random.ExpFloat64() * 30 * float64(time.Millisecond))
	}
	r.recorder.Turn(stats.TurnRow{Node: n.ID, Tree: n.Tree, Sandbox: n.Sandbox, StartedAt: n.StartedAt, Wall: took + wait, CaptureWait: wait, Verdict: n.Verdict})
	r.nodes = append(r.nodes, row)
	r.clock = n.EndedAt.Add(time.Duration(r.random.IntN(4000)) * time.Millisecond)
	return n
}

func (r *rollouts) policy(of ids.Tree) tree.CapturePolicy {
	for i := len(r.nodes) - 1; i >= 0; i-- {
		if r.nodes[i].Tree == of {
			return r.nodes[i].Policy
		}
	}
	return 0
}

// replayed adds a trajectory, as `boxwood replay --json` would tell of it.
func (r *rollouts) replayed(file string, turns int, policy tree.CapturePolicy, differs int) {
	root := r.newTree(policy)
	out := json.NewEncoder(&r.replay)
	matched := 0
	n := root
	for i := range turns {
		n = r.turn(n, "sb_"+string(root.Tree[3:]))
		t := turnReport{Tree: string(root.Tree), Step: i + 1, Node: string(n.ID), Match: differs == 0 || i+1 < differs}
		if i%9 == 4 {
			t.Tool = "str_replace_editor"
		}
		if t.Match {
			matched++
		} else {
			t.Different = "the output differs"
		}
		_ = out.Encode(t)
	}
	o := outcome{File: file, Tree: string(root.Tree), Turns: turns, Compared: turns, Matched: matched, FirstDivergence: differs}
	o.MatchedPct = o.matchedPct()
	o.Evidence = *o.MatchedPct >= enough
	if differs > 0 {
		o.Cause = "a file or folder isn't there " + hostile
	}
	_ = out.Encode(o)
}

// search adds a tree that was grown by forks.
func (r *rollouts) search(nodes int) {
	root := r.newTree(tree.Sparse)
	open := []*tree.Node{root}
	for made := 0; made < nodes; {
		n := open[len(open)-1-r.random.IntN(min(len(open), 6))]
		children := 1 + 3*r.random.IntN(2)
		for i := range children {
			if children > 1 {
				outcome := stats.OK
				if r.random.IntN(30) == 0 {
					outcome = stats.Failed
				}
				r.recorder.Fork(stats.ForkRow{Request: fmt.Sprint(made), Node: n.ID, Tree: n.Tree, Child: int64(i), Batch: int64(children), Outcome: outcome, Ready: time.Duration(1e6 * (1 + 3*r.random.ExpFloat64()))})
			}
			open = append(open, r.turn(n, fmt.Sprintf("sb_search%026d", made%7)))
			made++
		}
	}
	for range 300 {
		r.recorder.Fork(stats.ForkRow{Node: root.ID, Tree: root.Tree, Batch: 1, Outcome: stats.OK, Ready: time.Duration(6e5 * (1 + r.random.ExpFloat64()))})
		r.recorder.Fork(stats.ForkRow{Node: root.ID, Tree: root.Tree, Batch: 64, Outcome: stats.OK, Ready: time.Duration(2e7 * (1 + r.random.ExpFloat64()))})
	}
}

// many are trees, and replays of which one is no evidence.
func (r *rollouts) many(t *testing.T) (replay string) {
	for _, policy := range []tree.CapturePolicy{tree.Sparse, tree.Full, tree.FilesOnly} {
		r.replayed("runs/astropy__astropy-12907.traj", 60, policy, 0)
		r.replayed("runs/django__django-11099.traj", 45, policy, 41)
	}
	r.replayed("runs/"+hostile+".traj", 30, tree.Sparse, 0)
	r.replayed("runs/a-repository-that-is-not-there/with-a-long-name/trajectory.json", 30, tree.Sparse, 3)
	replay = filepath.Join(t.TempDir(), "replay.jsonl")
	if err := os.WriteFile(replay, r.replay.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return replay
}

// figure is one of what report --json prints.
type figure struct {
	Name  string
	N     int
	Notes []string
	Rows  [][]any
}

// figures are those of a report, by name.
func (c *cli) figures(t *testing.T, args ...string) map[string]figure {
	t.Helper()
	out, errOut, status := c.run(append([]string{"report", "--json"}, args...)...)
	if status != 0 {
		t.Fatalf("status %d: %s", status, errOut)
	}
	var all struct{ Figures []figure }
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		t.Fatal(err)
	}
	found := map[string]figure{}
	for _, f := range all.Figures {
		found[f.Name] = f
	}
	return found
}

func TestReportOfReplays(t *testing.T) {
	r, c := newRollouts(t)
	replay := r.many(t)
	r.search(40) // of nobody's replay
	f := c.figures(t, replay)
	rows := f["trajectories"].Rows
	if len(rows) != 8 || rows[0][6] != "not evidence" || rows[1][6] != "yes" || len(f["trajectories"].Notes) != 1 {
		t.Errorf("trajectories: %v", rows)
	}
	// 60 and 40 of 45 in the policy sparse, and the hostile one's 30.
	for _, name := range []string{"verdicts_by_trajectory", "verdicts_by_tool"} {
		sum := 0.0
		for _, row := range f[name].Rows {
			sum += row[1].(float64)
			if row[1].(float64) != row[2].(float64)+row[3].(float64)+row[4].(float64)+row[5].(float64) {
				t.Errorf("%s: %v", name, row)
			}
		}
		if f[name].N != 130 || sum != 130 {
			t.Errorf("%s: n is %d, and its rows have %v", name, f[name].N, sum)
		}
	}
	// What can be compared are the two trajectories that ran under each policy.
	bytes, captures := map[string]float64{}, map[string]float64{}
	for _, n := range r.nodes[:2*3+3*(60+45)] {
		if n.Depth > 0 && n.Depth <= 60 && (r.turns(n.Tree) == 60 || n.Depth <= 40) && n.Restores != nil {
			policy := []string{"", "sparse", "full", "files"}[n.Policy]
			bytes[policy] += float64(n.Restores.Bytes)
			captures[policy]++
		}
	}
	order := ""
	for _, row := range f["bytes_by_policy"].Rows {
		policy := row[0].(string)
		order += policy + " "
		if row[1] != 100.0 || row[2] != captures[policy] || row[3] != bytes[policy] || row[4] != bytes[policy]/100 || row[3] != row[5].(float64)+row[6].(float64)+row[7].(float64) {
			t.Errorf("bytes: %v, and there are %v of %v", row, bytes[policy], captures[policy])
		}
	}
	if order != "files sparse full " {
		t.Errorf("policies: %s", order)
	}
	for _, row := range f["savings"].Rows {
		if row[1] == 100.0 && (row[2] != captures[row[0].(string)] || row[3] != 100-row[2].(float64)) {
			t.Errorf("savings: %v", row)
		}
	}
	if n := len(f["timelines"].Rows); n != 8 || f["tree"].N != 61 {
		t.Errorf("%d timelines, %d nodes: those of other trees don't belong here", n, f["tree"].N)
	}
}

// turns of a tree.
func (r *rollouts) turns(of ids.Tree) (n int) {
	for _, node := range r.nodes {
		if node.Tree == of && node.Parent != "" {
			n++
		}
	}
	return n
}

func TestReportOfTrees(t *testing.T) {
	r, c := newRollouts(t)
	r.search(100)
	r.replayed("alone", 9, tree.Sparse, 0)
	dir := t.TempDir()
	f := c.figures(t)
	if f["verdicts_by_tree"].N != r.turns(r.nodes[0].Tree)+9 || f["trajectories"].Rows != nil || f["fork_latencies"].N < 600 {
		t.Errorf("of the daemon: %v", f)
	}
	if one := c.figures(t, "--tree", string(r.nodes[len(r.nodes)-1].Tree)); one["verdicts_by_tree"].N != 9 || one["fork_latencies"].N != 0 || one["exposed_delays"].N != 9 {
		t.Errorf("of one tree: %v", one)
	}
	live, _, _ := c.run("report", "--json")
	for _, ext := range []string{".parquet", ".arrow", ".arrows"} {
		args := []string{"report", "--json"}
		for _, table := range []string{"nodes", "turns", "captures", "forks"} {
			file := filepath.Join(dir, table+ext)
			if out, errOut, status := c.run("stats", table, "-o", file); status != 0 {
				t.Fatal(out, errOut)
			}
			args = append(args, file)
		}
		if out, errOut, _ := c.run(args...); out != live {
			t.Errorf("%s gives another report than the daemon: %s\n%s", ext, errOut, out)
		}
		raw, err := os.ReadFile(args[2])
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{0, 9, len(raw) / 2, len(raw) - 20} {
			broken := filepath.Join(dir, "broken"+ext)
			if err := os.WriteFile(broken, raw[:n], 0o600); err != nil {
				t.Fatal(err)
			}
			// A stream has an end wherever a batch does.
			if out, errOut, status := c.run("report", "--json", broken); (status != failureStatus || !strings.Contains(errOut, "broken"+ext)) && ext != ".arrows" {
				t.Errorf("%d bytes of %s: %d, %s%s", n, ext, status, out, errOut)
			}
		}
	}
	out, errOut, status := c.run("report", "--png", filepath.Join(dir, "pictures"))
	names := strings.Fields(out)
	if status != 0 || len(names) != 9 {
		t.Fatalf("pictures: %d, %s%s", status, out, errOut)
	}
	for _, name := range names {
		raw, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		picture, err := png.Decode(raw)
		raw.Close()
		if err != nil || picture.Bounds().Dx() != 1920 || picture.Bounds().Dy() < 300 {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// What is missing leaves a page that says so; what is much, one that isn't larger for it.
func TestReportOfLittleAndMuch(t *testing.T) {
	for _, test := range []struct {
		name  string
		grow  func(*rollouts)
		turns int
		empty int // figures with nothing to show
	}{
		{"nothing", func(*rollouts) {}, 0, 9},
		{"a root", func(r *rollouts) { r.newTree(tree.Sparse) }, 0, 8},
		{"one turn", func(r *rollouts) { r.turn(r.newTree(tree.Sparse), "sb_1") }, 1, 1},
		{"nothing captured", func(r *rollouts) { r.replayed("x", 30, tree.Uncaptured, 0) }, 30, 1},
		{"100,000 turns", func(r *rollouts) {
			for range 50 {
				r.replayed("x", 1000, tree.Sparse, 0)
			}
			r.search(50_000)
		}, 100_000, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, c := newRollouts(t)
			test.grow(r)
			page, errOut, status := c.run("report", "-o", "-")
			if status != 0 {
				t.Fatal(errOut)
			}
			if n := strings.Count(page, "There is nothing to show"); n != test.empty {
				t.Errorf("%d figures have nothing to show", n)
			}
			if strings.Contains(page, "NaN") || strings.Contains(page, "Inf") || strings.Contains(page, "ZgotmplZ") {
				t.Error("the page has values that are none")
			}
			if len(page) > 1<<20 {
				t.Errorf("the page has %d bytes", len(page))
			}
			if n := c.figures(t)["verdicts_by_tree"].N; n < test.turns || n > test.turns+3 {
				t.Errorf("%d turns", n)
			}
		})
	}
}

// Whoever opens a report must not run what an agent wrote, nor see it in another order.
func TestReportOfHostileText(t *testing.T) {
	r, c := newRollouts(t)
	replay := r.many(t)
	page, errOut, status := c.run("report", replay, "-o", "-")
	if status != 0 {
		t.Fatal(errOut)
	}
	for _, bad := range []string{"<script", "<img", "onerror=\"", "\x1b", "\u202e", "http://", "https://", "url("} {
		if strings.Contains(strings.ReplaceAll(page, "http://www.w3.org/", ""), bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	if !strings.Contains(page, "&lt;script&gt;window.stolen=1") {
		t.Error("the page lacks the text")
	}
}

func TestReportRefuses(t *testing.T) {
	_, c := newRollouts(t)
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, test := range []struct {
		say  string
		args []string
	}{
		{"one of -o, --png and --json", nil},
		{"no such file", []string{"--json", filepath.Join(dir, "absent.parquet")}},
		{"a.csv is neither", []string{"--json", write("a.csv", "1,2")}},
		{"a.arrow", []string{"--json", write("a.arrow", "ARROW1\x00\x00 or not")}},
		{"a.json: reading what a replay printed", []string{"--json", write("a.json", `{"step": 1}{"step":`)}},
		{"b.json: reading what a replay printed", []string{"--json", write("b.json", `{"step": "one"}`)}},
		{"writing", []string{"-o", filepath.Join(dir, "absent", "r.html")}},
	} {
		if out, errOut, status := c.run(append([]string{"report"}, test.args...)...); status != failureStatus || !strings.Contains(errOut, test.say) {
			t.Errorf("%q: %d, %s%s", test.args, status, out, errOut)
		}
	}
}
