// Package inspector watches what the processes of a sandbox do to the machine
// and judges each half, files and processes, changed or unchanged.
//
// Promise (law 2): a half that changed is never judged unchanged. What can't be
// known about a half (a lost event, an unresolved identity, an unknown call)
// counts as changed.
//
// An epoch begins when a sandbox is made from a checkpoint and at each
// successful capture. Verdicts sum effects since the epoch began; the effects
// that are reported are the turn's own.
package inspector

import (
	"context"
	"time"

	"github.com/boxwood-rl/boxwood/tree"
)

// Subject is one sandbox to watch.
type Subject struct {
	// Cgroup is the v2 id of the group under which its turns run.
	Cgroup uint64
	// Upper is its folder of changes on the host, Subvolume its btrfs root id.
	Upper     string
	Subvolume uint64
	// Base is the folder of changes of the snapshot it was made from.
	Base string
	// Lower is the image's layers on the host, lowest first. It may be empty; with
	// it, a file that was only copied up is told from one that changed.
	Lower []string
	// Survivors lists the sandbox's processes other than pid 1.
	Survivors func() ([]Survivor, error)
	// Restored says that processes are there already, standing still, as a dump had
	// them: the epoch begins with them.
	Restored bool
}

// Survivor is a process that is there at the barrier.
type Survivor struct {
	PID     int // in the sandbox
	HostPID int // 0: not known, so that it counts as changed
	Cmdline []byte
	// Elsewhere: whether this process changed is judged by the caller, as with a
	// persistent shell that is described. It may run, and so may what it starts;
	// what of it others hold, too, makes those changed.
	Elsewhere bool
	// Ignored is the name by which the caller has it counted for nothing, with Elsewhere: that it
	// came or ended is no change either. Empty: it counts.
	Ignored string
}

// Fate is what became of one survivor since the epoch began.
type Fate struct {
	Survivor
	// Changed says why its process side is no longer what it was then: it ran, it was
	// reached, a file it has open changed, it is new. Empty: it is what it was.
	Changed string
}

// Report is what the inspector says at the end of a turn.
type Report struct {
	// Verdict is over everything since the epoch began; Turn is this turn alone.
	Verdict, Turn tree.Verdict
	External      bool
	// Effects of this turn, the first tree.MaxEffects; Count has them all.
	Effects []tree.Effect
	Count   int64
	// Written are the bytes that calls of this turn wrote to files (stores to mapped files aside),
	// Started the processes that its processes started.
	Written, Started int64
	// Beyond: the process half changed since the epoch began, or may have, in something other
	// than processes that came, went or ran: a kernel object, something unknown.
	Beyond bool
	// Survivors says what became of each process that is there.
	Survivors []Fate
	// Reasons for Verdict, for a person: "2 files changed", "1 process survives".
	Reasons []string
	// Lost counts events of this sandbox that could not be kept.
	Lost    uint64
	Barrier time.Duration
}

// Watch is the inspector's view of one sandbox. One goroutine uses it at a time.
type Watch interface {
	// BeginTurn marks where the turn's own effects start.
	BeginTurn()
	// Barrier counts everything the kernel saw so far. It never fails: what it
	// can't find out is in the report as changed.
	Barrier(ctx context.Context) Report
	// Tainted says that the engine itself wrote, or a capture failed: until the
	// next NewEpoch no verdict is below tree.Files (both: also below Both).
	Tainted(both bool, why string)
	// ProcessChanges gives the reasons why the processes are no longer what they were
	// when the epoch began; none: they are. It can be asked while the sandbox is
	// frozen, so that a capture knows whether a process state from before is still
	// true of what it saves now.
	ProcessChanges() []string
	// Superseded names files of the image that a process has mapped, and that were changed
	// since: it goes on seeing what they were, where one that is restored would see what they
	// are. It can be asked while the sandbox is frozen.
	Superseded() ([]string, error)
	// NewEpoch begins an epoch whose base is the snapshot folder base. It is
	// called while the sandbox is still frozen, after a snapshot that succeeded.
	// Processes that are there count as saved: those that are asleep are unchanged
	// until they run or are reached.
	NewEpoch(base string)
	Close()
}

// Inspector makes watches.
type Inspector interface {
	// Watch begins an epoch. It must return before any process of the subject runs.
	Watch(s Subject) (Watch, error)
	// LostEvents counts what was lost since start.
	LostEvents() uint64
	Close() error
}
