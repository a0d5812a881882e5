package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/boxwood-rl/boxwood/cmd/boxwood/view"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/printable"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// maxStdin is what the service takes.
const maxStdin = 4 << 20

// commandFlags are how a turn is described, for run and exec.
type commandFlags struct {
	shell, cwd, user string
	session          string
	env, labels      map[string]string
	secrets          []string
	timeout          time.Duration
	stdin            bool
	captured         bool
}

func (f *commandFlags) add(c *cobra.Command) {
	c.Flags().StringVarP(&f.shell, "command", "c", "", "a line for `bash -lc`, instead of arguments")
	c.Flags().StringVar(&f.session, "session", "", "run the line of -c in this shell, which lives on between turns and in forks; it is opened if it isn't there")
	c.Flags().StringVar(&f.cwd, "cwd", "", "working folder")
	c.Flags().StringVar(&f.user, "user", "", `user: a name, "uid" or "uid:gid"`)
	c.Flags().StringToStringVarP(&f.env, "env", "e", nil, "environment, NAME=VALUE")
	c.Flags().StringSliceVar(&f.secrets, "secret-env", nil, "names of variables of this program's environment that the command gets and that are recorded nowhere")
	c.Flags().StringToStringVar(&f.labels, "label", nil, "labels of the node, NAME=VALUE")
	c.Flags().DurationVar(&f.timeout, "timeout", 0, "deadline, after which everything the turn started is killed")
	c.Flags().BoolVarP(&f.stdin, "stdin", "i", false, "pass standard input on, up to 4 MiB")
	c.Flags().BoolVar(&f.captured, "wait-captured", false, "return when the node can be forked")
}

func (f *commandFlags) request(a *app, c *cobra.Command, sandbox string, args []string) (*pb.RunTurnRequest, error) {
	r := &pb.RunTurnRequest{
		SandboxId: sandbox,
		Command:   &pb.Command{Shell: []byte(f.shell), Cwd: f.cwd, User: f.user, Env: f.env, DeadlineNs: int64(f.timeout), Session: f.session},
		Node:      &pb.NodeInput{Labels: f.labels},
	}
	for _, name := range f.secrets {
		value, ok := os.LookupEnv(name)
		if !ok {
			return nil, usage(c, fmt.Errorf("there is no variable %s in the environment: --secret-env takes names, and never a value", name))
		}
		if r.Command.SecretEnv == nil {
			r.Command.SecretEnv = map[string]string{}
		}
		r.Command.SecretEnv[name] = value
	}
	if f.captured {
		r.Ack = pb.Ack_ACK_CAPTURED
	}
	for _, arg := range args {
		r.Command.Argv = append(r.Command.Argv, []byte(arg))
	}
	if (f.shell == "") == (len(args) == 0) {
		return nil, usage(c, errors.New("name the command after --, or a line for bash with -c"))
	}
	if f.session != "" && f.shell == "" {
		return nil, usage(c, errors.New("a session takes a line with -c"))
	}
	if f.stdin {
		data, err := io.ReadAll(io.LimitReader(a.in, maxStdin+1))
		if err != nil {
			return nil, fault.New(fault.Invalid, "bad_stdin", "reading standard input: %w", err)
		}
		if len(data) > maxStdin {
			return nil, fault.New(fault.Invalid, "stdin_too_large", "standard input is larger than 4 MiB").
				WithHint("upload a file instead and read it in the sandbox")
		}
		r.Command.Stdin = data
	}
	return r, nil
}

func (a *app) runCommand() *cobra.Command {
	var f commandFlags
	var image, sandbox, start string
	var keep bool
	c := &cobra.Command{
		Use:   "run (--image IMAGE | --node NODE | --sandbox SANDBOX) -- COMMAND [ARG...]",
		Short: "Run a command as the first turn of a new tree, or as a turn of a sandbox",
		Long: `Makes a tree from an image or a node, runs the command as a turn of its first
sandbox and passes output and exit status on. The sandbox is released afterwards
(--keep leaves it); the nodes stay. With --sandbox it is the same as exec.`,
		Example: `  boxwood run --image boxwood/base:latest -- python3 -c 'print(6 * 7)'
  boxwood run --image boxwood/base:latest --keep -c 'git init /work && cd /work && ls -la'
  boxwood run --node nd_01j... -- make test`,
		RunE: func(c *cobra.Command, args []string) error {
			if given := count(image != "", sandbox != "", start != ""); given != 1 {
				return usage(c, errors.New("name exactly one of --image, --node and --sandbox"))
			}
			r, err := f.request(a, c, sandbox, args)
			if err != nil {
				return err
			}
			client, err := a.client()
			if err != nil {
				return err
			}
			if sandbox != "" {
				return a.turn(c.Context(), client, r)
			}
			create := &pb.CreateTreeRequest{WithSandbox: true, Start: &pb.CreateTreeRequest_Image{Image: image}}
			if start != "" {
				create.Start = &pb.CreateTreeRequest_NodeId{NodeId: start}
			}
			made, err := client.CreateTree(c.Context(), create)
			if err != nil {
				return err
			}
			r.SandboxId = made.Sandbox.GetId()
			if keep {
				a.note("tree %s, sandbox %s", made.Tree.Id, r.SandboxId)
			} else {
				defer func() {
					ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Context()), 10*time.Second)
					defer cancel()
					_, _ = client.Release(ctx, &pb.ReleaseRequest{SandboxIds: []string{r.SandboxId}}) // its lease ends it otherwise
				}()
			}
			return a.turn(c.Context(), client, r)
		},
	}
	f.add(c)
	c.Flags().StringVar(&image, "image", "", "image to make the tree from: a name or digest")
	c.Flags().StringVar(&start, "node", "", "node to make the tree from")
	c.Flags().StringVar(&sandbox, "sandbox", "", "live sandbox to run the turn in")
	c.Flags().BoolVar(&keep, "keep", false, "keep the sandbox")
	return a.jsonFlag(c)
}

func (a *app) execCommand() *cobra.Command {
	var f commandFlags
	c := &cobra.Command{
		Use:   "exec SANDBOX -- COMMAND [ARG...]",
		Short: "Run a command as a turn of a live sandbox",
		Long: `Runs the command as one turn, passes its output and exit status on, and makes a
node. Output beyond the sandbox's limit is cut in the node, not here.`,
		Example: `  boxwood exec sb_01j... -- ls -la
  boxwood exec sb_01j... -c 'cd /work && make test' --timeout 5m
  boxwood exec sb_01j... --session main -c 'cd /work; x=5'
  boxwood exec sb_01j... -i -- tee /work/notes < notes`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			r, err := f.request(a, c, args[0], args[1:])
			if err != nil {
				return err
			}
			client, err := a.client()
			if err != nil {
				return err
			}
			return a.turn(c.Context(), client, r)
		},
	}
	f.add(c)
	return a.jsonFlag(c)
}

// turn runs a turn, passing output on as it is, and ends with its exit status.
func (a *app) turn(ctx context.Context, client pb.BoxwoodClient, r *pb.RunTurnRequest) error {
	out, errOut := a.out, a.err
	if a.json {
		out, errOut = io.Discard, io.Discard
	}
	if name := r.Command.GetSession(); name != "" {
		if err := a.ensureSession(ctx, client, r.SandboxId, name, r.Command.SecretEnv); err != nil {
			return err
		}
		r.Command.SecretEnv = nil // the session has them
	}
	result, err := runTurn(ctx, client, r, out, errOut)
	if err != nil {
		return err
	}
	if a.json {
		if err := a.printMessage(result); err != nil {
			return err
		}
	}
	a.note("%s", turnLine(result))
	return turnStatus(result)
}

// ensureSession opens a session that isn't there, which is a turn of its own. One that is there can be given no secrets.
func (a *app) ensureSession(ctx context.Context, client pb.BoxwoodClient, sandbox, name string, secrets map[string]string) error {
	list, err := client.ListSessions(ctx, &pb.ListSessionsRequest{SandboxId: sandbox})
	if err != nil {
		return err
	}
	for _, s := range list.Sessions {
		if s.Name != name {
			continue
		}
		if len(secrets) > 0 {
			return fault.New(fault.Invalid, "session_exists", "session %s is there already, and takes secrets when it is opened only", name)
		}
		return nil
	}
	made, err := client.OpenSession(ctx, &pb.OpenSessionRequest{SandboxId: sandbox, Name: name, SecretEnv: secrets})
	if err != nil {
		return err
	}
	a.note("opened session %s: node %s", name, made.GetResult().GetNode().GetId())
	return nil
}

// runTurn gives the turn's result; output goes to the writers as it comes.
func runTurn(ctx context.Context, client pb.BoxwoodClient, r *pb.RunTurnRequest, out, errOut io.Writer) (*pb.TurnResult, error) {
	events, err := client.RunTurn(ctx, r)
	if err != nil {
		return nil, err
	}
	for {
		ev, err := events.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return nil, fault.New(fault.Internal, "no_result", "the daemon ended the turn without a result")
			}
			return nil, err
		}
		switch ev := ev.Event.(type) {
		case *pb.TurnEvent_Stdout:
			_, err = out.Write(ev.Stdout)
		case *pb.TurnEvent_Stderr:
			_, err = errOut.Write(ev.Stderr)
		case *pb.TurnEvent_Result:
			return ev.Result, nil
		}
		if err != nil {
			return nil, fault.New(fault.Invalid, "output", "passing output on: %w", err)
		}
	}
}

// turnLine says in one line what became of a turn.
func turnLine(r *pb.TurnResult) string {
	n := r.Node
	line := fmt.Sprintf("node %s: %s", n.GetId(), view.VerdictName(n.GetVerdict()))
	if len(n.GetReasons()) > 0 {
		line += " (" + printable.Line(strings.Join(n.Reasons, ", ")) + ")"
	}
	if n.GetExternal() {
		line += ", something left the sandbox"
	}
	if n.GetWithheldReason() != "" {
		line += ", withheld: " + printable.Line(n.WithheldReason)
	}
	line += ", " + millis(r.Timings.GetTotalNs())
	if wait := r.Timings.GetCaptureWaitNs(); wait > 0 {
		line += fmt.Sprintf(" of which %s waiting for the capture before", millis(wait))
	}
	if r.SessionEnded {
		line += "; the session is gone"
	}
	if r.SandboxLost {
		line += "; the sandbox is gone"
	}
	return line
}

// turnStatus is the command's own exit status: 128 + signal as shells have it,
// 124 for a timeout as timeout(1) has it.
func turnStatus(r *pb.TurnResult) error {
	o := r.Node.GetObservation()
	switch r.Node.GetTurnStatus() {
	case pb.TurnStatus_TURN_STATUS_TIMED_OUT:
		return exitStatus(124)
	case pb.TurnStatus_TURN_STATUS_CANCELLED:
		return exitStatus(130)
	case pb.TurnStatus_TURN_STATUS_LOST:
		return fault.New(fault.Internal, "sandbox_lost", "the sandbox died in the turn").
			WithHint("the turn may have killed its pid 1 or run out of memory; fork the node before it")
	}
	switch {
	case o.GetSignal() != 0:
		return exitStatus(128 + o.GetSignal())
	case o.GetExitCode() != 0:
		return exitStatus(o.GetExitCode())
	}
	return nil
}

func millis(ns int64) string { return fmt.Sprintf("%.1f ms", float64(ns)/1e6) }

func count(conditions ...bool) (n int) {
	for _, c := range conditions {
		if c {
			n++
		}
	}
	return n
}
