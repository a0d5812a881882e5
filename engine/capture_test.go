package engine

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// If it fails, a node whose capture failed while the state disk was full stays undecided until a restart, and
// whoever waits for it waits as long.
func TestWithheldOnceTheDiskHasSpace(t *testing.T) {
	disk := vfs.NewCrashableMem()
	disk.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 1 << 30})
	store, err := tree.Open("state", tree.Options{FS: disk, AllowTmpfs: true})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	life, stop := context.WithCancel(context.Background())
	defer stop()
	e := &Engine{Parts: Parts{Store: store}, log: slog.New(slog.DiscardHandler), life: life}
	defer e.recording.Wait()
	defer stop()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	pending := func() ids.Node {
		t.Helper()
		tr := tree.Tree{ID: ids.NewTree(), Root: ids.NewNode(), CreatedAt: time.Now()}
		if _, err := store.Update(ctx, func(tx *tree.Tx) error {
			if err := tx.PutTree(tr); err != nil {
				return err
			}
			_, err := tx.AddNode(tree.Node{ID: tr.Root, Tree: tr.ID, Capture: tree.Recorded, TurnStatus: tree.Completed})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return tr.Root
	}

	late, never := pending(), pending()
	disk.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 1 << 20})
	e.withhold(context.Background(), late, "capture failed: no space")
	if n, err := store.View().Node(late); err != nil || n.Capture != tree.Recorded {
		t.Fatalf("a full disk took a change: %+v, %v", n, err)
	}
	disk.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 1 << 30})
	got, err := e.WaitCaptured(ctx, []ids.Node{late})
	if err != nil || got[0].Capture != tree.Withheld || got[0].WithheldReason != "capture failed: no space" {
		t.Fatalf("with space again: %+v, %v", got, err)
	}

	// A close doesn't wait for space: the next start decides.
	disk.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 1 << 20})
	e.withhold(context.Background(), never, "capture failed: no space")
	stop()
	e.recording.Wait()
	if n, err := store.View().Node(never); err != nil || n.Capture != tree.Recorded {
		t.Fatalf("after a close on a full disk: %+v, %v", n, err)
	}
}
