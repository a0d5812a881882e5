package stats

import (
	"time"

	"github.com/boxwood-rl/boxwood/internal/hostload"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

// TurnRow is one finished turn.
type TurnRow struct {
	Node      ids.Node
	Tree      ids.Tree
	Sandbox   ids.Sandbox
	StartedAt time.Time

	// Wall is what the client waited for; the others are its parts.
	Wall, Command, Barrier, CaptureWait, Record time.Duration

	Verdict     tree.Verdict // since the last successful capture: what decided
	TurnVerdict tree.Verdict // of this turn alone
	External    bool
	Effects     EffectCounts
	EffectCount int64

	Status      tree.TurnStatus
	ExitCode    int32
	Signal      int32
	OutputBytes int64 // both streams, bytes cut out included
	LostEvents  int64
	// What calls of the turn wrote to files, and processes that its processes started.
	BytesWritten, ProcessesStarted int64
}

// EffectCounts holds how many effects of each kind a turn kept.
type EffectCounts [tree.ProcessChanged + 1]int64

// CountEffects counts a node's kept effects (the first tree.MaxEffects).
func CountEffects(effects []tree.Effect) (counts EffectCounts) {
	for _, e := range effects {
		if int(e.Kind) < len(counts) {
			counts[e.Kind]++
		}
	}
	return counts
}

// ForkRow is one child of a fork, ready or failed.
type ForkRow struct {
	Request    string // the same for all children of one call
	Node       ids.Node
	Tree       ids.Tree
	Child      int64 // place in the request, from 0
	Sandbox    ids.Sandbox
	Checkpoint ids.Checkpoint
	StartedAt  time.Time

	// Ready runs from the request's arrival; the others are parts of it.
	Ready, Clone, Attach, Verify time.Duration

	Outcome Outcome
	Reason  string // the fault's reason code
	Batch   int64  // children of the request
	Scratch bool
}

// RestoreRow is one body that was made from a checkpoint, or wasn't, as something failed.
type RestoreRow struct {
	Purpose    Purpose
	Node       ids.Node // whose checkpoint it is
	Tree       ids.Tree // whose sandbox it is for
	Checkpoint ids.Checkpoint
	Generation ids.Generation
	StartedAt  time.Time
	Kind       tree.ProcessKind

	// Total is all of it. Clone and Attach are parts of it, 0 if it failed before; the rest is waiting for its turn.
	Total, Clone, Attach time.Duration

	Outcome Outcome
	Reason  string
}

// Purpose is what a body was made for.
type Purpose uint8

const (
	ForFork     Purpose = iota + 1
	ForRollback         // of a sandbox, in place
	ForSpare            // made ahead, to be handed out at once
	ForTrial            // to see whether a checkpoint can be restored
)

// ReplayRow is one turn that a fork ran again, as its node is withheld.
type ReplayRow struct {
	Of        ids.Node // whose turn it was
	Node      ids.Node // that it made now; empty for a scratch child
	Tree      ids.Tree
	Sandbox   ids.Sandbox
	StartedAt time.Time
	Took      time.Duration

	SameOutput, SameExit bool // if OK
	Outcome              Outcome
	Reason               string
}

// SandboxRow is one sandbox that has ended.
type SandboxRow struct {
	Sandbox    ids.Sandbox
	Tree       ids.Tree
	Scratch    bool
	Head       ids.Node // where it stood
	Generation ids.Generation
	EndedAt    time.Time
	Ended      Ending
	Limits     tree.Limits
}

// Ending is why a sandbox has ended.
type Ending uint8

const (
	Released    Ending = iota + 1 // by its client, or with its tree or run
	TreeClosed                    // before it was handed out
	Expired                       // its lease
	Lost                          // it died
	TurnFailed                    // a turn of it couldn't be recorded
	NotReplayed                   // the turns on the way to its node couldn't be run again
	Defect                        // of the daemon, in a call of it
	Shutdown                      // of the daemon
	GoneAtStart                   // the daemon's next start didn't find it as it was recorded
)

func (e Ending) String() string { return endWords[e-1] }

// CaptureRow is one attempt to make a node's checkpoint.
type CaptureRow struct {
	Node       ids.Node
	Tree       ids.Tree
	Sandbox    ids.Sandbox
	Checkpoint ids.Checkpoint
	StartedAt  time.Time
	Verdict    tree.Verdict
	Kind       tree.ProcessKind
	Kept       bool // the process half is that of the checkpoint before

	// Queue is from the node's record to the start of the capture. Freeze is how
	// long the sandbox stood still, Snapshot the part of it in the pool.
	Queue, Flush, Freeze, Snapshot, Finish time.Duration

	Bytes   int64 // that only this checkpoint holds; < 0: unknown
	Outcome Outcome
	Reason  string
	Urgent  bool // someone waited for it
}

// AuditRow is one turn whose verdict was compared with what really changed.
type AuditRow struct {
	Node      ids.Node
	Tree      ids.Tree
	Sandbox   ids.Sandbox
	StartedAt time.Time
	Took      time.Duration
	Verdict   tree.Verdict

	FilesChanged, ProcessChanged bool // what was found
	MissedFiles, MissedProcess   bool // false negatives
	// Files and Processes are the figures so far, with their intervals.
	Files, Processes string
}

// SchedulerRow is what one class of work did on one line of the scheduler in an interval.
type SchedulerRow struct {
	At       time.Time
	Interval time.Duration
	Line     Line
	Class    sched.Class
	Slots    int
	Standing sched.Standing // its counters are of the interval
}

// Line is one of the things that there is little of on a host, and that work waits for.
type Line uint8

const (
	LineClones Line = iota + 1 // of snapshots
	LineBoxes                  // zygotes that take a root, restores
	LineCaptures
	LineRemovals // of released sandboxes and their files
	LineWrites   // of dumps to the disk
)

func (l Line) String() string { return lineWords[l-1] }

// HostRow is how the host was in an interval.
type HostRow struct {
	At       time.Time
	Interval time.Duration
	Stalls   *hostload.Stalls // in the interval; nil: the kernel doesn't tell

	MemoryTotal, MemoryAvailable int64
	PoolTotal, PoolUsed          int64
	Processor                    time.Duration // of the daemon, in the interval
	Resident                     int64         // bytes of the daemon
	Sandboxes, Nodes, Zygotes    int64
	PendingRemovals              int64
}

// Outcome is how a fork's child or a capture ended.
type Outcome uint8

const (
	OK       Outcome = 1
	Failed   Outcome = 2
	Withheld Outcome = 3 // captures only: the node can't be restored exactly
)

// NodeRow is a node as the tree has it now.
type NodeRow struct {
	*tree.Node
	// Restores is the checkpoint that Node.Checkpoint names; nil if there is none.
	Restores *tree.Checkpoint
	// Policy is that of its tree; 0: sparse.
	Policy tree.CapturePolicy
}
