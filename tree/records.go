package tree

import (
	"time"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/seccomp"
)

// Verdict is the sum of effects since the sandbox's last successful capture.
type Verdict uint8

const (
	None    Verdict = 1 // nothing to save
	Files   Verdict = 2
	Process Verdict = 3
	Both    Verdict = 4
)

// Capture is how far a node's checkpoint has come.
type Capture uint8

const (
	Recorded Capture = 1 // durable; capture pending or running
	Captured Capture = 2 // complete and checksummed
	Proven   Capture = 3 // restored once and found equal
	Withheld Capture = 4 // can't be restored exactly; WithheldReason says why
)

// ProcessKind is how the process half of a checkpoint was saved.
type ProcessKind uint8

const (
	Empty  ProcessKind = 1
	Shells ProcessKind = 2
	Dump   ProcessKind = 3
)

// TurnStatus is how a turn ended.
type TurnStatus uint8

const (
	Completed TurnStatus = 1
	TimedOut  TurnStatus = 2
	Stopped   TurnStatus = 3 // cancelled by the client
	Lost      TurnStatus = 4 // the sandbox died in it
)

// EffectKind names what a turn did to one thing.
type EffectKind uint8

const (
	FileCreated EffectKind = iota + 1
	FileChanged
	FileDeleted
	FileRenamed
	FileMetadata
	ProcessSurvived
	ProcessEnded
	KernelObject
	External
	Unknown
	ProcessChanged // by what a session says of itself
)

// Effect is one change that outlives its turn. Subject comes out of the
// sandbox: it is hostile and need not be UTF-8.
type Effect struct {
	Kind    EffectKind
	Subject []byte
	Detail  string
}

// The bounds of what one node keeps of its turn.
const (
	MaxAction      = 64 << 10
	MaxEffects     = 64
	MaxObservation = 4 << 20
	MaxPayload     = 1 << 20
)

// Observation is what the turn printed, head and tail, and how it ended.
type Observation struct {
	Stdout, Stderr               []byte
	StdoutOmitted, StderrOmitted int64 // bytes cut out between head and tail
	StdoutCutAt, StderrCutAt     int64 // where in the kept bytes the cut lies
	ExitCode                     int32 // -1 if a signal ended it
	Signal                       int32
	OOMKilled                    bool
}

// Action is what ran.
type Action struct {
	Text  []byte
	Argv  [][]byte
	Steps int32
}

// MaxRecipe bounds what a node keeps of its steps.
const MaxRecipe = 1 << 20

// Recipe is what it takes to run a turn again, and to say whether the same came of it.
type Recipe struct {
	Steps []Step
	// Once says why the turn can't be run again; empty: it can.
	Once string
	// sha256 of all of a stream, if the observation has not all of it.
	Stdout, Stderr []byte
}

// StepKind is the call that a step was.
type StepKind uint8

const (
	CommandStep StepKind = iota + 1
	WriteStep
	UploadStep
	OpenSessionStep
	CloseSessionStep
)

// Step is one command or transfer of a turn, as it was asked for, and how it ended. The
// defaults of its tree aren't in it.
type Step struct {
	Kind        StepKind
	Text        string   // of a command that is text for a shell
	Argv        []string // of another
	Session     string
	Cwd, User   string
	Env         map[string]string
	Content     []byte // stdin of a command, content of a file, a tar stream
	Deadline    time.Duration
	OutputLimit int64
	Path        string
	Mode        int64
	Append, TTY bool
	Rows, Cols  int32

	Status           TurnStatus // of a command
	ExitCode, Signal int32
	Failed           string // the reason, if a transfer failed
}

// Size is about how many bytes a record of it has.
func (s *Step) Size() int {
	n := 64 + len(s.Text) + len(s.Session) + len(s.Cwd) + len(s.User) + len(s.Content) + len(s.Path)
	for _, a := range s.Argv {
		n += len(a) + 2
	}
	for k, v := range s.Env {
		n += len(k) + len(v) + 6
	}
	return n
}

// Tree is all nodes grown from one start state.
type Tree struct {
	ID        ids.Tree
	Root      ids.Node
	Image     ids.Image
	Labels    map[string]string
	Defaults  Defaults
	CreatedAt time.Time
	Closed    bool
	// Where its nodes are; ArchivedNodes are those that only the disk has. Set by the store.
	Archive       ArchiveState
	ArchivedNodes int64
	Run           string // that it was made in; may be empty

	CreateIndex, ModifyIndex uint64
}

// Run is all trees of one training run. Its attempts are numbered from 1; only the newest may work.
type Run struct {
	Name     string
	Attempt  int64
	OpenedAt time.Time // the attempt
	Closed   bool

	ModifyIndex uint64
}

// MaxRunName bounds the name of a run.
const MaxRunName = 128

// ArchiveState is where the nodes of a tree are.
type ArchiveState uint8

const (
	InMemory ArchiveState = 0
	Moving   ArchiveState = 1 // part of them, on the way out or back
	OnDisk   ArchiveState = 2
)

// Defaults apply to every sandbox and turn of a tree that doesn't say otherwise.
type Defaults struct {
	User, Cwd    string
	Env          map[string]string
	Limits       Limits
	Lease        time.Duration
	TurnDeadline time.Duration
	Capture      CapturePolicy // 0: Sparse
}

// CapturePolicy says which turns of a tree are captured. A node that isn't is withheld, unless it is as the
// checkpoint before it.
type CapturePolicy uint8

const (
	Sparse     CapturePolicy = 1 // those that changed something
	Full       CapturePolicy = 2 // each, with another dump of all that runs
	FilesOnly  CapturePolicy = 3 // as Sparse, but processes are never saved
	Uncaptured CapturePolicy = 4 // none
)

// CapturePolicyOf refuses the number of a policy that this boxwood doesn't know.
func CapturePolicyOf(n int32) (CapturePolicy, error) {
	if n < 0 || n > int32(Uncaptured) {
		return 0, fault.New(fault.Invalid, "bad_capture_policy", "there is no capture policy of number %d", n).
			WithHint("the policies are sparse, full, files and uncaptured")
	}
	return CapturePolicy(n), nil
}

// Limits bound one sandbox; 0 means the server's default.
type Limits struct {
	MemoryBytes, Pids, CPUMillis, DiskBytes int64
	// Calls that it may make beyond the usual. All sandboxes of a tree have the same: what runs in a
	// saved process half was started under it.
	Calls seccomp.Groups
}

// What a limit may be: more than any host has, and far below what sums of them could overflow.
const (
	maxLimitBytes = 1 << 50
	maxLimitPids  = 1<<22 - 2 // the kernel takes one more than it can number, and pid 1 is one
	maxLimitCPU   = 1 << 30
)

// Check refuses limits that bound nothing, or that no kernel takes.
func (l Limits) Check() error {
	for _, of := range []struct {
		name     string
		is, most int64
	}{{"memory_bytes", l.MemoryBytes, maxLimitBytes}, {"disk_bytes", l.DiskBytes, maxLimitBytes}, {"pids", l.Pids, maxLimitPids}, {"cpu_millis", l.CPUMillis, maxLimitCPU}} {
		if of.is < 0 || of.is > of.most {
			return fault.New(fault.Invalid, "bad_limits", "the limit %s is %d, and can be 0, which is the default, to %d", of.name, of.is, of.most)
		}
	}
	return nil
}

// Node is a turn boundary in a tree. A node read from the store is a constant.
//
// What its turn did (Action, Stdout and Stderr of Observation, Reasons, Effects) is
// written once and lies on disk only: FullNode reads it, every other read
// leaves it empty.
type Node struct {
	ID      ids.Node
	Tree    ids.Tree
	Parent  ids.Node // empty for the root
	Depth   int32
	Ordinal int32 // place among its parent's children, from 0; set by the store

	Action      Action
	Observation Observation
	TurnStatus  TurnStatus
	Verdict     Verdict
	External    bool
	Reasons     []string
	Effects     []Effect // the first MaxEffects
	EffectCount int64

	Capture        Capture
	Checkpoint     ids.Checkpoint // its own or an ancestor's; empty while pending or withheld
	WithheldReason string

	Rewards       map[string]float64
	Value         float64
	Visits        int64
	Labels        map[string]string
	PolicyVersion string
	PayloadDigest string // sha256 in hex
	PayloadBytes  int64
	Pinned        bool

	StartedAt, EndedAt time.Time
	FrozenAt           time.Time // zero unless the checkpoint is its own
	SurvivorsRan       bool
	Sandbox            ids.Sandbox
	Timings            Timings

	// Set by the store. Every write has an index of its own; later is higher.
	CreateIndex, ModifyIndex uint64

	Recipe Recipe
	// ReplayOf is the node whose turn was run again here, since it was withheld; empty: none.
	ReplayOf ids.Node
}

// Timings of the turn that made a node.
type Timings struct {
	CaptureWait, Command, Barrier, Record, Total, Capture time.Duration
}

// Checkpoint is a pair (snapshot, process state) that was true at one instant.
type Checkpoint struct {
	ID       ids.Checkpoint
	Tree     ids.Tree
	Node     ids.Node // the node it was made for; others share it
	Snapshot ids.Snapshot
	Seal     Seal
	Process  ProcessKind
	// State is the saved process half; none if Process is Empty. Checkpoints between
	// which the files alone changed share one.
	State ids.Process
	// Bytes that only this snapshot holds, where the pool can tell; else 0.
	Bytes     int64
	CreatedAt time.Time
	FreezeFor time.Duration
	Proven    bool
	// Secrets: Process is Dump, and what was dumped may hold secrets.
	Secrets bool

	ModifyIndex uint64
}

// Seal is what a snapshot looked like when it was made: a fork compares it with
// what is there. Layers are those the snapshot lies on, lowest first.
type Seal struct {
	UUID       string
	Generation uint64
	Layers     []ids.Layer
}

// ProcessState is a saved process half, of kind Shells or Dump; Empty needs none.
// Its content lies outside the store, with whoever saved it.
type ProcessState struct {
	ID     ids.Process
	Kind   ProcessKind
	Digest string // sha256 of the content, in hex
	Bytes  int64  // of the content
	// What the content was made under, as far as it can be read by the same only: the
	// kernel's release, and CRIU's version or that of the shell.
	Kernel, Program string
	CreatedAt       time.Time
	// Condemned: no checkpoint has it any more, and its content is still to be
	// removed. Set by the store.
	Condemned bool

	ModifyIndex uint64
}

// Sandbox is a live process tree that stands at a node.
type Sandbox struct {
	ID         ids.Sandbox
	Tree       ids.Tree
	Head       ids.Node
	Generation ids.Generation
	Scratch    bool
	LeaseUntil time.Time
	Lease      time.Duration
	Labels     map[string]string
	Hostname   string
	Limits     Limits
	// Commands counts the commands pid 1 has started: one that the store doesn't
	// know of means that the sandbox isn't as its head node says.
	Commands uint64

	ModifyIndex uint64
}

// Image is a read-only root file system.
type Image struct {
	Digest    ids.Image
	Names     []string
	Layers    []ids.Layer  // lowest first, the seal layer last
	Base      ids.Snapshot // the empty upper that first sandboxes are cloned from
	BaseSeal  Seal
	Env       map[string]string
	Cwd       string
	User      string
	Bytes     int64
	CreatedAt time.Time

	ModifyIndex uint64
}

// Reply is the recorded answer to a request with an idempotency key.
type Reply struct {
	Key     string
	Method  string
	Request string // digest of the request
	Body    []byte // the marshalled response
	At      time.Time
}

// Setup remembers the node that a set-up led to, so that it runs once.
type Setup struct {
	Digest string // over (start, steps)
	Node   ids.Node
}
