package engine

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/boxwood-rl/boxwood/engine/merged"
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/kernelobjects"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
	"github.com/boxwood-rl/boxwood/internal/wilson"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

// An audit asks, for a share of the turns, whether the inspector was right: it
// compares files with those of the last checkpoint and kernel objects with those
// before the first turn, by code that the inspector doesn't have. It runs behind
// the reply and before the next turn of that sandbox, as captures do.
//
// A half that changed and was called unchanged is a false negative: it is logged
// with its cause, kept as a case below the state folder, and the node gets a
// checkpoint of its own (or, for processes, is withheld). The other way round is a
// false positive, which is counted.

// audits counts what audits found since the daemon started.
type audits struct {
	mu             sync.Mutex
	files, process halfAudit
	failed         int64
}

// halfAudit is of one half: turns judged unchanged and changed, and of them those
// that were wrong.
type halfAudit struct{ unchanged, missed, changed, needless int64 }

func (h *halfAudit) add(judged, found bool) {
	switch {
	case judged && found:
		h.changed++
	case judged:
		h.changed++
		h.needless++
	case found:
		h.unchanged++
		h.missed++
	default:
		h.unchanged++
	}
}

func (h halfAudit) String() string {
	return fmt.Sprintf("missed %s, needless %s", wilson.String(h.missed, h.unchanged), wilson.String(h.needless, h.changed))
}

// capability tells the figures in Info.
func (a *audits) capability(rate float64) Capability {
	a.mu.Lock()
	defer a.mu.Unlock()
	return Capability{Name: "audit", State: 1, Detail: fmt.Sprintf("%g of the turns; files: %s; processes: %s; %d audits failed", rate, a.files, a.process, a.failed)}
}

// auditing says whether this turn's verdict is to be audited.
func (e *Engine) auditing() bool { return e.cfg.Audit > 0 && rand.Float64() < e.cfg.Audit }

// noteObjects remembers the kernel objects of a body before its first turn. They
// stay what they were in every node that is captured.
func (e *Engine) noteObjects(ctx context.Context, b *body) {
	if e.cfg.Audit <= 0 || b.objects != nil {
		return
	}
	objects, err := e.firstObjects(b)
	if err != nil {
		e.log.WarnContext(ctx, "kernel objects can't be audited", "generation", b.gen, "error", err)
		return
	}
	b.objects = objects
}

// firstObjects waits for pid 1: a box is handed out while that is still on its way to its own root, and its
// mounts look different until then.
func (e *Engine) firstObjects(b *body) ([]string, error) {
	if err := e.inOwnRoot(context.Background(), b); err != nil {
		return nil, err
	}
	return kernelobjects.Of(b.box.PID1())
}

// rootPatience is how long pid 1 may take to stand in its own root.
const rootPatience = 10 * time.Second

// inOwnRoot waits until pid 1 stands in its own root and has let go of the one before.
func (e *Engine) inOwnRoot(ctx context.Context, b *body) error {
	ctx, cancel := context.WithTimeoutCause(ctx, rootPatience, fault.New(fault.Internal, "no_root", "pid 1 isn't in its root after %s", rootPatience))
	defer cancel()
	for {
		settled, err := inOwnRoot(b.box.PID1())
		if err != nil || settled {
			return err
		}
		if err := pause(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}

// inOwnRoot: the overlay is the only mount at "/". While the root before hangs on to
// it, there are two.
func inOwnRoot(pid int) (bool, error) {
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		return false, err
	}
	roots, overlays := 0, 0
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 4 && f[4] == "/" {
			roots++
			if strings.Contains(line, " - overlay ") {
				overlays++
			}
		}
	}
	return roots == 1 && overlays == 1, nil
}

// submitAudit puts the audit of a turn in line that isn't captured.
func (e *Engine) submitAudit(cause context.Context, s *sandbox, b *body, n *tree.Node) {
	job := e.captures.Submit(e.work(sched.Audit, s.tree), func(ctx context.Context, _ time.Duration) error {
		ctx = aboutNode(ctx, cause, n, s.id)
		return e.audit(ctx, s, b, n, b.checkpoint, nil)
	})
	s.mu.Lock()
	s.capture = job
	s.mu.Unlock()
}

// auditCase is what one audit found, and what is needed to do it again: fork the parent
// node, run the action.
type auditCase struct {
	Node    ids.Node
	Parent  ids.Node
	Action  string
	Argv    []string // if the action was one command without a shell
	Verdict tree.Verdict
	Reasons []string
	Files   []string // what differs from the checkpoint, if files were compared
	Process []string
	Kernel  string
}

// audit compares a node with the checkpoint before it. now is its own checkpoint, if
// it has one; else its files are looked at in a snapshot that is thrown away.
func (e *Engine) audit(ctx context.Context, s *sandbox, b *body, n *tree.Node, was, now *tree.Checkpoint) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), captureLimit)
	defer cancel()
	began := time.Now()
	row := stats.AuditRow{Node: n.ID, Tree: n.Tree, Sandbox: s.id, StartedAt: began, Verdict: n.Verdict}
	found, err := e.compareHalves(ctx, b, n, was, now)
	if err != nil {
		e.audits.mu.Lock()
		e.audits.failed++
		e.audits.mu.Unlock()
		e.log.WarnContext(ctx, "an audit failed", "node", n.ID, "error", err)
		return nil // the verdict stands, and so does the node
	}
	judgedFiles := n.Verdict == tree.Files || n.Verdict == tree.Both
	judgedProcess := n.Verdict == tree.Process || n.Verdict == tree.Both
	row.FilesChanged, row.ProcessChanged = len(found.Files) > 0, len(found.Process) > 0
	e.audits.mu.Lock()
	if !judgedProcess {
		e.audits.files.add(judgedFiles, row.FilesChanged)
	}
	e.audits.process.add(judgedProcess, row.ProcessChanged)
	row.Files, row.Processes = e.audits.files.String(), e.audits.process.String()
	e.audits.mu.Unlock()
	row.MissedFiles = row.FilesChanged && !judgedFiles && !judgedProcess
	row.MissedProcess = row.ProcessChanged && !judgedProcess
	row.Took = time.Since(began)
	b.veil().maskTexts(found.Files)
	e.Stats.Audit(row)
	if !row.MissedFiles && !row.MissedProcess {
		return nil
	}
	e.log.ErrorContext(ctx, "an audit found a change that was judged unchanged", "node", n.ID, "action", n.Action.Text,
		"files", found.Files, "process", found.Process, "case", e.keepCase(string(n.ID), found))
	b.watch.Tainted(row.MissedProcess, "an audit found a change that was missed")
	if row.MissedProcess {
		e.withhold(ctx, n.ID, "an audit found a change of processes that was missed: "+joinReasons(found.Process))
		return nil
	}
	if why := e.leftOut(s.defaults.Capture, b); why != "" {
		e.withhold(ctx, n.ID, why)
		return nil
	}
	return e.capture(ctx, s, b, n, 0)
}

// compareHalves finds what really changed. Of a sandbox with survivors the files
// aren't compared: they may have moved on since.
func (e *Engine) compareHalves(ctx context.Context, b *body, n *tree.Node, was, now *tree.Checkpoint) (*auditCase, error) {
	c := &auditCase{Node: n.ID, Parent: n.Parent, Action: string(n.Action.Text), Verdict: n.Verdict, Reasons: n.Reasons, Kernel: KernelRelease()}
	for _, a := range n.Action.Argv {
		c.Argv = append(c.Argv, string(a))
	}
	alive, err := e.survivors(b.box)
	if err != nil {
		return nil, fmt.Errorf("listing survivors: %w", err)
	}
	sessions := map[int]bool{} // compared by what they say of themselves
	for _, s := range b.box.Sessions() {
		sessions[s.HostPID] = true
	}
	for _, p := range alive {
		if sessions[p.HostPID] || was.State != "" && was.State == b.dumped.id && b.dumped.was.Processes[p.PID] != nil {
			continue
		}
		c.Process = append(c.Process, fmt.Sprintf("process %d: %q", p.PID, b.veil().mask(p.Cmdline)))
	}
	if b.objects != nil {
		objects, err := kernelobjects.Of(b.box.PID1())
		if err != nil {
			return nil, fmt.Errorf("reading kernel objects: %w", err)
		}
		c.Process = append(c.Process, treewalk.Diff(b.objects, objects, 20)...)
		if len(c.Process) == 0 && len(objects) != len(b.objects) {
			c.Process = append(c.Process, "kernel objects came or went that look like others")
		}
	}
	if n.Verdict == tree.Process || n.Verdict == tree.Both || len(alive) > len(sessions) {
		return c, nil
	}
	id, drop := ids.Snapshot(""), func() {}
	if now != nil {
		id = now.Snapshot
	} else {
		if err := e.Pool.Flush(ctx, b.gen); err != nil {
			return nil, fmt.Errorf("flushing: %w", err)
		}
		id = ids.NewSnapshot()
		pending, err := e.Pool.Snapshot(ctx, b.gen, id)
		if err != nil {
			return nil, fmt.Errorf("taking a snapshot to look at: %w", err)
		}
		if _, err := pending.Finish(ctx); err != nil {
			pending.Abort()
			return nil, fmt.Errorf("finishing the snapshot to look at: %w", err)
		}
		drop = func() { e.removeSnapshot(ctx, id) }
	}
	defer drop()
	c.Files, err = merged.Differ(ctx, b.upper.Layers, e.Pool.SnapshotDir(was.Snapshot), e.Pool.SnapshotDir(id))
	return c, err
}

// keepCase writes what is needed to look into something that went wrong, under the name of
// the node or process state that it is about, and says where.
func (e *Engine) keepCase(name string, v any) string {
	dir := filepath.Join(e.cfg.StateDir, "audit")
	path := filepath.Join(dir, name+".json")
	data, err := e.secrets.all().maskedJSON(v)
	if err == nil {
		if err = os.MkdirAll(dir, 0o700); err == nil {
			err = os.WriteFile(path, data, 0o600)
		}
	}
	if err != nil {
		return "not kept: " + err.Error()
	}
	return path
}
