package main

import (
	"context"
	"encoding/json"
	"errors"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/boxwood-rl/boxwood/internal/agenttools"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/trajectory"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// machine is the sandbox of a replay, for tools of the recorded agent, in the
// turn that is open.
type machine struct {
	*replay
	turn string
	cwd  string
}

// toolPayload is what the node of a call keeps, so that a later attempt can go
// on after it.
type toolPayload struct {
	Output     string           `json:"output"`
	Complained bool             `json:"complained,omitempty"`
	Cut        bool             `json:"cut,omitempty"`
	Unable     string           `json:"unable,omitempty"`
	Tools      agenttools.State `json:"tools"`
}

// maxPayloadOutput leaves the payload within what a node takes, whatever JSON
// makes of the text.
const maxPayloadOutput = 128 << 10

// call does a call of a tool as a turn.
func (r *replay) call(ctx context.Context, i int, e trajectory.Event) (*pb.TurnResult, trajectory.Observed, string, error) {
	begun, err := r.client.BeginTurn(ctx, &pb.BeginTurnRequest{SandboxId: r.sandbox, DeadlineNs: int64(r.timeout)})
	if err != nil {
		return nil, trajectory.Observed{}, "", err
	}
	r.machine.turn, r.machine.cwd = begun.TurnId, e.Cwd
	output, complained, err := r.tools.Do(ctx, e.Call)
	var unable agenttools.Unable
	if err != nil && !errors.As(err, &unable) {
		return nil, trajectory.Observed{}, "", err // its sandbox is released, and the turn with it
	}
	keep := toolPayload{Output: output, Complained: complained, Unable: string(unable), Tools: r.tools.State()}
	keep.Tools.Forgot = true // what can be undone isn't kept
	if len(output) > maxPayloadOutput {
		keep.Output, keep.Cut = strings.ToValidUTF8(output[:maxPayloadOutput], ""), true
	}
	payload, err := json.Marshal(keep)
	if err != nil {
		return nil, trajectory.Observed{}, "", err
	}
	result, err := r.client.EndTurn(ctx, &pb.EndTurnRequest{TurnId: begun.TurnId, Node: &pb.NodeInput{Labels: r.nodeLabels(i), Payload: payload}})
	if err != nil {
		return nil, trajectory.Observed{}, "", err
	}
	return result, trajectory.Observed{Stdout: output, Complained: complained}, string(unable), nil
}

// exec runs a program within the turn.
func (m *machine) exec(ctx context.Context, c *pb.Command) (*pb.CommandResult, error) {
	c.OutputLimit = maxReplayOutput
	events, err := m.client.Exec(ctx, &pb.ExecRequest{TurnId: m.turn, Command: c, ResultOnly: true})
	if err != nil {
		return nil, err
	}
	event, err := events.Recv()
	if err != nil {
		return nil, err
	}
	done := event.GetCommand()
	switch {
	case done == nil:
		return nil, fault.New(fault.Internal, "no_result", "the daemon ended a command without a result")
	case done.Status != pb.TurnStatus_TURN_STATUS_COMPLETED:
		return nil, agenttools.Unable("a tool that did not end in time")
	case done.Observation.GetStdoutOmitted() > 0:
		return nil, agenttools.Unable("a tool that finds more than 4 MiB")
	}
	return done, nil
}

func argv(words ...string) (out [][]byte) {
	for _, w := range words {
		out = append(out, []byte(w))
	}
	return out
}

func (m *machine) Cwd(ctx context.Context) (string, error) {
	switch {
	case m.kept:
		done, err := m.exec(ctx, &pb.Command{Session: shellSession, Shell: []byte("builtin pwd -P")})
		return strings.TrimSuffix(string(done.GetObservation().GetStdout()), "\n"), err
	case m.cwd != "":
		return m.cwd, nil
	case m.start.Cwd != "":
		return m.start.Cwd, nil
	}
	return "/", nil
}

func (m *machine) Kind(ctx context.Context, path string) (agenttools.Kind, error) {
	done, err := m.exec(ctx, &pb.Command{Argv: argv("stat", "-L", "-c", "%F", "--", path)})
	if err != nil {
		return agenttools.Nothing, err
	}
	switch kind := strings.TrimSpace(string(done.Observation.GetStdout())); {
	case done.Observation.GetExitCode() == 127:
		return agenttools.Nothing, agenttools.Unable("a tool that needs stat, which the image lacks")
	case done.Observation.GetExitCode() != 0:
		return agenttools.Nothing, nil
	case kind == "directory":
		return agenttools.Folder, nil
	case strings.HasPrefix(kind, "regular"):
		return agenttools.File, nil
	}
	return agenttools.Nothing, agenttools.Unable("a tool on what is neither file nor folder")
}

func (m *machine) Read(ctx context.Context, path string) (string, error) {
	file, err := m.client.ReadFile(ctx, &pb.ReadFileRequest{SandboxId: m.sandbox, TurnId: m.turn, Path: path})
	if err == nil && file.Size > agenttools.MaxFile {
		return "", agenttools.Unable("a tool on a file larger than 4 MiB")
	}
	return string(file.GetContent()), err
}

func (m *machine) Write(ctx context.Context, path, text string) error {
	if len(text) > agenttools.MaxFile {
		return agenttools.Unable("a tool on a file larger than 4 MiB")
	}
	before, err := m.client.ReadFile(ctx, &pb.ReadFileRequest{SandboxId: m.sandbox, TurnId: m.turn, Path: path, Limit: 1})
	if err != nil && status.Code(err) != codes.NotFound {
		return err
	}
	_, err = m.client.WriteFile(ctx, &pb.WriteFileRequest{SandboxId: m.sandbox, TurnId: m.turn, Path: path, Content: []byte(text), Mode: before.GetMode()})
	return err
}

// Run gives a program's output, whatever its status: searches that find nothing
// have one of their own.
func (m *machine) Run(ctx context.Context, words ...string) (string, error) {
	done, err := m.exec(ctx, &pb.Command{Argv: argv(words...)})
	if err != nil {
		return "", err
	}
	if done.Observation.GetExitCode() == 127 {
		return "", agenttools.Unable("a tool that needs " + words[0] + ", which the image lacks")
	}
	return string(done.Observation.GetStdout()), nil
}
