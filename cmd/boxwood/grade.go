package main

import (
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func (a *app) gradeCommand() *cobra.Command {
	var f commandFlags
	var image, start, rewards string
	var paths []string
	var files map[string]string
	var annotate bool
	c := a.jsonFlag(&cobra.Command{
		Use:   "grade NODE [--image IMAGE | --node NODE --path PATH...] -- COMMAND [ARG...]",
		Short: "Grade a node out of its agent's reach",
		Long: `Runs a command that says what a node is worth and prints the rewards. With --image
or --node it runs in a fresh sandbox that gets of the graded node only what lies
at the paths; without, in a scratch fork, where every program is the agent's.
Nothing of it stays in the node.`,
		Example: `  boxwood grade nd_01j... --image task:7 --path /work/src --file /grading/test.py=test.py \
    --rewards /grading/rewards.json -- python3 -I /grading/test.py
  boxwood grade nd_01j... -- make -C /work check`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			if image != "" && start != "" {
				return usage(c, fmt.Errorf("name --image or --node, not both"))
			}
			run, err := f.request(a, c, "", args[1:])
			if err != nil {
				return err
			}
			g := &pb.Grader{Command: run.Command, Paths: paths, RewardsFile: rewards}
			switch {
			case image != "":
				g.Start = &pb.Grader_Image{Image: image}
			case start != "":
				g.Start = &pb.Grader_NodeId{NodeId: start}
			}
			for _, to := range slices.Sorted(maps.Keys(files)) {
				file, err := hidden(to, files[to])
				if err != nil {
					return err
				}
				g.Files = append(g.Files, file)
			}
			return a.grade(c, &pb.EvaluateRequest{NodeId: args[0], Grader: g}, annotate)
		},
	})
	f.add(c)
	c.Flags().StringVar(&image, "image", "", "image of the fresh sandbox: a name or digest")
	c.Flags().StringVar(&start, "node", "", "node for the fresh sandbox to stand at")
	c.Flags().StringArrayVar(&paths, "path", nil, "what the fresh sandbox gets of the graded node, at the same place")
	c.Flags().StringToStringVar(&files, "file", nil, "what the agent must not see, PATH=LOCALFILE")
	c.Flags().StringVar(&rewards, "rewards", "", "file that the command writes rewards to; without, its exit status is the reward")
	c.Flags().BoolVar(&annotate, "annotate", false, "set the rewards on the node")
	for _, of := range []string{"label", "wait-captured"} { // a grading makes no node
		_ = c.Flags().MarkHidden(of)
	}
	return c
}

// hidden reads a local file that is written to a path of the grader's sandbox.
func hidden(to, local string) (*pb.FileToWrite, error) {
	content, err := os.ReadFile(local)
	if err != nil {
		return nil, fault.New(fault.Invalid, "no_such_file", "reading the file for %s: %w", to, err)
	}
	mode := uint32(0o644)
	if info, err := os.Stat(local); err == nil {
		mode = uint32(info.Mode().Perm())
	}
	return &pb.FileToWrite{Path: path.Clean(to), Content: content, Mode: mode}, nil
}

func (a *app) grade(c *cobra.Command, r *pb.EvaluateRequest, annotate bool) error {
	client, err := a.client()
	if err != nil {
		return err
	}
	found, err := client.Evaluate(c.Context(), r)
	if err != nil {
		return err
	}
	if annotate && len(found.Rewards) > 0 {
		note := &pb.NodeAnnotation{NodeId: r.NodeId, Rewards: found.Rewards}
		if _, err := client.Annotate(c.Context(), &pb.AnnotateRequest{Annotations: []*pb.NodeAnnotation{note}}); err != nil {
			return err
		}
	}
	if a.json {
		if err := a.printMessage(found); err != nil {
			return err
		}
	} else {
		for _, name := range slices.Sorted(maps.Keys(found.Rewards)) {
			value := strconv.FormatFloat(found.Rewards[name], 'g', -1, 64)
			if _, err := fmt.Fprintf(a.out, "%s %s\n", printable.Line(name), value); err != nil {
				return err
			}
		}
		for _, p := range found.Missing {
			fmt.Fprintf(a.err, "the node has no %s\n", printable.Line(p))
		}
	}
	if found.Problem != "" {
		return fault.New(fault.Precondition, "no_reward", "no reward: %s", printable.Line(found.Problem)).
			WithHint("what it said: %s", printable.Line(tail(found.Observation)))
	}
	return nil
}

// tail is the end of what a command said, its errors before its output.
func tail(o *pb.Observation) string {
	said := o.GetStderr()
	if len(said) == 0 {
		said = o.GetStdout()
	}
	return string(said[max(0, len(said)-200):])
}
