package tree

import "github.com/boxwood-rl/boxwood/internal/seccomp"

// The fields of each record as they lie in the log (see codec.go). Numbers are
// for ever. docs/TREE.md has the keys.

func layoutTree(c *coder, t *Tree) {
	text(c, 1, &t.ID)
	text(c, 2, &t.Root)
	text(c, 3, &t.Image)
	c.labels(4, &t.Labels)
	nested(c, 5, &t.Defaults, layoutDefaults)
	c.instant(6, &t.CreatedAt)
	c.flag(7, &t.Closed)
	unsigned(c, 8, &t.ModifyIndex)
	unsigned(c, 9, &t.CreateIndex)
	unsigned(c, 10, &t.Archive)
	signed(c, 11, &t.ArchivedNodes)
	text(c, 12, &t.Run)
	// Trees of a format without this flag go on as they were: their sandboxes' programs may gain rights.
	none := !c.decoding && t.Defaults.Limits.Calls&seccomp.Setuid == 0
	c.flag(13, &none)
	if c.decoding && !none {
		t.Defaults.Limits.Calls |= seccomp.Setuid
	}
}

func layoutRun(c *coder, r *Run) {
	text(c, 1, &r.Name)
	signed(c, 2, &r.Attempt)
	c.instant(3, &r.OpenedAt)
	c.flag(4, &r.Closed)
	unsigned(c, 5, &r.ModifyIndex)
}

func layoutDefaults(c *coder, d *Defaults) {
	text(c, 1, &d.User)
	text(c, 2, &d.Cwd)
	c.labels(3, &d.Env)
	nested(c, 4, &d.Limits, layoutLimits)
	signed(c, 5, &d.Lease)
	signed(c, 6, &d.TurnDeadline)
	unsigned(c, 7, &d.Capture)
}

func layoutLimits(c *coder, l *Limits) {
	signed(c, 1, &l.MemoryBytes)
	signed(c, 2, &l.Pids)
	signed(c, 3, &l.CPUMillis)
	signed(c, 4, &l.DiskBytes)
	unsigned(c, 5, &l.Calls)
}

// layoutNode is the part of a node that is kept in memory, too, as these bytes. Of
// the rows of nodes, those that format 1 wrote have field 1; it is their key.
func layoutNode(c *coder, n *Node) {
	name(c, 1, &n.ID, "nd_")
	name(c, 2, &n.Tree, "tr_")
	name(c, 3, &n.Parent, "nd_")
	signed(c, 4, &n.Depth)
	signed(c, 5, &n.Ordinal)
	unsigned(c, 6, &n.TurnStatus)
	unsigned(c, 7, &n.Verdict)
	c.flag(8, &n.External)
	signed(c, 9, &n.EffectCount)
	unsigned(c, 10, &n.Capture)
	name(c, 11, &n.Checkpoint, "ck_")
	text(c, 12, &n.WithheldReason)
	c.scores(13, &n.Rewards)
	c.real(14, &n.Value)
	signed(c, 15, &n.Visits)
	c.labels(16, &n.Labels)
	text(c, 17, &n.PolicyVersion)
	c.digest(18, &n.PayloadDigest)
	signed(c, 19, &n.PayloadBytes)
	c.flag(20, &n.Pinned)
	c.instant(21, &n.StartedAt)
	c.instant(22, &n.EndedAt)
	c.instant(23, &n.FrozenAt)
	c.flag(24, &n.SurvivorsRan)
	name(c, 25, &n.Sandbox, "sb_")
	nested(c, 26, &n.Timings, layoutTimings)
	nested(c, 27, &n.Observation, layoutOutcome)
	unsigned(c, 28, &n.ModifyIndex)
	unsigned(c, 29, &n.CreateIndex)
	name(c, 30, &n.ReplayOf, "nd_")
}

func layoutTimings(c *coder, t *Timings) {
	signed(c, 1, &t.CaptureWait)
	signed(c, 2, &t.Command)
	signed(c, 3, &t.Barrier)
	signed(c, 4, &t.Record)
	signed(c, 5, &t.Total)
	signed(c, 6, &t.Capture)
}

// layoutOutcome is an observation without its bytes.
func layoutOutcome(c *coder, o *Observation) {
	signed(c, 1, &o.StdoutOmitted)
	signed(c, 2, &o.StderrOmitted)
	signed(c, 3, &o.StdoutCutAt)
	signed(c, 4, &o.StderrCutAt)
	signed(c, 5, &o.ExitCode)
	signed(c, 6, &o.Signal)
	c.flag(7, &o.OOMKilled)
}

// layoutDetail is the rest of a node: written once, on disk only.
func layoutDetail(c *coder, n *Node) {
	c.blob(1, &n.Action.Text)
	c.blobs(2, &n.Action.Argv)
	signed(c, 3, &n.Action.Steps)
	c.blob(4, &n.Observation.Stdout)
	c.blob(5, &n.Observation.Stderr)
	texts(c, 6, &n.Reasons)
	list(c, 7, &n.Effects, layoutEffect)
	nested(c, 8, &n.Recipe, layoutRecipe)
}

func layoutRecipe(c *coder, r *Recipe) {
	list(c, 1, &r.Steps, layoutStep)
	text(c, 2, &r.Once)
	c.blob(3, &r.Stdout)
	c.blob(4, &r.Stderr)
}

func layoutStep(c *coder, s *Step) {
	unsigned(c, 1, &s.Kind)
	text(c, 2, &s.Text)
	texts(c, 3, &s.Argv)
	text(c, 4, &s.Session)
	text(c, 5, &s.Cwd)
	text(c, 6, &s.User)
	c.labels(7, &s.Env)
	c.blob(8, &s.Content)
	signed(c, 9, &s.Deadline)
	signed(c, 10, &s.OutputLimit)
	text(c, 11, &s.Path)
	signed(c, 12, &s.Mode)
	c.flag(13, &s.Append)
	c.flag(14, &s.TTY)
	signed(c, 15, &s.Rows)
	signed(c, 16, &s.Cols)
	unsigned(c, 17, &s.Status)
	signed(c, 18, &s.ExitCode)
	signed(c, 19, &s.Signal)
	text(c, 20, &s.Failed)
}

// EncodeRecipe is a recipe as its node's record has it, for archives.
func EncodeRecipe(r *Recipe) []byte { return encode(r, layoutRecipe) }

// DecodeRecipe reads what EncodeRecipe wrote.
func DecodeRecipe(b []byte) (*Recipe, error) { return decode(b, layoutRecipe) }

func layoutEffect(c *coder, e *Effect) {
	unsigned(c, 1, &e.Kind)
	c.blob(2, &e.Subject)
	text(c, 3, &e.Detail)
}

func layoutCheckpoint(c *coder, k *Checkpoint) {
	text(c, 1, &k.ID)
	text(c, 2, &k.Tree)
	text(c, 3, &k.Node)
	text(c, 4, &k.Snapshot)
	nested(c, 5, &k.Seal, layoutSeal)
	unsigned(c, 6, &k.Process)
	signed(c, 7, &k.Bytes)
	c.instant(8, &k.CreatedAt)
	signed(c, 9, &k.FreezeFor)
	c.flag(10, &k.Proven)
	unsigned(c, 11, &k.ModifyIndex)
	text(c, 12, &k.State)  // since format 2
	c.flag(13, &k.Secrets) // since format 5
}

func layoutProcess(c *coder, p *ProcessState) {
	text(c, 1, &p.ID)
	unsigned(c, 2, &p.Kind)
	text(c, 3, &p.Digest)
	signed(c, 4, &p.Bytes)
	text(c, 5, &p.Kernel)
	text(c, 6, &p.Program)
	c.instant(7, &p.CreatedAt)
	c.flag(8, &p.Condemned)
	unsigned(c, 9, &p.ModifyIndex)
}

func layoutSeal(c *coder, s *Seal) {
	text(c, 1, &s.UUID)
	unsigned(c, 2, &s.Generation)
	texts(c, 3, &s.Layers)
}

func layoutSandbox(c *coder, s *Sandbox) {
	text(c, 1, &s.ID)
	text(c, 2, &s.Tree)
	text(c, 3, &s.Head)
	text(c, 4, &s.Generation)
	c.flag(5, &s.Scratch)
	// 6 was a state that was never set.
	c.instant(7, &s.LeaseUntil)
	signed(c, 8, &s.Lease)
	c.labels(9, &s.Labels)
	text(c, 10, &s.Hostname)
	nested(c, 11, &s.Limits, layoutLimits)
	// 12 was what a body's file has (engine/births.go).
	unsigned(c, 13, &s.Commands)
	unsigned(c, 14, &s.ModifyIndex)
}

func layoutImage(c *coder, i *Image) {
	text(c, 1, &i.Digest)
	texts(c, 2, &i.Names)
	texts(c, 3, &i.Layers)
	text(c, 4, &i.Base)
	nested(c, 5, &i.BaseSeal, layoutSeal)
	c.labels(6, &i.Env)
	text(c, 7, &i.Cwd)
	text(c, 8, &i.User)
	signed(c, 9, &i.Bytes)
	c.instant(10, &i.CreatedAt)
	unsigned(c, 11, &i.ModifyIndex)
}

// layoutReply is what is kept of a reply in memory, too.
func layoutReply(c *coder, r *Reply) {
	text(c, 1, &r.Key)
	text(c, 2, &r.Method)
	text(c, 3, &r.Request)
	c.instant(4, &r.At)
}

func layoutFullReply(c *coder, r *Reply) {
	layoutReply(c, r)
	c.blob(5, &r.Body)
}

func layoutSetup(c *coder, s *Setup) {
	text(c, 1, &s.Digest)
	text(c, 2, &s.Node)
}

// condemned is a snapshot that no record needs and whose file state is still
// to be removed.
type condemned struct {
	Snapshot    string
	ModifyIndex uint64
}

func layoutCondemned(c *coder, d *condemned) {
	text(c, 1, &d.Snapshot)
	unsigned(c, 2, &d.ModifyIndex)
}

// removal is what one Prune removed of one tree: node i went at index First+i.
type removal struct {
	First uint64
	Tree  string
	Nodes []string
}

func layoutRemoval(c *coder, r *removal) {
	unsigned(c, 1, &r.First)
	text(c, 2, &r.Tree)
	texts(c, 3, &r.Nodes)
}
