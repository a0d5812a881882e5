package engine

import (
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/inspector"
	"github.com/boxwood-rl/boxwood/tree"
)

// countTurn adds a turn to the statistics.
func (e *Engine) countTurn(t *turn, n *tree.Node, r inspector.Report) {
	o := n.Observation
	e.Stats.Turn(stats.TurnRow{
		Node: n.ID, Tree: n.Tree, Sandbox: n.Sandbox, StartedAt: n.StartedAt,
		Wall: n.Timings.Total, Command: n.Timings.Command, Barrier: n.Timings.Barrier,
		CaptureWait: n.Timings.CaptureWait, Record: n.Timings.Record,
		Verdict: n.Verdict, TurnVerdict: r.Turn, External: n.External,
		Effects: stats.CountEffects(n.Effects), EffectCount: n.EffectCount,
		Status: n.TurnStatus, ExitCode: o.ExitCode, Signal: o.Signal,
		OutputBytes:  int64(len(o.Stdout)+len(o.Stderr)) + o.StdoutOmitted + o.StderrOmitted,
		BytesWritten: r.Written, ProcessesStarted: r.Started,
		LostEvents: int64(r.Lost),
	})
}
