package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/boxwood-rl/boxwood/engine/shell"
	"github.com/boxwood-rl/boxwood/engine/witness"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
	"github.com/boxwood-rl/boxwood/tree"
)

// A capture beside processes that are still as the last checkpoint's dump has them makes no other: its checkpoint is a
// new snapshot and that dump. Law 4 allows it if the half kept from before can't have changed,
// and two who share no code must say so in the freeze of the snapshot: the inspector, that none of the processes
// ran or was reached, and that no file it uses has changed, nor anything on the way to one; and the witness, that all
// looks as it did when the dump was made. Any doubt, and they are dumped again.
//
// Sessions run in every turn. Of them a dump is true if all say of themselves what they said when it was made, as for
// kind shells; see toldOf. A session that says otherwise, or that can't be told by what it says, is dumped again.
//
// By the same rule a checkpoint may follow that keeps the dump once more: nothing changed from one to the next.

// keptSaving is a dump on record that may still be true.
type keptSaving struct {
	b        *body
	state    *tree.ProcessState
	was      *witness.State
	paranoid bool
}

// errNotKept: the processes have to be saved anew. The sandbox is untouched.
var errNotKept = errors.New("the processes aren't as they were saved")

// dumped is what a body's processes were saved as, or restored from.
type dumped struct {
	id       ids.Process
	was      *witness.State
	sessions bool
	shells   []byte // what the sessions said of themselves; nil: not known to be true of the dump
}

// toldOf is what the sessions of a frozen body said of themselves at the end of the turn, if that is all there is to them
// and true to this instant; nil: it isn't known. Nobody else has run since the last capture, so that nobody can have
// woken them since; and none has, or had, a job: what a shell remembers of jobs isn't told.
func (b *body) toldOf() []byte {
	if len(b.box.Sessions()) == 0 || b.shells.now == nil || len(b.watch.ProcessChanges()) > 0 || !b.asTold() {
		return nil
	}
	for _, s := range readShells(b.shells.now) {
		if d, err := shell.Read(s.Description); err != nil || d.HadJobs() {
			return nil
		}
	}
	return b.shells.now
}

// asTold: each session is idle and, seen from outside, as it said at the end of the turn. The box may be frozen.
func (b *body) asTold() bool {
	all := readShells(b.shells.now)
	for name, s := range all {
		d, err := shell.Read(s.Description)
		if err != nil {
			return false
		}
		f, err := b.box.Facts(name)
		if err != nil || f.Busy != "" || !bytes.Equal(f.Text, d.Kernel) {
			return false
		}
	}
	return len(all) == len(b.box.Sessions())
}

// sessionsChanged: what sessions say isn't what they said when the dump was made that b stands on. The last is what they
// said at the end of the turn.
func (b *body) sessionsChanged() bool {
	if !b.dumped.sessions && len(b.box.Sessions()) == 0 {
		return false
	}
	return b.dumped.shells == nil || !bytes.Equal(b.dumped.shells, b.shells.now) && !sabotage.On("kept") || !b.asTold()
}

// keep is a saving of the processes of b by the dump that its last checkpoint has; nil: they have to
// be saved anew.
func (k *dumpKeeper) keep(b *body) *keptSaving {
	ck := b.checkpoint
	switch {
	case ck.Process != tree.Dump || ck.State != b.dumped.id || ck.ID == b.unkept,
		b.sessionsChanged(),
		b.shells.beyond && !sabotage.On("kept"):
		return nil
	}
	v := k.e.Store.View()
	_, err := v.Checkpoint(ck.ID) // or it failed its trial
	state, gone := v.Process(ck.State)
	if err != nil || gone != nil || state.Condemned {
		return nil
	}
	s := &keptSaving{b: b, state: state, was: b.dumped.was, paranoid: k.e.cfg.Paranoid}
	if s.changed() != nil { // what is seen now needs no freeze to be seen
		return nil
	}
	return s
}

// changed says why the dump may not be true any more.
func (s *keptSaving) changed() error {
	if why := s.b.watch.ProcessChanges(); len(why) > 0 && !sabotage.On("kept") {
		return fmt.Errorf("%w: %s", errNotKept, strings.Join(why, "; "))
	}
	if s.b.sessionsChanged() {
		return fmt.Errorf("%w: sessions changed", errNotKept)
	}
	return nil
}

func (s *keptSaving) freeze(context.Context) error {
	err := s.changed()
	if err == nil {
		err = s.differs()
	}
	if err != nil {
		s.b.unkept = s.b.checkpoint.ID
	}
	return err
}

// differs says what the witness sees otherwise than when the dump was made.
func (s *keptSaving) differs() error {
	is, err := look(s.b.box)
	if err != nil {
		return fmt.Errorf("%w: %w", errNotKept, err)
	}
	var shells []int // whose memory isn't what they are
	for _, session := range s.b.box.Sessions() {
		shells = append(shells, session.PID)
	}
	was := s.was.WithoutMemory(shells)
	is = is.WithoutMemory(shells)
	d := witness.Diff(was, is)
	if len(d) == 0 && s.paranoid && was.Remembers {
		if d, err = witness.MemoryDiff(was, is); err != nil {
			return fmt.Errorf("%w: %w", errNotKept, err)
		}
	}
	if len(d) > 0 && !sabotage.On("kept") {
		return fmt.Errorf("%w: %s", errNotKept, strings.Join(d[:min(len(d), 3)], "; "))
	}
	return nil
}

func (s *keptSaving) finish(context.Context, *tree.Checkpoint) (*tree.ProcessState, error) {
	return s.state, nil
}

func (*keptSaving) abort() {}
