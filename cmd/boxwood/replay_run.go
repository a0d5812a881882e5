package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/boxwood-rl/boxwood/cmd/boxwood/view"
	"github.com/boxwood-rl/boxwood/internal/agenttools"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/internal/trajectory"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// maxReplayOutput of a turn is compared; beyond, only the exit status is. It is
// also what a node may keep of it.
const maxReplayOutput = 4 << 20

// replay is one trajectory being run again.
type replay struct {
	*replays
	out io.Writer

	file      *trajectory.Trajectory
	start     *trajectory.Start
	startFile string
	image     string
	// kept: commands run in one shell that stays.
	kept bool

	tree, sandbox string
	generation    string
	sessions      map[string]bool
	tools         *agenttools.Tools
	machine       machine
	verifier      verifier

	// Waits: when the last turn began, now and in the record, and when its keys
	// have been waited for.
	began time.Time
	at    time.Duration
	due   time.Time

	// What came of it. counted are the nodes before the first divergence; left is
	// how many actions were left out so far.
	result  outcome
	counted []*pb.Node
	left    int
	unable  map[string]int
	lines   []trajectory.Line
}

// The sessions that a replay opens.
const (
	shellSession    = "agent"
	terminalSession = "terminal"
)

// Labels of what a replay makes. Nodes also have the step, for people.
const (
	labelRun  = "replay.run"
	labelOf   = "replay.of"
	labelTurn = "replay.turn"
)

func (r *replay) run(ctx context.Context) error {
	r.sessions, r.unable = map[string]bool{}, map[string]int{}
	r.machine.replay = r
	r.tools = agenttools.New(&r.machine, agenttools.State{})
	from, err := r.begin(ctx)
	if err != nil {
		return err
	}
	if !r.keep && r.sandbox != "" {
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			defer cancel()
			_, _ = r.client.Release(ctx, &pb.ReleaseRequest{SandboxIds: []string{r.sandbox}}) // its lease ends it otherwise
		}()
	}
	for i := from; i < len(r.file.Events); i++ {
		if err := r.turn(ctx, i); err != nil {
			return fmt.Errorf("step %d: %w", r.file.Events[i].Step, err)
		}
	}
	if r.verify {
		if r.result.Verified, err = r.verified(ctx); err != nil {
			return fmt.Errorf("verifying: %w", err)
		}
	}
	return nil
}

// begin makes the tree, or finds the one of an earlier attempt. It gives the
// event to go on with, for which there is a sandbox if it is to be run.
func (r *replay) begin(ctx context.Context) (from int, err error) {
	create, err := r.treeRequest()
	if err != nil {
		return 0, err
	}
	if r.name != "" {
		if from, err = r.resume(ctx, create.Labels); err != nil || r.tree != "" {
			return from, err
		}
	}
	made, err := r.client.CreateTree(ctx, create)
	if err != nil {
		return 0, err
	}
	r.tree, r.sandbox, r.generation = made.Tree.GetId(), made.Sandbox.GetId(), made.Sandbox.GetGeneration()
	if err := r.title(""); err != nil {
		return 0, err
	}
	return 0, r.reference(ctx, nil)
}

func (r *replay) title(how string) error {
	if r.app.json {
		return nil
	}
	_, err := fmt.Fprintf(r.out, "tree %s, %d turns of %s (%s)%s\n", r.tree, len(r.file.Events), printable.Line(r.file.Name), r.file.Format, how)
	return err
}

func (r *replay) treeRequest() (*pb.CreateTreeRequest, error) {
	request := &pb.CreateTreeRequest{
		Start: &pb.CreateTreeRequest_Image{Image: r.image}, WithSandbox: true, Labels: map[string]string{},
		// Not its folder: the set-up runs with the defaults, too, and may have to make it.
		Defaults: &pb.Defaults{User: r.start.User, Env: r.start.Env, LeaseNs: int64(r.lease()), CapturePolicy: modes[r.mode]},
	}
	for name, value := range r.labels {
		request.Labels[name] = value
	}
	if r.name != "" {
		request.Labels[labelRun], request.Labels[labelOf] = r.name, r.identity()
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

// lease is long enough for the longest wait; 0: there is none, and the
// daemon's will do.
func (r *replay) lease() time.Duration {
	if r.speed == 0 {
		return 0
	}
	longest, at := time.Duration(0), time.Duration(0)
	for _, e := range r.file.Events {
		if e.At > 0 {
			longest, at = max(longest, e.At-at), e.At
		}
		longest = max(longest, e.Took)
	}
	return 30*time.Minute + r.timeout + time.Duration(float64(longest)/r.speed)
}

// identity tells this trajectory from others of its run, by what is run.
func (r *replay) identity() string {
	h := sha256.New()
	start, _ := json.Marshal(r.start)
	fmt.Fprintf(h, "%q %s %v %s\n", r.image, start, r.kept, r.mode)
	for _, e := range r.file.Events {
		call, _ := json.Marshal(e.Call)
		fmt.Fprintf(h, "%v %q %q %q %s\n", e.Skip != "", e.Command, e.Keystrokes, e.Cwd, call)
	}
	id := hex.EncodeToString(h.Sum(nil)[:16])
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.copies[id]
	r.copies[id]++
	return fmt.Sprintf("%s.%d", id, n)
}

// turn runs one event.
func (r *replay) turn(ctx context.Context, i int) error {
	e := r.file.Events[i]
	if e.Skip != "" {
		return r.skipped(e, "", e.Skip, false)
	}
	if name := r.session(e); name != "" {
		if err := r.open(ctx, name); err != nil {
			return err
		}
	}
	if err := r.wait(ctx, e); err != nil {
		return err
	}
	var o trajectory.Observed
	var result *pb.TurnResult
	var unable string
	var err error
	if e.Call != nil {
		result, o, unable, err = r.call(ctx, i, e)
	} else {
		result, o, err = r.command(ctx, i, e)
	}
	switch {
	case err != nil:
		return err
	case result.SandboxLost:
		return fault.New(fault.Internal, "sandbox_lost", "the sandbox died in the turn").
			WithHint("the turn may have killed its pid 1 or run out of memory; fork the node before it")
	}
	r.count(func() { r.turns++ })
	if err := r.reference(ctx, result.Node); err != nil {
		return err
	}
	return r.observed(e, o, result.Node, result.Timings.GetTotalNs(), unable, false)
}

// wait passes the time that was recorded before a turn.
func (r *replay) wait(ctx context.Context, e trajectory.Event) error {
	if r.speed > 0 {
		if gap := e.At - r.at; !r.began.IsZero() && gap > 0 {
			if at := r.began.Add(time.Duration(float64(gap) / r.speed)); at.After(r.due) {
				r.due = at
			}
		}
		if left := time.Until(r.due); left > 0 {
			timer := time.NewTimer(left)
			defer timer.Stop()
			select {
			case <-timer.C:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	if r.began = time.Now(); e.At > 0 {
		r.at = e.At
	}
	if e.Keystrokes != "" && r.speed > 0 {
		r.due = r.began.Add(time.Duration(float64(e.Took) / r.speed))
	}
	return nil
}

// command runs a line as a turn: in a shell of its own, in the one that stays,
// or typed in the terminal.
func (r *replay) command(ctx context.Context, i int, e trajectory.Event) (*pb.TurnResult, trajectory.Observed, error) {
	c := &pb.Command{Shell: []byte(e.Command), DeadlineNs: int64(r.deadline(e)), OutputLimit: outputLimit(e), Session: r.session(e)}
	if c.Session == "" {
		if c.Cwd = e.Cwd; c.Cwd == "" {
			c.Cwd = r.start.Cwd
		}
	}
	var out, errOut bounded
	result, err := runTurn(ctx, r.client, &pb.RunTurnRequest{SandboxId: r.sandbox, Command: c, Node: &pb.NodeInput{Labels: r.nodeLabels(i)}}, &out, &errOut)
	if err != nil {
		return nil, trajectory.Observed{}, err
	}
	if result.SessionEnded {
		delete(r.sessions, c.Session)
	}
	o := observedOf(result.Node)
	o.Stdout, o.Stderr, o.Cut = out.String(), errOut.String(), out.cut || errOut.cut || result.Unstreamed > 0
	return result, o, nil
}

func (r *replay) nodeLabels(i int) map[string]string {
	return map[string]string{"step": fmt.Sprint(r.file.Events[i].Step), labelTurn: fmt.Sprint(i)}
}

// deadline of a turn. What didn't end in the record isn't waited for longer
// than then.
func (r *replay) deadline(e trajectory.Event) time.Duration {
	if e.Hung {
		return min(r.timeout, max(e.Took, 10*time.Second))
	}
	return r.timeout
}

// outputLimit is what the node keeps of each stream, so that an attempt that
// goes on can compare it: half of it at each end.
func outputLimit(e trajectory.Event) int64 {
	if e.Output == nil {
		return 0
	}
	return min(maxReplayOutput, max(64<<10, 2*int64(len(*e.Output))+4096))
}

// observedOf is how a node's command ended.
func observedOf(n *pb.Node) trajectory.Observed {
	o := trajectory.Observed{ExitCode: int(n.GetObservation().GetExitCode()), TimedOut: n.GetTurnStatus() == pb.TurnStatus_TURN_STATUS_TIMED_OUT}
	if signal := n.GetObservation().GetSignal(); signal != 0 {
		o.ExitCode = 128 + int(signal) // as records of shells have it
	}
	return o
}

// session is the one that an event belongs to; empty: none.
func (r *replay) session(e trajectory.Event) string {
	switch {
	case e.Keystrokes != "":
		return terminalSession
	case r.kept:
		return shellSession
	}
	return ""
}

// open opens a session that isn't there, which is a turn of its own.
func (r *replay) open(ctx context.Context, name string) error {
	if r.sessions[name] {
		return nil
	}
	opened, err := r.client.OpenSession(ctx, &pb.OpenSessionRequest{
		SandboxId: r.sandbox, Name: name, Tty: name == terminalSession, Cwd: r.start.Cwd, User: r.start.User, Env: r.start.Env,
	})
	if r.sessions[name] = err == nil; err != nil {
		return err
	}
	return r.reference(ctx, opened.Result.GetNode())
}

// observed compares what a turn gave with its record, and prints it.
func (r *replay) observed(e trajectory.Event, o trajectory.Observed, n *pb.Node, took int64, unable string, earlier bool) error {
	report := turnReport{Step: e.Step, Command: e.Command, Node: n.GetId(), Verdict: view.VerdictName(n.GetVerdict()), ExitCode: o.ExitCode, TotalNs: took, Earlier: earlier}
	if e.Call != nil {
		report.Tool, report.Command = e.Call.Tool, e.Call.String()
	}
	if unable != "" {
		r.unable[unable]++
		return r.skipped(e, n.GetId(), unable, earlier)
	}
	r.result.Turns++
	if earlier {
		r.result.Earlier++
	}
	report.Different = e.Compare(o)
	report.Match = report.Different == ""
	if e.ExitCode != nil || e.Output != nil || e.Hung {
		r.result.Compared++
		if report.Match {
			r.result.Matched++
		} else if r.result.FirstDivergence == 0 {
			r.result.FirstDivergence, r.result.Cause = e.Step, r.cause(e, o, report.Different)
		}
	}
	// What comes after the first difference counts for nothing.
	if r.result.FirstDivergence == 0 || sabotage.On("evidence") {
		r.counted = append(r.counted, n)
	}
	if r.record != "" && e.Call == nil {
		line := trajectory.Line{Command: e.Command, Cwd: e.Cwd, ExpectExit: &o.ExitCode}
		if !o.Cut {
			line.ExpectStdout = &o.Stdout
		}
		r.lines = append(r.lines, line)
	}
	return r.printTurn(report)
}

// skipped takes note of an action that is left out, and prints it.
func (r *replay) skipped(e trajectory.Event, node, why string, earlier bool) error {
	r.left++
	return r.printTurn(turnReport{Step: e.Step, Node: node, Skipped: why, Earlier: earlier})
}

func (r *replay) writeRecord() error {
	return writeFile(r.record, func(f *os.File) error { return trajectory.Write(f, r.file.Start, r.lines) })
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
