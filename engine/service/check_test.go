package service

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/engine/check"
	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/internal/btrfs"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

// stopped is a state folder whose daemon has ended, and what is known of it.
type stopped struct {
	t            *testing.T
	o            check.Options
	image        string
	root, first  ids.Node // first has a checkpoint of its own
	second, last ids.Node // both below first, with one each
	payload      string
}

func (s *stopped) store(f func(*tree.Store) error) {
	s.t.Helper()
	st, err := tree.Open(filepath.Join(s.o.State, "tree"), tree.Options{})
	if err == nil {
		if err = f(st); err == nil {
			err = st.Close()
		}
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *stopped) update(f func(*tree.Tx) error) {
	s.t.Helper()
	s.store(func(st *tree.Store) error {
		_, err := st.Update(context.Background(), f)
		return err
	})
}

func (s *stopped) pool(f func(*pool.Btrfs) error) {
	s.t.Helper()
	p, err := pool.OpenBtrfs(pool.Options{Dir: s.o.State})
	if err == nil {
		if err = f(p); err == nil {
			err = p.Close()
		}
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

// raw writes a row past the store.
func (s *stopped) raw(key, value string) {
	s.t.Helper()
	db, err := pebble.Open(filepath.Join(s.o.State, "tree", "log"), &pebble.Options{FormatMajorVersion: pebble.FormatWALSyncChunks})
	if err == nil {
		err = db.Set([]byte(key), []byte(value), pebble.Sync)
	}
	if err == nil {
		err = db.Close()
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *stopped) checkpoint(of ids.Node) (k *tree.Checkpoint) {
	s.t.Helper()
	s.store(func(st *tree.Store) error {
		n, err := st.View().Node(of)
		if err == nil {
			k, err = st.View().Checkpoint(n.Checkpoint)
		}
		return err
	})
	return k
}

func kinds(r *check.Report) []string {
	var out []string
	for _, f := range r.Findings {
		if !slices.Contains(out, f.Kind) {
			out = append(out, f.Kind)
		}
	}
	return out
}

// Each kind of damage is found as what it is; what can be mended is said, mended,
// and then nothing is found any more, and a daemon starts.
func TestCheckFindsAndMends(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	dir := stateDir(t)
	d := startDaemon(t, dir)
	d.importRoot(t)
	root, sb := d.newTree(t)
	s := &stopped{t: t, o: check.Options{State: dir, Cgroup: "boxwood-test-" + filepath.Base(dir)}, image: d.image, root: ids.Node(root.GetId())}
	for i, at := range []*ids.Node{&s.first, &s.second, &s.last} {
		n := d.run(t, sb.GetId(), fmt.Sprintf("echo %d > /root/state", i)).GetNode()
		d.captured(t, n.GetId())
		*at = ids.Node(n.GetId())
	}
	if _, err := d.client.Annotate(ctx(t), &boxwoodv1.AnnotateRequest{Annotations: []*boxwoodv1.NodeAnnotation{{NodeId: string(s.first), Payload: []byte("mine")}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := check.Run(ctx(t), s.o); fault.As(err).Reason != "state_in_use" {
		t.Fatalf("a check beside a daemon: %v", err)
	}
	d.stop()
	s.store(func(st *tree.Store) error {
		n, err := st.View().Node(s.first)
		s.payload = n.PayloadDigest
		return err
	})
	if r, err := check.Run(ctx(t), s.o); err != nil || len(r.Findings) != 0 || r.Nodes != 4 || r.Snapshots != 4 {
		t.Fatalf("a clean state: %+v, %v", r, err)
	}
	for _, c := range s.damages() {
		t.Run(c.kind+" "+c.name, func(t *testing.T) {
			s.t = t
			c.spoil()
			r, err := check.Run(ctx(t), s.o)
			if err != nil || !slices.Contains(kinds(r), c.kind) {
				t.Fatalf("found %v, %v", r.Findings, err)
			}
			var said []string
			left, err := check.Repair(ctx(t), s.o, func(f check.Finding) { said = append(said, f.Kind) })
			if err != nil {
				t.Fatal(err)
			}
			if len(left.Findings) != 0 {
				t.Fatalf("left after the repair: %v", left.Findings)
			}
			if !slices.Contains(said, c.kind) {
				t.Fatalf("the repair said %v", said)
			}
		})
	}
	s.t = t
	d = startDaemon(t, dir)
	if got := d.ok(t, d.fork(t, string(s.first), 1)[0].GetId(), "cat /root/state"); got != "0\n" {
		t.Fatalf("after all repairs the first node shows %q", got)
	}
	for _, id := range []ids.Node{s.second, s.last} {
		n, err := d.client.GetNode(ctx(t), &boxwoodv1.GetNodeRequest{NodeId: string(id)})
		if err != nil || n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD || !strings.Contains(n.GetWithheldReason(), "state lost") {
			t.Fatalf("a node whose state was lost: %v, %v", n, err)
		}
	}
}

type damage struct {
	kind, name string
	spoil      func()
}

func (s *stopped) damages() []damage {
	ctx := context.Background()
	runDir := func(parts ...string) string {
		path := filepath.Join(append([]string{engine.FindRunDir(s.o.State)}, parts...)...)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			s.t.Fatal(err)
		}
		return path
	}
	return []damage{
		{"orphan_snapshot", "", func() {
			layers := s.checkpoint(s.first).Seal.Layers
			s.pool(func(p *pool.Btrfs) error { _, err := p.AddBase(ctx, ids.NewSnapshot(), layers); return err })
		}},
		{"orphan_upper", "", func() {
			k := s.checkpoint(s.first)
			s.pool(func(p *pool.Btrfs) error {
				_, err := p.Clone(ctx, k.Snapshot, k.Seal, ids.NewGeneration(), 0)
				return err
			})
		}},
		{"orphan_layer", "", func() {
			s.pool(func(p *pool.Btrfs) error {
				return p.AddLayer(ctx, ids.Layer("sha256:"+strings.Repeat("ab", 32)), func(string) error { return nil })
			})
		}},
		{"orphan_state", "", func() {
			if err := os.MkdirAll(filepath.Join(s.o.State, "processes", string(ids.NewProcess())), 0o700); err != nil {
				s.t.Fatal(err)
			}
		}},
		{"half_made", "", func() {
			s.pool(func(p *pool.Btrfs) error {
				f, err := os.Open(filepath.Join(p.Dir(), "snapshots"))
				if err != nil {
					return err
				}
				defer f.Close()
				return btrfs.Create(f, ".new-half")
			})
		}},
		{"dead_sandbox", "", func() {
			s.update(func(tx *tree.Tx) error {
				n, err := tx.Node(s.root)
				if err != nil {
					return err
				}
				return tx.PutSandbox(tree.Sandbox{ID: ids.NewSandbox(), Tree: n.Tree, Head: n.ID, Generation: ids.NewGeneration()})
			})
		}},
		{"pending_capture", "", func() {
			s.update(func(tx *tree.Tx) error {
				n, err := tx.Node(s.root)
				if err == nil {
					_, err = tx.AddNode(tree.Node{ID: ids.NewNode(), Tree: n.Tree, Parent: n.ID, Capture: tree.Recorded})
				}
				return err
			})
		}},
		{"condemned", "", func() {
			s.update(func(tx *tree.Tx) error { // a node of its own snapshot, pruned, and the removal not finished
				n, err := tx.Node(s.root)
				if err != nil {
					return err
				}
				extra := tree.Node{ID: ids.NewNode(), Tree: n.Tree, Parent: n.ID, Capture: tree.Recorded}
				if _, err := tx.AddNode(extra); err != nil {
					return err
				}
				k := tree.Checkpoint{ID: ids.NewCheckpoint(), Tree: n.Tree, Node: extra.ID, Snapshot: ids.NewSnapshot(), Process: tree.Empty}
				if err := tx.PutCheckpoint(k); err != nil {
					return err
				}
				extra.Capture, extra.Checkpoint = tree.Captured, k.ID
				if err := tx.PutNode(extra); err != nil {
					return err
				}
				_, err = tx.Prune(extra.ID, false)
				return err
			})
		}},
		{"condemned", "process state", func() {
			s.update(func(tx *tree.Tx) error { // no checkpoint has it
				return tx.PutProcess(tree.ProcessState{ID: ids.NewProcess(), Kind: tree.Shells, Digest: strings.Repeat("0", 64)})
			})
		}},
		{"stray_birth", "that is none", func() {
			if err := os.WriteFile(runDir("births", string(ids.NewGeneration())), []byte("{"), 0o600); err != nil {
				s.t.Fatal(err)
			}
		}},
		{"leftover_box", "a folder", func() {
			if err := os.MkdirAll(runDir("boxes", "7"), 0o700); err != nil {
				s.t.Fatal(err)
			}
		}},
		{"leftover_box", "a cgroup", func() {
			if err := os.MkdirAll(filepath.Join(v2Mount(s.t), s.o.Cgroup, "9"), 0o755); err != nil {
				s.t.Fatal(err)
			}
		}},
		{"lost_state", "gone", func() {
			k := s.checkpoint(s.second)
			s.pool(func(p *pool.Btrfs) error { return p.Remove(k.Snapshot) })
		}},
		{"lost_state", "changed", func() {
			k := s.checkpoint(s.last)
			s.pool(func(p *pool.Btrfs) error { spoil(s.t, filepath.Dir(p.SnapshotDir(k.Snapshot))); return nil })
		}},
	}
}

// What nobody can mend is named all the same: other bytes than were put, a row that
// is none, and a log that is damaged in the middle, by file and offset.
func TestCheckNamesWhatCannotBeMended(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	dir := stateDir(t)
	d := startDaemon(t, dir)
	d.importRoot(t)
	root, sb := d.newTree(t)
	n := d.run(t, sb.GetId(), "true").GetNode()
	if _, err := d.client.Annotate(ctx(t), &boxwoodv1.AnnotateRequest{Annotations: []*boxwoodv1.NodeAnnotation{{NodeId: n.GetId(), Payload: []byte("mine")}}}); err != nil {
		t.Fatal(err)
	}
	d.stop()
	s := &stopped{t: t, o: check.Options{State: dir, Cgroup: "boxwood-test-" + filepath.Base(dir)}}
	s.store(func(st *tree.Store) error {
		got, err := st.View().Node(ids.Node(n.GetId()))
		s.payload = got.PayloadDigest
		return err
	})
	find := func(kind, what string) {
		t.Helper()
		r, err := check.Repair(ctx(t), s.o, func(f check.Finding) { t.Errorf("mends %s", f) })
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range r.Findings {
			if f.Kind == kind && strings.Contains(f.What, what) {
				return
			}
		}
		t.Errorf("no %s with %q among %v", kind, what, r.Findings)
	}
	s.raw("p"+s.payload, "yours")
	find("store", "payload "+s.payload+" has other bytes")
	s.raw("p"+s.payload, "mine")
	s.update(func(tx *tree.Tx) error {
		_, err := tx.AddNode(tree.Node{ID: ids.NewNode(), Tree: ids.Tree(root.GetTreeId()), Parent: ids.Node(root.GetId()), Capture: tree.Captured})
		return err
	})
	find("status", "is captured and has no checkpoint")
	s.raw("n"+root.GetId(), "\xff\xff")
	find("log_damaged", root.GetId())
	expected.Store(dir, "log_damaged")
}
