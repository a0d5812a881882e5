package main

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/cmd/boxwood/view"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/trajectory"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (a *app) treeATIFCommand() *cobra.Command {
	var folder, leaf string
	c := &cobra.Command{
		Use:   "atif TREE -o FOLDER",
		Short: "Write a tree's paths as trajectories in ATIF, a file per leaf",
		Long: `Writes a file FOLDER/LEAF.json for each leaf of the tree, in ATIF 1.7: the turns
on the way from the root to it. A turn that several leaves share is in the first
of their files; in the others it is marked as copied context, so that who trains
on all of them sees each turn once. Our ids, verdicts, rewards and labels stand in
"extra", under "boxwood".`,
		Example: "  boxwood tree atif tr_01j... -o trajectories/\n  boxwood replay --list trajectories/*.json",
		Args:    cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if folder == "" {
				return usage(c, fmt.Errorf("name the folder to write to with -o"))
			}
			client, err := a.client()
			if err != nil {
				return err
			}
			stream, err := client.ListNodes(c.Context(), &pb.ListNodesRequest{TreeId: args[0]})
			if err != nil {
				return err
			}
			list, err := all(stream.Recv)
			if err != nil {
				return err
			}
			if err := os.MkdirAll(folder, 0o755); err != nil {
				return fault.New(fault.Invalid, "bad_file", "making %s: %w", folder, err)
			}
			return a.writeATIF(folder, args[0], leaf, list)
		},
	}
	c.Flags().StringVarP(&folder, "output", "o", "", "folder to write to; it is made if it isn't there")
	c.Flags().StringVar(&leaf, "leaf", "", "only the path to this node, which need not be a leaf")
	return c
}

// writeATIF writes the files in the order in which the leaves were made: which
// file has a shared turn, and which its copy, is the same each time as long as
// no leaf is pruned.
func (a *app) writeATIF(folder, tree, leaf string, list []*pb.Node) error {
	nodes, inner := map[string]*pb.Node{}, map[string]bool{}
	for _, n := range list {
		nodes[n.Id] = n
		inner[n.ParentId] = true
	}
	if leaf != "" && nodes[leaf] == nil {
		return fault.New(fault.NotFound, "no_such_node", "the tree has no node %q", leaf)
	}
	written := map[string]bool{}
	for _, n := range list {
		if leaf != "" && n.Id != leaf || leaf == "" && inner[n.Id] {
			continue
		}
		run := trajectory.ATIFRun{Run: tree, ID: n.Id, Agent: "boxwood", Version: fullVersion(), Extra: map[string]any{"tree": tree, "leaf": n.Id}}
		for at := n; at != nil; at = nodes[at.ParentId] {
			run.Turns = append(run.Turns, atifTurn(at, written[at.Id]))
			written[at.Id] = true
		}
		slices.Reverse(run.Turns)
		path := filepath.Join(folder, n.Id+".json")
		if err := writeFile(path, func(f *os.File) error { return trajectory.WriteATIF(f, run) }); err != nil {
			return err
		}
		fmt.Fprintln(a.out, path)
	}
	return nil
}

// transfer is an action that was no command, as the daemon words it.
var transfer = regexp.MustCompile(`^# (write \d+ bytes to|upload to|open session|close session) `)

func atifTurn(n *pb.Node, copied bool) trajectory.ATIFTurn {
	o := n.GetObservation()
	t := trajectory.ATIFTurn{
		ID: n.Id, Copied: copied, At: time.Unix(0, n.StartedAt), Output: string(o.GetStdout()) + string(o.GetStderr()),
		Cut: o.GetStdoutOmitted()+o.GetStderrOmitted() > 0,
		Extra: map[string]any{
			"parent": n.ParentId, "verdict": view.VerdictName(n.Verdict), "status": strings.ToLower(strings.TrimPrefix(n.TurnStatus.String(), "TURN_STATUS_")),
			"capture": strings.ToLower(strings.TrimPrefix(n.Capture.String(), "CAPTURE_STATUS_")),
		},
	}
	text := string(n.GetAction().GetText())
	switch {
	case n.ParentId == "":
		return t
	case n.GetAction().GetSteps() == 1 && len(text) < 64<<10 && !transfer.MatchString(text) && strings.ToValidUTF8(text, "") == text:
		exit := int(observedOf(n).ExitCode)
		t.Command, t.ExitCode = text, &exit
	default:
		t.What = strings.ToValidUTF8(text, "\uFFFD")
	}
	for name, value := range map[string]string{"checkpoint": n.CheckpointId, "withheld": n.WithheldReason, "policy_version": n.PolicyVersion, "payload": n.PayloadDigest} {
		if value != "" {
			t.Extra[name] = value
		}
	}
	if len(n.Rewards) > 0 {
		rewards := map[string]any{}
		for name, r := range n.Rewards {
			if rewards[name] = r; math.IsNaN(r) || math.IsInf(r, 0) {
				rewards[name] = fmt.Sprint(r) // JSON has no such numbers
			}
		}
		t.Extra["rewards"] = rewards
	}
	if len(n.Labels) > 0 {
		t.Extra["labels"] = n.Labels
	}
	if n.Visits > 0 {
		t.Extra["value"], t.Extra["visits"] = n.Value, n.Visits
	}
	if n.External {
		t.Extra["external"] = true
	}
	return t
}
