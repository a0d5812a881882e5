package service

import (
	"time"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/engine/archive"
	"github.com/boxwood-rl/boxwood/internal/ids"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

// The enums of the records and of the messages have the same numbers; the test
// of this file holds that.

func nanos(t time.Time) int64 { return archive.Nanos(t) }

func nodeMessage(n *tree.Node, ck *tree.Checkpoint) *boxwoodv1.Node {
	return archive.NodeMessage(n, ck)
}

// node makes a message with what its checkpoint says.
func node(v reader, n *tree.Node) *boxwoodv1.Node {
	if n.Checkpoint == "" {
		return nodeMessage(n, nil)
	}
	ck, err := v.Checkpoint(n.Checkpoint)
	if err != nil {
		return nodeMessage(n, nil)
	}
	return nodeMessage(n, ck)
}

// reader is what View and Tx share.
type reader interface {
	Checkpoint(id ids.Checkpoint) (*tree.Checkpoint, error)
}

func observationMessage(o tree.Observation) *boxwoodv1.Observation {
	return &boxwoodv1.Observation{
		Stdout: o.Stdout, Stderr: o.Stderr, StdoutOmitted: o.StdoutOmitted, StderrOmitted: o.StderrOmitted,
		StdoutCutAt: o.StdoutCutAt, StderrCutAt: o.StderrCutAt, ExitCode: o.ExitCode, Signal: o.Signal, OomKilled: o.OOMKilled,
	}
}

func treeMessage(v *tree.View, t *tree.Tree) *boxwoodv1.Tree {
	m := &boxwoodv1.Tree{
		Id: string(t.ID), RootId: string(t.Root), Image: string(t.Image), Labels: t.Labels, CreatedAt: nanos(t.CreatedAt), Closed: t.Closed,
		Run: t.Run, Archived: t.Archive == tree.OnDisk,
	}
	if v != nil {
		m.NodeCount, m.CheckpointCount, m.SandboxCount = int64(v.NodeCount(t.ID)), int64(v.CheckpointCount(t.ID)), int64(v.SandboxCount(t.ID))
	}
	return m
}

func sandboxMessage(s engine.Sandbox) *boxwoodv1.Sandbox {
	return &boxwoodv1.Sandbox{
		Id: string(s.ID), TreeId: string(s.Tree), HeadId: string(s.Head), Generation: string(s.Generation), Scratch: s.Scratch,
		LeaseUntil: nanos(s.LeaseUntil), Labels: s.Labels, Hostname: s.Hostname, Busy: s.Busy,
	}
}

func sandboxMessages(list []engine.Sandbox) []*boxwoodv1.Sandbox {
	out := make([]*boxwoodv1.Sandbox, len(list))
	for i, s := range list {
		out[i] = sandboxMessage(s)
	}
	return out
}

func imageMessage(i *tree.Image) *boxwoodv1.Image {
	m := &boxwoodv1.Image{
		Digest: string(i.Digest), Names: i.Names, Bytes: i.Bytes, CreatedAt: nanos(i.CreatedAt), Env: i.Env, Cwd: i.Cwd, User: i.User,
	}
	for _, l := range i.Layers {
		m.Layers = append(m.Layers, string(l))
	}
	return m
}

func timingsMessage(t tree.Timings) *boxwoodv1.Timings { return archive.TimingsMessage(t) }

func resultMessage(v reader, r engine.TurnResult) *boxwoodv1.TurnResult {
	return &boxwoodv1.TurnResult{Node: node(v, r.Node), Timings: timingsMessage(r.Timings), SandboxLost: r.SandboxLost, SessionEnded: r.SessionEnded}
}

func limits(m *boxwoodv1.Limits) (tree.Limits, error) {
	l := tree.Limits{MemoryBytes: m.GetMemoryBytes(), Pids: m.GetPids(), CPUMillis: m.GetCpuMillis(), DiskBytes: m.GetDiskBytes()}
	return l, l.Check()
}

func limitsMessage(l tree.Limits) *boxwoodv1.Limits {
	return &boxwoodv1.Limits{MemoryBytes: l.MemoryBytes, Pids: l.Pids, CpuMillis: l.CPUMillis, DiskBytes: l.DiskBytes}
}

func command(m *boxwoodv1.Command) engine.Command {
	c := engine.Command{
		Shell: string(m.GetShell()), Cwd: m.GetCwd(), User: m.GetUser(), Env: m.GetEnv(), Secrets: m.GetSecretEnv(), Stdin: m.GetStdin(), Session: m.GetSession(),
		Deadline: time.Duration(m.GetDeadlineNs()), OutputLimit: int(m.GetOutputLimit()),
	}
	for _, a := range m.GetArgv() {
		c.Argv = append(c.Argv, string(a))
	}
	return c
}

func nodeInput(m *boxwoodv1.NodeInput) engine.NodeInput {
	return engine.NodeInput{Labels: m.GetLabels(), PolicyVersion: m.GetPolicyVersion(), Payload: m.GetPayload()}
}

func nodeIDs(list []string) []ids.Node {
	out := make([]ids.Node, len(list))
	for i, id := range list {
		out[i] = ids.Node(id)
	}
	return out
}

func sandboxIDs(list []string) []ids.Sandbox {
	out := make([]ids.Sandbox, len(list))
	for i, id := range list {
		out[i] = ids.Sandbox(id)
	}
	return out
}
