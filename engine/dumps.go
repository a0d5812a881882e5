package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/engine/criu"
	"github.com/boxwood-rl/boxwood/engine/witness"
	"github.com/boxwood-rl/boxwood/internal/doctor"
	"github.com/boxwood-rl/boxwood/internal/failpoint"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/printable"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

// dumpKeeper keeps the process halves that CRIU can save and restore: anything
// that isn't empty and isn't shells alone.
//
// A dump is a folder:
//
//	images/       CRIU's files
//	witness.json  what the processes looked like in the freeze, seen by package witness
//	dump.json     what a restore needs besides: struct dumpFile
//	sums          sha256, size and name of each of these files, a line each
//
// Its digest is that of sums, which every restore starts from: nothing tells CRIU what to do, and nothing restored
// runs, that isn't as it was saved (law 5). It lies in memory first, in the
// run folder, and is copied to the vault behind the capture (dumpstore.go, dumppages.go). Both outlive a killed daemon; a host
// that goes down before the copy is on the disk loses the dump, and the next start
// withholds its nodes.
//
// A child that has been restored is compared with witness.json before it may
// run and before anybody hears of it. Both halves of that look are taken of frozen trees.
type dumpKeeper struct {
	e       *Engine
	program *criu.Program
	kernel  string

	// works is the outcome of a dump and restore of a process of our own: a CRIU that
	// hangs on this kernel would take a sandbox with it.
	works func() error

	memory memoryChecks
}

// dumpLimit is how long CRIU may take for one dump or one restore.
const dumpLimit = 40 * time.Second

type dumpFile struct {
	box.Saved
	Program string // digest of pid 1's
	// Shells is what the sessions said of themselves, if it is known to be true of the dump.
	Shells []byte `json:",omitempty"`
}

func newDumpKeeper(e *Engine, program *criu.Program) *dumpKeeper {
	left, _ := filepath.Glob(filepath.Join(e.cfg.StateDir, doctor.CRIUFolders+"*"))
	for _, dir := range left { // of a daemon that was killed
		_ = os.RemoveAll(dir)
	}
	k := &dumpKeeper{e: e, program: program, kernel: KernelRelease()}
	k.works = sync.OnceValue(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), dumpLimit)
		defer cancel()
		return doctor.CheckCRIU(ctx, program.Path(), e.cfg.StateDir)
	})
	return k
}

// version names what a dump was made with.
func (k *dumpKeeper) version() string { return "CRIU " + k.program.Version() }

// dumpSaving is one dump being made.
type dumpSaving struct {
	k      *dumpKeeper
	b      *body
	id     ids.Process
	dir    string
	parted bool
	kept   bool
	saw    dumped
}

func (k *dumpKeeper) prepare(ctx context.Context, b *body) (saving, error) {
	if err := k.works(); err != nil {
		return nil, fault.New(fault.Unsupported, "criu_unfit", "processes survive, and CRIU doesn't work on this host: %w", err).
			WithHint("boxwood doctor says more")
	}
	if b.box.Program() != box.ProgramDigest() {
		return nil, fault.New(fault.Precondition, "other_program", "processes survive, and their pid 1 is that of another version of Boxwood, which alone could restore them").
			WithHint("go on in a fork of an earlier node")
	}
	if s := k.keep(b); s != nil {
		return s, nil
	}
	s := &dumpSaving{k: k, b: b, id: ids.NewProcess()}
	var err error
	if s.dir, err = k.e.dumps.begin(s.id, memoryOf(b.box)); err != nil {
		return nil, err
	}
	if err := b.box.Part(ctx, k.program); err != nil {
		s.abort()
		return nil, err
	}
	s.parted = true
	return s, nil
}

// memoryOf is about how large a dump will be.
func memoryOf(b box.Box) (bytes int64) {
	procs, _ := b.Survivors()
	for _, p := range procs {
		if f, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.HostPID)); err == nil {
			var size, resident, shared int64
			fmt.Sscan(string(f), &size, &resident, &shared)
			bytes += resident * int64(os.Getpagesize())
		}
	}
	return bytes
}

func (s *dumpSaving) freeze(ctx context.Context) error {
	objects, err := witness.ObjectsOf(s.b.box.PID1())
	if err != nil {
		return fmt.Errorf("looking for kernel objects: %w", err)
	}
	if err := unsavable(objects); err != nil {
		return err
	}
	was, err := look(s.b.box)
	if err != nil {
		return err
	}
	if err := unfit(was); err != nil {
		return err
	}
	if err := inPassing(s.b.box.PID1(), was); err != nil {
		return err
	}
	older, err := s.b.watch.Superseded()
	if err != nil {
		return fmt.Errorf("looking at what is mapped: %w", err)
	}
	if len(older) > 0 {
		return fault.New(fault.Precondition, "mapped_before", "a process goes on seeing %s as it was before it was changed, which can't be saved", brief([]byte(older[0]), 200))
	}
	images := filepath.Join(s.dir, imagesDir)
	if err := os.Mkdir(images, 0o755); err != nil {
		return err
	}
	told := s.b.toldOf()
	ctx, cancel := context.WithTimeout(ctx, dumpLimit)
	defer cancel()
	saved, err := s.b.box.Save(ctx, images)
	if err != nil {
		return s.unharmed(ctx, err, was)
	}
	if err := failpoint.Hit("dump saved"); err != nil {
		return err
	}
	if err := s.stoodStill(ctx, was); err != nil {
		return errors.Join(err, os.RemoveAll(images))
	}
	if err := s.k.remember(was, images); err != nil {
		return err
	}
	s.saw = dumped{s.id, was, len(saved.Sessions) > 0, told}
	if err := s.write("witness.json", was); err != nil {
		return err
	}
	return s.write("dump.json", dumpFile{saved, box.ProgramDigest(), told})
}

// unsavable refuses what CRIU would lose without a word.
func unsavable(o witness.Objects) error {
	switch {
	case o.Queues > 0:
		return fault.New(fault.Precondition, "posix_queue", "%d POSIX message queues can't be saved", o.Queues)
	case o.Keys > 0:
		return fault.New(fault.Precondition, "keyring", "%d keys in keyrings can't be saved", o.Keys)
	}
	return nil
}

// unfit names what CRIU is known to refuse, in better words than its own.
func unfit(s *witness.State) error {
	if len(s.Traced) > 0 {
		return fault.New(fault.Precondition, "traced", "process %d is traced by another, which can't be saved", s.Traced[0])
	}
	for _, pid := range slices.Sorted(maps.Keys(s.Processes)) {
		for _, file := range s.Processes[pid].Files {
			if strings.HasPrefix(file, "anon_inode:[io_uring]") {
				return fault.New(fault.Precondition, "io_uring", "process %d holds an io_uring, which can't be saved", pid)
			}
		}
	}
	return nil
}

// A passing state is one that can't be saved, and that most programs leave in a moment.
type passing struct{ error }

func (p passing) Unwrap() error { return p.error }

// A capture tries passingTries times, however long that takes, and again for passingPatience. A program that stays as it
// is withholds the node.
const (
	passingTries    = 3
	passingPatience = 500 * time.Millisecond
)

// inPassing says what of a frozen box can't be made again now, and can be soon: a group in the foreground that
// is gone, which nobody can put there, and the name of a connection whose other end is closed.
func inPassing(pid1 int, s *witness.State) error {
	if len(s.Adrift) > 0 {
		return passing{fault.New(fault.Precondition, "no_foreground", "the terminal of process %d has a foreground group that is gone", s.Adrift[0])}
	}
	half, err := witness.HalfClosed(pid1)
	if err != nil {
		return err
	}
	if len(half) > 0 {
		return passing{fault.New(fault.Precondition, "half_closed", "a connection to %s whose other end is closed can't be saved", printable.Line(half[0])).
			WithHint("the server that accepted it has to close it")}
	}
	return nil
}

// look sees what there is in a frozen box.
func look(b box.Box) (*witness.State, error) {
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		s, err := lookOnce(b)
		gone := errors.Is(err, witness.ErrExiting) || errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH)
		if !gone || time.Since(began) > exitPatience {
			return s, err
		}
	}
}

// sinceFrozen says what of a box isn't as it was, which has been frozen since.
func sinceFrozen(b box.Box, was *witness.State) ([]string, error) {
	is, err := look(b)
	if err != nil {
		return nil, err
	}
	return append(witness.Diff(was, is), witness.Moved(was, is)...), nil
}

// exitPatience is how long processes that are ending anyway may take to be gone.
const exitPatience = 2 * time.Second

func lookOnce(b box.Box) (*witness.State, error) {
	procs, err := b.Survivors()
	if err != nil {
		return nil, err
	}
	pids := make([]int, len(procs))
	for i, p := range procs {
		pids[i] = p.HostPID
	}
	return witness.Of(b.PID1(), pids)
}

// stoodStill looks once more, after the dump: what was seen before is true of it only if nothing ran in between. A process that
// did has the dump made again. A freeze that was no freeze was found by this (see cgroup.Freeze); it is kept for the next one.
func (s *dumpSaving) stoodStill(ctx context.Context, was *witness.State) error {
	d, err := sinceFrozen(s.b.box, was)
	if err != nil {
		return fmt.Errorf("looking again: %w", err)
	}
	if len(d) > 0 && !sabotage.On("still") {
		s.k.e.log.WarnContext(ctx, "a process ran while it was saved", "generation", s.b.gen, "differences", d[:min(len(d), 3)])
		return passing{fault.New(fault.Precondition, "not_frozen", "a process ran while it was saved: %s", d[0])}
	}
	return nil
}

// unharmed is called after a dump that failed: either the box is exactly as it was
// before, or it is ended.
func (s *dumpSaving) unharmed(ctx context.Context, failed error, was *witness.State) error {
	d, err := sinceFrozen(s.b.box, was)
	if err == nil && len(d) > 0 {
		err = errors.New(strings.Join(d[:min(len(d), 3)], "; "))
	}
	if err == nil {
		return failed
	}
	s.k.e.log.ErrorContext(ctx, "a dump that failed harmed its sandbox, which is ended", "generation", s.b.gen, "error", failed, "found", err)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	if kerr := s.b.box.Kill(ctx); kerr != nil {
		s.k.e.log.ErrorContext(ctx, "ending a harmed sandbox", "generation", s.b.gen, "error", kerr)
	}
	return fault.New(fault.DataLoss, "dump_harmed", "the sandbox was lost when its processes were saved: %w", failed)
}

func (s *dumpSaving) write(name string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(s.dir, name), text, 0o600)
}

func (s *dumpSaving) finish(ctx context.Context, ck *tree.Checkpoint) (*tree.ProcessState, error) {
	if err := s.rejoin(ctx); err != nil {
		return nil, err
	}
	digest, bytes, err := seal(s.dir)
	if err != nil {
		return nil, fmt.Errorf("sealing a dump: %w", err)
	}
	before := ids.Process("")
	if was := s.b.checkpoint; was != nil && was.Process == tree.Dump {
		before = was.State
	}
	if err := failpoint.Hit("dump sealed"); err != nil {
		return nil, err
	}
	if err := s.k.e.dumps.complete(s.k.e.work(sched.Persist, ck.Tree), s.id, bytes, before); err != nil {
		return nil, err
	}
	s.kept, s.b.dumped = true, s.saw
	return &tree.ProcessState{
		ID: s.id, Kind: tree.Dump, Digest: digest, Bytes: bytes, Kernel: s.k.kernel, Program: s.k.version(), CreatedAt: ck.CreatedAt,
	}, nil
}

func (s *dumpSaving) rejoin(ctx context.Context) error {
	if !s.parted {
		return nil
	}
	s.parted = false
	return s.b.box.Rejoin(ctx)
}

func (s *dumpSaving) abort() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := s.rejoin(ctx); err != nil {
		s.k.e.log.ErrorContext(ctx, "a sandbox was lost after a dump that failed", "generation", s.b.gen, "error", err)
	}
	if !s.kept {
		if err := s.k.e.dumps.drop(s.id); err != nil {
			s.k.e.log.ErrorContext(ctx, "removing a dump", "state", s.id, "error", err)
		}
	}
}

func (k *dumpKeeper) verify(state *tree.ProcessState) error {
	err := k.e.dumps.with(k.e.dumps.place, state.ID, func(dir string) error { return checkSeal(dir, state.Digest) })
	if err != nil {
		return errVault(state, err)
	}
	return nil
}

// with gives do the folder of a dump, where find or place finds it. If that is let go from memory meanwhile, for another dump, whatever do made of what
// was left of it counts for nothing: it is run once more, where the dump is then.
func (s *dumpStore) with(where func(ids.Process) (string, error), id ids.Process, do func(dir string) error) error {
	dir, err := where(id)
	if err != nil {
		return err
	}
	was, _ := os.Stat(dir)
	if err = do(dir); err == nil {
		return nil
	}
	other, gone := where(id)
	if is, _ := os.Stat(other); gone == nil && !os.SameFile(was, is) {
		return do(other)
	}
	return err
}

func (k *dumpKeeper) start(ctx context.Context, b *body, root box.Root, id box.Identity, state *tree.ProcessState) error {
	if err := k.works(); err != nil {
		return fault.New(fault.Unsupported, "criu_unfit", "CRIU doesn't work on this host: %w", err)
	}
	found := false
	err := k.e.dumps.with(k.e.dumps.find, state.ID, func(dir string) error {
		found = true
		return k.restore(ctx, b, root, id, state, dir)
	})
	if err != nil && !found {
		return errVault(state, err)
	}
	return err
}

// restore is start from a folder.
func (k *dumpKeeper) restore(ctx context.Context, b *body, root box.Root, id box.Identity, state *tree.ProcessState, dir string) error {
	pages, err := vet(dir, state.Digest)
	if err != nil {
		return errVault(state, err)
	}
	was, file, err := readDump(dir)
	if err != nil {
		return errVault(state, err)
	}
	if file.Program != box.ProgramDigest() {
		return fault.New(fault.Precondition, "other_program", "it was saved by another version of Boxwood, whose pid 1 isn't here")
	}
	limit, cancel := context.WithTimeout(ctx, dumpLimit)
	defer cancel()
	file.Vetted = pages
	bx, err := k.e.Boxes.Restore(limit, root, id, file.Saved, k.program)
	if err != nil {
		if damaged := pages(); damaged != nil { // whatever CRIU made of it
			return errVault(state, damaged)
		}
		if state.Kernel != k.kernel || state.Program != k.version() {
			err = fmt.Errorf("saved under Linux %s by %s, restored under Linux %s by %s: %w", state.Kernel, state.Program, k.kernel, k.version(), err)
		}
		return err
	}
	if err := k.compare(ctx, bx, state, was); err != nil {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		return errors.Join(err, bx.Kill(end))
	}
	b.box, b.dumped = bx, dumped{state.ID, was, len(file.Sessions) > 0, file.Shells}
	return nil
}

// vet holds a dump against its record before anything of it runs. What tells CRIU what to do is right when vet
// returns; the pages, which only fill memory, are looked at while CRIU works, and pages waits for that.
func vet(dir, digest string) (pages func() error, err error) {
	if sabotage.On("dump") {
		return func() error { return nil }, nil
	}
	s, err := openSeal(dir, digest)
	if err == nil {
		err = s.check(false)
	}
	if err != nil {
		return nil, err
	}
	pages = sync.OnceValue(func() error { return s.check(true) })
	go pages()
	return pages, nil
}

// compare holds a restored child against its parent in the freeze.
func (k *dumpKeeper) compare(ctx context.Context, b box.Box, state *tree.ProcessState, was *witness.State) error {
	is, err := look(b)
	if err != nil {
		return fmt.Errorf("looking at a restored child: %w", err)
	}
	if given, err := witness.GiveSockets(was, is); err != nil {
		return err
	} else if given {
		if is, err = look(b); err != nil {
			return fmt.Errorf("looking at a restored child: %w", err)
		}
	}
	d := witness.Diff(was, is)
	if len(d) == 0 {
		if sabotage.On("memory") {
			procs, _ := b.Survivors()
			for _, p := range procs {
				sabotage.FlipHeap(p.HostPID)
			}
		}
		if d, err = k.memoryDiff(was, is); err != nil {
			return err
		}
	}
	if len(d) == 0 {
		return nil
	}
	k.e.secrets.all().maskTexts(d)
	kept := k.e.keepCase(string(state.ID), struct {
		State       *tree.ProcessState
		Differences []string
		Was, Is     *witness.State
	}{state, d, was, is})
	k.e.log.ErrorContext(ctx, "a restored child isn't what was saved", "state", state.ID, "differences", d, "case", kept)
	return fault.New(fault.DataLoss, "restored_differs", "a restored child isn't what was saved: %s", strings.Join(d[:min(len(d), 3)], "; "))
}

func readDump(dir string) (*witness.State, dumpFile, error) {
	var file dumpFile
	text, err := os.ReadFile(filepath.Join(dir, "witness.json"))
	if err != nil {
		return nil, file, err
	}
	was, err := witness.Decode(text)
	if err != nil {
		return nil, file, err
	}
	if text, err = os.ReadFile(filepath.Join(dir, "dump.json")); err != nil {
		return nil, file, err
	}
	if err := json.Unmarshal(text, &file); err != nil {
		return nil, file, err
	}
	file.Images = filepath.Join(dir, imagesDir)
	return was, file, nil
}

// leader is what pid 1 of a fresh box looks like, of which a turn can alter some
// things that all it starts inherits.
type leader struct {
	once sync.Once
	mu   sync.Mutex
	is   []string
}

// noteLeader looks at the pid 1 of the first box, in which nothing has run yet.
func (e *Engine) noteLeader(ctx context.Context, b box.Box) {
	e.leader.once.Do(func() {
		is, err := witness.LeaderOf(b.PID1())
		if err != nil {
			e.log.WarnContext(ctx, "pid 1 can't be looked at", "error", err)
		}
		e.leader.mu.Lock()
		e.leader.is = is
		e.leader.mu.Unlock()
	})
}

// objectsLeft says whether turns have left something in the kernel that has no process, or
// altered pid 1: neither is a part of Empty or Shells. It looks only where a verdict or the
// checkpoint before says that there may be any.
func (e *Engine) objectsLeft(b *body) (bool, error) {
	if !b.touchedProcesses && (b.checkpoint == nil || b.checkpoint.Process != tree.Dump) {
		return false, nil
	}
	o, err := witness.ObjectsOf(b.box.PID1())
	if err != nil || !o.None() {
		return true, err
	}
	is, err := witness.LeaderOf(b.box.PID1())
	e.leader.mu.Lock()
	defer e.leader.mu.Unlock()
	return e.leader.is == nil || !slices.Equal(is, e.leader.is), err
}

// prove marks the nodes of a checkpoint as proven: it has been restored and found equal.
func (e *Engine) prove(ctx context.Context, ck *tree.Checkpoint) {
	_, err := e.Store.Update(ctx, func(tx *tree.Tx) error { return tx.SetProven(ck.ID) })
	if err != nil && !fault.Is(err, fault.NotFound) {
		e.log.ErrorContext(ctx, "marking a checkpoint as proven", "checkpoint", ck.ID, "error", err)
	}
}
