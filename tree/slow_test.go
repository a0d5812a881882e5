package tree

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// If it fails, a disk that doesn't answer holds up readers, lets changes pile up without a word, or
// costs one that was under way.
func TestSlowDisk(t *testing.T) {
	var mu sync.Mutex // held: the disk doesn't answer
	asked := make(chan bool, 64)
	fs := errorfs.Wrap(vfs.NewCrashableMem(), errorfs.InjectorFunc(func(op errorfs.Op) error {
		if strings.HasSuffix(op.Path, ".log") && op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			select {
			case asked <- true:
			default:
			}
			mu.Lock() // the wait
			defer mu.Unlock()
		}
		return nil
	}))
	const patience = 20 * time.Millisecond
	s := mustOpen(t, "state", Options{FS: fs, SlowFlush: patience})
	tr := mustTree(t, s)
	label := func(value string) func(*Tx) error {
		return func(tx *Tx) error {
			return tx.Annotate([]Annotation{{Node: tr.Root, Labels: map[string]string{"at": value}}})
		}
	}
	mustUpdate(t, s, label("first"))
	for len(asked) > 0 {
		<-asked
	}
	mu.Lock()
	done := make(chan error, 1)
	go func() { _, err := s.Update(context.Background(), label("waits")); done <- err }()
	<-asked
	again, enough := time.NewTicker(time.Millisecond), time.After(deadline)
	defer again.Stop()
	for {
		n, err := s.View().Node(tr.Root)
		full, ferr := s.FullNode(tr.Root)
		if err != nil || ferr != nil || n.Labels["at"] != "first" || full.Labels["at"] != "first" {
			t.Fatalf("a read beside a disk that doesn't answer: %v %v, %v %v", n, err, full, ferr)
		}
		if err := s.slow(); err != nil {
			break
		}
		select {
		case <-again.C:
		case <-enough:
			t.Fatal("a flush is never found slow")
		}
	}
	_, err := s.Update(context.Background(), label("refused"))
	if f := fault.As(err); f.Reason != "disk_slow" || !f.Retryable() {
		t.Fatalf("a change beside a disk that doesn't answer: %v", err)
	}
	select {
	case err := <-done:
		t.Fatalf("the change that waits for the disk was answered: %v", err)
	default:
	}
	mu.Unlock()
	if err := <-done; err != nil {
		t.Fatalf("the change that waited: %v", err)
	}
	for err != nil { // another flush may be under way
		if _, err = s.Update(context.Background(), label("after")); err != nil {
			select {
			case <-again.C:
			case <-enough:
				t.Fatal(err)
			}
		}
	}
	if n, nerr := s.View().Node(tr.Root); err != nil || nerr != nil || n.Labels["at"] != "after" {
		t.Fatalf("once the disk answers: %v, %v", n, err)
	}
}
