package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
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
	replayOptions

	file  *trajectory.Trajectory
	start *trajectory.Start

	// What came of it.
	tree            string
	nodes           []*pb.Node
	ran, matched    int
	told            int // turns whose record tells something to compare with
	firstDivergence int
	lines           []trajectory.Line
}

// replayOptions are the flags of `boxwood replay`, for all trajectories.
type replayOptions struct {
	image, setup, record string
	timeout              time.Duration
	labels               map[string]string
	keep, list           bool
}

func (a *app) replayCommand() *cobra.Command {
	var o replayOptions
	c := &cobra.Command{
		Use:   "replay FILE...",
		Short: "Run recorded trajectories again, turn by turn, and compare",
		Long: `Runs each recorded action as a turn of a new tree, in the start state that the
trajectory names (or --setup), and compares exit status and output with the
record, times, hashes and addresses aside. Reads our own files, those of
SWE-agent, mini-swe-agent, OpenHands, ATIF and asciicast, rows of SWE-smith and
nebius, and folders of Harbor's jobs; docs/REPLAY.md says which of them, and how.
Actions that can't be run again are counted by reason; --list only counts. What
can't be read is reported, and the rest goes on. The exit status is 125 if
something failed, else 1 if a turn differed.`,
		Example: `  boxwood replay examples/trajectories/wordfreq/trajectory.jsonl
  boxwood replay --list runs/*.traj jobs/
  boxwood replay run.traj --image task:1 --setup start.json --json
  boxwood replay old.jsonl --record new.jsonl`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error { return a.replayAll(c, args, o) },
	}
	c.Flags().StringVar(&o.image, "image", "", "image to start from (default: the start state's)")
	c.Flags().StringVar(&o.setup, "setup", "", "manifest of the start state (default: the one the trajectory names)")
	c.Flags().StringVar(&o.record, "record", "", "write what was observed as a trajectory of our format")
	c.Flags().DurationVar(&o.timeout, "timeout", 5*time.Minute, "deadline of a turn")
	c.Flags().StringToStringVar(&o.labels, "label", nil, "labels of the trees, NAME=VALUE")
	c.Flags().BoolVar(&o.keep, "keep", false, "keep the sandboxes")
	c.Flags().BoolVar(&o.list, "list", false, "don't run; say what would be, and count what can't be by reason")
	c.Flags().BoolVar(&a.json, "json", false, "print one JSON object a line: each turn, then the summary")
	return c
}

// replayAll goes through all trajectories of all paths. One that fails is
// reported; the rest goes on.
func (a *app) replayAll(c *cobra.Command, paths []string, o replayOptions) error {
	var worst exitStatus
	read := 0
	for _, p := range paths {
		for t, err := range trajectory.All(p) {
			if read++; read > 1 && o.record != "" {
				return usage(c, fmt.Errorf("--record takes one trajectory, and there are more"))
			}
			if err == nil {
				t.Name = strings.TrimSpace(p + " " + t.Name)
				err = a.replayOne(c, filepath.Dir(p), t, o)
			}
			var status exitStatus
			switch {
			case err == nil:
			case c.Context().Err() != nil:
				return err
			case errors.As(err, &status):
				worst = max(worst, status)
			default:
				a.report(err)
				worst = failureStatus
			}
		}
	}
	if worst != 0 {
		return worst
	}
	return nil
}

func (a *app) replayOne(c *cobra.Command, folder string, t *trajectory.Trajectory, o replayOptions) (err error) {
	r := &replay{app: a, replayOptions: o, file: t, start: &trajectory.Start{}}
	if o.list {
		return r.describe()
	}
	if r.setup == "" && t.Start != "" {
		r.setup = filepath.Join(folder, t.Start)
	}
	if r.setup != "" {
		if r.start, err = trajectory.OpenStart(r.setup); err != nil {
			return err
		}
	}
	if r.image == "" {
		r.image = r.start.Image
	}
	if r.image == "" {
		return usage(c, fmt.Errorf("neither --image nor the start state names an image"))
	}
	if n := r.runnable(); n == 0 {
		return fault.New(fault.Invalid, "nothing_to_replay", "%s: none of its %d actions can be run again", t.Name, len(t.Events)).
			WithHint("boxwood replay --list says why")
	}
	if r.client, err = a.client(); err != nil {
		return err
	}
	if err := r.run(c.Context(), o.keep); err != nil {
		message, hint := explain(err, a.target())
		return fault.New(fault.Internal, "replay_failed", "%s: %s", t.Name, message).WithHint("%s", hint)
	}
	if o.record != "" {
		err := writeFile(o.record, func(f *os.File) error { return trajectory.Write(f, t.Start, r.lines) })
		if err != nil {
			return err
		}
	}
	return r.finish()
}

// runnable counts the actions that can be run again.
func (r *replay) runnable() int {
	n := len(r.file.Events)
	for _, skipped := range r.file.Skipped() {
		n -= skipped
	}
	return n
}

// describe prints what would be run.
func (r *replay) describe() error {
	skipped := r.file.Skipped()
	if r.app.json {
		return json.NewEncoder(r.app.out).Encode(map[string]any{
			"file": r.file.Name, "format": r.file.Format, "actions": len(r.file.Events), "runnable": r.runnable(),
			"skipped": skipped, "other": r.file.Other,
		})
	}
	fmt.Fprintf(r.app.out, "%s: %s, %d of %d actions can be run again\n", printable.Line(r.file.Name), r.file.Format, r.runnable(), len(r.file.Events))
	r.printCounts("  %d can't be: %s\n", skipped)
	r.printCounts("  %d beside actions: %s\n", r.file.Other)
	return nil
}

func (r *replay) printCounts(format string, counts map[string]int) {
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		fmt.Fprintf(r.app.out, format, counts[what], printable.Line(what))
	}
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
		fmt.Fprintf(r.app.out, "tree %s, %d turns of %s (%s)\n", r.tree, len(r.file.Events), printable.Line(r.file.Name), r.file.Format)
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
			"file": r.file.Name, "tree": r.tree, "format": r.file.Format, "turns": r.ran, "compared": r.told, "matched": r.matched,
			"silent": summary.Silent, "files": summary.Files, "process": summary.Process, "both": summary.Both,
			"skipped": skipped, "first_divergence": r.firstDivergence,
		})
		if err != nil {
			return err
		}
	} else {
		fmt.Fprintf(r.app.out, "%d turns ran; %d of %d compared are as recorded; %d changed nothing and saved nothing\n", r.ran, r.matched, r.told, summary.Silent)
		r.printCounts("%d could not be run again: %s\n", skipped)
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
