package service

import (
	"context"
	"time"

	"google.golang.org/grpc"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

func (s *Service) Fork(req *boxwoodv1.ForkRequest, out grpc.ServerStreamingServer[boxwoodv1.ForkResult]) error {
	arrived := time.Now()
	ctx := out.Context()
	id := requestID(ctx)
	asked, err := limits(req.GetLimits())
	if err != nil {
		return err
	}
	all, replayed, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.ForkResults{}, func(record) (*boxwoodv1.ForkResults, error) {
		var wants []engine.Want
		for _, w := range req.GetWants() {
			if (w.GetNodeId() != "") == (w.GetSandboxId() != "") {
				return nil, fault.New(fault.Invalid, "bad_fork", "a fork wants children of a node or of a sandbox, and one of them must be named")
			}
			wants = append(wants, engine.Want{Node: ids.Node(w.GetNodeId()), Sandbox: ids.Sandbox(w.GetSandboxId()), Count: int(w.GetCount())})
		}
		all := &boxwoodv1.ForkResults{}
		var sending error
		err := s.e.Fork(ctx, arrived, wants, engine.ForkOptions{
			Scratch: req.GetScratch(), Labels: req.GetLabels(), Lease: time.Duration(req.GetLeaseNs()), Limits: asked,
			MinReady: int(req.GetMinReady()), ReplaceFailed: req.GetReplaceFailed(), Seed: req.GetSeed(), SameSeed: req.GetSameSeed(), Replay: req.GetReplay(),
			Request: id, Secrets: req.GetSecretEnv(),
		}, func(c engine.Child) {
			m := childMessage(id, c)
			all.Results = append(all.Results, m)
			if sending == nil {
				sending = out.Send(m)
			}
		})
		if err != nil {
			return nil, err
		}
		if sending != nil && req.GetIdempotencyKey() == "" {
			s.releaseUnheard(ctx, all) // nobody knows of these children, nobody can ask for them again
			return nil, sending
		}
		return all, nil
	})
	if err != nil || !replayed {
		return err
	}
	for _, m := range all.GetResults() {
		if err := out.Send(m); err != nil {
			return err
		}
	}
	return nil
}

func (s *Service) releaseUnheard(ctx context.Context, all *boxwoodv1.ForkResults) {
	var list []ids.Sandbox
	for _, m := range all.GetResults() {
		if sb := m.GetSandbox(); sb != nil {
			list = append(list, ids.Sandbox(sb.GetId()))
		}
	}
	if _, err := s.e.Release(context.WithoutCancel(ctx), list); err != nil {
		s.log.ErrorContext(ctx, "releasing the children of a client that went away", "error", err)
	}
}

func childMessage(request string, c engine.Child) *boxwoodv1.ForkResult {
	m := &boxwoodv1.ForkResult{Want: int32(c.Want), Child: int32(c.Child), ReadyNs: int64(c.Ready)}
	for _, r := range c.Replayed {
		m.Replayed = append(m.Replayed, &boxwoodv1.ReplayedTurn{NodeId: string(r.Of), ReplayId: string(r.Node), SameOutput: r.SameOutput, SameExit: r.SameExit})
	}
	if c.Err == nil {
		m.Outcome = &boxwoodv1.ForkResult_Sandbox{Sandbox: sandboxMessage(c.Sandbox)}
		return m
	}
	f, code := classify(c.Err)
	m.Outcome = &boxwoodv1.ForkResult_Error{Error: errorDetail(request, f)}
	m.Code, m.Message = int32(code), f.Message
	return m
}

func (s *Service) Rollback(ctx context.Context, req *boxwoodv1.RollbackRequest) (*boxwoodv1.RollbackResponse, error) {
	arrived := time.Now()
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.RollbackResponse{}, func(rec record) (*boxwoodv1.RollbackResponse, error) {
		answer := func(b engine.Sandbox) *boxwoodv1.RollbackResponse {
			return &boxwoodv1.RollbackResponse{Sandbox: sandboxMessage(b), ReadyNs: int64(time.Since(arrived))}
		}
		b, err := s.e.Rollback(ctx, ids.Sandbox(req.GetSandboxId()), ids.Node(req.GetNodeId()),
			func(tx *tree.Tx, b engine.Sandbox) error { return rec(tx, answer(b)) })
		return answer(b), err
	})
	return got, err
}

func (s *Service) Release(ctx context.Context, req *boxwoodv1.ReleaseRequest) (*boxwoodv1.ReleaseResponse, error) {
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.ReleaseResponse{}, func(record) (*boxwoodv1.ReleaseResponse, error) {
		n, err := s.e.Release(ctx, sandboxIDs(req.GetSandboxIds()))
		return &boxwoodv1.ReleaseResponse{Released: int64(n)}, err
	})
	return got, err
}

func (s *Service) Renew(_ context.Context, req *boxwoodv1.RenewRequest) (*boxwoodv1.RenewResponse, error) {
	list, err := s.e.Renew(sandboxIDs(req.GetSandboxIds()), time.Duration(req.GetLeaseNs()))
	return &boxwoodv1.RenewResponse{Sandboxes: sandboxMessages(list)}, err
}

func (s *Service) ListSandboxes(_ context.Context, req *boxwoodv1.ListSandboxesRequest) (*boxwoodv1.ListSandboxesResponse, error) {
	return &boxwoodv1.ListSandboxesResponse{Sandboxes: sandboxMessages(s.e.Sandboxes(ids.Tree(req.GetTreeId())))}, nil
}

func (s *Service) WaitCaptured(ctx context.Context, req *boxwoodv1.WaitCapturedRequest) (*boxwoodv1.WaitCapturedResponse, error) {
	nodes, err := s.e.WaitCaptured(ctx, nodeIDs(req.GetNodeIds()))
	if err != nil {
		return nil, err
	}
	return &boxwoodv1.WaitCapturedResponse{Nodes: nodeMessages(s.e.Store.View(), nodes)}, nil
}

func (s *Service) Evaluate(ctx context.Context, req *boxwoodv1.EvaluateRequest) (*boxwoodv1.EvaluateResponse, error) {
	m := req.GetGrader()
	asked, err := limits(m.GetLimits())
	if err != nil {
		return nil, err
	}
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.EvaluateResponse{}, func(record) (*boxwoodv1.EvaluateResponse, error) {
		g := engine.Grader{
			Start: engine.Start{Image: m.GetImage(), Node: ids.Node(m.GetNodeId())}, Paths: m.GetPaths(),
			Command: command(m.GetCommand()), RewardsFile: m.GetRewardsFile(), Limits: asked,
		}
		for _, f := range m.GetFiles() {
			g.Files = append(g.Files, engine.File{Path: f.GetPath(), Content: f.GetContent(), Mode: f.GetMode()})
		}
		v, err := s.e.Evaluate(ctx, ids.Node(req.GetNodeId()), g)
		return &boxwoodv1.EvaluateResponse{
			Rewards: v.Rewards, Observation: observationMessage(v.Observation), Status: boxwoodv1.TurnStatus(v.Status),
			Problem: v.Problem, Missing: v.Missing, WallNs: int64(v.Wall),
		}, err
	})
	return got, err
}
