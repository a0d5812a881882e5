package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/boxwood-rl/boxwood/internal/agenttools"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/internal/trajectory"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// A replay with a name goes on where an earlier attempt of the name was: its
// tree is found by its labels, each event that has a node of a turn that ended
// is taken from there, and a fork of the last of them runs the rest. A turn that
// the attempt's end cut off left its node at most as cancelled; the fork stands
// before it.

// resume finds what an earlier attempt did. r.tree stays empty if there was none.
func (r *replay) resume(ctx context.Context, labels map[string]string) (from int, err error) {
	trees, err := r.client.ListTrees(ctx, &pb.ListTreesRequest{Labels: map[string]string{labelRun: labels[labelRun], labelOf: labels[labelOf]}})
	if err != nil || len(trees.Trees) == 0 || sabotage.On("resume") {
		return 0, err
	}
	tree := slices.MinFunc(trees.Trees, func(a, b *pb.Tree) int { return strings.Compare(a.Id, b.Id) })
	r.tree = tree.Id
	nodes, err := r.earlier(ctx)
	if err != nil {
		return 0, err
	}
	if err := r.title(", gone on with"); err != nil {
		return 0, err
	}
	last := tree.RootId
	for from < len(r.file.Events) {
		e, id := r.file.Events[from], nodes[from]
		if e.Skip == "" && id == "" {
			break
		}
		if e.Skip != "" {
			err = r.skipped(e, "", e.Skip, true)
		} else {
			last = id
			err = r.again(ctx, e, id)
		}
		if err != nil {
			return 0, err
		}
		from++
	}
	if !slices.ContainsFunc(r.file.Events[from:], func(e trajectory.Event) bool { return e.Skip == "" }) {
		return from, nil
	}
	return from, r.forkOf(ctx, last)
}

// earlier gives the nodes of turns that have ended, by event.
func (r *replay) earlier(ctx context.Context) (map[int]string, error) {
	stream, err := r.client.ListNodes(ctx, &pb.ListNodesRequest{TreeId: r.tree, Brief: true})
	if err != nil {
		return nil, err
	}
	list, err := all(stream.Recv)
	if err != nil {
		return nil, err
	}
	nodes := map[int]string{}
	for _, n := range list {
		i, err := strconv.Atoi(n.Labels[labelTurn])
		ended := n.TurnStatus == pb.TurnStatus_TURN_STATUS_COMPLETED || n.TurnStatus == pb.TurnStatus_TURN_STATUS_TIMED_OUT
		if err == nil && ended && n.ReplayOf == "" {
			nodes[i] = n.Id
		}
	}
	return nodes, nil
}

// again takes a turn from its node.
func (r *replay) again(ctx context.Context, e trajectory.Event, id string) error {
	n, err := r.client.GetNode(ctx, &pb.GetNodeRequest{NodeId: id})
	if err != nil {
		return err
	}
	if e.Call == nil {
		o, seen := observedOf(n), n.GetObservation()
		o.Stdout, o.Stderr = string(seen.GetStdout()), string(seen.GetStderr())
		o.Cut = seen.GetStdoutOmitted()+seen.GetStderrOmitted() > 0
		return r.observed(e, o, n, 0, "", true)
	}
	kept, err := r.client.GetPayload(ctx, &pb.GetPayloadRequest{NodeId: id})
	if err != nil {
		return err
	}
	var p toolPayload
	if err := json.Unmarshal(kept.Payload, &p); err != nil {
		return fault.New(fault.Internal, "bad_payload", "the payload of node %s is not a replay's: %w", id, err)
	}
	r.tools = agenttools.New(&r.machine, p.Tools)
	return r.observed(e, trajectory.Observed{Stdout: p.Output, Complained: p.Complained, Cut: p.Cut}, n, 0, p.Unable, true)
}

// forkOf makes a sandbox that stands at a node.
func (r *replay) forkOf(ctx context.Context, id string) error {
	stream, err := r.client.Fork(ctx, &pb.ForkRequest{
		Wants: []*pb.ForkRequest_Want{{From: &pb.ForkRequest_Want_NodeId{NodeId: id}, Count: 1}}, LeaseNs: int64(r.lease()),
	})
	if err != nil {
		return err
	}
	children, err := all(stream.Recv)
	switch {
	case err != nil:
		return err
	case len(children) != 1:
		return fmt.Errorf("the daemon made %d sandboxes, not one", len(children))
	case children[0].GetSandbox() == nil:
		return fault.New(fault.Precondition, "not_resumable", "it can't go on from node %s: %s", id, children[0].Message).
			WithHint("under another name, --run begins anew")
	}
	r.sandbox = children[0].GetSandbox().GetId()
	sessions, err := r.client.ListSessions(ctx, &pb.ListSessionsRequest{SandboxId: r.sandbox})
	if err != nil {
		return err
	}
	for _, s := range sessions.Sessions {
		r.sessions[s.Name] = true
	}
	return nil
}
