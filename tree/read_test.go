package tree

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// unreliable is a disk of which read number at fails, once or from then on, as a disk's do: by an
// error that names the file.
type unreliable struct {
	vfs.FS
	once bool
	left atomic.Int64 // reads until then

	mu     sync.Mutex
	failed []string // files
}

func failingRead(disk vfs.FS, at int64, once bool) *unreliable {
	u := &unreliable{once: once}
	u.left.Store(at)
	u.FS = errorfs.Wrap(disk, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() != errorfs.OpIsRead {
			return nil
		}
		if n := u.left.Add(-1); n == -1 || n < -1 && !u.once {
			u.mu.Lock()
			u.failed = append(u.failed, filepath.Base(op.Path))
			u.mu.Unlock()
			return &fs.PathError{Op: "read", Path: op.Path, Err: syscall.EIO}
		}
		return nil
	}))
	return u
}

// hit are the files that couldn't be read.
func (u *unreliable) hit() []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Clone(u.failed)
}

// rich is a store in memory with a row of each kind that is read: in tables and in the newest write-ahead file, a
// tree in memory and an archived one.
func rich(t *testing.T) (all files, here, gone *Tree, nodes []ids.Node, payload string) {
	t.Helper()
	disk := vfs.NewMem()
	s, err := Open("state", Options{FS: disk})
	if err != nil {
		t.Fatal(err)
	}
	here, gone = mustTree(t, s), mustTree(t, s)
	for _, tr := range []*Tree{here, gone} {
		nodes = append(nodes, tr.Root)
		for range 20 {
			root, err := s.View().Node(tr.Root)
			if err != nil {
				t.Fatal(err)
			}
			n := typicalNode(root)
			n.Observation.Stdout = bytes.Repeat([]byte(n.ID), 100) // so that the table has blocks that a start doesn't read
			mustUpdate(t, s, func(tx *Tx) error { _, err := tx.AddNode(n); return err })
			nodes = append(nodes, n.ID)
		}
	}
	kept := []byte("of the trainer")
	mustUpdate(t, s, func(tx *Tx) error { return tx.Annotate([]Annotation{{Node: nodes[1], Payload: &kept}}) })
	mustUpdate(t, s, func(tx *Tx) error { return tx.PutReply(Reply{Key: "key", Method: "m", Body: []byte("answer")}) })
	mustSetClosed(t, s, gone.ID, true)
	if err := s.Archive(context.Background(), gone.ID); err != nil {
		t.Fatal(err)
	}
	if err := s.log.db.Flush(); err != nil {
		t.Fatal(err)
	}
	nodes = append(nodes, mustNode(t, s, here.Root).ID)
	n, err := s.View().Node(nodes[1])
	if err != nil {
		t.Fatal(err)
	}
	all = filesOf(t, disk)
	mustClose(t, s)
	return all, here, gone, nodes, n.PayloadDigest
}

// If it fails, a disk that fails at some read makes a start or a read find less than there is, and say nothing: each read
// of a start, and of all reads after it, fails once, then all after it.
func TestFaultAtEachRead(t *testing.T) {
	all, here, gone, nodes, payload := rich(t)
	for _, mode := range []string{"once", "from then on"} {
		t.Run(mode, func(t *testing.T) {
			late, k := 0, int64(0)
			for ; !t.Failed(); k++ {
				mem := all.disk(t)
				disk := failingRead(mem, k, mode == "once")
				s, err := Open("state", Options{FS: disk})
				if err != nil {
					wantReadFault(t, disk, k, err)
					if reason := fault.As(err).Reason; reason != "state_dir" && reason != "state_in_use" {
						t.Errorf("read %d %q: opening gives %v, of another reason", k, disk.hit(), err)
					}
					continue
				}
				ask := func(what string, err error) {
					if err != nil {
						wantReadFault(t, disk, k, err)
						if fault.As(err).Reason != "state_unreadable" {
							t.Errorf("read %d %q: %s gives %v, of another reason", k, disk.hit(), what, err)
						}
					}
				}
				for _, id := range nodes {
					n, err := s.FullNode(id)
					ask("a node", err)
					if err == nil && n.ID != id {
						t.Errorf("read %d: node %s is %s", k, id, n.ID)
					}
				}
				for tr, want := range map[*Tree]int{here: 22, gone: 21} {
					v := s.View()
					got := len(slices.Collect(v.NodesOf(tr.ID)))
					ask("a tree", v.Err())
					if v.Err() == nil && got != want {
						t.Errorf("read %d: tree %s has %d nodes, want %d, and no error", k, tr.ID, got, want)
					}
					v = s.View()
					got = len(slices.Collect(v.Children(tr.Root)))
					ask("children", v.Err())
					if v.Err() == nil && got != want-1 {
						t.Errorf("read %d: the root of %s has %d children, want %d, and no error", k, tr.ID, got, want-1)
					}
				}
				_, err = s.Payload(payload)
				ask("a payload", err)
				_, err = s.View().Reply("key")
				ask("a reply", err)
				hit := len(disk.hit()) > 0
				_ = s.Close() // which may not be able to, either
				// The disk is well again, and nothing was lost by it.
				s = mustOpen(t, "state", Options{FS: filesOf(t, mem).disk(t)})
				for _, id := range nodes {
					if _, err := s.FullNode(id); err != nil {
						t.Errorf("read %d failed, and after the disk was well: %v", k, err)
					}
				}
				mustCheck(t, s)
				mustClose(t, s)
				if !hit {
					break
				}
				late++
			}
			if t.Logf("%d reads, %d of them after the start", k, late); !t.Failed() && (late == 0 || k < 20) {
				t.Error("these are too few to have been all")
			}
		})
	}
}

// wantReadFault: a failed read is told with its cause and its file.
func wantReadFault(t *testing.T, disk *unreliable, k int64, err error) {
	t.Helper()
	failed := disk.hit()
	var known *fault.Error
	switch {
	case len(failed) == 0:
		t.Errorf("read %d: %v, and no read had failed", k, err)
	case !errors.As(err, &known):
		t.Errorf("read %d %q: %v is of no kind", k, failed, err)
	case !errors.Is(err, syscall.EIO) || !slices.ContainsFunc(failed, func(f string) bool { return strings.Contains(err.Error(), f) }):
		t.Errorf("read %d %q: %v names neither file nor cause", k, failed, err)
	}
}
