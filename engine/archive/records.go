package archive

import (
	"time"

	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/seccomp"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

// Nanos are what a message has for a time; 0 for none.
func Nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func instant(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return time.Unix(0, ns).UTC()
}

// NodeMessage is a node as the service and an archive say it; ck, if any, is its checkpoint.
func NodeMessage(n *tree.Node, ck *tree.Checkpoint) *pb.Node {
	o := n.Observation
	m := &pb.Node{
		Id: string(n.ID), TreeId: string(n.Tree), ParentId: string(n.Parent), Depth: n.Depth, Ordinal: n.Ordinal,
		Action: &pb.Action{Text: n.Action.Text, Argv: n.Action.Argv, Steps: n.Action.Steps},
		Observation: &pb.Observation{
			Stdout: o.Stdout, Stderr: o.Stderr, StdoutOmitted: o.StdoutOmitted, StderrOmitted: o.StderrOmitted,
			StdoutCutAt: o.StdoutCutAt, StderrCutAt: o.StderrCutAt, ExitCode: o.ExitCode, Signal: o.Signal, OomKilled: o.OOMKilled,
		},
		TurnStatus: pb.TurnStatus(n.TurnStatus), Verdict: pb.Verdict(n.Verdict), External: n.External,
		Reasons: n.Reasons, EffectCount: n.EffectCount, CheckpointId: string(n.Checkpoint),
		Capture: pb.CaptureStatus(n.Capture), WithheldReason: n.WithheldReason,
		Rewards: n.Rewards, Value: n.Value, Visits: n.Visits, Labels: n.Labels, PolicyVersion: n.PolicyVersion,
		PayloadDigest: n.PayloadDigest, PayloadBytes: n.PayloadBytes,
		StartedAt: Nanos(n.StartedAt), EndedAt: Nanos(n.EndedAt), FrozenAt: Nanos(n.FrozenAt), SurvivorsRan: n.SurvivorsRan,
		Pinned: n.Pinned, ModifyIndex: n.ModifyIndex, SandboxId: string(n.Sandbox), ReplayOf: string(n.ReplayOf),
	}
	for _, e := range n.Effects {
		m.Effects = append(m.Effects, &pb.Effect{Kind: pb.Effect_Kind(e.Kind), Subject: e.Subject, Detail: e.Detail})
	}
	if ck != nil {
		m.CheckpointNodeId, m.ProcessKind, m.MayHoldSecrets = string(ck.Node), pb.ProcessKind(ck.Process), ck.Secrets
	}
	return m
}

// NodeRecord is the node of a message; what the store sets (depth, ordinal, indexes) is left to it.
func NodeRecord(m *pb.Node, t *pb.Timings) tree.Node {
	o := m.GetObservation()
	n := tree.Node{
		ID: ids.Node(m.GetId()), Tree: ids.Tree(m.GetTreeId()), Parent: ids.Node(m.GetParentId()),
		Action: tree.Action{Text: m.GetAction().GetText(), Argv: m.GetAction().GetArgv(), Steps: m.GetAction().GetSteps()},
		Observation: tree.Observation{
			Stdout: o.GetStdout(), Stderr: o.GetStderr(), StdoutOmitted: o.GetStdoutOmitted(), StderrOmitted: o.GetStderrOmitted(),
			StdoutCutAt: o.GetStdoutCutAt(), StderrCutAt: o.GetStderrCutAt(), ExitCode: o.GetExitCode(), Signal: o.GetSignal(), OOMKilled: o.GetOomKilled(),
		},
		TurnStatus: tree.TurnStatus(m.GetTurnStatus()), Verdict: tree.Verdict(m.GetVerdict()), External: m.GetExternal(),
		Reasons: m.GetReasons(), EffectCount: m.GetEffectCount(), Checkpoint: ids.Checkpoint(m.GetCheckpointId()),
		Capture: tree.Capture(m.GetCapture()), WithheldReason: m.GetWithheldReason(),
		Rewards: m.GetRewards(), Value: m.GetValue(), Visits: m.GetVisits(), Labels: m.GetLabels(), PolicyVersion: m.GetPolicyVersion(),
		PayloadDigest: m.GetPayloadDigest(), PayloadBytes: m.GetPayloadBytes(),
		StartedAt: instant(m.GetStartedAt()), EndedAt: instant(m.GetEndedAt()), FrozenAt: instant(m.GetFrozenAt()), SurvivorsRan: m.GetSurvivorsRan(),
		Pinned: m.GetPinned(), Sandbox: ids.Sandbox(m.GetSandboxId()), Timings: timingsRecord(t), ReplayOf: ids.Node(m.GetReplayOf()),
	}
	for _, e := range m.GetEffects() {
		n.Effects = append(n.Effects, tree.Effect{Kind: tree.EffectKind(e.GetKind()), Subject: e.GetSubject(), Detail: e.GetDetail()})
	}
	return n
}

// TimingsMessage is how long the parts of a turn took.
func TimingsMessage(t tree.Timings) *pb.Timings {
	return &pb.Timings{
		CaptureWaitNs: int64(t.CaptureWait), CommandNs: int64(t.Command), BarrierNs: int64(t.Barrier), RecordNs: int64(t.Record),
		TotalNs: int64(t.Total), CaptureNs: int64(t.Capture),
	}
}

func timingsRecord(m *pb.Timings) tree.Timings {
	d := func(ns int64) time.Duration { return time.Duration(ns) }
	return tree.Timings{
		CaptureWait: d(m.GetCaptureWaitNs()), Command: d(m.GetCommandNs()), Barrier: d(m.GetBarrierNs()), Record: d(m.GetRecordNs()),
		Total: d(m.GetTotalNs()), Capture: d(m.GetCaptureNs()),
	}
}

// TreeMessage is a tree without its counts.
func TreeMessage(t *tree.Tree) *pb.Tree {
	return &pb.Tree{Id: string(t.ID), RootId: string(t.Root), Image: string(t.Image), Labels: t.Labels, CreatedAt: Nanos(t.CreatedAt), Closed: t.Closed}
}

// TreeRecord is the tree of an archive, open. It may ask for calls that aren't known here.
func TreeRecord(h *pb.ArchiveHeader) (tree.Tree, error) {
	m, d := h.GetTree(), h.GetDefaults()
	l := d.GetLimits()
	calls, err := seccomp.Parse(d.GetAllowCalls())
	if err != nil {
		return tree.Tree{}, err
	}
	if h.GetFormat() < 3 {
		calls |= seccomp.Setuid
	}
	capture, err := tree.CapturePolicyOf(int32(d.GetCapturePolicy()))
	if err != nil {
		return tree.Tree{}, err
	}
	return tree.Tree{
		ID: ids.Tree(m.GetId()), Root: ids.Node(m.GetRootId()), Image: ids.Image(m.GetImage()), Labels: m.GetLabels(), CreatedAt: instant(m.GetCreatedAt()),
		Defaults: tree.Defaults{
			User: d.GetUser(), Cwd: d.GetCwd(), Env: d.GetEnv(), Lease: time.Duration(d.GetLeaseNs()), TurnDeadline: time.Duration(d.GetTurnDeadlineNs()),
			Limits:  tree.Limits{MemoryBytes: l.GetMemoryBytes(), Pids: l.GetPids(), CPUMillis: l.GetCpuMillis(), DiskBytes: l.GetDiskBytes(), Calls: calls},
			Capture: capture,
		},
	}, nil
}

// DefaultsMessage are those of a tree.
func DefaultsMessage(d tree.Defaults) *pb.Defaults {
	return &pb.Defaults{
		User: d.User, Cwd: d.Cwd, Env: d.Env, LeaseNs: int64(d.Lease), TurnDeadlineNs: int64(d.TurnDeadline),
		Limits:     &pb.Limits{MemoryBytes: d.Limits.MemoryBytes, Pids: d.Limits.Pids, CpuMillis: d.Limits.CPUMillis, DiskBytes: d.Limits.DiskBytes},
		AllowCalls: d.Limits.Calls.Names(), CapturePolicy: pb.CapturePolicy(d.Capture),
	}
}
