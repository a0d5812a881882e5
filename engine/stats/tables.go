package stats

import (
	"fmt"
	"time"

	"github.com/boxwood-rl/boxwood/internal/hostload"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

// The vocabularies follow the numbers of tree's and this package's constants.
var (
	verdictWords = []string{"none", "files", "process", "both"}
	captureWords = []string{"recorded", "captured", "proven", "withheld"}
	kindWords    = []string{"empty", "shells", "dump"}
	statusWords  = []string{"completed", "timed_out", "cancelled", "lost"}
	outcomeWords = []string{"ok", "failed", "withheld"}
	purposeWords = []string{"fork", "rollback", "spare", "trial"}
	policyWords  = []string{"sparse", "full", "files", "uncaptured"}
	endWords     = []string{"released", "tree_closed", "expired", "lost", "turn_failed", "not_replayed", "defect", "shutdown", "gone_at_start"}
)

func effects(name, doc string, kind tree.EffectKind) column[TurnRow] {
	return number(name, "effects", doc+", among the turn's first 64 effects",
		func(r *TurnRow) int64 { return r.Effects[kind] })
}

var turnsTable = define(Turns, "One row per finished turn.",
	text("node", "The node that the turn made.", "a turn of a scratch sandbox, which makes no node",
		func(r *TurnRow) string { return string(r.Node) }),
	text("tree", "The tree it belongs to.", "unknown", func(r *TurnRow) string { return string(r.Tree) }),
	text("sandbox", "The sandbox that ran it.", "unknown", func(r *TurnRow) string { return string(r.Sandbox) }),
	instant("started_at", "When the turn's first command started.", "unknown", func(r *TurnRow) time.Time { return r.StartedAt }),
	nanos("wall_ns", "From the request's arrival to the reply.", func(r *TurnRow) time.Duration { return r.Wall }),
	nanos("command_ns", "The commands of the turn.", func(r *TurnRow) time.Duration { return r.Command }),
	nanos("barrier_ns", "Waiting until all that the kernel saw was counted.", func(r *TurnRow) time.Duration { return r.Barrier }),
	nanos("capture_wait_ns", "Waiting for this sandbox's earlier capture: the exposed delay.", func(r *TurnRow) time.Duration { return r.CaptureWait }),
	nanos("record_ns", "Making the node durable.", func(r *TurnRow) time.Duration { return r.Record }),
	word("verdict", "Effects since the sandbox's last successful capture; decides what is captured.", "unknown", verdictWords, func(r *TurnRow) uint8 { return uint8(r.Verdict) }),
	word("turn_verdict", "Effects of this turn alone.", "unknown", verdictWords, func(r *TurnRow) uint8 { return uint8(r.TurnVerdict) }),
	flag("external", "Whether something left the sandbox.", func(r *TurnRow) bool { return r.External }),
	number("effect_count", "effects", "All effects of the turn.", func(r *TurnRow) int64 { return r.EffectCount }),
	effects("files_created", "Files created", tree.FileCreated),
	effects("files_changed", "Files with other content", tree.FileChanged),
	effects("files_deleted", "Files deleted", tree.FileDeleted),
	effects("files_renamed", "Files renamed", tree.FileRenamed),
	effects("files_metadata", "Files with other modes, owners, times or attributes", tree.FileMetadata),
	effects("processes_survived", "Processes that outlive the turn", tree.ProcessSurvived),
	effects("processes_ended", "Processes of earlier turns that ended", tree.ProcessEnded),
	effects("kernel_objects", "Kernel objects made, changed or removed", tree.KernelObject),
	effects("externals", "Connections and datagrams to the outside", tree.External),
	effects("unknown_effects", "Effects that could not be resolved and count as changes", tree.Unknown),
	word("status", "How the turn ended.", "unknown", statusWords, func(r *TurnRow) uint8 { return uint8(r.Status) }),
	optional("exit_code", "", "The last command's exit code.", "a signal ended it", func(r *TurnRow) (int64, bool) {
		return int64(r.ExitCode), r.Signal == 0 && r.ExitCode >= 0
	}),
	optional("signal", "", "The signal that ended the last command.", "none did", func(r *TurnRow) (int64, bool) {
		return int64(r.Signal), r.Signal != 0
	}),
	number("output_bytes", "bytes", "Standard output and error, with what was cut out.", func(r *TurnRow) int64 { return r.OutputBytes }),
	number("bytes_written", "bytes", "What calls wrote to files, also to files that are gone again.", func(r *TurnRow) int64 { return r.BytesWritten }),
	number("processes_started", "processes", "Processes that the turn's processes started, also those that ended.", func(r *TurnRow) int64 { return r.ProcessesStarted }),
	number("lost_events", "events", "Kernel events of this sandbox that could not be kept; more than 0 forces the verdict.", func(r *TurnRow) int64 { return r.LostEvents }),
)

var forksTable = define(Forks, "One row per child of a fork.",
	text("request", "The fork call; the same for all its children.", "unknown", func(r *ForkRow) string { return r.Request }),
	text("node", "The node that was forked.", "unknown", func(r *ForkRow) string { return string(r.Node) }),
	text("tree", "The tree it belongs to.", "unknown", func(r *ForkRow) string { return string(r.Tree) }),
	number("child", "", "The child's place in the request, from 0.", func(r *ForkRow) int64 { return r.Child }),
	text("sandbox", "The new sandbox.", "the child failed", func(r *ForkRow) string { return string(r.Sandbox) }),
	text("checkpoint", "The checkpoint that it was made from.", "none could be used", func(r *ForkRow) string { return string(r.Checkpoint) }),
	instant("started_at", "When the request arrived.", "unknown", func(r *ForkRow) time.Time { return r.StartedAt }),
	nanos("ready_ns", "From the request's arrival to ready, or to the failure.", func(r *ForkRow) time.Duration { return r.Ready }),
	nanos("clone_ns", "Checking and cloning the snapshot.", func(r *ForkRow) time.Duration { return r.Clone }),
	nanos("attach_ns", "Mounting the root and giving it to a zygote.", func(r *ForkRow) time.Duration { return r.Attach }),
	nanos("verify_ns", "Comparing what was restored with what was saved.", func(r *ForkRow) time.Duration { return r.Verify }),
	word("outcome", "How it went.", "unknown", outcomeWords, func(r *ForkRow) uint8 { return uint8(r.Outcome) }),
	text("reason", "The code of the failure.", "it did not fail", func(r *ForkRow) string { return r.Reason }),
	number("batch", "children", "Children of the same request.", func(r *ForkRow) int64 { return r.Batch }),
	flag("scratch", "Whether the child writes no nodes.", func(r *ForkRow) bool { return r.Scratch }),
)

var capturesTable = define(Captures, "One row per attempt to make a node's checkpoint.",
	text("node", "The node.", "unknown", func(r *CaptureRow) string { return string(r.Node) }),
	text("tree", "The tree it belongs to.", "unknown", func(r *CaptureRow) string { return string(r.Tree) }),
	text("sandbox", "The sandbox that was captured.", "unknown", func(r *CaptureRow) string { return string(r.Sandbox) }),
	text("checkpoint", "The checkpoint that was made.", "none was made", func(r *CaptureRow) string { return string(r.Checkpoint) }),
	instant("started_at", "When the capture started.", "unknown", func(r *CaptureRow) time.Time { return r.StartedAt }),
	word("verdict", "What had to be saved.", "unknown", verdictWords, func(r *CaptureRow) uint8 { return uint8(r.Verdict) }),
	word("kind", "How the process half was saved.", "it was not", kindWords, func(r *CaptureRow) uint8 { return uint8(r.Kind) }),
	flag("kept", "Whether the process half is that of the checkpoint before, which still was true.", func(r *CaptureRow) bool { return r.Kept }),
	nanos("queue_ns", "From the node's record to the start of the capture.", func(r *CaptureRow) time.Duration { return r.Queue }),
	nanos("flush_ns", "Writing dirty data out before the freeze.", func(r *CaptureRow) time.Duration { return r.Flush }),
	nanos("freeze_ns", "How long the sandbox stood still.", func(r *CaptureRow) time.Duration { return r.Freeze }),
	nanos("snapshot_ns", "The snapshot, inside the freeze.", func(r *CaptureRow) time.Duration { return r.Snapshot }),
	nanos("finish_ns", "What followed the thaw.", func(r *CaptureRow) time.Duration { return r.Finish }),
	optional("bytes", "bytes", "What only this checkpoint holds.", "unknown", func(r *CaptureRow) (int64, bool) { return r.Bytes, r.Bytes >= 0 }),
	word("outcome", "How it went.", "unknown", outcomeWords, func(r *CaptureRow) uint8 { return uint8(r.Outcome) }),
	text("reason", "The code of the failure, or why the node is withheld.", "it did not fail", func(r *CaptureRow) string { return r.Reason }),
	flag("urgent", "Whether a turn or a fork waited for it.", func(r *CaptureRow) bool { return r.Urgent }),
)

var auditsTable = define(Audits, "One row per turn whose verdict was compared with what really changed (serve --audit).",
	text("node", "The node.", "unknown", func(r *AuditRow) string { return string(r.Node) }),
	text("tree", "The tree it belongs to.", "unknown", func(r *AuditRow) string { return string(r.Tree) }),
	text("sandbox", "The sandbox that ran the turn.", "unknown", func(r *AuditRow) string { return string(r.Sandbox) }),
	instant("started_at", "When the audit started.", "unknown", func(r *AuditRow) time.Time { return r.StartedAt }),
	nanos("took_ns", "How long it took.", func(r *AuditRow) time.Duration { return r.Took }),
	word("verdict", "What the turn was judged.", "unknown", verdictWords, func(r *AuditRow) uint8 { return uint8(r.Verdict) }),
	flag("files_changed", "Whether the files differ from the checkpoint before; false, too, where they weren't compared because a process survives.", func(r *AuditRow) bool { return r.FilesChanged }),
	flag("process_changed", "Whether a process survives or a kernel object differs.", func(r *AuditRow) bool { return r.ProcessChanged }),
	flag("missed_files", "Whether a change of files was judged unchanged.", func(r *AuditRow) bool { return r.MissedFiles }),
	flag("missed_process", "Whether a change of processes was judged unchanged.", func(r *AuditRow) bool { return r.MissedProcess }),
	text("files", "Wrong verdicts on files since the daemon's start, with 95 % intervals.", "never", func(r *AuditRow) string { return r.Files }),
	text("processes", "The same of processes.", "never", func(r *AuditRow) string { return r.Processes }),
)

var restoresTable = define(Restores, "One row per attempt to make files and processes as a checkpoint has them. A fork that is handed a spare has none of its own.",
	word("purpose", "What for.", "unknown", purposeWords, func(r *RestoreRow) uint8 { return uint8(r.Purpose) }),
	text("node", "The node whose checkpoint it is.", "unknown", func(r *RestoreRow) string { return string(r.Node) }),
	text("tree", "The tree that it was made for.", "unknown", func(r *RestoreRow) string { return string(r.Tree) }),
	text("checkpoint", "The checkpoint.", "unknown", func(r *RestoreRow) string { return string(r.Checkpoint) }),
	text("generation", "What was made; a sandbox that has it is of this row.", "unknown", func(r *RestoreRow) string { return string(r.Generation) }),
	instant("started_at", "When it was asked for.", "unknown", func(r *RestoreRow) time.Time { return r.StartedAt }),
	word("kind", "How the process half was saved.", "unknown", kindWords, func(r *RestoreRow) uint8 { return uint8(r.Kind) }),
	nanos("total_ns", "All of it; what is neither clone nor attach is mostly waiting in line.", func(r *RestoreRow) time.Duration { return r.Total }),
	nanos("clone_ns", "Cloning the snapshot; 0 if that didn't begin.", func(r *RestoreRow) time.Duration { return r.Clone }),
	nanos("attach_ns", "Mounting the root, giving it to a zygote, restoring processes, comparing files where that is asked for; 0 if that didn't end.", func(r *RestoreRow) time.Duration { return r.Attach }),
	word("outcome", "How it went.", "unknown", outcomeWords, func(r *RestoreRow) uint8 { return uint8(r.Outcome) }),
	text("reason", "The code of the failure.", "it did not fail", func(r *RestoreRow) string { return r.Reason }),
)

var replaysTable = define(Replays, "One row per turn that a fork ran again, as its node was withheld.",
	text("replay_of", "The node whose turn it was.", "unknown", func(r *ReplayRow) string { return string(r.Of) }),
	text("node", "The node that it made now.", "it failed, or the child is scratch", func(r *ReplayRow) string { return string(r.Node) }),
	text("tree", "The tree they belong to.", "unknown", func(r *ReplayRow) string { return string(r.Tree) }),
	text("sandbox", "The child.", "unknown", func(r *ReplayRow) string { return string(r.Sandbox) }),
	instant("started_at", "When it began.", "unknown", func(r *ReplayRow) time.Time { return r.StartedAt }),
	nanos("took_ns", "How long it took, with the wait for the capture of the turn before.", func(r *ReplayRow) time.Duration { return r.Took }),
	flag("same_output", "Whether both streams were the same, byte for byte; false if it failed.", func(r *ReplayRow) bool { return r.SameOutput }),
	flag("same_exit", "Whether each command ended with the same status, and each transfer as before; false if it failed.", func(r *ReplayRow) bool { return r.SameExit }),
	word("outcome", "How it went: failed turns have no end that could be compared.", "unknown", outcomeWords, func(r *ReplayRow) uint8 { return uint8(r.Outcome) }),
	text("reason", "The code of the failure.", "it did not fail", func(r *ReplayRow) string { return r.Reason }),
)

// limit is a column of what a sandbox may have.
func limit(name, unit, doc string, get func(*tree.Limits) int64) column[SandboxRow] {
	return optional(name, unit, doc, "no limit of its own", func(r *SandboxRow) (int64, bool) { v := get(&r.Limits); return v, v > 0 })
}

var sandboxesTable = define(Sandboxes, "One row per sandbox that has ended. Those that live are in ListSandboxes.",
	text("sandbox", "The sandbox.", "unknown", func(r *SandboxRow) string { return string(r.Sandbox) }),
	text("tree", "The tree that it grew.", "unknown", func(r *SandboxRow) string { return string(r.Tree) }),
	flag("scratch", "Whether it wrote no nodes.", func(r *SandboxRow) bool { return r.Scratch }),
	text("head", "The node at which it stood.", "unknown", func(r *SandboxRow) string { return string(r.Head) }),
	text("generation", "Its last files and processes; a rollback makes others.", "unknown", func(r *SandboxRow) string { return string(r.Generation) }),
	instant("started_at", "When it was asked for, to the millisecond.", "unknown", func(r *SandboxRow) time.Time { return ids.MadeAt(string(r.Sandbox)) }),
	instant("ended_at", "When it ended, or was found to have.", "unknown", func(r *SandboxRow) time.Time { return r.EndedAt }),
	word("ended", "Why it ended.", "unknown", endWords, func(r *SandboxRow) uint8 { return uint8(r.Ended) }),
	limit("memory_limit", "bytes", "What it could have of memory.", func(l *tree.Limits) int64 { return l.MemoryBytes }),
	limit("pids_limit", "processes", "How many processes it could have.", func(l *tree.Limits) int64 { return l.Pids }),
	limit("cpu_limit", "1/1000 core", "What it could have of processors.", func(l *tree.Limits) int64 { return l.CPUMillis }),
	limit("disk_limit", "bytes", "What it could write to the disk.", func(l *tree.Limits) int64 { return l.DiskBytes }),
)

// classWords are sched's, in its order; a row's value is one more than the class.
var classWords = func() (words []string) {
	for k := sched.Fork; k <= sched.Audit; k++ {
		words = append(words, k.String())
	}
	return words
}()

var lineWords = []string{"clones", "boxes", "captures", "removals", "writes"}

func counter(name, doc string, get func(*sched.Standing) uint64) column[SchedulerRow] {
	return number(name, "pieces", doc, func(r *SchedulerRow) int64 { return int64(get(&r.Standing)) })
}

func sum(name, doc string, of func(*sched.Standing) *sched.Histogram) column[SchedulerRow] {
	return nanos(name, doc, func(r *SchedulerRow) time.Duration { return of(&r.Standing).Sum })
}

func quantile(name string, q float64, doc string, of func(*sched.Standing) *sched.Histogram) column[SchedulerRow] {
	return optional(name, "ns", fmt.Sprintf("%s: a bound that %g %% of them don't pass, at most twice the true one.", doc, 100*q), "there were none",
		func(r *SchedulerRow) (int64, bool) { h := of(&r.Standing); return int64(h.Quantile(q)), h.Count > 0 })
}

func waitOf(s *sched.Standing) *sched.Histogram    { return &s.Wait }
func tookOf(s *sched.Standing) *sched.Histogram    { return &s.Took }
func exposedOf(s *sched.Standing) *sched.Histogram { return &s.Exposed }

var schedulerTable = define(Scheduler, "One row per line and class of work, and interval in which there was some.",
	instant("at", "The end of the interval.", "never", func(r *SchedulerRow) time.Time { return r.At }),
	nanos("interval_ns", "How long the interval was.", func(r *SchedulerRow) time.Duration { return r.Interval }),
	word("line", "What the work waited for.", "never", lineWords, func(r *SchedulerRow) uint8 { return uint8(r.Line) }),
	word("class", "Who waits for it; earlier words go first.", "never", classWords, func(r *SchedulerRow) uint8 { return uint8(r.Class) + 1 }),
	number("slots", "pieces", "What may run at once on the line, of all classes, at the end of the interval: the largest of their limits.", func(r *SchedulerRow) int64 { return int64(r.Slots) }),
	number("running", "pieces", "What runs at the end of the interval.", func(r *SchedulerRow) int64 { return int64(r.Standing.Running) }),
	number("waiting", "pieces", "What waits at the end of the interval.", func(r *SchedulerRow) int64 { return int64(r.Standing.Waiting) }),
	number("tenants", "tenants", "Whose work waits then: trees.", func(r *SchedulerRow) int64 { return int64(r.Standing.Tenants) }),
	nanos("oldest_ns", "The longest that the first in line of one of them has waited.", func(r *SchedulerRow) time.Duration { return r.Standing.Oldest }),
	counter("added", "What came.", func(s *sched.Standing) uint64 { return s.Added }),
	counter("started", "What started.", func(s *sched.Standing) uint64 { return s.Started }),
	counter("done", "What ended after it had started.", func(s *sched.Standing) uint64 { return s.Done }),
	counter("failed", "What of it ended with an error.", func(s *sched.Standing) uint64 { return s.Failed }),
	counter("cancelled", "What nobody wanted any more before it started.", func(s *sched.Standing) uint64 { return s.Cancelled }),
	counter("dropped", "What was past its deadline when its turn came.", func(s *sched.Standing) uint64 { return s.Dropped }),
	counter("promoted", "What became urgent, as somebody came to wait for it: it counts as added there.", func(s *sched.Standing) uint64 { return s.Promoted }),
	counter("refused", "What wasn't taken in, as the queue was full.", func(s *sched.Standing) uint64 { return s.Refused }),
	counter("late", "Captures in the shadow that had no slack left when they started.", func(s *sched.Standing) uint64 { return s.Late }),
	sum("wait_ns", "All waits of what started, together.", waitOf),
	quantile("wait_p50_ns", 0.5, "Waits", waitOf),
	quantile("wait_p95_ns", 0.95, "Waits", waitOf),
	quantile("wait_p99_ns", 0.99, "Waits", waitOf),
	sum("took_ns", "How long all that ended took, together.", tookOf),
	quantile("took_p50_ns", 0.5, "What pieces took", tookOf),
	quantile("took_p95_ns", 0.95, "What pieces took", tookOf),
	counter("exposed", "Pieces whose end somebody came to wait for.", func(s *sched.Standing) uint64 { return s.Exposed.Count }),
	sum("exposed_ns", "How long they waited, together: the exposed delay.", exposedOf),
	quantile("exposed_p95_ns", 0.95, "Exposed delays", exposedOf),
	quantile("slack_p05_ns", 0.05, "Slack of captures in the shadow when they started, without the late ones", func(s *sched.Standing) *sched.Histogram { return &s.Slack }),
	nanos("wasted_ns", "Time of what failed, and of what was made ahead and not used.", func(r *SchedulerRow) time.Duration { return r.Standing.Wasted }),
	added(number("limit", "pieces", "What of the class may run at once at the end of the interval; it follows the host.", func(r *SchedulerRow) int64 { return int64(r.Standing.Limit) })),
	added(counter("raised", "How often the limit went up by one.", func(s *sched.Standing) uint64 { return s.Raised })),
	added(counter("lowered", "How often it went down by one.", func(s *sched.Standing) uint64 { return s.Lowered })),
)

func stall(name, doc string, get func(*hostload.Stalls) time.Duration) column[HostRow] {
	return optional(name, "ns", doc, "the kernel doesn't tell (no PSI)", func(r *HostRow) (int64, bool) {
		if r.Stalls == nil {
			return 0, false
		}
		return int64(get(r.Stalls)), true
	})
}

var hostTable = define(Host, "One row per interval: how much the host and the daemon had to do.",
	instant("at", "The end of the interval.", "never", func(r *HostRow) time.Time { return r.At }),
	nanos("interval_ns", "How long the interval was.", func(r *HostRow) time.Duration { return r.Interval }),
	stall("cpu_some_ns", "Time of the interval in which some task waited for a core.", func(s *hostload.Stalls) time.Duration { return s.CPU }),
	stall("io_some_ns", "Time in which some task waited for a disk.", func(s *hostload.Stalls) time.Duration { return s.IO }),
	stall("io_full_ns", "Time in which all that had something to do waited for a disk.", func(s *hostload.Stalls) time.Duration { return s.IOFull }),
	stall("memory_some_ns", "Time in which some task waited for memory.", func(s *hostload.Stalls) time.Duration { return s.Memory }),
	stall("memory_full_ns", "Time in which all that had something to do waited for memory.", func(s *hostload.Stalls) time.Duration { return s.MemoryFull }),
	number("memory_total", "bytes", "Memory of the host.", func(r *HostRow) int64 { return r.MemoryTotal }),
	number("memory_available", "bytes", "What of it could be had without swapping.", func(r *HostRow) int64 { return r.MemoryAvailable }),
	number("pool_total", "bytes", "Size of the pool.", func(r *HostRow) int64 { return r.PoolTotal }),
	number("pool_used", "bytes", "What of it is in use.", func(r *HostRow) int64 { return r.PoolUsed }),
	nanos("daemon_cpu_ns", "Processor time of the daemon in the interval, without CRIU's.", func(r *HostRow) time.Duration { return r.Processor }),
	number("daemon_resident", "bytes", "Memory of the daemon.", func(r *HostRow) int64 { return r.Resident }),
	number("sandboxes", "sandboxes", "Live sandboxes.", func(r *HostRow) int64 { return r.Sandboxes }),
	number("nodes", "nodes", "Nodes of all trees.", func(r *HostRow) int64 { return r.Nodes }),
	number("zygotes", "zygotes", "Processes that wait to become a sandbox.", func(r *HostRow) int64 { return r.Zygotes }),
	number("pending_removals", "removals", "Released sandboxes and removed snapshots whose resources aren't back yet.", func(r *HostRow) int64 { return r.PendingRemovals }),
)

// ownCheckpoint says whether the node's checkpoint was made for the node itself.
func (r *NodeRow) ownCheckpoint() bool { return r.Restores != nil && r.Restores.Node == r.ID }

var nodesTable = define(Nodes, "One row per node of the trees, as they are at the export.",
	text("node", "The node.", "never", func(r *NodeRow) string { return string(r.ID) }),
	text("tree", "The tree it belongs to.", "never", func(r *NodeRow) string { return string(r.Tree) }),
	text("parent", "The node it grew from.", "the root", func(r *NodeRow) string { return string(r.Parent) }),
	number("depth", "turns", "Turns from the root.", func(r *NodeRow) int64 { return int64(r.Depth) }),
	number("ordinal", "", "Its place among its parent's children, from 0.", func(r *NodeRow) int64 { return int64(r.Ordinal) }),
	text("action", "What ran, the first 1024 bytes.", "the root, or an empty action", func(r *NodeRow) string { return string(r.Action.Text) }),
	instant("started_at", "When the turn started.", "unknown", func(r *NodeRow) time.Time { return r.StartedAt }),
	instant("ended_at", "When the observation was complete.", "unknown", func(r *NodeRow) time.Time { return r.EndedAt }),
	word("verdict", "Effects since the sandbox's last successful capture.", "the root", verdictWords, func(r *NodeRow) uint8 { return uint8(r.Verdict) }),
	flag("external", "Whether something left the sandbox.", func(r *NodeRow) bool { return r.External }),
	word("capture", "How far its checkpoint has come.", "unknown", captureWords, func(r *NodeRow) uint8 { return uint8(r.Capture) }),
	text("withheld_reason", "Why it can't be restored exactly.", "it is not withheld", func(r *NodeRow) string { return r.WithheldReason }),
	text("checkpoint", "The checkpoint that a fork of it uses.", "pending or withheld", func(r *NodeRow) string { return string(r.Checkpoint) }),
	flag("own_checkpoint", "Whether that checkpoint was made for this node and not for an ancestor.", (*NodeRow).ownCheckpoint),
	word("process_kind", "How the process half of the checkpoint was saved.", "pending or withheld", kindWords, func(r *NodeRow) uint8 {
		if r.Restores == nil {
			return 0
		}
		return uint8(r.Restores.Process)
	}),
	optional("checkpoint_bytes", "bytes", "What only its own checkpoint holds.", "it shares an ancestor's, or has none", func(r *NodeRow) (int64, bool) {
		if !r.ownCheckpoint() {
			return 0, false
		}
		return r.Restores.Bytes, true
	}),
	word("status", "How the turn ended.", "the root", statusWords, func(r *NodeRow) uint8 { return uint8(r.TurnStatus) }),
	optional("exit_code", "", "The last command's exit code.", "a signal ended it", func(r *NodeRow) (int64, bool) {
		return int64(r.Observation.ExitCode), r.Observation.Signal == 0 && r.Observation.ExitCode >= 0
	}),
	number("effect_count", "effects", "All effects of the turn.", func(r *NodeRow) int64 { return r.EffectCount }),
	optional("payload_bytes", "bytes", "Size of the trainer's payload.", "it has none", func(r *NodeRow) (int64, bool) {
		return r.PayloadBytes, r.PayloadDigest != ""
	}),
	object("rewards", "Named rewards as a JSON object.", func(r *NodeRow) map[string]float64 { return r.Rewards }),
	real64("value", "", "The search's value.", func(r *NodeRow) float64 { return r.Value }),
	number("visits", "visits", "The search's visits.", func(r *NodeRow) int64 { return r.Visits }),
	object("labels", "Labels as a JSON object.", func(r *NodeRow) map[string]string { return r.Labels }),
	text("policy_version", "The trainer's policy version.", "none was given", func(r *NodeRow) string { return r.PolicyVersion }),
	flag("pinned", "Whether it is kept from pruning.", func(r *NodeRow) bool { return r.Pinned }),
	text("sandbox", "The sandbox that ran the turn.", "the root", func(r *NodeRow) string { return string(r.Sandbox) }),
	word("capture_policy", "Which turns of its tree are captured.", "never", policyWords, func(r *NodeRow) uint8 { return max(uint8(r.Policy), uint8(tree.Sparse)) }),
)
