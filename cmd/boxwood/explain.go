package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/cmd/boxwood/view"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (a *app) explainCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "explain NODE",
		Short: "Say why a node has its verdict and its capture, and what its turn took",
		Long: `Says what a node's turn did and how it ended, why its verdict is what it is, where its state comes from
or why it is withheld, how long each part took, what was forked of it, and each effect. Timings come
from the daemon's tables, whose oldest rows go (docs/STATS.md). --json has all of it, rows included.`,
		Example: `  boxwood explain nd_01j...
  boxwood explain nd_01j... --json | jq .rows.captures`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			s, err := a.story(c.Context(), args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(s)
			}
			return s.tell(a.out)
		},
	}
	c.Flags().BoolVar(&a.json, "json", false, "print JSON")
	return c
}

// story is all that the daemon knows of a node but for its payload.
type story struct {
	Node json.RawMessage `json:"node"` // as the service has it
	// Nearest is the closest node above a withheld one that can be forked; Turns lead from there to it.
	Nearest string `json:"nearest_node_id,omitempty"`
	Turns   int    `json:"nearest_turns,omitempty"`
	// Rows of the tables that name the node.
	Rows map[string][]row `json:"rows"`
	// Told is the same in words, a line each.
	Told []string `json:"told"`

	node, parent *pb.Node
}

// row of a table, by columns. Durations and times are nanoseconds.
type row map[string]any

func (r row) ns(column string) time.Duration {
	v, _ := r[column].(int64)
	return time.Duration(v)
}

// storyTables are those whose rows tell of single nodes. Who refers to one names it in one of storyColumns.
var (
	storyTables  = []string{"turns", "captures", "audits", "forks", "restores", "replays"}
	storyColumns = []string{"node", "replay_of"}
)

func (a *app) story(ctx context.Context, id string) (*story, error) {
	client, err := a.client()
	if err != nil {
		return nil, err
	}
	s := &story{}
	if s.node, err = client.GetNode(ctx, &pb.GetNodeRequest{NodeId: id}); err != nil {
		return nil, err
	}
	if s.Node, err = toJSON(s.node); err != nil {
		return nil, err
	}
	withheld := s.node.Capture == pb.CaptureStatus_CAPTURE_STATUS_WITHHELD
	for above := s.node; above.ParentId != "" && (s.parent == nil || withheld); {
		if above, err = client.GetNode(ctx, &pb.GetNodeRequest{NodeId: above.ParentId}); err != nil {
			return nil, err
		}
		if s.parent == nil {
			s.parent = above
		}
		s.Turns++
		if above.CheckpointId != "" {
			s.Nearest = above.Id
			break
		}
	}
	if !withheld || s.Nearest == "" {
		s.Nearest, s.Turns = "", 0
	}
	if s.Rows, err = a.rowsOf(ctx, s.node.TreeId, id); err != nil {
		return nil, err
	}
	s.Told = s.words()
	return s, nil
}

// rowsOf gives the rows of each of storyTables that name one of these nodes of a tree.
func (a *app) rowsOf(ctx context.Context, tree string, nodes ...string) (map[string][]row, error) {
	rows := map[string][]row{}
	for _, table := range storyTables {
		in, err := a.openTable(ctx, &pb.ExportStatsRequest{Table: table, TreeId: tree})
		if err != nil {
			return nil, err
		}
		if rows[table], err = rowsNaming(in, storyColumns, nodes...); err != nil {
			return nil, fmt.Errorf("reading the table %s: %w", table, err)
		}
	}
	return rows, nil
}

// rowsNaming reads a table for the rows that have one of these values in one of these columns.
func rowsNaming(in io.Reader, columns []string, values ...string) ([]row, error) {
	rows := []row{}
	r, err := ipc.NewReader(in)
	if err != nil {
		return nil, fault.New(fault.Internal, "bad_stream", "%w", err)
	}
	defer r.Release()
	wanted := map[string]bool{}
	for _, v := range values {
		wanted[v] = true
	}
	for r.Next() {
		batch := r.Record()
		var look []arrow.Array
		for _, name := range columns {
			if at := batch.Schema().FieldIndices(name); len(at) > 0 {
				look = append(look, batch.Column(at[0]))
			}
		}
		for i := range int(batch.NumRows()) {
			for _, col := range look {
				if !col.IsNull(i) && wanted[col.ValueStr(i)] {
					rows = append(rows, rowOf(batch, i))
					break
				}
			}
		}
	}
	return rows, r.Err()
}

func rowOf(batch arrow.Record, i int) row {
	out := row{}
	for k, col := range batch.Columns() {
		name := batch.ColumnName(k)
		if col.IsNull(i) {
			out[name] = nil
			continue
		}
		switch col := col.(type) {
		case *array.Int64:
			out[name] = col.Value(i)
		case *array.Timestamp:
			out[name] = int64(col.Value(i))
		case *array.Float64:
			out[name] = col.Value(i)
		case *array.Boolean:
			out[name] = col.Value(i)
		case *array.Dictionary:
			out[name] = col.Dictionary().ValueStr(col.GetValueIndex(i))
		default:
			out[name] = col.ValueStr(i)
		}
	}
	return out
}

func (s *story) words() (told []string) {
	n := s.node
	say := func(format string, args ...any) { told = append(told, fmt.Sprintf(format, args...)) }
	if n.ParentId == "" {
		say("%s is the root of tree %s: the state that the tree starts from, no turn.", n.Id, n.TreeId)
		told = append(told, s.captureWords()...)
		return append(told, s.forkWords()...)
	}
	say("%s is turn %d of its path in tree %s; sandbox %s ran it from %s on.", n.Id, n.Depth, n.TreeId, n.SandboxId, when(n.StartedAt))
	say("It ran %q, which ended %s after %s.", n.Action.GetText(), ended(n), time.Duration(n.EndedAt-n.StartedAt).Round(10*time.Microsecond))
	if n.ReplayOf != "" {
		say("It is the turn of %s, run again by a fork with replay.", n.ReplayOf)
	}
	told = append(told, s.verdictWords()...)
	told = append(told, s.captureWords()...)
	told = append(told, s.timeWords()...)
	told = append(told, s.forkWords()...)
	if n.EffectCount > 0 {
		say("Effects of the turn, %d in all:", n.EffectCount)
		for _, e := range n.Effects {
			say("  %s %s", strings.ToLower(strings.ReplaceAll(e.Kind.String(), "_", " ")), strings.TrimSpace(string(e.Subject)+" "+e.Detail))
		}
		if more := n.EffectCount - int64(len(n.Effects)); more > 0 {
			say("  and %d more", more)
		}
	}
	return told
}

func (s *story) verdictWords() (told []string) {
	n := s.node
	since := "the last successful capture of its sandbox"
	switch n.Verdict {
	case pb.Verdict_VERDICT_NONE:
		told = append(told, "Verdict none: nothing that outlives a turn changed since "+since+".")
	case pb.Verdict_VERDICT_FILES:
		told = append(told, "Verdict files: files changed since "+since+", and no process"+because(n.Reasons)+".")
	case pb.Verdict_VERDICT_PROCESS:
		told = append(told, "Verdict process: processes or kernel objects changed since "+since+", and no file"+because(n.Reasons)+".")
	default:
		told = append(told, "Verdict both: files and processes changed since "+since+because(n.Reasons)+".")
	}
	for _, r := range s.Rows["turns"] {
		if own, _ := r["turn_verdict"].(string); own != "" && own != view.VerdictName(n.Verdict) {
			told = append(told, fmt.Sprintf("This turn alone changed: %s. The rest is of turns before it that weren't captured, or what wasn't known of them.", own))
		}
		if lost := r.ns("lost_events"); lost > 0 {
			told = append(told, fmt.Sprintf("%d events of the kernel were lost, so that both halves count as changed.", int64(lost)))
		}
	}
	if n.External {
		told = append(told, "Something left the sandbox, or tried to. That is a mark and never changes a verdict.")
	}
	for _, r := range s.Rows["audits"] {
		switch {
		case r["missed_files"] == true || r["missed_process"] == true:
			told = append(told, "An audit found that the verdict was WRONG: a change had been missed. The daemon kept a case; please report it (boxwood bundle).")
		default:
			told = append(told, fmt.Sprintf("An audit compared it with what really changed: files %v, processes %v.", r["files_changed"], r["process_changed"]))
		}
	}
	return told
}

func (s *story) captureWords() (told []string) {
	n := s.node
	say := func(format string, args ...any) { told = append(told, fmt.Sprintf(format, args...)) }
	kind := map[pb.ProcessKind]string{
		pb.ProcessKind_PROCESS_KIND_EMPTY: "no processes", pb.ProcessKind_PROCESS_KIND_SHELLS: "its sessions as text, started anew in each fork",
		pb.ProcessKind_PROCESS_KIND_DUMP: "its processes as a dump of CRIU",
	}[n.ProcessKind]
	switch {
	case n.Capture == pb.CaptureStatus_CAPTURE_STATUS_WITHHELD:
		say("It is withheld, since it can't be restored exactly: %s.", n.WithheldReason)
		if s.Nearest != "" {
			say("The nearest node that can be forked is %s, %d turns before; boxwood fork --replay %s runs them again from there.", s.Nearest, s.Turns, n.Id)
		} else {
			say("No node above it can be forked either.")
		}
	case n.CheckpointId == "":
		say("Its capture is pending or running; a fork waits for it.")
	case n.CheckpointNodeId == n.Id:
		say("It has a checkpoint of its own, %s: its files, and %s.", n.CheckpointId, kind)
	default:
		say("It made no checkpoint: its state is that of %s, whose checkpoint %s it shares, with %s.", n.CheckpointNodeId, n.CheckpointId, kind)
	}
	if n.Capture == pb.CaptureStatus_CAPTURE_STATUS_PROVEN {
		say("It was restored once and found equal (proven).")
	}
	if n.SurvivorsRan {
		say("Processes of earlier turns ran on between its observation and its capture, so its state may be later than what it shows.")
	}
	if n.MayHoldSecrets {
		say("The dump may hold secrets that its processes were given.")
	}
	if n.Pinned {
		say("It is pinned: nothing prunes it.")
	}
	return told
}

func (s *story) timeWords() (told []string) {
	say := func(format string, args ...any) { told = append(told, fmt.Sprintf(format, args...)) }
	for _, r := range s.Rows["turns"] {
		say("The client waited %s: %s for the capture before, %s for the command, %s until all was counted, %s until it was durable.", millis(int64(r.ns("wall_ns"))),
			millis(int64(r.ns("capture_wait_ns"))), millis(int64(r.ns("command_ns"))), millis(int64(r.ns("barrier_ns"))), millis(int64(r.ns("record_ns"))))
	}
	if len(s.Rows["turns"]) == 0 {
		say("The daemon's tables have no row of this turn any more.")
	}
	for _, r := range s.Rows["captures"] {
		line := fmt.Sprintf("Its capture (%v) waited %s, flushed for %s, froze the sandbox for %s, and took %s after that", r["outcome"], millis(int64(r.ns("queue_ns"))),
			millis(int64(r.ns("flush_ns"))), millis(int64(r.ns("freeze_ns"))), millis(int64(r.ns("finish_ns"))))
		if bytes, ok := r["bytes"].(int64); ok {
			line += fmt.Sprintf("; the checkpoint holds %s of its own", size(bytes))
		}
		if r["kept"] == true {
			line += "; the processes are still as the dump before has them"
		}
		if r["urgent"] == true {
			line += "; somebody waited for it"
		}
		if why, ok := r["reason"].(string); ok {
			line += ": " + why
		}
		say("%s.", line)
	}
	return told
}

func (s *story) forkWords() []string {
	ok, reasons := 0, []string{}
	for _, r := range s.Rows["forks"] {
		if r["outcome"] == "ok" {
			ok++
		} else if why, is := r["reason"].(string); is {
			reasons = append(reasons, why)
		}
	}
	if len(s.Rows["forks"]) == 0 {
		return nil
	}
	line := fmt.Sprintf("It was forked: %d children came to be, %d failed", ok, len(s.Rows["forks"])-ok)
	return []string{line + because(reasons) + "."}
}

// tell prints a story for a person; what came out of a sandbox is escaped.
func (s *story) tell(w io.Writer) error {
	var b bytes.Buffer
	for _, line := range s.Told {
		b.WriteString(printable.Line(line) + "\n")
	}
	_, err := w.Write(b.Bytes())
	return err
}
