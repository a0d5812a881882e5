package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// The process half of a checkpoint is of one kind (docs/PROCESS-STATE.md). Each
// kind has a keeper, which saves that half in the freeze of a capture and makes it
// again in a child. What a keeper can't keep exactly it refuses, and the node is
// withheld (law 6).

// keeper is one kind of process state. Safe for concurrent use.
type keeper interface {
	// prepare begins to save the process half of a body that is running and in no turn.
	// errOtherKind: this half isn't of this kind, another keeper may have it. Any other
	// error: it can't be saved, and says why.
	prepare(ctx context.Context, b *body) (saving, error)
	// start gives a body a box whose root is root and whose processes are as state says, which
	// is nil for Empty. It hands out nothing that it hasn't compared with
	// what was saved (law 5). On failure nothing of the box is left.
	start(ctx context.Context, b *body, root box.Root, id box.Identity, state *tree.ProcessState) error
	// verify holds a saved content against its record.
	verify(state *tree.ProcessState) error
}

// saving is one process half on its way into a checkpoint. freeze, then finish, each
// at most once; abort after a failure, or instead of them.
type saving interface {
	// freeze takes what has to be true at the instant of the snapshot (law 4). The box is
	// frozen, its snapshot is taken next; it stays frozen whatever freeze does. A process half that
	// isn't any more as it was when prepare saw it is an error.
	freeze(ctx context.Context) error
	// finish runs after the thaw, when the snapshot is complete; ck says all of the
	// checkpoint but its process state. It returns that, with its content in the vault, or
	// nil for Empty. A state that can't be restored is an error: the node is withheld.
	finish(ctx context.Context, ck *tree.Checkpoint) (*tree.ProcessState, error)
	// abort gives back what was saved. Harmless after anything else, and twice.
	abort()
}

// errOtherKind is a keeper's answer to what is of another kind.
var errOtherKind = errors.New("this process state is of another kind")

// kinds in the order in which they are tried, cheapest first.
var kinds = []tree.ProcessKind{tree.Empty, tree.Shells, tree.Dump}

// prepareHalf finds the keeper of what runs in a body. Of several that refuse, the last
// knows best.
func (e *Engine) prepareHalf(ctx context.Context, policy tree.CapturePolicy, b *body) (saving, tree.ProcessKind, error) {
	refused := error(fault.New(fault.Precondition, "survivors", "processes survive and can't be saved yet"))
	for _, kind := range kindsOf(policy) {
		k := e.keepers[kind]
		if k == nil {
			continue
		}
		s, err := k.prepare(ctx, b)
		if err == nil {
			return s, kind, nil
		}
		if !errors.Is(err, errOtherKind) {
			refused = err
		}
	}
	return nil, 0, refused
}

// startHalf gives a body a box that stands at a checkpoint with this process state; nil: Empty.
func (e *Engine) startHalf(ctx context.Context, b *body, root box.Root, id box.Identity, state *tree.ProcessState) error {
	kind := tree.Empty
	if state != nil {
		kind = state.Kind
	}
	k := e.keepers[kind]
	if k == nil {
		return fault.New(fault.Unsupported, "no_keeper", "this boxwood can't restore process states of kind %d", kind)
	}
	return k.start(ctx, b, root, id, state)
}

// stateOf reads the process state of a checkpoint; nil: it has none.
func (e *Engine) stateOf(ck *tree.Checkpoint) (*tree.ProcessState, error) {
	if ck.State == "" {
		return nil, nil
	}
	return e.Store.View().Process(ck.State)
}

// emptyKeeper keeps what needs no keeping: no process of a turn survives.
type emptyKeeper struct{ e *Engine }

type emptySaving struct {
	e *Engine
	b *body
}

func (k emptyKeeper) prepare(_ context.Context, b *body) (saving, error) {
	s := emptySaving{k.e, b}
	if err := s.check(); err != nil {
		return nil, err
	}
	return s, nil
}

func (s emptySaving) check() error {
	alive, err := s.e.survivors(s.b.box)
	switch {
	case err != nil:
		return fmt.Errorf("looking for survivors: %w", err)
	case len(alive) > 0 || s.b.shells.beyond:
		return errOtherKind
	}
	left, err := s.e.objectsLeft(s.b)
	switch {
	case err != nil:
		return fmt.Errorf("looking for kernel objects: %w", err)
	case left:
		return errOtherKind
	}
	return nil
}

// freeze looks again: nobody was there, so that nobody can have come.
func (s emptySaving) freeze(context.Context) error {
	if err := s.check(); err != nil {
		return fault.New(fault.Precondition, "survivors", "processes appeared between the turn and its capture")
	}
	return nil
}

func (emptySaving) finish(context.Context, *tree.Checkpoint) (*tree.ProcessState, error) {
	return nil, nil
}
func (emptySaving) abort() {}

func (emptyKeeper) verify(*tree.ProcessState) error { return nil }

func (k emptyKeeper) start(ctx context.Context, b *body, root box.Root, id box.Identity, _ *tree.ProcessState) (err error) {
	b.box, err = k.e.Boxes.Start(ctx, root, id)
	return err
}

// vault keeps the content of process states, one folder each, below the state
// directory. What is in it and on no record is removed by a start. A content is complete
// and flushed before its record is written, and compared with its digest
// whenever it is read.
type vault struct{ dir string }

const (
	processesDir = "processes" // of the state folder
	contentName  = "content"   // of what is one file
)

func openVault(state string) (*vault, error) {
	v := &vault{dir: filepath.Join(state, processesDir)}
	if err := os.MkdirAll(v.dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the folder of process states: %w", err)
	}
	return v, nil
}

// folder of one state; make makes it.
func (v *vault) folder(id ids.Process) string { return filepath.Join(v.dir, string(id)) }

func (v *vault) make(id ids.Process) (string, error) {
	dir := v.folder(id)
	return dir, os.Mkdir(dir, 0o700)
}

func (v *vault) remove(id ids.Process) error { return os.RemoveAll(v.folder(id)) }

// putFile keeps a content that is one file. It is on the disk when putFile returns.
func (v *vault) putFile(id ids.Process, content []byte) (digest string, err error) {
	dir, err := v.make(id)
	if err != nil {
		return "", fmt.Errorf("keeping a process state: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("keeping a process state: %w", err), v.remove(id))
		}
	}()
	f, err := os.OpenFile(filepath.Join(dir, contentName), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if _, err := f.Write(content); err != nil {
		return "", err
	}
	if err := errors.Join(f.Sync(), flush(dir), flush(v.dir)); err != nil {
		return "", err
	}
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:]), nil
}

// file reads a content that putFile kept, and refuses any other than was kept.
func (v *vault) file(state *tree.ProcessState) ([]byte, error) {
	content, err := v.read(state)
	if err != nil {
		return nil, errVault(state, err)
	}
	return content, nil
}

func (v *vault) read(state *tree.ProcessState) ([]byte, error) {
	f, err := os.Open(filepath.Join(v.folder(state.ID), contentName))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, state.Bytes+1))
	if err != nil {
		return nil, err
	}
	if sum := sha256.Sum256(content); hex.EncodeToString(sum[:]) != state.Digest {
		return nil, errors.New("it has other bytes than were saved")
	}
	return content, nil
}

// Copy is one place where the content of a process state is.
type Copy struct {
	Dir string
	Err error // it isn't what was saved
}

// Copies finds what a daemon with this state and run folder has of a process state, and holds it against its
// record, for who has no daemon. A dump is in memory first, and on the disk from a little later.
func Copies(state, run string, p *tree.ProcessState) (list []Copy) {
	v := &vault{filepath.Join(state, processesDir)}
	places := []string{v.folder(p.ID)}
	if p.Kind == tree.Dump {
		places = append(places, filepath.Join(MemoryDir(run), string(p.ID)))
	}
	for _, dir := range places {
		if _, err := os.Lstat(dir); errors.Is(err, os.ErrNotExist) {
			continue
		}
		c := Copy{Dir: dir}
		if p.Kind == tree.Dump {
			c.Err = checkSeal(dir, p.Digest)
		} else {
			_, c.Err = v.read(p)
		}
		list = append(list, c)
	}
	return list
}

// MemoryDir is where dumps are in memory.
func MemoryDir(run string) string { return filepath.Join(run, dumpsDir) }

func errVault(state *tree.ProcessState, err error) error {
	return fault.New(fault.DataLoss, "process_state_lost", "reading process state %s: %w", state.ID, err)
}

// reconcile removes what is on no record, and says how much that was.
func (v *vault) reconcile(keep map[ids.Process]bool) (removed int, err error) {
	entries, err := os.ReadDir(v.dir)
	if err != nil {
		return 0, err
	}
	var errs []error
	for _, d := range entries {
		if id := ids.Process(d.Name()); !keep[id] {
			errs = append(errs, v.remove(id))
			removed++
		}
	}
	return removed, errors.Join(errs...)
}

// verifyState holds the process half of a checkpoint against what was saved.
func (e *Engine) verifyState(v *tree.View, ck *tree.Checkpoint) error {
	if ck.State == "" {
		return nil
	}
	state, err := v.Process(ck.State)
	if err != nil {
		return err
	}
	if k := e.keepers[state.Kind]; k != nil {
		return k.verify(state)
	}
	return errVault(state, errors.New("nothing here can read it"))
}
