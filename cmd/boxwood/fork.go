package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (a *app) forkCommand() *cobra.Command {
	var n int32
	var scratch, quiet, replay, sameSeed bool
	var labels map[string]string
	var lease time.Duration
	var seed uint64
	c := a.jsonFlag(&cobra.Command{
		Use:   "fork NODE|SANDBOX",
		Short: "Make sandboxes that stand at a node",
		Long: `Makes N live sandboxes that stand at a node, or at the node where a sandbox
stands. All come from one checkpoint; each succeeds or fails alone.

A withheld node is refused, and the hint names the nearest one that can be forked. With
--replay each child is made from that one, and the turns from there run again in it:
they make nodes of their own, and what differs from what was recorded is said.`,
		Example: `  boxwood fork nd_01j... -n 8
  boxwood fork --replay nd_01j...
  for sb in $(boxwood fork nd_01j... -n 4 -q); do boxwood exec $sb -- make test; done`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			want := &pb.ForkRequest_Want{Count: n, From: &pb.ForkRequest_Want_NodeId{NodeId: args[0]}}
			if strings.HasPrefix(args[0], "sb_") {
				want.From = &pb.ForkRequest_Want_SandboxId{SandboxId: args[0]}
			}
			return a.fork(c, &pb.ForkRequest{
				Wants: []*pb.ForkRequest_Want{want}, Scratch: scratch, Labels: labels, LeaseNs: int64(lease), Seed: seed, SameSeed: sameSeed, Replay: replay,
			}, quiet)
		},
	})
	c.Flags().Int32VarP(&n, "count", "n", 1, "how many, up to 1024")
	c.Flags().BoolVar(&scratch, "scratch", false, "the children write no nodes")
	c.Flags().StringToStringVar(&labels, "label", nil, "labels of the sandboxes, NAME=VALUE")
	c.Flags().DurationVar(&lease, "lease", 0, "how long a child lives without a call (default: the tree's)")
	c.Flags().Uint64Var(&seed, "seed", 0, "BOXWOOD_SEED of the children is made from it")
	c.Flags().BoolVar(&sameSeed, "same-seed", false, "the same BOXWOOD_SEED for all children")
	c.Flags().BoolVar(&replay, "replay", false, "make a withheld node again by running its turns again")
	c.Flags().BoolVarP(&quiet, "quiet", "q", false, "print the sandboxes' ids alone")
	return c
}

func (a *app) fork(c *cobra.Command, r *pb.ForkRequest, quiet bool) error {
	client, err := a.client()
	if err != nil {
		return err
	}
	results, err := client.Fork(c.Context(), r)
	if err != nil {
		return err
	}
	var ready, failed int
	for {
		child, err := results.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		sandbox := child.GetSandbox()
		if sandbox != nil {
			ready++
		} else {
			failed++
		}
		switch {
		case a.json:
			err = a.printMessage(child)
		case sandbox == nil:
			fmt.Fprintf(a.err, "child %d failed: %s: %s\n", child.Child, codes.Code(child.Code), printable.Line(child.Message))
			if hint := child.GetError().GetHint(); hint != "" {
				fmt.Fprintf(a.err, "  hint: %s\n", printable.Line(hint))
			}
		case quiet:
			_, err = fmt.Fprintln(a.out, sandbox.Id)
		default:
			_, err = fmt.Fprintf(a.out, "%s  ready in %s%s\n", sandbox.Id, millis(child.ReadyNs), replayed(child.Replayed))
		}
		if err != nil {
			return err
		}
	}
	if failed > 0 {
		return fault.New(fault.Internal, "children_failed", "%d of %d children failed", failed, ready+failed)
	}
	return nil
}

// replayed says what came of the turns that were run again for a child.
func replayed(turns []*pb.ReplayedTurn) string {
	if len(turns) == 0 {
		return ""
	}
	same := 0
	var differ []string
	for _, t := range turns {
		switch {
		case t.SameOutput && t.SameExit:
			same++
		case t.SameOutput:
			differ = append(differ, "the status of "+t.NodeId)
		case t.SameExit:
			differ = append(differ, "the output of "+t.NodeId)
		default:
			differ = append(differ, "output and status of "+t.NodeId)
		}
	}
	line := fmt.Sprintf("; %d of %d turns came out as before", same, len(turns))
	if len(differ) > 0 {
		line += ", otherwise " + strings.Join(differ, ", ")
	}
	return line
}

func (a *app) rollbackCommand() *cobra.Command {
	return a.jsonFlag(&cobra.Command{
		Use:   "rollback SANDBOX NODE",
		Short: "Put a live sandbox back to a node",
		Long:  "Puts the sandbox back in place: it keeps its id and gets a new generation. What ran in it is gone.",
		Example: `  boxwood rollback sb_01j... nd_01j...
  boxwood rollback sb_01j... $(boxwood sandbox list --json | jq -r '.sandboxes[0].head_id')`,
		Args: cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			reply, err := client.Rollback(c.Context(), &pb.RollbackRequest{SandboxId: args[0], NodeId: args[1]})
			if err != nil {
				return err
			}
			if a.json {
				return a.printMessage(reply)
			}
			fmt.Fprintf(a.out, "%s stands at %s, ready in %s\n", reply.Sandbox.GetId(), reply.Sandbox.GetHeadId(), millis(reply.ReadyNs))
			return nil
		},
	})
}

func (a *app) releaseCommand() *cobra.Command {
	return &cobra.Command{
		Use: "release SANDBOX...", Short: "End sandboxes; their nodes stay", Args: cobra.MinimumNArgs(1),
		Example: `  boxwood release sb_01j...
  boxwood sandbox list -q | xargs -r boxwood release`,
		RunE: func(c *cobra.Command, args []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			reply, err := client.Release(c.Context(), &pb.ReleaseRequest{SandboxIds: args})
			if err != nil {
				return err
			}
			fmt.Fprintf(a.out, "released %d of %d\n", reply.Released, len(args))
			return nil
		},
	}
}

func (a *app) sandboxCommand() *cobra.Command {
	c := &cobra.Command{Use: "sandbox", Short: "List live sandboxes"}
	var tree string
	var quiet bool
	list := a.jsonFlag(&cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List live sandboxes", Args: cobra.NoArgs,
		Example: "  boxwood sandbox list --tree tr_01j...",
		RunE: func(c *cobra.Command, _ []string) error {
			client, err := a.client()
			if err != nil {
				return err
			}
			reply, err := client.ListSandboxes(c.Context(), &pb.ListSandboxesRequest{TreeId: tree})
			if err != nil {
				return err
			}
			if a.json {
				return a.printMessage(reply)
			}
			var rows [][]string
			for _, s := range reply.Sandboxes {
				if quiet {
					fmt.Fprintln(a.out, s.Id)
					continue
				}
				state := "idle"
				if s.Busy {
					state = "busy"
				}
				if s.Scratch {
					state += ", scratch"
				}
				rows = append(rows, []string{s.Id, s.HeadId, state, when(s.LeaseUntil), pairs(s.Labels)})
			}
			if !quiet {
				a.table([]string{"SANDBOX", "STANDS AT", "STATE", "LEASE UNTIL", "LABELS"}, rows)
			}
			return nil
		},
	})
	list.Flags().StringVar(&tree, "tree", "", "only those of this tree")
	list.Flags().BoolVarP(&quiet, "quiet", "q", false, "print ids alone")
	c.AddCommand(list)
	return c
}
