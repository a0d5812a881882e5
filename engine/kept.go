package engine

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/boxwood-rl/boxwood/engine/witness"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// A capture beside processes that are still as the last checkpoint's dump has them makes no other: its checkpoint is a
// new snapshot and that dump. Law 4 allows it if the half kept from before can't have changed,
// and two who share no code must say so in the freeze of the snapshot: the inspector, that none of the processes
// ran or was reached, and that no file it uses has changed, nor anything on the way to one; and the witness, that all
// looks as it did when the dump was made. Any doubt, and they are dumped again.
//
// By the same rule a checkpoint may follow that keeps the dump once more: nothing changed from one to the next.

// keptSaving is a dump on record that may still be true.
type keptSaving struct {
	b     *body
	state *tree.ProcessState
	was   *witness.State
}

// errNotKept: the processes have to be saved anew. The sandbox is untouched.
var errNotKept = errors.New("the processes aren't as they were saved")

// dumped is what a body's processes were saved as, or restored from.
type dumped struct {
	id       ids.Process
	was      *witness.State
	sessions bool
}

// keep is a saving of the processes of b by the dump that its last checkpoint has; nil: they have to
// be saved anew. Sessions run in every turn, so that no dump of one is kept.
func (k *dumpKeeper) keep(b *body) *keptSaving {
	ck := b.checkpoint
	switch {
	case ck.Process != tree.Dump || ck.State != b.dumped.id || ck.ID == b.unkept,
		b.dumped.sessions || len(b.box.Sessions()) > 0,
		b.shells.beyond && comparesKept:
		return nil
	}
	v := k.e.Store.View()
	_, err := v.Checkpoint(ck.ID) // or it failed its trial
	state, gone := v.Process(ck.State)
	if err != nil || gone != nil || state.Condemned {
		return nil
	}
	s := &keptSaving{b: b, state: state, was: b.dumped.was}
	if s.changed() != nil { // what is seen now needs no freeze to be seen
		return nil
	}
	return s
}

// changed says why the dump may not be true any more.
func (s *keptSaving) changed() error {
	if why := s.b.watch.ProcessChanges(); len(why) > 0 && comparesKept {
		return fmt.Errorf("%w: %s", errNotKept, strings.Join(why, "; "))
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
	if d := witness.Diff(s.was, is); len(d) > 0 && comparesKept {
		return fmt.Errorf("%w: %s", errNotKept, strings.Join(d[:min(len(d), 3)], "; "))
	}
	return nil
}

func (s *keptSaving) finish(context.Context, *tree.Checkpoint) (*tree.ProcessState, error) {
	return s.state, nil
}

func (*keptSaving) abort() {}
