package tree

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

func shellState() ProcessState {
	return ProcessState{ID: ids.NewProcess(), Kind: Shells, Digest: "d", Bytes: 6 << 10, Kernel: "6.18", Program: "bash 5.2", CreatedAt: time.Now()}
}

func condemnedStates(s *Store) (out []ids.Process) {
	for p := range s.View().CondemnedProcesses() {
		out = append(out, p.ID)
	}
	return out
}

// If it fails, a process state goes while a checkpoint has it, or stays when none has.
func TestProcessStateLivesAsLongAsACheckpointHasIt(t *testing.T) {
	o := memory()
	s := mustOpen(t, "state", o)
	tr := mustTree(t, s)
	p := shellState()
	with := func(n *Node) Checkpoint {
		k := checkpointOf(tr.ID, n.ID)
		k.Process, k.State = Shells, p.ID
		return k
	}
	a := mustNode(t, s, tr.Root)
	b := mustNode(t, s, a.ID)
	mustUpdate(t, s, func(tx *Tx) error {
		if err := tx.PutProcess(p); err != nil {
			return err
		}
		return tx.SetCaptured(with(a), time.Now(), false, 1)
	})
	mustUpdate(t, s, func(tx *Tx) error { return tx.SetCaptured(with(b), time.Now(), false, 1) }) // shared
	mustPrune(t, s, b.ID, false)
	if got := condemnedStates(s); len(got) > 0 {
		t.Fatalf("%v are condemned, and a checkpoint has it", got)
	}
	mustUpdate(t, s, func(tx *Tx) error { return tx.SetWithheld(a.ID, "why") })
	if got := condemnedStates(s); !slices.Equal(got, []ids.Process{p.ID}) {
		t.Fatalf("condemned are %v, want %s", got, p.ID)
	}
	_, err := s.Update(context.Background(), func(tx *Tx) error { return tx.SetCaptured(with(a), time.Now(), false, 1) })
	wantFault(t, err, fault.Precondition, "process_condemned")
	_, err = s.Update(context.Background(), func(tx *Tx) error { return tx.PutProcess(p) })
	wantFault(t, err, fault.Precondition, "process_condemned")
	mustClose(t, s)
	s = mustOpen(t, "state", o)
	if got := condemnedStates(s); !slices.Equal(got, []ids.Process{p.ID}) {
		t.Fatalf("after a restart %v are condemned, want %s", got, p.ID)
	}
	mustUpdate(t, s, func(tx *Tx) error { return tx.FinishProcessRemoval([]ids.Process{p.ID, "ps_x"}) })
	if n := len(slices.Collect(s.View().Processes())); n != 0 {
		t.Fatalf("%d process states are left", n)
	}
}

// If it fails, a checkpoint can name a process half that it doesn't have.
func TestCheckpointsNameTheirProcessState(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	n := mustNode(t, s, tr.Root)
	p := shellState()
	for name, c := range map[string]struct {
		kind  ProcessKind
		state ids.Process
	}{
		"shells without a state":       {Shells, ""},
		"empty with a state":           {Empty, p.ID},
		"a state of another kind":      {Dump, p.ID},
		"a state that isn't on record": {Shells, "ps_x"},
	} {
		_, err := s.Update(context.Background(), func(tx *Tx) error {
			if err := tx.PutProcess(p); err != nil {
				return err
			}
			k := checkpointOf(tr.ID, n.ID)
			k.Process, k.State = c.kind, c.state
			return tx.SetCaptured(k, time.Now(), false, 1)
		})
		if err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	mustUpdate(t, s, func(tx *Tx) error { return tx.FinishProcessRemoval([]ids.Process{p.ID}) })
	mustUpdate(t, s, func(tx *Tx) error { return tx.PutProcess(p) }) // nobody has it
	if got := condemnedStates(s); !slices.Equal(got, []ids.Process{p.ID}) {
		t.Errorf("a state that no checkpoint has: condemned are %v", got)
	}
}
