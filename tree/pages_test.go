package tree

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/boxwood-rl/boxwood/internal/ids"
)

// gate is a disk that stops at its next write to the log, until it is opened.
type gate struct {
	vfs.FS
	armed             atomic.Bool
	reached, released chan struct{}
	open              func()
}

func newGate() *gate {
	g := &gate{reached: make(chan struct{}), released: make(chan struct{})}
	g.open = sync.OnceFunc(func() { close(g.released) })
	g.FS = errorfs.Wrap(vfs.NewCrashableMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if strings.HasSuffix(op.Path, ".log") && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && g.armed.CompareAndSwap(true, false) {
			close(g.reached)
			<-g.released
		}
		return nil
	}))
	return g
}

// If it fails, what a refused change wrote stays in memory when it shares a group with others, or a reader
// sees pages that are still written to: hundreds of changes of one group, a third refused after all they did.
func TestChangesOfAGroupShareTheirPages(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := newRand(seed)
	disk := newGate()
	s := mustOpen(t, "state", Options{FS: disk})
	t.Cleanup(disk.open)
	var all []ids.Node
	for range 4 {
		tr := mustTree(t, s)
		all = append(all, tr.Root)
		for range 30 {
			all = append(all, mustNode(t, s, all[len(all)-1]).ID)
		}
	}
	before := frozen(t, s)

	var waits []func() error
	start := func(change func(tx *Tx) error) {
		done, err := s.Start(context.Background(), change)
		if err != nil {
			t.Fatal(err)
		}
		waits = append(waits, done)
	}
	var refused sync.WaitGroup
	refuse := func(change func(tx *Tx) error) {
		ran := make(chan struct{})
		refused.Go(func() {
			if _, err := s.Update(context.Background(), func(tx *Tx) error {
				defer close(ran)
				if err := change(tx); err != nil {
					return err
				}
				return errOops
			}); err != errOops {
				t.Errorf("got %v, want what the function returned", err)
			}
		})
		<-ran // the next change waits until it is undone
	}
	disk.armed.Store(true)
	start(func(tx *Tx) error { return tx.Pin(all[0]) })
	<-disk.reached
	for range 400 {
		at := all[rnd.IntN(len(all))]
		var grown []ids.Node
		change := func(tx *Tx) error {
			grown = nil
			p, err := tx.Node(at)
			if err != nil {
				return nil // it was pruned
			}
			switch rnd.IntN(4) {
			case 0:
				k := checkpointOf(p.Tree, p.ID)
				return tx.SetCaptured(k, k.CreatedAt, false, 0)
			case 1:
				_, err := tx.Prune(p.ID, rnd.IntN(3) > 0)
				if err != nil && p.ID != all[0] && p.Parent != "" {
					return err
				}
			default:
				for range 1 + rnd.IntN(3) {
					if p, err = tx.AddNode(typicalNode(p)); err != nil {
						return err
					}
					grown = append(grown, p.ID)
				}
			}
			return nil
		}
		if rnd.IntN(3) == 0 {
			refuse(change)
			continue
		}
		start(change)
		all = append(all, grown...)
	}
	wantEqual(t, "before anything is durable", frozen(t, s), before)
	disk.open()
	for _, wait := range waits {
		if err := wait(); err != nil {
			t.Fatal(err)
		}
	}
	refused.Wait()
	mustCheck(t, s)
	after := frozen(t, s)
	mustClose(t, s)
	wantEqual(t, "after a restart", frozen(t, mustOpen(t, "state", Options{FS: disk})), after)
}
