package report

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"gonum.org/v1/gonum/stat"

	"github.com/boxwood-rl/boxwood/internal/printable"
)

// The bounds of a figure: what is beyond them is added up in one row or left out,
// and the figure's note says so.
const (
	maxRows      = 20  // bars, trees and trajectories
	maxTimelines = 12  // rows of timelines
	maxTurns     = 200 // turns of one timeline
	maxPoints    = 400 // points of a curve
	maxNodes     = 400 // nodes of the tree
)

// Figure is what one picture shows, in numbers; Draw is nil where there is nothing
// to draw.
type Figure struct {
	Name    string   `json:"name"`
	Title   string   `json:"title"`
	N       int      `json:"n"`
	Of      string   `json:"of"` // what n counts
	Notes   []string `json:"notes"`
	Columns []Column `json:"columns"`
	// Rows have a cell a column: a string, an int64, a float64 or nil, of which
	// nothing is known.
	Rows [][]any `json:"rows"`

	draw func() *picture
	warn func(row []any) bool // which rows stand out in the page; nil: none
}

// Column of a figure. Unit is "": a count or text.
type Column struct {
	Name string `json:"name"`
	Unit string `json:"unit,omitempty"`
}

func (f *Figure) note(format string, args ...any) {
	f.Notes = append(f.Notes, fmt.Sprintf(format, args...))
}

func (f *Figure) row(cells ...any) { f.Rows = append(f.Rows, cells) }

func columnsOf(names ...string) (all []Column) {
	for _, name := range names {
		name, unit, _ := strings.Cut(name, "/")
		all = append(all, Column{name, unit})
	}
	return all
}

// counted is a turn that the figures of verdicts and bytes count.
type counted struct {
	*node
	trajectory string
}

// selection is what of the data a report is of.
type selection struct {
	*Data
	counted []counted // in the order in which they began
	// what groups turns: "trajectory", if replays say so, or "tree".
	group string
	left  int // turns of replays that don't count
	// names of trees, and titles, which differ between a trajectory's trees under
	// several policies, too.
	names, titles map[string]string
}

// Figures makes all figures. trees: of these alone; none: of the replays' trees, or of all.
func (d *Data) Figures(trees []string) []*Figure {
	s := d.choose(trees)
	figures := []*Figure{s.overview()}
	if len(d.replays) > 0 {
		figures = append(figures, s.trajectories())
	}
	return append(figures,
		s.verdicts("verdicts_by_"+s.group), s.verdicts("verdicts_by_tool"), s.bytes(), s.captured(), s.cumulativeBytes(),
		s.timelines(), s.exposed(), s.forked(), s.tree())
}

// choose leaves the rows of the trees that are asked for.
func (d *Data) choose(trees []string) *selection {
	if len(trees) == 0 {
		trees = d.Trees()
	}
	wanted := map[string]bool{}
	for _, t := range trees {
		wanted[t] = true
	}
	in := func(tree string) bool { return len(wanted) == 0 || wanted[tree] }
	s := &selection{Data: &Data{nodes: map[string]*node{}, replayed: d.replayed, endless: d.endless}, group: "tree"}
	if len(d.replays) > 0 {
		s.group = "trajectory"
	}
	for _, r := range d.replays {
		if in(r.tree) {
			s.replays = append(s.replays, r)
		}
	}
	s.names, s.titles = d.names()
	for id, n := range d.nodes {
		if !in(n.tree) {
			continue
		}
		s.nodes[id] = n
		switch r, of := d.replayed[id]; {
		case n.parent == "", len(d.replays) > 0 && (!of || d.replays[r.trajectory].tree != n.tree):
		case of && !r.counts:
			s.left++
		default:
			s.counted = append(s.counted, counted{n, s.names[n.tree]})
		}
	}
	slices.SortFunc(s.counted, func(a, b counted) int {
		return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.depth, b.depth), cmp.Compare(a.id, b.id))
	})
	for _, t := range d.turns {
		if in(t.tree) {
			s.turns = append(s.turns, t)
		}
	}
	for _, c := range d.captures {
		if in(c.tree) {
			s.captures = append(s.captures, c)
		}
	}
	for _, f := range d.forks {
		if in(f.tree) {
			s.forks = append(s.forks, f)
		}
	}
	return s
}

// names are what trees are called: the file that a replay ran, without the folders
// that all of them share, else the id's end.
func (d *Data) names() (names, titles map[string]string) {
	var files []string
	for _, r := range d.replays {
		files = append(files, r.file)
	}
	shared := 0
	if len(files) > 0 {
		low, high := slices.Min(files), slices.Max(files)
		for i := 0; i < min(len(low), len(high)) && low[i] == high[i]; i++ {
			if low[i] == '/' {
				shared = i + 1
			}
		}
		if low == high {
			shared = strings.LastIndexByte(low, '/') + 1
		}
	}
	names, policies := map[string]string{}, map[string]string{}
	for _, n := range d.nodes {
		if names[n.tree] == "" {
			names[n.tree], policies[n.tree] = short(n.tree), n.policy
		}
	}
	// Two files that are cut to the same name are two.
	byFile, uses, trees := map[string]string{}, map[string]int{}, map[string]int{}
	for _, r := range d.replays {
		name, known := byFile[r.file]
		if !known {
			name = label(r.file[shared:])
			if uses[name]++; uses[name] > 1 {
				name = fmt.Sprintf("%s (%d)", name, uses[name])
			}
			byFile[r.file] = name
		}
		names[r.tree] = name
		trees[name]++
	}
	titles = maps.Clone(names)
	for _, r := range d.replays {
		if name := names[r.tree]; trees[name] > 1 {
			titles[r.tree] = name + ", " + cmp.Or(policies[r.tree], "unknown")
		}
	}
	return names, titles
}

// short is an id's kind and end, which differs between two of them.
func short(id string) string {
	kind, rest, ok := strings.Cut(id, "_")
	if !ok || len(rest) <= 8 {
		return label(id)
	}
	return label(kind + "_…" + rest[len(rest)-8:])
}

// label is text of a sandbox as one line; of what is long the middle is left out.
func label(text string) string {
	const half = 15
	text = printable.Line(text)
	if printable.Width(text) <= 2*half {
		return text
	}
	tail := []rune(text)
	for printable.Width(string(tail)) > half-1 {
		tail = tail[1:]
	}
	return printable.Cut(text, half+1) + string(tail)
}

func (s *selection) overview() *Figure {
	f := &Figure{Name: "overview", Title: "Overview", N: len(s.counted), Of: "turns", Columns: columnsOf("what", "value", "unit")}
	var silent, captures, bytes, withheld int64
	judged := s.judged()
	trees := map[string]bool{}
	for _, n := range s.nodes {
		trees[n.tree] = true
		if n.capture == "withheld" {
			withheld++
		}
	}
	for _, n := range judged {
		if n.verdict == "none" {
			silent++
		}
	}
	for _, n := range s.counted {
		if n.own {
			captures++
			bytes += n.bytes
		}
	}
	f.row("trees", int64(len(trees)), "")
	f.row("turns that count", int64(len(s.counted)), "")
	f.row("changed nothing", share(silent, len(judged)), "%")
	f.row("checkpoints of their own", captures, "")
	f.row("captured", bytes, "bytes")
	f.row("withheld nodes", withheld, "")
	waits := s.waits()
	f.row("exposed delay, p95", quantile(waits, 0.95), "ms")
	var ready []float64
	for _, k := range s.forks {
		if k.outcome == "ok" {
			ready = append(ready, millis(k.ready))
		}
	}
	slices.Sort(ready)
	f.row("fork to ready, median", quantile(ready, 0.5), "ms")
	if s.group == "tree" {
		f.note("Whether a replay's turns came out as recorded isn't in the tables: give what \"replay --json\" printed, and what is no evidence is left out.")
	} else if s.left > 0 {
		f.note("%d turns are left out: of trajectories that are no evidence, or after the first that differs from its record.", s.left)
	}
	if len(s.nodes) == 0 {
		f.note("There are no nodes: is there a tree, and was the table nodes given?")
	}
	return f
}

// trajectories lists replays, those that are no evidence first.
func (s *selection) trajectories() *Figure {
	f := &Figure{Name: "trajectories", Title: "Trajectories", N: len(s.replays), Of: "trajectories",
		Columns: columnsOf("trajectory", "policy", "turns", "as recorded/%", "first difference/step", "cause", "evidence"),
		warn:    func(row []any) bool { return row[6] != "yes" }}
	policies := map[string]string{}
	for _, n := range s.nodes {
		policies[n.tree] = n.policy
	}
	all := slices.Clone(s.replays)
	slices.SortStableFunc(all, func(a, b trajectory) int { return cmp.Compare(evidence(a), evidence(b)) })
	not := 0
	for i, t := range all {
		if !t.evidence {
			not++
		}
		if i >= maxRows {
			continue
		}
		var pct, first any
		if t.matchedPct != nil {
			pct = *t.matchedPct
		}
		if t.first > 0 {
			first = t.first
		}
		f.row(s.names[t.tree], policies[t.tree], t.turns, pct, first, printable.Cut(printable.Line(t.cause), 80), evidence(t))
	}
	if not > 0 {
		f.note("%d of %d are no evidence: less than 80 %% of their turns came out as recorded, or nothing could be compared. No other figure of verdicts or bytes counts them.", not, len(all))
	}
	if len(all) > maxRows {
		f.note("%d of them are not listed.", len(all)-maxRows)
	}
	if len(s.endless) > 0 {
		f.note("%d more have no end in what the replay printed, and count for nothing.", len(s.endless))
	}
	return f
}

func evidence(t trajectory) string {
	if t.evidence {
		return "yes"
	}
	return "not evidence"
}

// judged are the turns whose verdicts are compared: with other policies than sparse
// a verdict is of more than its turn. If there are none of it, all are taken.
func (s *selection) judged() []counted {
	turns := slices.DeleteFunc(slices.Clone(s.counted), func(n counted) bool { return n.policy != "sparse" })
	if len(turns) == 0 {
		return s.counted
	}
	return turns
}

var verdictWords = []string{"none", "files", "process", "both"}

// verdicts are the shares of verdicts, a bar for each trajectory or tree, or each tool.
func (s *selection) verdicts(name string) *Figure {
	tools := name == "verdicts_by_tool"
	f := &Figure{Name: name, Title: "Verdicts by " + s.group, Of: "turns", Columns: columnsOf(s.group, "turns", "none", "files", "process", "both", "changed nothing/%")}
	if tools {
		f.Title, f.Columns[0].Name = "Verdicts by tool", "tool"
	}
	turns := s.judged()
	if n := len(s.counted) - len(turns); n > 0 {
		f.note("Of the policy sparse alone; %d turns had others.", n)
	}
	f.N = len(turns)
	type sum [5]int64 // the last is of none of the words
	sums := map[string]*sum{}
	for _, n := range turns {
		key := n.trajectory
		if tools {
			key = s.toolOf(n.node)
		}
		if sums[key] == nil {
			sums[key] = &sum{}
		}
		at := slices.Index(verdictWords, n.verdict)
		if at < 0 {
			at = 4
		}
		sums[key][at]++
	}
	total := func(m *sum) (n int64) {
		for _, v := range m {
			n += v
		}
		return n
	}
	keys := slices.SortedFunc(maps.Keys(sums), func(a, b string) int {
		return cmp.Or(cmp.Compare(total(sums[b]), total(sums[a])), cmp.Compare(a, b))
	})
	rest := sum{}
	for i, key := range keys {
		m := sums[key]
		if i < maxRows || len(keys) == maxRows+1 {
			f.row(key, total(m), m[0], m[1], m[2], m[3], share(m[0], int(total(m))))
			continue
		}
		for j, v := range m {
			rest[j] += v
		}
	}
	if n := total(&rest); n > 0 {
		f.row(fmt.Sprintf("(%d others)", len(keys)-maxRows), n, rest[0], rest[1], rest[2], rest[3], share(rest[0], int(n)))
	}
	if tools {
		f.note("A tool is the agent's, or the first program of a command.")
	}
	if len(f.Rows) > 0 {
		f.draw = func() *picture { return shareBars(f.Rows) }
	}
	return f
}

func (s *selection) toolOf(n *node) string {
	tool := n.tool
	if r := s.replayed[n.id]; r.tool != "" {
		tool = r.tool
	}
	if tool == "" {
		return "(no command)"
	}
	return printable.Cut(printable.Line(tool), 24)
}

var policyWords = []string{"uncaptured", "files", "sparse", "full"}

// byPolicy are the turns that count, by their trees' policies. If replays ran
// under several, only trajectories that ran under each can be compared.
func (s *selection) byPolicy(f *Figure) (policies []string, turns map[string][]counted) {
	turns = map[string][]counted{}
	ran := map[string]map[string]bool{}
	for _, n := range s.counted {
		policy := n.policy
		if policy == "" {
			policy = "unknown"
		}
		turns[policy] = append(turns[policy], n)
		if ran[n.trajectory] == nil {
			ran[n.trajectory] = map[string]bool{}
		}
		ran[n.trajectory][policy] = true
	}
	policies = slices.SortedFunc(maps.Keys(turns), func(a, b string) int {
		return cmp.Or(cmp.Compare(slices.Index(policyWords, a), slices.Index(policyWords, b)), cmp.Compare(a, b))
	})
	if s.group != "trajectory" || len(policies) < 2 {
		if len(policies) > 1 {
			f.note("Compare policies only if the same work ran under each.")
		}
		return policies, turns
	}
	in, of := 0, len(ran)
	for _, under := range ran {
		if len(under) == len(policies) {
			in++
		}
	}
	if in == 0 {
		f.note("No trajectory ran under every policy: they can't be compared.")
		return policies, turns
	}
	for policy, all := range turns {
		turns[policy] = slices.DeleteFunc(all, func(n counted) bool { return len(ran[n.trajectory]) < len(policies) })
	}
	f.note("Of the %d of %d trajectories that ran under every policy.", in, of)
	return policies, turns
}

var kindWords = []string{"empty", "shells", "dump"}

// bytes are what checkpoints hold, a turn, by policy.
func (s *selection) bytes() *Figure {
	f := &Figure{Name: "bytes_by_policy", Title: "Bytes captured by policy", Of: "turns",
		Columns: columnsOf("policy", "turns", "checkpoints", "bytes/bytes", "a turn/bytes", "files/bytes", "shells/bytes", "dumps/bytes")}
	policies, turns := s.byPolicy(f)
	for _, policy := range policies {
		var captures, sum int64
		kinds := [3]int64{}
		for _, n := range turns[policy] {
			if !n.own {
				continue
			}
			captures++
			sum += n.bytes
			kinds[max(0, slices.Index(kindWords, n.kind))] += n.bytes
		}
		n := len(turns[policy])
		f.N += n
		if n > 0 {
			f.row(policy, int64(n), captures, sum, float64(sum)/float64(n), kinds[0], kinds[1], kinds[2])
		}
	}
	f.note("What only a turn's own checkpoint holds, its image excluded. Pruned nodes are gone, and not counted.")
	if len(f.Rows) > 0 {
		f.draw = func() *picture { return byteBars(f.Rows) }
	}
	return f
}

// captured is how many checkpoints were made, turn after turn, beside one a turn.
func (s *selection) captured() *Figure {
	f := s.cumulative("savings", "Cumulative savings: checkpoints", func(n counted) int64 {
		if n.own {
			return 1
		}
		return 0
	})
	f.Columns = columnsOf("policy", "after turns", "checkpoints", "saved/%")
	for i, row := range f.Rows {
		f.Rows[i] = append(row, share(row[1].(int64)-row[2].(int64), int(row[1].(int64))))
	}
	f.note("Saved: turns that needed no checkpoint of their own.")
	return f
}

func (s *selection) cumulativeBytes() *Figure {
	f := s.cumulative("savings_bytes", "Cumulative savings: bytes", func(n counted) int64 { return n.bytes })
	f.Columns = columnsOf("policy", "after turns", "bytes/bytes")
	if !slices.ContainsFunc(f.Rows, func(row []any) bool { return row[0] == "full" }) {
		f.note("What captures of every turn would hold isn't known: run the same work with the policy full.")
	}
	return f
}

// cumulative adds up turn after turn, a curve a policy.
func (s *selection) cumulative(name, title string, of func(counted) int64) *Figure {
	f := &Figure{Name: name, Title: title, Of: "turns"}
	policies, turns := s.byPolicy(f)
	var curves []curve
	for _, policy := range policies {
		all := turns[policy]
		f.N += len(all)
		c := curve{name: policy}
		var sum int64
		step := max(1, len(all)/maxPoints)
		for i, n := range all {
			sum += of(n)
			if i == 0 || (i+1)%step == 0 || i == len(all)-1 {
				c.add(float64(i+1), float64(sum))
			}
			if at := i + 1; at == len(all) || slices.Contains([]int{len(all) / 4, len(all) / 2, len(all) * 3 / 4}, at) {
				f.row(policy, int64(at), sum)
			}
		}
		if len(all) > 0 {
			curves = append(curves, c)
		}
	}
	if len(curves) > 0 {
		f.draw = func() *picture { return cumulativeCurves(curves, name == "savings") }
	}
	return f
}

// line is one row of timelines: what one sandbox did, from its first turn on.
type line struct {
	name  string
	turns []*node
}

func (s *selection) timelines() *Figure {
	f := &Figure{Name: "timelines", Title: "Turn timelines", Of: "turns", Columns: columnsOf("sandbox", "turns", "shown", "took/s", "in turns/%", "waited for captures/ms")}
	rows := map[string]*line{}
	for _, n := range s.nodes {
		if n.parent == "" || n.from == 0 || n.to < n.from {
			continue
		}
		key := cmp.Or(n.sandbox, n.tree)
		if rows[key] == nil {
			name := short(key)
			if s.group == "trajectory" {
				name = s.titles[n.tree]
			}
			rows[key] = &line{name: name}
		}
		rows[key].turns = append(rows[key].turns, n)
		f.N++
	}
	keys := slices.SortedFunc(maps.Keys(rows), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(rows[b].turns), len(rows[a].turns)), cmp.Compare(rows[a].name, rows[b].name), cmp.Compare(a, b))
	})
	if len(keys) > maxTimelines {
		f.note("The %d sandboxes of %d with the most turns.", maxTimelines, len(keys))
		keys = keys[:maxTimelines]
	}
	waits := map[string]int64{}
	for _, t := range s.turns {
		waits[t.node] = t.wait
	}
	saved := map[string]capture{}
	for _, c := range s.captures {
		saved[c.node] = c
	}
	var lines []line
	cut := false
	for _, key := range keys {
		l := *rows[key]
		slices.SortFunc(l.turns, func(a, b *node) int { return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.id, b.id)) })
		var busy, waited int64
		n, last := len(l.turns), int64(0)
		for _, t := range l.turns {
			busy, waited, last = busy+t.to-t.from, waited+waits[t.id], max(last, t.to)
		}
		took := last - l.turns[0].from
		l.turns = l.turns[:min(n, maxTurns)]
		cut = cut || len(l.turns) < n
		f.row(l.name, int64(n), int64(len(l.turns)), float64(took)/1e9, 100*float64(busy)/float64(max(1, took)), millis(waited))
		lines = append(lines, l)
	}
	if cut {
		f.note("Of each the first %d turns.", maxTurns)
	}
	f.note("A turn is at least as wide as can be seen. Gaps between turns are the model's.")
	if len(lines) > 0 {
		f.draw = func() *picture { return timelines(lines, waits, saved) }
	}
	return f
}

// waits are the exposed delays in ms, sorted.
func (s *selection) waits() []float64 {
	all := make([]float64, 0, len(s.turns))
	for _, t := range s.turns {
		all = append(all, millis(t.wait))
	}
	slices.Sort(all)
	return all
}

func (s *selection) exposed() *Figure {
	f := &Figure{Name: "exposed_delays", Title: "Exposed delays", N: len(s.turns), Of: "turns",
		Columns: columnsOf("turns", "number", "waited/%", "p50/ms", "p95/ms", "p99/ms", "max/ms", "together/ms")}
	all := s.waits()
	if len(all) == 0 {
		return f
	}
	waited, sum := int64(0), 0.0
	for _, w := range all {
		if sum += w; w > 0 {
			waited++
		}
	}
	f.row("all", int64(len(all)), share(waited, len(all)), quantile(all, 0.5), quantile(all, 0.95), quantile(all, 0.99), all[len(all)-1], sum)
	f.note("How long a turn waited for the capture of the turn before it. The curve begins at the share that didn't wait.")
	if waited > 0 {
		f.draw = func() *picture {
			return distributions([]curve{distribution("all turns", all)}, "exposed delay (ms)", "turns (%)")
		}
	} else {
		f.note("No turn waited.")
	}
	return f
}

// batches are the sizes of forks that are shown apart.
var batches = []struct {
	name string
	upTo int64
}{{"1 child", 1}, {"2 to 8 children", 8}, {"9 to 64 children", 64}, {"more than 64", 1 << 62}}

func (s *selection) forked() *Figure {
	f := &Figure{Name: "fork_latencies", Title: "Fork latencies", N: len(s.forks), Of: "children",
		Columns: columnsOf("children of a call", "children", "failed or withheld", "p50/ms", "p95/ms", "p99/ms", "max/ms")}
	ready, failed := make([][]float64, len(batches)), make([]int64, len(batches))
	for _, k := range s.forks {
		at := slices.IndexFunc(batches, func(b struct {
			name string
			upTo int64
		}) bool {
			return k.batch <= b.upTo
		})
		if k.outcome != "ok" {
			failed[at]++
			continue
		}
		ready[at] = append(ready[at], millis(k.ready))
	}
	var curves []curve
	for i, all := range ready {
		if len(all) > 0 {
			slices.Sort(all)
			f.row(batches[i].name, int64(len(all))+failed[i], failed[i], quantile(all, 0.5), quantile(all, 0.95), quantile(all, 0.99), all[len(all)-1])
			curves = append(curves, distribution(batches[i].name, all))
		} else if failed[i] > 0 {
			f.row(batches[i].name, failed[i], failed[i], nil, nil, nil, nil)
		}
	}
	f.note("From the request's arrival to a child that is ready; those that failed or were withheld are counted, and not in the curves.")
	if len(curves) > 0 {
		f.draw = func() *picture { return distributions(curves, "ready after (ms)", "children (%)") }
	}
	return f
}

// tree draws the tree with the most nodes, and lists the largest.
func (s *selection) tree() *Figure {
	f := &Figure{Name: "tree", Title: "The tree", Of: "nodes", Columns: columnsOf("tree", "nodes", "depth", "leaves", "forks", "checkpoints", "withheld", "pending")}
	children := map[string][]*node{}
	of := map[string][]*node{}
	for _, n := range s.nodes {
		of[n.tree] = append(of[n.tree], n)
		if n.parent != "" {
			children[n.parent] = append(children[n.parent], n)
		}
	}
	trees := slices.SortedFunc(maps.Keys(of), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(of[b]), len(of[a])), cmp.Compare(a, b))
	})
	for i, tree := range trees {
		if i == maxRows {
			f.note("The %d largest of %d trees are listed.", maxRows, len(trees))
			break
		}
		var depth, leaves, forks, own, withheld, pending int64
		for _, n := range of[tree] {
			depth = max(depth, n.depth)
			switch len(children[n.id]) {
			case 0:
				leaves++
			case 1:
			default:
				forks++
			}
			if n.own {
				own++
			}
			switch n.capture {
			case "withheld":
				withheld++
			case "recorded":
				pending++
			}
		}
		f.row(s.titles[tree], int64(len(of[tree])), depth, leaves, forks, own, withheld, pending)
	}
	if len(trees) == 0 {
		return f
	}
	largest := of[trees[0]]
	f.N = len(largest)
	slices.SortFunc(largest, func(a, b *node) int {
		return cmp.Or(cmp.Compare(a.depth, b.depth), cmp.Compare(a.ordinal, b.ordinal), cmp.Compare(a.id, b.id))
	})
	if len(trees) > 1 {
		f.note("Drawn is the largest, %s.", s.titles[trees[0]])
	}
	if len(largest) > maxNodes {
		f.note("Drawn are the %d nodes of %d that are nearest to the root.", maxNodes, len(largest))
		largest = largest[:maxNodes]
	}
	f.note("Large nodes have a checkpoint of their own.")
	f.draw = func() *picture { return drawTree(largest) }
	return f
}

func millis(ns int64) float64 { return float64(ns) / 1e6 }

// share is a part in percent; of nothing it is 0.
func share(part int64, of int) float64 {
	if of == 0 {
		return 0
	}
	return 100 * float64(part) / float64(of)
}

// quantile of sorted values; nil: there are none.
func quantile(sorted []float64, q float64) any {
	if len(sorted) == 0 {
		return nil
	}
	return stat.Quantile(q, stat.Empirical, sorted, nil)
}
