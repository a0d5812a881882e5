package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/cmd/boxwood/view"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (a *app) nodeCommand() *cobra.Command {
	c := &cobra.Command{Use: "node", Short: "Look at one node"}
	c.AddCommand(a.jsonFlag(&cobra.Command{
		Use: "show NODE", Short: "Show a node: action, verdict, effects, output, annotations", Args: cobra.ExactArgs(1),
		Example: `  boxwood node show nd_01j...
  boxwood node show nd_01j... --json | jq -r .observation.stdout | base64 -d`,
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			n, err := client.GetNode(c.Context(), &pb.GetNodeRequest{NodeId: args[0]})
			if err != nil {
				return err
			}
			if a.json {
				return a.printMessage(n)
			}
			return showNode(a.out, n)
		},
	}), a.nodePathCommand())
	return c
}

func (a *app) nodePathCommand() *cobra.Command {
	var quiet bool
	c := a.jsonFlag(&cobra.Command{
		Use: "path NODE", Short: "Show the turns that lead to a node, the root first", Args: cobra.ExactArgs(1),
		Example: `  boxwood node path nd_01j...
  for n in $(boxwood node path -q nd_01j...); do boxwood grade $n -c 'make test'; done`,
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			path, err := pathTo(c.Context(), client, args[0])
			if err != nil {
				return err
			}
			var rows [][]string
			for _, n := range path {
				switch {
				case a.json:
					if err := a.printMessage(n); err != nil {
						return err
					}
				case quiet:
					fmt.Fprintln(a.out, n.Id)
				case n.ParentId == "":
					rows = append(rows, []string{"0", n.Id, "root", captureState(n), "", ""})
				default:
					rows = append(rows, []string{fmt.Sprint(n.Depth), n.Id, view.VerdictName(n.Verdict), captureState(n), ended(n), string(n.Action.GetText())})
				}
			}
			if rows != nil {
				a.table([]string{"TURN", "NODE", "VERDICT", "CAPTURE", "ENDED", "ACTION"}, rows)
			}
			return nil
		},
	})
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "print ids alone")
	return c
}

// pathTo gives the nodes from the root to a node.
func pathTo(ctx context.Context, client pb.BoxwoodClient, id string) (path []*pb.Node, err error) {
	for id != "" {
		n, err := client.GetNode(ctx, &pb.GetNodeRequest{NodeId: id})
		if err != nil {
			return nil, err
		}
		path = append(path, n)
		id = n.ParentId
	}
	slices.Reverse(path)
	return path, nil
}

// showNode prints a node for a person; what came out of the sandbox is escaped.
func showNode(w io.Writer, n *pb.Node) error {
	var b strings.Builder
	field := func(name, format string, args ...any) {
		if text := printable.Line(fmt.Sprintf(format, args...)); text != "" {
			fmt.Fprintf(&b, "%-12s %s\n", name, text)
		}
	}
	field("node", "%s", n.Id)
	field("tree", "%s, depth %d", n.TreeId, n.Depth)
	field("parent", "%s", n.ParentId)
	field("sandbox", "%s", n.SandboxId)
	if n.ReplayOf != "" {
		field("replay of", "%s", n.ReplayOf)
	}
	if n.ParentId != "" {
		field("action", "%s", n.Action.GetText())
		field("ended", "%s", ended(n))
		field("time", "%s, %s", when(n.StartedAt), time.Duration(n.EndedAt-n.StartedAt).Round(100*time.Microsecond))
		field("verdict", "%s%s", view.VerdictName(n.Verdict), because(n.Reasons))
	}
	if n.External {
		field("external", "something left the sandbox")
	}
	field("capture", "%s", captureLine(n))
	field("rewards", "%s", rewards(n.Rewards))
	if n.Visits != 0 || n.Value != 0 {
		field("value", "%.6g after %d visits", n.Value, n.Visits)
	}
	field("labels", "%s", pairs(n.Labels))
	field("policy", "%s", n.PolicyVersion)
	if n.PayloadDigest != "" {
		field("payload", "%s, sha256 %s", size(n.PayloadBytes), n.PayloadDigest)
	}
	if n.Pinned {
		field("pinned", "yes")
	}
	for i, e := range n.Effects {
		name := ""
		if i == 0 {
			name = "effects"
		}
		field(name, "%s %s", strings.ToLower(strings.ReplaceAll(e.Kind.String(), "_", " ")), strings.TrimSpace(string(e.Subject)+" "+e.Detail))
	}
	if more := n.EffectCount - int64(len(n.Effects)); more > 0 {
		field("", "and %d more", more)
	}
	o := n.Observation
	stream(&b, "stdout", o.GetStdout(), o.GetStdoutOmitted(), o.GetStdoutCutAt())
	stream(&b, "stderr", o.GetStderr(), o.GetStderrOmitted(), o.GetStderrCutAt())
	_, err := io.WriteString(w, b.String())
	return err
}

func stream(b *strings.Builder, name string, data []byte, omitted, cutAt int64) {
	if len(data) == 0 {
		return
	}
	fmt.Fprintf(b, "%s:\n", name)
	part := func(data []byte) {
		for _, line := range strings.Split(strings.TrimRight(printable.Text(data), "\n"), "\n") {
			fmt.Fprintf(b, "  │ %s\n", line)
		}
	}
	if omitted == 0 || cutAt < 0 || cutAt > int64(len(data)) {
		part(data)
		return
	}
	part(data[:cutAt])
	fmt.Fprintf(b, "  … %s left out\n", size(omitted))
	part(data[cutAt:])
}

func ended(n *pb.Node) string {
	o := n.Observation
	switch n.TurnStatus {
	case pb.TurnStatus_TURN_STATUS_TIMED_OUT:
		return "at its deadline"
	case pb.TurnStatus_TURN_STATUS_CANCELLED:
		return "cancelled"
	case pb.TurnStatus_TURN_STATUS_LOST:
		return "with the sandbox"
	}
	switch {
	case o.GetOomKilled():
		return "out of memory"
	case o.GetSignal() != 0:
		return fmt.Sprintf("by signal %d", o.GetSignal())
	}
	return fmt.Sprintf("with exit status %d", o.GetExitCode())
}

func captureLine(n *pb.Node) string {
	line := checkpointLine(n)
	if k := n.ProcessKind; k == pb.ProcessKind_PROCESS_KIND_SHELLS || k == pb.ProcessKind_PROCESS_KIND_DUMP {
		line += ", with processes as " + strings.ToLower(strings.TrimPrefix(k.String(), "PROCESS_KIND_"))
	}
	return line
}

func captureState(n *pb.Node) string {
	return strings.ToLower(strings.TrimPrefix(n.Capture.String(), "CAPTURE_STATUS_"))
}

func checkpointLine(n *pb.Node) string {
	state := captureState(n)
	switch {
	case n.Capture == pb.CaptureStatus_CAPTURE_STATUS_WITHHELD:
		return state + ": " + n.WithheldReason
	case n.CheckpointId == "":
		return state
	case n.CheckpointNodeId == n.Id:
		return state + ", has checkpoint " + n.CheckpointId
	}
	return state + ", shares checkpoint " + n.CheckpointId + " of " + n.CheckpointNodeId
}

func because(reasons []string) string {
	if len(reasons) == 0 {
		return ""
	}
	return ": " + strings.Join(reasons, ", ")
}

func rewards(m map[string]float64) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, fmt.Sprintf("%s=%.6g", k, m[k]))
	}
	return strings.Join(parts, " ")
}

func pairs(m map[string]string) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, k+"="+m[k])
	}
	return strings.Join(parts, " ")
}

func (a *app) annotateCommand() *cobra.Command {
	var rewardFlags, labels map[string]string
	var value float64
	var visits int64
	var policy, payload string
	c := &cobra.Command{
		Use:   "annotate NODE...",
		Short: "Set rewards, value, visits, labels or payload of nodes",
		Example: `  boxwood annotate nd_01j... --reward tests=1 --label best=yes
  boxwood annotate nd_01j... --payload messages.json`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			r := &pb.AnnotateRequest{}
			for _, id := range args {
				n := &pb.NodeAnnotation{NodeId: id, Labels: labels, Rewards: map[string]float64{}}
				for name, text := range rewardFlags {
					v, err := strconv.ParseFloat(text, 64)
					if err != nil {
						return usage(c, fmt.Errorf("the reward %s=%s is not a number", name, text))
					}
					n.Rewards[name] = v
				}
				if c.Flags().Changed("value") {
					n.Value = &value
				}
				if c.Flags().Changed("visits") {
					n.Visits = &visits
				}
				if c.Flags().Changed("policy-version") {
					n.PolicyVersion = &policy
				}
				if payload != "" {
					data, err := os.ReadFile(payload)
					if err != nil {
						return fault.New(fault.Invalid, "bad_payload", "reading the payload: %w", err)
					}
					n.Payload = data
				}
				r.Annotations = append(r.Annotations, n)
			}
			client, err := a.client()
			if err != nil {
				return err
			}
			_, err = client.Annotate(c.Context(), r)
			return err
		},
	}
	c.Flags().StringToStringVar(&rewardFlags, "reward", nil, "named rewards, NAME=NUMBER")
	c.Flags().Float64Var(&value, "value", 0, "the search's value")
	c.Flags().Int64Var(&visits, "visits", 0, "the search's visits")
	c.Flags().StringToStringVar(&labels, "label", nil, "labels, NAME=VALUE; an empty value removes one")
	c.Flags().StringVar(&policy, "policy-version", "", "the policy that chose the action")
	c.Flags().StringVar(&payload, "payload", "", "a file of up to 1 MiB to keep with the node")
	return c
}

func (a *app) pruneCommand() *cobra.Command {
	var r pb.PruneRequest
	c := a.jsonFlag(&cobra.Command{
		Use:   "prune NODE",
		Short: "Remove a node and all below it",
		Long:  "Removes a subtree and the checkpoints that nothing else uses. Refused while a node of it is pinned or a sandbox stands there.",
		Example: `  boxwood prune nd_01j...
  boxwood prune nd_01j... --keep-node --release
  boxwood prune nd_01j... --keep-node --states`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			r.NodeId = args[0]
			reply, err := client.Prune(c.Context(), &r)
			if err != nil {
				return err
			}
			if a.json {
				return a.printMessage(reply)
			}
			what := "removed %d nodes and %d checkpoints, %s come back\n"
			if r.StatesOnly {
				what = "%d nodes are withheld now, %d checkpoints removed, %s come back\n"
			}
			fmt.Fprintf(a.out, what, reply.Nodes, reply.Checkpoints, size(reply.FreedBytes))
			return nil
		},
	})
	c.Flags().BoolVar(&r.KeepNode, "keep-node", false, "remove only what lies below it")
	c.Flags().BoolVar(&r.StatesOnly, "states", false, "give up the saved states alone; the nodes stay and say how to make them again")
	c.Flags().BoolVar(&r.ReleaseSandboxes, "release", false, "release sandboxes that stand there instead of refusing")
	return c
}

func (a *app) pinCommand() *cobra.Command {
	return &cobra.Command{
		Use: "pin NODE...", Short: "Keep nodes from being pruned", Args: cobra.MinimumNArgs(1),
		Example: "  boxwood pin nd_01j...",
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			_, err = client.Pin(c.Context(), &pb.PinRequest{NodeIds: args})
			return err
		},
	}
}

func (a *app) unpinCommand() *cobra.Command {
	return &cobra.Command{
		Use: "unpin NODE...", Short: "Let nodes be pruned again", Args: cobra.MinimumNArgs(1),
		Example: "  boxwood unpin nd_01j...",
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			_, err = client.Unpin(c.Context(), &pb.UnpinRequest{NodeIds: args})
			return err
		},
	}
}

// all collects a stream.
func all[T any](next func() (T, error)) (items []T, err error) {
	for {
		item, err := next()
		if errors.Is(err, io.EOF) {
			return items, nil
		}
		if err != nil {
			return nil, err
		}
		items = append(items, item)
	}
}
