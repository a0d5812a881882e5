package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/metadata"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
	"github.com/boxwood-rl/boxwood/internal/trajectory"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// replayOptions are the flags of `boxwood replay`, for all trajectories.
type replayOptions struct {
	image, manifest, record, name string
	shell, mode                   string
	timeout                       time.Duration
	speed                         float64
	jobs                          int
	labels                        map[string]string
	keep, list, verify            bool
}

// modes are the capture policies by name.
var modes = map[string]pb.CapturePolicy{
	"sparse":     pb.CapturePolicy_CAPTURE_POLICY_SPARSE,
	"full":       pb.CapturePolicy_CAPTURE_POLICY_FULL,
	"files":      pb.CapturePolicy_CAPTURE_POLICY_FILES,
	"uncaptured": pb.CapturePolicy_CAPTURE_POLICY_UNCAPTURED,
}

func (a *app) replayCommand() *cobra.Command {
	var o replayOptions
	c := &cobra.Command{
		Use:   "replay FILE...",
		Short: "Run recorded trajectories again, turn by turn, and compare",
		Long: `Runs each recorded action as a turn of a new tree, in the start state that comes
with the trajectory (or --start), and compares exit status and output with the
record, times, hashes and addresses aside. Reads our own files, those of
SWE-agent, mini-swe-agent, OpenHands, ATIF and asciicast, rows of SWE-smith and
nebius, and folders of Harbor's jobs; docs/REPLAY.md says which of them, and how.
Actions that can't be run again are counted by reason; --list only counts. What
can't be read or run is reported, and the rest goes on. With --run, a replay that
was stopped goes on where it was: no turn is run twice. The exit status is 125 if
something failed, else 1 if a turn differed.`,
		Example: `  boxwood replay examples/trajectories/wordfreq/trajectory.jsonl
  boxwood replay --list runs/*.traj jobs/
  boxwood replay run.traj --image task:1 --start start.json --json
  boxwood replay jobs/ --image task:1 --jobs 8 --run monday
  boxwood replay run.traj --mode full --verify
  boxwood replay old.jsonl --record new.jsonl`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			switch {
			case o.jobs < 1 || o.jobs > 1024:
				return usage(c, fmt.Errorf("--jobs is 1 to 1024"))
			case o.speed < 0 || o.speed > 1e6:
				return usage(c, fmt.Errorf("--speed is 0, for no waits, or how many times as fast as recorded"))
			case o.shell != "" && o.shell != "fresh" && o.shell != "kept":
				return usage(c, fmt.Errorf("--shell is fresh or kept, not %q", o.shell))
			case modes[o.mode] == 0:
				return usage(c, fmt.Errorf("--mode is sparse, full, files or uncaptured, not %q", o.mode))
			case o.verify && o.name != "":
				return usage(c, fmt.Errorf("--verify looks at each turn as it ends, and can't go on where another replay was: leave out --run"))
			case strings.Contains(o.name, "/") || len(o.name) > 128:
				return usage(c, fmt.Errorf("--run is a name of up to 128 bytes without a slash"))
			}
			return a.replayAll(c, args, o)
		},
	}
	c.Flags().StringVar(&o.image, "image", "", "image to start from (default: the start state's)")
	c.Flags().StringVar(&o.manifest, "start", "", "manifest of the start state (default: the one that comes with the trajectory)")
	c.Flags().StringVar(&o.record, "record", "", "write what was observed as a trajectory of our format")
	c.Flags().StringVar(&o.name, "run", "", "name of the replay: what it has done already under this name isn't done again")
	c.Flags().StringVar(&o.shell, "shell", "", `"fresh": a shell for each command; "kept": one that stays (default: as the recorded agent did)`)
	c.Flags().StringVar(&o.mode, "mode", "sparse", "which turns are captured: \"sparse\", those that changed something; \"full\", each; \"files\", without processes; \"uncaptured\", none")
	c.Flags().DurationVar(&o.timeout, "timeout", 5*time.Minute, "deadline of a turn")
	c.Flags().Float64Var(&o.speed, "speed", 0, "wait between turns as recorded, this many times as fast (default: don't wait)")
	c.Flags().IntVarP(&o.jobs, "jobs", "j", 1, "trajectories at a time")
	c.Flags().StringToStringVar(&o.labels, "label", nil, "labels of the trees, NAME=VALUE")
	c.Flags().BoolVar(&o.keep, "keep", false, "keep the sandboxes")
	c.Flags().BoolVar(&o.verify, "verify", false, "look at the sandbox after each turn, from the host, and in the end hold a fork of each node against that (root)")
	c.Flags().BoolVar(&o.list, "list", false, "don't run; say what would be, and count what can't be by reason")
	c.Flags().BoolVar(&a.json, "json", false, "print one JSON object a line: each turn, then the summary")
	return c
}

// replays are all trajectories of a command line, on their way.
type replays struct {
	app *app
	replayOptions
	client pb.BoxwoodClient

	mu sync.Mutex
	// copies counts trajectories by what they are, so that the second one that is
	// the same as another is told from it by a further attempt at --run.
	copies                     map[string]int
	worst                      exitStatus
	read, done, running, turns int
	outcomes                   []outcome
	progress                   progress
}

// item is one trajectory and the folder it came from.
type item struct {
	folder, path string
	file         *trajectory.Trajectory
}

// replayAll goes through all trajectories of all paths, some at a time. One
// that fails is reported; the rest goes on.
func (a *app) replayAll(c *cobra.Command, paths []string, o replayOptions) (err error) {
	all := &replays{app: a, replayOptions: o, copies: map[string]int{}, progress: progress{app: a}}
	ctx, cancel := context.WithCancel(c.Context())
	defer cancel()
	if !o.list {
		if all.client, err = a.client(); err != nil {
			return err
		}
	}
	if o.name != "" && !o.list {
		if ctx, err = all.openRun(ctx); err != nil {
			return err
		}
	}
	work := make(chan item)
	var workers sync.WaitGroup
	for range o.jobs {
		workers.Go(func() {
			for i := range work {
				all.one(ctx, i)
			}
		})
	}
	err = all.feed(c, paths, work)
	close(work)
	workers.Wait()
	all.progress.end()
	switch {
	case err != nil:
		return err
	case c.Context().Err() != nil:
		return c.Context().Err()
	}
	if err := all.finish(); err != nil {
		return err
	}
	if all.worst != 0 {
		return all.worst
	}
	return nil
}

// openRun makes this a new attempt of the run. What an earlier one still did
// has ended when it returns, and its sandboxes are gone.
func (s *replays) openRun(ctx context.Context) (context.Context, error) {
	run, err := s.client.OpenRun(ctx, &pb.OpenRunRequest{Name: s.name})
	if err != nil {
		return nil, err
	}
	return metadata.AppendToOutgoingContext(ctx, "x-boxwood-run", fmt.Sprintf("%s/%d", s.name, run.Attempt)), nil
}

// feed reads the trajectories, no faster than they are run.
func (s *replays) feed(c *cobra.Command, paths []string, work chan<- item) error {
	for _, p := range paths {
		for t, err := range trajectory.All(p) {
			s.mu.Lock()
			s.read++
			many := s.read > 1
			s.mu.Unlock()
			if many && s.record != "" {
				return usage(c, fmt.Errorf("--record takes one trajectory, and there are more"))
			}
			if err != nil {
				s.failed(err)
				continue
			}
			t.Name = strings.TrimSpace(p + " " + t.Name)
			select {
			case work <- item{filepath.Dir(p), p, t}:
			case <-c.Context().Done():
				return c.Context().Err()
			}
		}
	}
	return nil
}

// failed reports what went wrong with one item.
func (s *replays) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress.end()
	s.app.report(err)
	s.worst = failureStatus
}

// one replays a trajectory. Its lines are printed as they come if it is alone,
// else all together when it is done.
func (s *replays) one(ctx context.Context, i item) {
	var later bytes.Buffer
	out := s.app.out
	if s.jobs > 1 {
		out = &later
	}
	s.count(func() { s.running++ })
	result, err := s.replay(ctx, i, out)
	s.mu.Lock()
	s.running--
	s.done++
	if later.Len() > 0 {
		s.progress.end()
		_, _ = s.app.out.Write(later.Bytes())
	}
	if result != nil {
		s.outcomes = append(s.outcomes, *result)
		if result.Matched < result.Compared {
			s.worst = max(s.worst, 1)
		}
		if v := result.Verified; v != nil && v.Failed+v.Different > 0 {
			s.worst = failureStatus
		}
	}
	s.mu.Unlock()
	if err != nil && ctx.Err() == nil {
		s.failed(err)
	}
	s.count(func() {})
}

// count changes a counter and shows progress.
func (s *replays) count(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	line := fmt.Sprintf("%d trajectories done, %d running", s.done, s.running)
	switch {
	case s.list:
	case s.app.errIsTerminal:
		s.progress.show(fmt.Sprintf("%s, %d turns", line, s.turns), 0, 0)
	case s.read > 1:
		s.progress.show(line, 0, 0)
	}
}

func (s *replays) replay(ctx context.Context, i item, out io.Writer) (*outcome, error) {
	r := &replay{replays: s, out: out, file: i.file, start: &trajectory.Start{}}
	if s.list {
		return nil, r.describe()
	}
	if err := r.prepare(i); err != nil {
		return nil, err
	}
	if err := r.run(ctx); err != nil {
		message, hint := explain(err, s.app.target())
		return nil, fault.New(fault.Internal, "replay_failed", "%s: %s", r.file.Name, message).WithHint("%s", hint)
	}
	return r.finish(ctx)
}

// prepare finds the start state, and whether there is anything to run.
func (r *replay) prepare(i item) (err error) {
	start := r.manifest
	if start == "" && r.file.Start != "" {
		start = filepath.Join(i.folder, r.file.Start)
	}
	if start == "" {
		start = trajectory.StartBeside(i.path)
	}
	if start != "" {
		if r.start, err = trajectory.OpenStart(start); err != nil {
			return err
		}
	}
	r.startFile = start
	if r.image = r.replayOptions.image; r.image == "" {
		r.image = r.start.Image
	}
	if r.image == "" {
		return fault.New(fault.Invalid, "no_image", "%s: neither --image nor a start state names an image", r.file.Name).
			WithHint("boxwood replay --help shows how")
	}
	if n := r.runnable(); n == 0 {
		return fault.New(fault.Invalid, "nothing_to_replay", "%s: none of its %d actions can be run again", r.file.Name, len(r.file.Events)).
			WithHint("boxwood replay --list says why")
	}
	r.kept = r.file.Kept
	if r.shell != "" {
		r.kept = r.shell == "kept"
	}
	return nil
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
		return json.NewEncoder(r.out).Encode(map[string]any{
			"file": r.file.Name, "format": r.file.Format, "actions": len(r.file.Events), "runnable": r.runnable(),
			"skipped": skipped, "other": r.file.Other,
		})
	}
	fmt.Fprintf(r.out, "%s: %s, %d of %d actions can be run again\n", printable.Line(r.file.Name), r.file.Format, r.runnable(), len(r.file.Events))
	printCounts(r.out, "  %d can't be: %s\n", skipped)
	printCounts(r.out, "  %d beside actions: %s\n", r.file.Other)
	return nil
}

func printCounts(out io.Writer, format string, counts map[string]int) {
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		fmt.Fprintf(out, format, counts[what], printable.Line(what))
	}
}

// finish says of several trajectories which are evidence of anything.
func (s *replays) finish() error {
	if s.list || s.read < 2 {
		return nil
	}
	var sum outcome
	var not []string
	for _, o := range s.outcomes {
		sum.add(o)
		if !o.Evidence {
			not = append(not, o.File)
		}
	}
	slices.Sort(not)
	if s.app.json {
		return errors.Join(json.NewEncoder(s.app.out).Encode(map[string]any{
			"trajectories": len(s.outcomes), "failed": s.read - len(s.outcomes), "not_evidence": not,
			"turns": sum.Turns, "compared": sum.Compared, "matched": sum.Matched, "matched_pct": sum.matchedPct(),
			"counted": sum.Counted, "silent": sum.Silent, "files": sum.Files, "process": sum.Process, "both": sum.Both,
		}))
	}
	fmt.Fprintf(s.app.out, "%d trajectories, %d failed: %s\n", len(s.outcomes), s.read-len(s.outcomes), sum.shares())
	for _, file := range not {
		fmt.Fprintf(s.app.out, "not evidence: %s\n", printable.Line(file))
	}
	return nil
}
