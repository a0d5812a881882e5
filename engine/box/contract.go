// Package box runs sandboxes: pid 1 and its protocol, zygotes, cgroups, mounts,
// commands. It knows nothing of nodes or of what a snapshot is.
//
// A zygote is pid 1 already waiting in fresh user, mount, pid, ipc, uts and net
// namespaces and in its cgroups, with no root. Attach gives it a root, after
// which it is a Box. What a turn starts lives in the cgroup leaf Run, pid 1
// itself beside it, so that the inspector sees the one and not the other.
//
// pid 1 outlives the daemon: it listens in a folder handed in from outside and
// obeys only a peer that isn't in its own pid namespace; Adopt finds it again.
// All that comes back from a box is hostile.
//
// No pipe crosses the border of a box: pid 1 holds the ends of a command's
// stdin, stdout and stderr and relays them, or no survivor could be captured.
package box

import (
	"context"
	"io"
	"os"
	"time"

	"github.com/boxwood-rl/boxwood/engine/criu"
	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/tree"
)

// Config of a Host.
type Config struct {
	// RunDir is a folder on the host for control folders and sockets.
	RunDir string
	// Zygotes to keep ready.
	Zygotes int
	// Limits that a box gets unless Identity says otherwise.
	Limits tree.Limits
	// CgroupRoot is the name of Boxwood's own group below each hierarchy.
	CgroupRoot string
	// Share is what the daemon and all boxes together may use.
	Share cgroup.Share
	// OnBox is called with the cgroup id of Run before any command can run in a
	// new box, and again (gone) after the last process of it is gone.
	OnBox func(runCgroup uint64, gone bool)

	wire int // that is said of new boxes; 0: wireNow. Tests have other daemons with it.
}

// Root is what a box sees as "/": an overlay of Lower (lowest first) and Upper.
type Root struct {
	Lower       []string
	Upper, Work string
}

// Identity is what makes a child a new authority (DESIGN: law 11). It reaches
// the box from outside its root, so that it is no effect.
type Identity struct {
	Hostname   string
	MachineID  string // 32 hex digits
	Generation string
	Seed       string // BOXWOOD_SEED; empty: not set
	Limits     tree.Limits
}

// Command is one process to run in a box.
type Command struct {
	Argv  []string // Argv[0] is looked up in PATH of Env
	Env   []string // the whole environment, "K=V"
	Cwd   string
	User  string // name, uid, or uid:gid, looked up in the box's own files
	Stdin []byte
	// Deadline after which everything the turn started is killed; zero: none.
	Deadline time.Time
	// Stdout and Stderr are called in order from one goroutine, never after Exec
	// has returned. They must not block.
	Stdout, Stderr func([]byte)
}

// Exit is how a command ended.
type Exit struct {
	Code      int // -1 if a signal ended it
	Signal    int
	TimedOut  bool
	Cancelled bool
	OOMKilled bool
	// Lost: pid 1 died or the box was killed; nothing of it runs any more.
	Lost bool
	Wall time.Duration
	CPU  time.Duration
}

// Proc is a process of a turn that is still there.
type Proc struct {
	PID     int // in the box
	HostPID int
	Name    string // of the command, as ps has it: the program gives it to itself
	Cmdline []byte
	dying   bool // killed, and not gone yet
}

// Box is one live sandbox. Its methods are safe for concurrent use, but one
// command runs at a time: Exec of a second is fault.Busy.
type Box interface {
	// RunCgroup is the v2 cgroup id under which all turns' processes live.
	RunCgroup() uint64
	// Exec runs a command to its end. Cancelling ctx kills what the turn
	// started since BeginTurn, and Exec returns with Cancelled. A command that
	// can't be started (not found, not executable, no such user or cwd) is an
	// Exit with code 127 or 126 and a line on Stderr, as a shell would do.
	Exec(ctx context.Context, c Command) (Exit, error)
	// BeginTurn opens a new cgroup leaf for what follows if processes of earlier
	// turns survive, so that KillTurn spares them.
	BeginTurn() error
	// KillTurn kills all that was started since BeginTurn and waits for its end.
	KillTurn(ctx context.Context) error
	// PID1 is pid 1's pid on the host. Nothing of a box that is gone may be looked
	// for by it.
	PID1() int
	// Survivors are the processes other than pid 1.
	Survivors() ([]Proc, error)
	// Program names pid 1's program as ProgramDigest names that of boxes which are started now. A box that a daemon of another release
	// has started has another one; empty: that release didn't say.
	Program() string
	// Commands counts what pid 1 has started in this box that can have changed
	// anything: commands, WriteFile and Unpack.
	Commands() uint64
	// Freeze stops every process of the box and returns when they are; Thaw lets
	// them go on. Freezing twice is once.
	Freeze(ctx context.Context) error
	Thaw() error
	// Part closes all that connects pid 1 with the outside; until Rejoin the box is
	// busy, and its processes can be saved, by what Part has started for that (nil: nothing). Rejoin needs a box that isn't frozen. A
	// box that fails either is killed.
	Part(ctx context.Context, by *criu.Program) error
	Rejoin(ctx context.Context) error
	// Resume lets the processes of a restored box go on for the first time. Other boxes
	// run already.
	Resume() error
	// Save dumps the processes of a frozen box that has parted into an empty folder.
	// It stays frozen. See package criu for what holds after a failure.
	Save(ctx context.Context, images string) (Saved, error)
	// CheckRoot returns fault.Precondition "mount_point_moved" if no box could be
	// made from this one's root as it is.
	CheckRoot() error
	// Root opens the box's root folder as it sees it itself, for transfers with
	// RESOLVE_IN_ROOT. Nil after Kill.
	Root() (*os.File, error)
	// OpenSession, CloseSession, Talk, Interrupt, Type and TerminalOf deal with programs that
	// live on between commands: see Session. An exchange is a command: no second runs beside it.
	OpenSession(ctx context.Context, s SessionSpec) (Session, error)
	CloseSession(ctx context.Context, name string) error
	Sessions() []Session
	Talk(ctx context.Context, t Talk) (TalkEnd, error)
	Interrupt(name string) (bool, error)
	Type(name string, keys []byte, rows, cols uint16) (bool, error)
	TerminalOf(ctx context.Context, name string) (Terminal, int, error)
	Facts(name string) (SessionFacts, error)
	Idle(name string) (SessionFacts, error)
	Resting(ignored func(Proc) bool) (string, error)
	// ReadFile, WriteFile, Unpack and Pack act inside the box as its root user,
	// in a process of Run, so that what they change is seen like any turn.
	ReadFile(ctx context.Context, path string, offset, limit int64) (content []byte, size int64, mode uint32, err error)
	WriteFile(ctx context.Context, path string, content []byte, mode uint32, appendTo bool) error
	// Unpack reads a tar stream into the folder path, which is made if missing;
	// entries replace what is there by name. Pack writes a file or folder as one,
	// named by the last part of path. Devices and sockets are left out by Pack
	// and refused by Unpack.
	Unpack(ctx context.Context, path string, r io.Reader) (entries, bytes int64, err error)
	Pack(ctx context.Context, path string, w io.Writer) error
	// Hooks are the paths of the programs in HooksDir, in the order of their names, as it was when the
	// box was made; none of an adopted one.
	Hooks() []string
	// SetSeed sets the BOXWOOD_SEED of a box in which nothing has run yet.
	SetSeed(seed string)
	// Record is what Adopt needs.
	Record() []byte
	// Done is closed when pid 1 is gone.
	Done() <-chan struct{}
	// Kill ends the box and returns when no process, mount, cgroup or namespace
	// of it is left. Idempotent.
	Kill(ctx context.Context) error
}
