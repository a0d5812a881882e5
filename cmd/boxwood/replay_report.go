package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"
	"time"

	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/ipc"

	"github.com/boxwood-rl/boxwood/cmd/boxwood/view"
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/printable"
	"github.com/boxwood-rl/boxwood/internal/trajectory"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// enough of a trajectory's turns must come out as recorded for it to be
// evidence: a repository that isn't there makes every turn look as if it changed
// nothing.
const enough = 80

// turnReport is one line of --json.
type turnReport struct {
	Tree      string `json:"tree"`
	Step      int    `json:"step"`
	Command   string `json:"command,omitempty"`
	Tool      string `json:"tool,omitempty"`
	Node      string `json:"node,omitempty"`
	Verdict   string `json:"verdict,omitempty"`
	ExitCode  int    `json:"exit_code"`
	Match     bool   `json:"match"`
	Different string `json:"different,omitempty"`
	Skipped   string `json:"skipped,omitempty"`
	// Earlier: it ran in an earlier attempt of the run.
	Earlier bool  `json:"earlier,omitempty"`
	TotalNs int64 `json:"total_ns,omitempty"`
}

// outcome of one trajectory, the last line of --json. Verdicts and bytes are of
// the turns before the first that came out otherwise than recorded: what came
// after it was in another state.
type outcome struct {
	File   string `json:"file"`
	Tree   string `json:"tree"`
	Format string `json:"format"`

	Turns      int      `json:"turns"`
	Earlier    int      `json:"earlier,omitempty"`
	Compared   int      `json:"compared"`
	Matched    int      `json:"matched"`
	MatchedPct *float64 `json:"matched_pct"`
	Evidence   bool     `json:"evidence"`

	FirstDivergence int    `json:"first_divergence"`
	Cause           string `json:"cause,omitempty"`

	Counted int    `json:"counted"`
	Silent  int    `json:"silent"`
	Files   int    `json:"files"`
	Process int    `json:"process"`
	Both    int    `json:"both"`
	Bytes   *int64 `json:"bytes"`

	Skipped map[string]int `json:"skipped"`

	Verified *verification `json:"verified,omitempty"`
}

func (o *outcome) add(other outcome) {
	o.Turns, o.Compared, o.Matched = o.Turns+other.Turns, o.Compared+other.Compared, o.Matched+other.Matched
	if !other.Evidence {
		return
	}
	o.Counted += other.Counted
	o.Silent, o.Files, o.Process, o.Both = o.Silent+other.Silent, o.Files+other.Files, o.Process+other.Process, o.Both+other.Both
}

func (o *outcome) matchedPct() *float64 {
	if o.Compared == 0 {
		return nil
	}
	pct := 100 * float64(o.Matched) / float64(o.Compared)
	return &pct
}

func (o *outcome) shares() string {
	return fmt.Sprintf("%d turns ran; %d of %d compared are as recorded; of %d that count, %d changed nothing and saved nothing",
		o.Turns, o.Matched, o.Compared, o.Counted, o.Silent)
}

// printTurn prints a turn as it ends.
func (r *replay) printTurn(t turnReport) error {
	if r.app.json {
		t.Tree = r.tree
		return json.NewEncoder(r.out).Encode(t)
	}
	if t.Skipped != "" {
		_, err := fmt.Fprintf(r.out, "%4d  %-8s %s\n", t.Step, "skipped", printable.Line(t.Skipped))
		return err
	}
	width := 96
	if r.app.width > 0 {
		width = r.app.width
	}
	what := t.Command
	if t.Tool != "" {
		what = t.Tool + " " + what
	}
	_, err := fmt.Fprintf(r.out, "%4d  %-8s %s\n", t.Step, t.Verdict, printable.Cut(printable.Line(what), max(20, width-15)))
	if t.Different != "" {
		_, err = fmt.Fprintf(r.out, "%15s%s\n", "", printable.Line("differs: "+t.Different))
	}
	return err
}

// finish prints the summary, and writes what was observed.
func (r *replay) finish(ctx context.Context) (*outcome, error) {
	if r.record != "" {
		if err := r.writeRecord(); err != nil {
			return nil, err
		}
	}
	summary := view.Summarise(r.counted)
	o := &r.result
	o.File, o.Tree, o.Format, o.Skipped = r.file.Name, r.tree, r.file.Format, r.file.Skipped()
	for why, n := range r.unable {
		o.Skipped[why] += n
	}
	o.MatchedPct = o.matchedPct()
	o.Evidence = o.MatchedPct != nil && *o.MatchedPct >= enough
	o.Counted, o.Silent, o.Files, o.Process, o.Both = len(r.counted), summary.Silent, summary.Files, summary.Process, summary.Both
	o.Bytes = r.bytes(ctx)
	if r.app.json {
		return o, json.NewEncoder(r.out).Encode(o)
	}
	fmt.Fprintln(r.out, o.shares())
	printCounts(r.out, "%d could not be run again: %s\n", o.Skipped)
	if o.FirstDivergence > 0 {
		fmt.Fprintf(r.out, "the first difference is at step %d: %s; verdicts after it are no evidence\n", o.FirstDivergence, printable.Line(o.Cause))
	}
	if o.Verified != nil {
		o.Verified.print(r.out)
	}
	switch {
	case o.MatchedPct == nil:
		fmt.Fprintln(r.out, "not evidence: the record has nothing to compare with")
	case !o.Evidence:
		fmt.Fprintf(r.out, "not evidence: %.0f %% of its turns came out as recorded, less than %d %%\n", *o.MatchedPct, enough)
	}
	return o, nil
}

// bytes are what the checkpoints of the turns that count hold, each what only
// it does; nil if the daemon can't say.
func (r *replay) bytes(ctx context.Context) *int64 {
	counts := map[string]bool{}
	var ids []string
	for _, n := range r.counted {
		counts[n.Id] = true
		ids = append(ids, n.Id)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if _, err := r.client.WaitCaptured(ctx, &pb.WaitCapturedRequest{NodeIds: ids}); err != nil {
		return nil
	}
	table, err := r.app.openTable(ctx, &pb.ExportStatsRequest{Table: stats.Nodes, TreeId: r.tree})
	if err != nil {
		return nil
	}
	sum, err := sumBytes(table, counts)
	if err != nil {
		return nil
	}
	return &sum
}

func sumBytes(table io.Reader, counts map[string]bool) (sum int64, err error) {
	in, err := ipc.NewReader(table)
	if err != nil {
		return 0, err
	}
	defer in.Release()
	node, bytes := in.Schema().FieldIndices("node"), in.Schema().FieldIndices("checkpoint_bytes")
	if len(node) != 1 || len(bytes) != 1 {
		return 0, fmt.Errorf("the table has no such columns")
	}
	for in.Next() {
		names, ok := in.Record().Column(node[0]).(*array.String)
		sizes, ok2 := in.Record().Column(bytes[0]).(*array.Int64)
		if !ok || !ok2 {
			return 0, fmt.Errorf("the table's columns are of other types")
		}
		for i := range names.Len() {
			if counts[names.Value(i)] && sizes.IsValid(i) {
				sum += sizes.Value(i)
			}
		}
	}
	return sum, in.Err()
}

// hints are what outputs say of why a turn came out otherwise.
var hints = []struct {
	said  *regexp.Regexp
	cause string
}{
	{regexp.MustCompile(`[Cc]ould not resolve host|[Tt]emporary failure in name resolution|[Nn]ame or service not known|[Nn]etwork is unreachable`), "there is no network"},
	{regexp.MustCompile(`command not found`), "a program isn't there"},
	{regexp.MustCompile(`No module named|ModuleNotFoundError|Cannot find module`), "a module isn't there"},
	{regexp.MustCompile(`[Nn]o such file or directory|does not exist`), "a file or folder isn't there"},
	{regexp.MustCompile(`[Pp]ermission denied|[Oo]peration not permitted`), "something isn't permitted"},
}

// cause is why a turn came out otherwise, as far as it can be told.
func (r *replay) cause(e trajectory.Event, o trajectory.Observed, different string) string {
	why := different
	for _, h := range hints {
		said := h.said.FindString(o.Stderr + "\n" + o.Stdout)
		if said != "" && (e.Output == nil || !strings.Contains(*e.Output, said)) {
			why = h.cause + " (" + different + ")"
			break
		}
	}
	if r.left > 0 {
		why += fmt.Sprintf("; %d actions before it could not be run again", r.left)
	}
	return why
}
