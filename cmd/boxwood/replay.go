package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/cmd/boxwood/view"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
	"github.com/boxwood-rl/boxwood/internal/trajectory"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// maxReplayOutput of a turn is compared; beyond, only the exit status is.
const maxReplayOutput = 4 << 20

// replay is one trajectory being run again.
type replay struct {
	app    *app
	client pb.BoxwoodClient
	labels map[string]string

	file    *trajectory.Trajectory
	start   *trajectory.Start
	image   string
	timeout time.Duration

	// What came of it.
	tree            string
	nodes           []*pb.Node
	ran, matched    int
	told            int // turns whose record tells something to compare with
	firstDivergence int
	lines           []trajectory.Line
}

func (a *app) replayCommand() *cobra.Command {
	var image, setup, record string
	var keep bool
	r := &replay{app: a}
	c := &cobra.Command{
		Use:   "replay FILE",
		Short: "Run a recorded trajectory again, turn by turn, and compare",
		Long: `Runs each recorded action as a turn of a new tree, in the start state that the
trajectory names (or --setup), and compares exit status and output with the
record, times, hashes and addresses aside. Reads our own files and those of
SWE-agent, mini-swe-agent, OpenHands (V0) and ATIF. Actions that can't be run
again are counted by reason. The exit status is 1 if a turn differed.`,
		Example: `  boxwood replay examples/trajectories/wordfreq/trajectory.jsonl
  boxwood replay run.traj --image task:1 --setup start.json --json
  boxwood replay old.jsonl --record new.jsonl`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) (err error) {
			if r.file, err = trajectory.Open(args[0]); err != nil {
				return err
			}
			if setup == "" && r.file.Start != "" {
				setup = filepath.Join(filepath.Dir(args[0]), r.file.Start)
			}
			r.start = &trajectory.Start{}
			if setup != "" {
				if r.start, err = trajectory.OpenStart(setup); err != nil {
					return err
				}
			}
			if r.image = image; r.image == "" {
				r.image = r.start.Image
			}
			if r.image == "" {
				return usage(c, fmt.Errorf("neither --image nor the start state names an image"))
			}
			if r.client, err = a.client(); err != nil {
				return err
			}
			if err := r.run(c.Context(), keep); err != nil {
				return err
			}
			if record != "" {
				err := writeFile(record, func(f *os.File) error { return trajectory.Write(f, r.file.Start, r.lines) })
				if err != nil {
					return err
				}
			}
			return r.finish()
		},
	}
	c.Flags().StringVar(&image, "image", "", "image to start from (default: the start state's)")
	c.Flags().StringVar(&setup, "setup", "", "manifest of the start state (default: the one the trajectory names)")
	c.Flags().StringVar(&record, "record", "", "write what was observed as a trajectory of our format")
	c.Flags().DurationVar(&r.timeout, "timeout", 5*time.Minute, "deadline of a turn")
	c.Flags().StringToStringVar(&r.labels, "label", nil, "labels of the tree, NAME=VALUE")
	c.Flags().BoolVar(&keep, "keep", false, "keep the sandbox")
	c.Flags().BoolVar(&a.json, "json", false, "print one JSON object a line: each turn, then the summary")
	return c
}

func (r *replay) run(ctx context.Context, keep bool) error {
	create, err := r.treeRequest()
	if err != nil {
		return err
	}
	made, err := r.client.CreateTree(ctx, create)
	if err != nil {
		return err
	}
	r.tree = made.Tree.GetId()
	r.nodes = append(r.nodes, made.Root)
	if !keep {
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			defer cancel()
			_, _ = r.client.Release(ctx, &pb.ReleaseRequest{SandboxIds: []string{made.Sandbox.GetId()}}) // its lease ends it otherwise
		}()
	}
	if !r.app.json {
		fmt.Fprintf(r.app.out, "tree %s, %d turns of %s\n", r.tree, len(r.file.Events), r.file.Format)
	}
	for _, e := range r.file.Events {
		if err := r.turn(ctx, made.Sandbox.GetId(), e); err != nil {
			return fmt.Errorf("step %d: %w", e.Step, err)
		}
	}
	return nil
}

func (r *replay) treeRequest() (*pb.CreateTreeRequest, error) {
	request := &pb.CreateTreeRequest{
		Start: &pb.CreateTreeRequest_Image{Image: r.image}, WithSandbox: true, Labels: r.labels,
		// Not its folder: the set-up runs with the defaults, too, and may have to make it.
		Defaults: &pb.Defaults{User: r.start.User, Env: r.start.Env},
	}
	var folders []string
	for _, f := range r.start.Files {
		folders = append(folders, "'"+strings.ReplaceAll(path.Dir(f.Path), "'", `'\''`)+"'")
	}
	if len(folders) > 0 {
		slices.Sort(folders)
		command := "mkdir -p -- " + strings.Join(slices.Compact(folders), " ")
		request.Setup = append(request.Setup, &pb.SetupStep{Step: &pb.SetupStep_Command{Command: command}})
	}
	for _, f := range r.start.Files {
		file := &pb.FileToWrite{Path: f.Path, Content: []byte(f.Content)}
		if f.Mode != "" {
			mode, err := strconv.ParseUint(f.Mode, 8, 12)
			if err != nil {
				return nil, fault.New(fault.Invalid, "bad_start_state", "the start state's file %s has mode %q, which is not octal", f.Path, f.Mode)
			}
			file.Mode = uint32(mode)
		}
		request.Setup = append(request.Setup, &pb.SetupStep{Step: &pb.SetupStep_File{File: file}})
	}
	for _, command := range r.start.Commands {
		request.Setup = append(request.Setup, &pb.SetupStep{Step: &pb.SetupStep_Command{Command: command}})
	}
	return request, nil
}

// turnReport is one line of --json.
type turnReport struct {
	Step      int    `json:"step"`
	Command   string `json:"command,omitempty"`
	Node      string `json:"node,omitempty"`
	Verdict   string `json:"verdict,omitempty"`
	ExitCode  int    `json:"exit_code"`
	Match     bool   `json:"match"`
	Different string `json:"different,omitempty"`
	Skipped   string `json:"skipped,omitempty"`
	TotalNs   int64  `json:"total_ns,omitempty"`
}

func (r *replay) turn(ctx context.Context, sandbox string, e trajectory.Event) error {
	if e.Skip != "" {
		return r.print(turnReport{Step: e.Step, Skipped: e.Skip})
	}
	cwd := e.Cwd
	if cwd == "" {
		cwd = r.start.Cwd
	}
	var out, errOut bounded
	result, err := runTurn(ctx, r.client, &pb.RunTurnRequest{
		SandboxId: sandbox,
		Command:   &pb.Command{Shell: []byte(e.Command), Cwd: cwd, DeadlineNs: int64(r.timeout)},
		Node:      &pb.NodeInput{Labels: map[string]string{"step": fmt.Sprint(e.Step)}},
	}, &out, &errOut)
	if err != nil {
		return err
	}
	if result.SandboxLost {
		return turnStatus(result)
	}
	exit := int(result.Node.GetObservation().GetExitCode())
	if result.Node.GetObservation().GetSignal() != 0 {
		exit = 128 + int(result.Node.Observation.Signal) // as records of shells have it
	}
	r.nodes = append(r.nodes, result.Node)
	r.ran++
	different := e.Compare(trajectory.Observed{
		ExitCode: exit, Stdout: out.String(), Stderr: errOut.String(), Cut: out.cut || errOut.cut,
	})
	if e.ExitCode != nil || e.Output != nil {
		r.told++
		if different == "" {
			r.matched++
		} else if r.firstDivergence == 0 {
			r.firstDivergence = e.Step
		}
	}
	line := trajectory.Line{Command: e.Command, Cwd: e.Cwd, ExpectExit: &exit}
	if text := out.String(); !out.cut {
		line.ExpectStdout = &text
	}
	r.lines = append(r.lines, line)
	return r.print(turnReport{
		Step: e.Step, Command: e.Command, Node: result.Node.GetId(), Verdict: view.VerdictName(result.Node.GetVerdict()),
		ExitCode: exit, Match: different == "", Different: different, TotalNs: result.Timings.GetTotalNs(),
	})
}

func (r *replay) print(t turnReport) error {
	if r.app.json {
		return json.NewEncoder(r.app.out).Encode(t)
	}
	if t.Skipped != "" {
		_, err := fmt.Fprintf(r.app.out, "%4d  %-8s %s\n", t.Step, "skipped", printable.Line(t.Skipped))
		return err
	}
	width := 96
	if r.app.width > 0 {
		width = r.app.width
	}
	_, err := fmt.Fprintf(r.app.out, "%4d  %-8s %s\n", t.Step, t.Verdict, printable.Cut(printable.Line(t.Command), max(20, width-15)))
	if t.Different != "" {
		_, err = fmt.Fprintf(r.app.out, "%15s%s\n", "", printable.Line("differs: "+t.Different))
	}
	return err
}

// finish prints the summary.
func (r *replay) finish() error {
	summary := view.Summarise(r.nodes)
	skipped := r.file.Skipped()
	if r.app.json {
		err := json.NewEncoder(r.app.out).Encode(map[string]any{
			"tree": r.tree, "format": r.file.Format, "turns": r.ran, "compared": r.told, "matched": r.matched,
			"silent": summary.Silent, "files": summary.Files, "process": summary.Process, "both": summary.Both,
			"skipped": skipped, "first_divergence": r.firstDivergence,
		})
		if err != nil {
			return err
		}
	} else {
		fmt.Fprintf(r.app.out, "%d turns ran; %d of %d compared are as recorded; %d changed nothing and saved nothing\n", r.ran, r.matched, r.told, summary.Silent)
		for _, reason := range slices.Sorted(maps.Keys(skipped)) {
			fmt.Fprintf(r.app.out, "%d could not be run again: %s\n", skipped[reason], printable.Line(reason))
		}
		if r.firstDivergence > 0 {
			fmt.Fprintf(r.app.out, "the first difference is at step %d; verdicts after it are no evidence\n", r.firstDivergence)
		}
	}
	if r.matched < r.told {
		return exitStatus(1)
	}
	return nil
}

// bounded keeps the first maxReplayOutput bytes.
type bounded struct {
	bytes.Buffer
	cut bool
}

func (b *bounded) Write(p []byte) (int, error) {
	room := maxReplayOutput - b.Len()
	if len(p) > room {
		b.cut = true
		b.Buffer.Write(p[:room])
		return len(p), nil
	}
	return b.Buffer.Write(p)
}
