// Package engine ties turns, nodes and captures together: the life of
// sandboxes, the capture that hides in the model's shadow, the fork from any
// past node.
//
// The path of one turn, by file: turn.go (begin, exec, end: the node is written
// and the reply goes out; command.go, sessions.go and transfer.go are what a turn is made
// of), capture.go (the shadow), halves.go (what a capture saves of processes, and how
// a child gets it: shells.go, dumps.go), fork.go (children of a node; spares.go makes
// some ahead, births.go remembers them, trials.go makes some to see whether it can be done), evaluate.go (a node graded out of its agent's
// reach), rollback.go, trees.go (where trees start), evict.go (states that go), sandbox.go
// (what is live: locks, leases, release), restart.go (what is found after a crash), audit.go
// (verdicts held against the file system).
//
// Locks, outermost first: a sandbox's slot (held for a whole turn, capture
// wait, rollback or release) > sandbox.mu (fields, never held over I/O) >
// Engine.mu (the maps). The store has its own. A capture runs without the
// slot: whoever takes the slot waits for it first.
package engine

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/engine/criu"
	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/inspector"
	"github.com/boxwood-rl/boxwood/internal/about"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

// Boxes starts sandboxes; *box.Host is the real one.
type Boxes interface {
	Start(ctx context.Context, root box.Root, id box.Identity) (box.Box, error)
	// Restore makes one of saved processes; they run when Resume says so.
	Restore(ctx context.Context, root box.Root, id box.Identity, s box.Saved, by *criu.Program) (box.Box, error)
	// Adopt finds a box of an earlier daemon by its record.
	Adopt(ctx context.Context, record []byte) (box.Box, error)
	// Sweep ends every box of an earlier daemon that wasn't adopted.
	Sweep(ctx context.Context) (killed int, err error)
	Ready() int
	// RefillInLine has what is made for later Starts made when its turn has come.
	RefillInLine(inLine func(do func() error) error)
	Close() error
}

// Parts are what an Engine is put together from. It owns and closes them.
type Parts struct {
	Store     *tree.Store
	Pool      pool.Pool
	Boxes     Boxes
	Inspector inspector.Inspector
	Stats     *stats.Recorder
	// CRIU saves what isn't empty and isn't shells alone; nil: such nodes are withheld.
	CRIU *criu.Program
	// Capabilities of the host, for Info.
	Capabilities []Capability
}

// Config of an Engine. Zero values mean the defaults named here.
type Config struct {
	StateDir string
	// RunDir holds what lasts as long as sandboxes do, control sockets and births;
	// empty: a folder of a tmpfs of the host, named after StateDir.
	RunDir string
	// Lease is how long a sandbox lives without a call: 30 minutes.
	Lease time.Duration
	// TurnDeadline of a command that names none: 10 minutes.
	TurnDeadline time.Duration
	// OutputLimit of a turn that names none: 64 KiB a stream.
	OutputLimit int
	// MaxSandboxes that may live at once: 2000.
	MaxSandboxes int
	// HookLimit is how long the hooks of one child may take together: 10 seconds.
	HookLimit time.Duration
	// Limits of a sandbox whose tree names none.
	Limits tree.Limits
	// Captures that run at once in the beginning (see adapting): 2.
	Captures int
	// Forks whose boxes are being made at once: 4. As Captures.
	Forks int
	// ForkQueue is how many children may be on their way at once, those that wait included, of one tree half as many: 4096.
	// A call that stands alone is always taken.
	ForkQueue int
	// ClientWeights are the shares of clients (see OwnerLabel) in what is scarce, beside those of others; of one that isn't there: 1.
	ClientWeights map[string]float64
	// DumpMemory bounds how many bytes of dumps are kept in memory: an eighth of the host's.
	DumpMemory int64
	// Audit is the share of turns whose verdict is compared with what really
	// changed, from 0 to 1.
	Audit float64
	// Verify is the share of captures, from 0 to 1, whose children's files are compared with what the parent saw: see walks.
	Verify float64
	// Paranoid: sums of the memory of processes are taken when they are saved, and compared when they are restored.
	Paranoid bool
	// IgnoreProcesses by the name of their command: see ignores. Empty: none.
	IgnoreProcesses []string
	// Retention of saved states; zero: all are kept until they are pruned.
	Retention Retention
	Log       *slog.Logger
}

func (c *Config) fill() {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	num := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	def(&c.Lease, 30*time.Minute)
	def(&c.TurnDeadline, 10*time.Minute)
	def(&c.HookLimit, 10*time.Second)
	num(&c.OutputLimit, 64<<10)
	num(&c.MaxSandboxes, 2000)
	num(&c.Captures, 2)
	num(&c.Forks, 4)
	num(&c.ForkQueue, 4*MaxChildren)
	if c.Limits == (tree.Limits{}) {
		c.Limits = tree.Limits{MemoryBytes: 2 << 30, Pids: 512, CPUMillis: 0, DiskBytes: 4 << 30}
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
}

// clonesAtOnce is as many as the pool has folders to make them in.
const clonesAtOnce = 16

// bodyQuantum is how far one tree may get ahead of another in the making of bodies for the sake of an earlier first child:
// a few bodies' time.
const bodyQuantum = 5 * time.Millisecond

// Engine runs sandboxes and grows trees. Safe for concurrent use.
type Engine struct {
	Parts
	cfg Config
	log *slog.Logger

	keepers map[tree.ProcessKind]keeper
	vault   *vault
	walks   *walks
	dumps   *dumpStore
	leader  leader

	captures  *sched.Runner
	audits    audits
	sampler   sampler
	ends      *sched.Pace   // of sandboxes
	clones    *sched.Runner // clones being made: those under way share transactions
	attaches  *sched.Runner // boxes being made
	spares    *spares
	trials    *trials
	secrets   *secrets
	ignores   ignores
	removals  *sched.Runner // kills of released boxes, removal of file state
	postponed atomic.Int64  // removals that failed and will be tried again
	condemned atomic.Bool   // one of them is removeCondemned
	setups    flights       // set-ups being run, by digest
	images    sync.Mutex    // one import or removal at a time

	mu        sync.Mutex
	sandboxes map[ids.Sandbox]*sandbox
	turns     map[ids.Turn]*turn
	pending   map[ids.Node]*sched.Job // captures not yet decided
	held      map[string]int          // snapshots and process states that are being read
	importing map[ids.Image]int       // trees that come and stand on it
	removing  ids.Image               // nothing new may stand on it
	retained  retained
	reserved  int // sandboxes being made
	closing   bool
	settled   chan struct{} // closed when closing and nothing is reserved

	closedTree chan struct{} // cap 1: there is something to archive

	recording sync.WaitGroup // records that are on their way to the disk

	life context.Context // until Close
	stop context.CancelFunc
	wg   sync.WaitGroup
}

// New puts an Engine together and brings it to the state its store describes:
// sandboxes of an earlier daemon are adopted or ended, captures that were
// pending are made again or their nodes withheld.
func New(ctx context.Context, parts Parts, cfg Config) (*Engine, error) {
	cfg.fill()
	if cfg.RunDir == "" {
		cfg.RunDir = chooseRunDir(cfg.StateDir)
	}
	life, stop := context.WithCancel(context.WithoutCancel(ctx))
	e := &Engine{
		Parts: parts, cfg: cfg, log: cfg.Log, life: life, stop: stop,
		captures:  sched.NewRunner(adapting(sched.Config{Slots: cfg.Captures})),
		removals:  sched.NewRunner(adapting(sched.Config{Slots: 2})),
		ends:      sched.NewPace(uint64(time.Now().UnixNano())),
		clones:    sched.NewRunner(sched.Config{Slots: clonesAtOnce, Quantum: bodyQuantum}),
		attaches:  sched.NewRunner(adapting(sched.Config{Slots: cfg.Forks, Quantum: bodyQuantum, Bound: cfg.ForkQueue})),
		sandboxes: map[ids.Sandbox]*sandbox{},
		turns:     map[ids.Turn]*turn{},
		pending:   map[ids.Node]*sched.Job{},
		held:      map[string]int{},
		importing: map[ids.Image]int{},
		settled:   make(chan struct{}),

		closedTree: make(chan struct{}, 1),
	}
	e.spares, e.trials = newSpares(e), newTrials(e)
	e.ignores.names = cfg.IgnoreProcesses
	e.keepers = map[tree.ProcessKind]keeper{tree.Empty: emptyKeeper{e}, tree.Shells: shellsKeeper{e}}
	var err error
	if e.vault, err = openVault(cfg.StateDir); err != nil {
		return nil, err
	}
	if e.walks, err = openWalks(cfg.StateDir, cfg.Verify); err != nil {
		return nil, err
	}
	if e.dumps, err = openDumpStore(e.vault, cfg.RunDir, cfg.DumpMemory, e.log.Error); err != nil {
		return nil, fmt.Errorf("opening the dumps in memory: %w", err)
	}
	if parts.CRIU != nil {
		e.keepers[tree.Dump] = newDumpKeeper(e, parts.CRIU)
	}
	if err := os.MkdirAll(e.boxDir(), 0o700); err != nil {
		return nil, fmt.Errorf("making the folder of box records: %w", err)
	}
	if e.secrets, err = openSecrets(cfg.RunDir); err != nil {
		return nil, err
	}
	e.log = about.Logger(e.Veiled(e.log))
	if err := e.reconcile(ctx); err != nil {
		return nil, err
	}
	if err := e.secrets.retain(func(t ids.Tree) bool { _, err := e.Store.View().Tree(t); return err == nil }); err != nil {
		return nil, err
	}
	e.uprootGraders(ctx)
	e.Boxes.RefillInLine(func(do func() error) error {
		release, err := e.attaches.Acquire(life, sched.Work{Class: sched.Refill})
		if err != nil {
			return err
		}
		err = do()
		release(err)
		return err
	})
	go e.spares.run()
	go e.trials.run()
	e.wg.Add(4)
	go e.reapExpired(life)
	go e.sampleAgain(life)
	go e.adaptAgain(life)
	go e.archiveClosed(life)
	if !cfg.Retention.none() {
		e.wg.Add(1)
		go e.retainAgain(life)
	}
	return e, nil
}

func (e *Engine) boxDir() string { return filepath.Join(e.cfg.RunDir, "births") }

// Info is what the engine knows of itself.
type Info struct {
	Sandboxes, Nodes int
	// Zygotes that wait, without those that spares will take.
	Zygotes         int
	Pool            pool.Usage
	Limits          tree.Limits
	LostEvents      uint64
	PendingRemovals int
	Capabilities    []Capability
}

// Capability is something of the host that work depends on. State is 1 yes,
// 2 no, 3 unknown.
type Capability struct {
	Name, Detail string
	State        int
}

// Info reads the engine's counters.
func (e *Engine) Info() (Info, error) {
	usage, err := e.Pool.Usage()
	if err != nil {
		return Info{}, err
	}
	e.mu.Lock()
	live := len(e.sandboxes)
	e.mu.Unlock()
	found := append(slices.Clone(e.Capabilities), e.dumps.capability())
	if e.cfg.Audit > 0 {
		found = append(found, e.audits.capability(e.cfg.Audit))
	}
	if e.cfg.Verify > 0 {
		found = append(found, e.walks.capability())
	}
	if k, ok := e.keepers[tree.Dump].(*dumpKeeper); ok {
		found = append(slices.Clone(found), e.trials.capability())
		if e.cfg.Paranoid {
			found = append(found, k.memory.capability())
		}
	}
	if len(e.ignores.names) > 0 {
		found = append(slices.Clone(found), e.ignores.capability())
	}
	return Info{
		Sandboxes: live, Nodes: e.Store.View().NodeCount(""), Zygotes: max(0, e.Boxes.Ready()-e.spares.missing()), Pool: usage,
		Limits: e.cfg.Limits, LostEvents: e.Inspector.LostEvents(),
		PendingRemovals: e.removals.Pending() + int(e.postponed.Load()) + e.trials.pending() + e.Pool.PendingRemovals(), Capabilities: found,
	}, nil
}

// KernelRelease is the running kernel's name, as uname -r says it; empty if it doesn't.
func KernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// Close refuses new work, cancels running turns (their nodes say so), finishes
// the captures that were acknowledged, ends every sandbox and lets go of the
// parts. Each step is bounded by ctx. Idempotent.
func (e *Engine) Close(ctx context.Context) error {
	e.mu.Lock()
	if e.closing {
		e.mu.Unlock()
		return nil
	}
	e.closing = true
	if e.reserved == 0 {
		close(e.settled)
	}
	e.mu.Unlock()
	e.stop()
	e.wg.Wait()
	select {
	case <-e.settled:
	case <-ctx.Done():
	}

	var all sync.WaitGroup
	for _, s := range e.live() {
		all.Add(1)
		go func() {
			defer all.Done()
			if err := e.release(ctx, s, stats.Shutdown); err != nil {
				e.log.WarnContext(ctx, "releasing a sandbox at shutdown", "sandbox", s.id, "error", err)
			}
		}()
	}
	all.Wait()
	if err := e.spares.close(ctx); err != nil {
		e.log.WarnContext(ctx, "ending spares at shutdown", "error", err)
	}
	e.trials.close()
	e.captures.Close()
	e.clones.Close()
	e.attaches.Close()
	e.removals.Drain(ctx)
	e.removals.Close()
	e.recording.Wait()
	e.dumps.close()
	e.secrets.forget()
	return e.closeParts()
}
