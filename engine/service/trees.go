package service

import (
	"context"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/seccomp"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

func (s *Service) CreateTree(ctx context.Context, req *boxwoodv1.CreateTreeRequest) (*boxwoodv1.CreateTreeResponse, error) {
	n := engine.NewTree{
		Start:  engine.Start{Image: req.GetImage(), Node: ids.Node(req.GetNodeId())},
		Labels: req.GetLabels(), WithSandbox: req.GetWithSandbox(), Run: runOf(ctx),
	}
	if d := req.GetDefaults(); d != nil {
		asked, err := limits(d.GetLimits())
		if err != nil {
			return nil, err
		}
		n.Defaults = tree.Defaults{
			User: d.GetUser(), Cwd: d.GetCwd(), Env: d.GetEnv(), Limits: asked,
			Lease: time.Duration(d.GetLeaseNs()), TurnDeadline: time.Duration(d.GetTurnDeadlineNs()),
		}
		if n.Defaults.Capture, err = tree.CapturePolicyOf(int32(d.GetCapturePolicy())); err != nil {
			return nil, err
		}
		if n.Defaults.Limits.Calls, err = seccomp.Parse(d.GetAllowCalls()); err != nil {
			return nil, err
		}
	}
	for i, step := range req.GetSetup() {
		f := step.GetFile()
		if (step.GetCommand() != "") == (f != nil) {
			return nil, fault.New(fault.Invalid, "bad_setup", "step %d of the set-up is a command or a file, and one of them must be there", i+1)
		}
		n.Setup = append(n.Setup, engine.SetupStep{Command: step.GetCommand(), Path: f.GetPath(), Content: f.GetContent(), Mode: f.GetMode()})
	}
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.CreateTreeResponse{}, func(rec record) (*boxwoodv1.CreateTreeResponse, error) {
		answer := func(v reader, c engine.CreatedTree) *boxwoodv1.CreateTreeResponse {
			m := &boxwoodv1.CreateTreeResponse{Tree: treeMessage(nil, c.Tree), Root: node(v, c.Root), SetupCached: c.SetupCached}
			m.Tree.NodeCount, m.Tree.CheckpointCount = 1, 1
			if c.Sandbox != nil {
				m.Sandbox = sandboxMessage(*c.Sandbox)
				m.Tree.SandboxCount = 1
			}
			return m
		}
		c, err := s.e.CreateTree(ctx, n, func(tx *tree.Tx, c engine.CreatedTree) error { return rec(tx, answer(tx, c)) })
		if err != nil {
			return nil, err
		}
		return answer(s.e.Store.View(), c), nil
	})
	return got, err
}

func (s *Service) CloseTree(ctx context.Context, req *boxwoodv1.CloseTreeRequest) (*boxwoodv1.CloseTreeResponse, error) {
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.CloseTreeResponse{}, func(record) (*boxwoodv1.CloseTreeResponse, error) {
		_, n, err := s.e.CloseTree(ctx, ids.Tree(req.GetTreeId()))
		return &boxwoodv1.CloseTreeResponse{Released: int64(n)}, err
	})
	return got, err
}

func (s *Service) OpenTree(ctx context.Context, req *boxwoodv1.OpenTreeRequest) (*boxwoodv1.OpenTreeResponse, error) {
	t, err := s.e.OpenTree(ctx, ids.Tree(req.GetTreeId()))
	if err != nil {
		return nil, err
	}
	return &boxwoodv1.OpenTreeResponse{Tree: treeMessage(s.e.Store.View(), t)}, nil
}

func (s *Service) ListTrees(_ context.Context, req *boxwoodv1.ListTreesRequest) (*boxwoodv1.ListTreesResponse, error) {
	v := s.e.Store.View()
	m := &boxwoodv1.ListTreesResponse{}
	for t := range v.Trees() {
		if _, internal := t.Labels[engine.SetupLabel]; internal && req.GetLabels()[engine.SetupLabel] == "" {
			continue
		}
		if hasLabels(t.Labels, req.GetLabels()) && !(t.Closed && req.GetOpenOnly()) {
			m.Trees = append(m.Trees, treeMessage(v, t))
		}
	}
	return m, nil
}

func hasLabels(have, want map[string]string) bool {
	for k, v := range want {
		if have[k] != v {
			return false
		}
	}
	return true
}

func nodeMessages(v *tree.View, nodes []*tree.Node) []*boxwoodv1.Node {
	out := make([]*boxwoodv1.Node, len(nodes))
	for i, n := range nodes {
		out[i] = node(v, n)
	}
	return out
}

func (s *Service) GetNode(_ context.Context, req *boxwoodv1.GetNodeRequest) (*boxwoodv1.Node, error) {
	if err := ids.Check(req.GetNodeId(), "nd_", "node"); err != nil {
		return nil, err
	}
	v := s.e.Store.View()
	n, err := v.FullNode(ids.Node(req.GetNodeId()))
	if err != nil {
		return nil, err
	}
	return node(v, n), nil
}

func (s *Service) ListNodes(req *boxwoodv1.ListNodesRequest, out grpc.ServerStreamingServer[boxwoodv1.Node]) error {
	v := s.e.Store.View()
	if _, err := v.Tree(ids.Tree(req.GetTreeId())); err != nil {
		return err
	}
	if err := v.Load(ids.Tree(req.GetTreeId())); err != nil {
		return err
	}
	want := tree.Where{Labels: req.GetLabels(), Depth: req.Depth}
	for _, c := range req.GetCapture() {
		want.Capture = append(want.Capture, tree.Capture(c))
	}
	nodes := v.NodesWhere(ids.Tree(req.GetTreeId()), want)
	if req.GetUnder() != "" {
		n, err := v.Node(ids.Node(req.GetUnder()))
		if err != nil {
			return err
		}
		if n.Tree != ids.Tree(req.GetTreeId()) {
			return fault.New(fault.Invalid, "other_tree", "node %s is of tree %s, not %s", n.ID, n.Tree, req.GetTreeId())
		}
		nodes = v.Subtree(n.ID)
	}
	sent := int64(0)
	for n := range nodes {
		if !want.Fits(n) || !wanted(v, req, n) {
			continue
		}
		if !req.GetBrief() {
			full, err := v.FullNode(n.ID)
			if fault.Is(err, fault.NotFound) {
				continue // pruned while it was being listed
			}
			if err != nil {
				return err
			}
			n = full
		}
		if err := out.Send(node(v, n)); err != nil {
			return err
		}
		if sent++; sent == req.GetLimit() {
			return nil
		}
	}
	return nil
}

// wanted is what tree.Where doesn't say.
func wanted(v *tree.View, req *boxwoodv1.ListNodesRequest, n *tree.Node) bool {
	if len(req.GetVerdict()) > 0 && !slices.Contains(req.GetVerdict(), boxwoodv1.Verdict(n.Verdict)) {
		return false
	}
	return !req.GetLeavesOnly() || !v.HasChildren(n.ID)
}

func (s *Service) WatchTree(req *boxwoodv1.WatchTreeRequest, out grpc.ServerStreamingServer[boxwoodv1.TreeEvent]) error {
	w, err := s.e.Store.Watch(out.Context(), ids.Tree(req.GetTreeId()), req.GetAfterIndex())
	if err != nil {
		return err
	}
	defer w.Close()
	for {
		ev, err := w.Next(out.Context())
		if err != nil {
			return err
		}
		v := s.e.Store.View()
		m := &boxwoodv1.TreeEvent{Index: ev.Index}
		switch {
		case ev.Node != nil:
			m.Change = &boxwoodv1.TreeEvent_Node{Node: node(v, ev.Node)}
		case ev.Tree != nil:
			m.Change = &boxwoodv1.TreeEvent_Tree{Tree: treeMessage(v, ev.Tree)}
		default:
			m.Change = &boxwoodv1.TreeEvent_RemovedNodeId{RemovedNodeId: string(ev.Removed)}
		}
		if err := out.Send(m); err != nil {
			return err
		}
	}
}

func (s *Service) Annotate(ctx context.Context, req *boxwoodv1.AnnotateRequest) (*boxwoodv1.AnnotateResponse, error) {
	list := make([]tree.Annotation, len(req.GetAnnotations()))
	for i, a := range req.GetAnnotations() {
		if err := ids.Check(a.GetNodeId(), "nd_", "node"); err != nil {
			return nil, err
		}
		list[i] = tree.Annotation{
			Node: ids.Node(a.GetNodeId()), Rewards: maps.Clone(a.GetRewards()), Value: a.Value, Visits: a.Visits,
			Labels: maps.Clone(a.GetLabels()), PolicyVersion: a.PolicyVersion,
		}
		if a.Payload != nil {
			list[i].Payload = &a.Payload
		}
	}
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.AnnotateResponse{}, func(rec record) (*boxwoodv1.AnnotateResponse, error) {
		m := &boxwoodv1.AnnotateResponse{}
		index, err := s.e.Store.Update(ctx, func(tx *tree.Tx) error {
			if err := tx.Annotate(list); err != nil {
				return err
			}
			return rec(tx, m)
		})
		m.Index = index
		return m, err
	})
	return got, err
}

var rules = map[boxwoodv1.BackupRequest_Rule]tree.BackupRule{
	boxwoodv1.BackupRequest_SUM: tree.Sum, boxwoodv1.BackupRequest_MEAN: tree.Mean,
	boxwoodv1.BackupRequest_MAX: tree.Max, boxwoodv1.BackupRequest_DISCOUNTED: tree.Discounted,
}

func (s *Service) Backup(ctx context.Context, req *boxwoodv1.BackupRequest) (*boxwoodv1.BackupResponse, error) {
	rule, ok := rules[req.GetRule()]
	if !ok {
		return nil, fault.New(fault.Invalid, "bad_rule", "no backup rule %d", req.GetRule())
	}
	items := make([]tree.BackupItem, len(req.GetItems()))
	for i, it := range req.GetItems() {
		if err := ids.Check(it.GetNodeId(), "nd_", "node"); err != nil {
			return nil, err
		}
		items[i] = tree.BackupItem{Node: ids.Node(it.GetNodeId()), Value: it.GetValue()}
	}
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.BackupResponse{}, func(rec record) (*boxwoodv1.BackupResponse, error) {
		m := &boxwoodv1.BackupResponse{}
		index, err := s.e.Store.Update(ctx, func(tx *tree.Tx) error {
			n, err := tx.Backup(items, rule, req.GetDiscount())
			if err != nil {
				return err
			}
			m.NodesChanged = int64(n)
			return rec(tx, m)
		})
		m.Index = index
		return m, err
	})
	return got, err
}

func (s *Service) GetPayload(_ context.Context, req *boxwoodv1.GetPayloadRequest) (*boxwoodv1.GetPayloadResponse, error) {
	n, err := s.e.Store.View().Node(ids.Node(req.GetNodeId()))
	if err != nil {
		return nil, err
	}
	if n.PayloadDigest == "" {
		return &boxwoodv1.GetPayloadResponse{}, nil
	}
	p, err := s.e.Store.Payload(n.PayloadDigest)
	return &boxwoodv1.GetPayloadResponse{Payload: p, Digest: n.PayloadDigest}, err
}

func (s *Service) Prune(ctx context.Context, req *boxwoodv1.PruneRequest) (*boxwoodv1.PruneResponse, error) {
	if err := ids.Check(req.GetNodeId(), "nd_", "node"); err != nil {
		return nil, err
	}
	got, _, err := once(ctx, s, req.GetIdempotencyKey(), req, &boxwoodv1.PruneResponse{}, func(rec record) (*boxwoodv1.PruneResponse, error) {
		answer := func(p engine.Pruned) *boxwoodv1.PruneResponse {
			return &boxwoodv1.PruneResponse{Nodes: int64(p.Nodes), Checkpoints: int64(p.Checkpoints), FreedBytes: p.FreedBytes}
		}
		prune := s.e.Prune
		if req.GetStatesOnly() {
			prune = s.e.PruneStates
		}
		p, err := prune(ctx, ids.Node(req.GetNodeId()), req.GetKeepNode(), req.GetReleaseSandboxes(),
			func(tx *tree.Tx, p engine.Pruned) error { return rec(tx, answer(p)) })
		if err != nil {
			return nil, err
		}
		return answer(p), nil
	})
	return got, err
}

func (s *Service) Pin(ctx context.Context, req *boxwoodv1.PinRequest) (*boxwoodv1.PinResponse, error) {
	return &boxwoodv1.PinResponse{}, s.eachNode(ctx, req.GetNodeIds(), (*tree.Tx).Pin)
}

func (s *Service) Unpin(ctx context.Context, req *boxwoodv1.UnpinRequest) (*boxwoodv1.UnpinResponse, error) {
	return &boxwoodv1.UnpinResponse{}, s.eachNode(ctx, req.GetNodeIds(), (*tree.Tx).Unpin)
}

func (s *Service) eachNode(ctx context.Context, list []string, do func(*tree.Tx, ids.Node) error) error {
	_, err := s.e.Store.Update(ctx, func(tx *tree.Tx) error {
		for _, id := range list {
			if err := do(tx, ids.Node(id)); err != nil {
				return err
			}
		}
		return nil
	})
	return err
}
