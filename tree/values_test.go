package tree

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// If it fails, a trainer's values are wrong: root - a - leaf, two values in order.
func TestBackupRules(t *testing.T) {
	for name, c := range map[string]struct {
		rule     BackupRule
		discount float64
		values   []float64
		want     [3]float64 // leaf, a, root
	}{
		"sum":               {Sum, 0, []float64{1, 0.5}, [3]float64{1.5, 1.5, 1.5}},
		"mean":              {Mean, 0, []float64{1, 0, 0.5}, [3]float64{0.5, 0.5, 0.5}},
		"max":               {Max, 0, []float64{0.2, 0.7, 0.1}, [3]float64{0.7, 0.7, 0.7}},
		"max of negatives":  {Max, 0, []float64{-3, -5}, [3]float64{-3, -3, -3}},
		"discounted":        {Discounted, 0.5, []float64{1, 2}, [3]float64{3, 1.5, 0.75}},
		"discounted by one": {Discounted, 1, []float64{1}, [3]float64{1, 1, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, together := range []bool{true, false} {
				s := mustOpen(t, "state", memory())
				tr := mustTree(t, s)
				a := mustNode(t, s, tr.Root)
				leaf := mustNode(t, s, a.ID)
				aside := mustNode(t, s, tr.Root)
				var items []BackupItem
				for _, v := range c.values {
					items = append(items, BackupItem{leaf.ID, v})
				}
				step := len(items)
				if !together {
					step = 1
				}
				for i := 0; i < len(items); i += step {
					mustUpdate(t, s, func(tx *Tx) error {
						n, err := tx.Backup(items[i:i+step], c.rule, c.discount)
						if n != 3 {
							t.Errorf("%d nodes changed, want 3", n)
						}
						return err
					})
				}
				for i, id := range []ids.Node{leaf.ID, a.ID, tr.Root} {
					n, _ := s.View().Node(id)
					if math.Abs(n.Value-c.want[i]) > 1e-12 || n.Visits != int64(len(c.values)) {
						t.Errorf("together=%v: at distance %d: value %v of %d visits, want %v of %d", together, i, n.Value, n.Visits, c.want[i], len(c.values))
					}
				}
				if n, _ := s.View().Node(aside.ID); n.Visits != 0 {
					t.Error("a node off the path was visited")
				}
				mustClose(t, s)
			}
		})
	}
}

// If it fails, workers that back up at the same time lose each other's values.
func TestBackupByManyWorkers(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			leaf := mustNode(t, s, tr.Root)
			for range 25 {
				mustUpdate(t, s, func(tx *Tx) error {
					_, err := tx.Backup([]BackupItem{{leaf.ID, 1}}, Sum, 0)
					return err
				})
			}
		})
	}
	wg.Wait()
	if n, _ := s.View().Node(tr.Root); n.Value != 200 || n.Visits != 200 {
		t.Fatalf("the root has %v of %d visits, want 200 of 200", n.Value, n.Visits)
	}
}

// If it fails, a trainer that carries up what many workers found, in one call, gets other values than one item at a time would give.
func TestBackupOfManyItemsIsAsOneByOne(t *testing.T) {
	rnd := newRand(rand.Uint64())
	for _, rule := range []BackupRule{Sum, Mean, Max, Discounted} {
		var stores [2]*Store
		for i := range stores {
			stores[i] = mustOpen(t, "state", memory())
		}
		// The same nodes in both: a tree, and another one.
		roots := []Tree{{ID: ids.NewTree(), Root: ids.NewNode()}, {ID: ids.NewTree(), Root: ids.NewNode()}}
		type child struct{ id, parent ids.Node }
		var all []child
		for range 60 {
			parent := roots[rnd.IntN(2)].Root
			if len(all) > 0 && rnd.IntN(4) > 0 {
				parent = all[rnd.IntN(len(all))].id
			}
			all = append(all, child{ids.NewNode(), parent})
		}
		value := -0.5 // without a visit, as a value network gives it
		for _, s := range stores {
			mustUpdate(t, s, func(tx *Tx) error {
				for _, r := range roots {
					if err := tx.PutTree(r); err != nil {
						return err
					}
					if _, err := tx.AddNode(Node{ID: r.Root, Tree: r.ID, Capture: Withheld, WithheldReason: "no"}); err != nil {
						return err
					}
				}
				for _, c := range all {
					p, err := tx.Node(c.parent)
					if err != nil {
						return err
					}
					if _, err := tx.AddNode(Node{ID: c.id, Tree: p.Tree, Parent: p.ID, Capture: Withheld, WithheldReason: "no"}); err != nil {
						return err
					}
				}
				return tx.Annotate([]Annotation{{Node: roots[0].Root, Value: &value}, {Node: all[7].id, Value: &value}})
			})
		}
		for range 3 {
			var items []BackupItem
			for range 100 {
				items = append(items, BackupItem{all[rnd.IntN(len(all))].id, rnd.Float64()*4 - 2})
			}
			mustUpdate(t, stores[0], func(tx *Tx) error { _, err := tx.Backup(items, rule, 0.9); return err })
			for _, item := range items {
				mustUpdate(t, stores[1], func(tx *Tx) error { _, err := tx.Backup([]BackupItem{item}, rule, 0.9); return err })
			}
		}
		for _, r := range roots {
			for n := range stores[0].View().NodesOf(r.ID) {
				one, _ := stores[1].View().Node(n.ID)
				if n.Visits != one.Visits || math.Abs(n.Value-one.Value) > 1e-9 {
					t.Errorf("rule %d: node %s at depth %d has %v of %d visits; one by one %v of %d", rule, n.ID, n.Depth, n.Value, n.Visits, one.Value, one.Visits)
				}
			}
		}
	}
}

// If it fails, a backup of many items holds up all other changes for items times levels, or for as many nodes as there are.
func TestBackupIsBounded(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	var leaf ids.Node
	mustUpdate(t, s, func(tx *Tx) error {
		p, err := tx.Node(tr.Root)
		for range 2000 {
			if err == nil {
				p, err = tx.AddNode(Node{ID: ids.NewNode(), Tree: tr.ID, Parent: p.ID, Capture: Withheld, WithheldReason: "no"})
				leaf = p.ID
			}
		}
		return err
	})
	cost := func(items int) time.Duration {
		var least time.Duration
		for range 3 {
			before := cpuTime()
			mustUpdate(t, s, func(tx *Tx) error {
				_, err := tx.Backup(slices.Repeat([]BackupItem{{leaf, 1}}, items), Sum, 0)
				return err
			})
			if took := cpuTime() - before; least == 0 || took < least {
				least = took
			}
		}
		return least
	}
	one, many := cost(1), cost(10_000)
	t.Logf("a path of 2,000 levels: %v for one item, %v for 10,000", one, many)
	if many > 8*one {
		t.Errorf("10,000 items take %.1f times as long as one", float64(many)/float64(one))
	}

	// Each leaf with a path of its own, and one node too many.
	var leaves []BackupItem
	for range 6 {
		a := mustNode(t, s, tr.Root)
		leaves = append(leaves, BackupItem{mustNode(t, s, a.ID).ID, 1})
	}
	s.o.maxBackup = 12
	_, err := s.Update(context.Background(), func(tx *Tx) error { _, err := tx.Backup(leaves, Sum, 0); return err })
	wantFault(t, err, fault.Invalid, "too_many")
	if n, _ := s.View().Node(leaves[0].Node); n.Visits != 0 {
		t.Error("a backup that was refused changed a node")
	}
	mustUpdate(t, s, func(tx *Tx) error { _, err := tx.Backup(leaves[:5], Sum, 0); return err })
	mustUpdate(t, s, func(tx *Tx) error { _, err := tx.Backup([]BackupItem{{leaf, 1}}, Sum, 0); return err })
}

// If it fails, a backup can be seen, or be there after a crash, on a part of its path, or loses what another one adds meanwhile. Workers
// carry values up one path and another that joins it, while readers look and the disk is copied as a power loss at each of its writes would leave it.
func TestBackupIsWhole(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	disk := vfs.NewCrashableMem()
	var mu sync.Mutex // of what follows
	var copies []*vfs.MemFS
	rnd, armed := newRand(seed), false
	fs := errorfs.Wrap(disk, errorfs.InjectorFunc(func(op errorfs.Op) error {
		mu.Lock()
		defer mu.Unlock()
		if armed && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && len(copies) < 40 {
			copies = append(copies, disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: rnd}))
		}
		return nil
	}))
	s := mustOpen(t, "state", Options{FS: fs})
	tr := mustTree(t, s)
	path := []ids.Node{tr.Root}
	for range 20 {
		path = append(path, mustNode(t, s, path[len(path)-1]).ID)
	}
	aside := mustNode(t, s, path[10]).ID
	whole := func(when string, s *Store) {
		v := s.View()
		n := map[ids.Node]float64{}
		for _, id := range append(path, aside) {
			node, err := v.Node(id)
			if err != nil {
				t.Error(when, err)
				return
			}
			if n[id] = node.Value; float64(node.Visits) != node.Value {
				t.Errorf("%s: node %s has %v of %d visits", when, id, node.Value, node.Visits)
			}
		}
		for i, id := range path {
			want := n[path[20]]
			if i <= 10 {
				want += n[aside]
			}
			if n[id] != want {
				t.Errorf("%s: level %d has %v, and %v came up to it", when, i, n[id], want)
				return
			}
		}
	}
	mu.Lock()
	armed = true
	mu.Unlock()
	const workers, each = 4, 10
	var working, reading sync.WaitGroup
	for range workers {
		working.Go(func() {
			for range each {
				mustUpdate(t, s, func(tx *Tx) error {
					_, err := tx.Backup([]BackupItem{{path[20], 1}, {aside, 1}, {path[20], 1}}, Sum, 0)
					return err
				})
			}
		})
	}
	done := make(chan struct{})
	reading.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				whole("meanwhile", s)
			}
		}
	})
	working.Wait()
	close(done)
	reading.Wait()
	whole("at the end", s)
	if n, _ := s.View().Node(tr.Root); n.Value != 3*workers*each {
		t.Errorf("the root has %v, and %d came up to it", n.Value, 3*workers*each)
	}
	mu.Lock()
	armed = false
	mu.Unlock()
	if len(copies) < 10 {
		t.Fatalf("the disk was written to %d times", len(copies))
	}
	for i, c := range copies {
		s := mustOpen(t, "state", Options{FS: c})
		whole(fmt.Sprintf("after a power loss at write %d", i), s)
		mustClose(t, s)
	}
}

func TestRefusedValues(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	nan, minus := math.NaN(), int64(-1)
	before := frozen(t, s)
	for name, f := range map[string]func(tx *Tx) error{
		"nan value":       func(tx *Tx) error { return tx.Annotate([]Annotation{{Node: tr.Root, Value: &nan}}) },
		"negative visits": func(tx *Tx) error { return tx.Annotate([]Annotation{{Node: tr.Root, Visits: &minus}}) },
		"nan reward": func(tx *Tx) error {
			return tx.Annotate([]Annotation{{Node: tr.Root, Rewards: map[string]float64{"r": nan}}})
		},
		"nan backup":  func(tx *Tx) error { _, err := tx.Backup([]BackupItem{{tr.Root, nan}}, Sum, 0); return err },
		"no rule":     func(tx *Tx) error { _, err := tx.Backup(nil, 0, 0); return err },
		"no discount": func(tx *Tx) error { _, err := tx.Backup(nil, Discounted, 0); return err },
		"discount 2":  func(tx *Tx) error { _, err := tx.Backup(nil, Discounted, 2); return err },
		"long label": func(tx *Tx) error {
			return tx.Annotate([]Annotation{{Node: tr.Root, Labels: map[string]string{"l": string(make([]byte, MaxLabelBytes))}}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := s.Update(context.Background(), f)
			wantFault(t, err, fault.Invalid, "bad_record")
			wantEqual(t, "after a refusal", frozen(t, s), before)
		})
	}
	v := 1.0
	_, err := s.Update(context.Background(), func(tx *Tx) error {
		return tx.Annotate([]Annotation{{Node: tr.Root, Value: &v}, {Node: "nd_x"}})
	})
	wantFault(t, err, fault.NotFound, "node_not_found")
	wantEqual(t, "after one bad annotation of two", frozen(t, s), before)
}

func TestAnnotate(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	n := mustNode(t, s, tr.Root)
	held, _ := s.View().Node(n.ID)
	value, visits, policy := 0.25, int64(4), "p2"
	mustUpdate(t, s, func(tx *Tx) error {
		return tx.Annotate([]Annotation{{Node: n.ID, Rewards: map[string]float64{"a": 1}, Labels: map[string]string{"step": "", "new": "x"}},
			{Node: n.ID, Rewards: map[string]float64{"b": 2}, Value: &value, Visits: &visits, PolicyVersion: &policy}})
	})
	got, _ := s.View().Node(n.ID)
	if fmt.Sprint(got.Rewards) != "map[a:1 b:2]" || fmt.Sprint(got.Labels) != "map[group:g-7 new:x role:policy]" ||
		got.Value != value || got.Visits != visits || got.PolicyVersion != policy {
		t.Fatalf("got %+v", got)
	}
	if held.Labels["step"] != "12" {
		t.Fatal("a record that was given out has changed")
	}
}

// If it fails, payloads leak, or one that is shared is lost with its first user.
func TestPayloads(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	a, b := mustNode(t, s, tr.Root), mustNode(t, s, tr.Root)
	put := func(n ids.Node, p []byte) {
		t.Helper()
		mustUpdate(t, s, func(tx *Tx) error { return tx.Annotate([]Annotation{{Node: n, Payload: &p}}) })
	}
	body := bytes.Repeat([]byte("x"), MaxPayload)
	put(a.ID, body)
	put(b.ID, body)
	n, _ := s.View().Node(a.ID)
	if n.PayloadBytes != MaxPayload {
		t.Fatalf("%d bytes", n.PayloadBytes)
	}
	put(a.ID, []byte("other"))
	if got, err := s.Payload(n.PayloadDigest); err != nil || !bytes.Equal(got, body) {
		t.Fatalf("the second user's payload: %v", err)
	}
	put(b.ID, nil)
	_, err := s.Payload(n.PayloadDigest)
	wantFault(t, err, fault.NotFound, "payload_not_found")
	n, _ = s.View().Node(a.ID)
	mustUpdate(t, s, func(tx *Tx) error { _, err := tx.PutPayload([]byte("nobody's")); return err })
	mustUpdate(t, s, func(tx *Tx) error { _, err := tx.Prune(a.ID, false); return err })
	_, err = s.Payload(n.PayloadDigest)
	wantFault(t, err, fault.NotFound, "payload_not_found")
	// The check at the end finds what is left of nobody's.
}

// If it fails, a repeated request is answered wrongly, or replies pile up.
func TestReplies(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	var mu sync.Mutex
	o := memory()
	o.MaxReplies = 10
	o.Clock = func() time.Time { mu.Lock(); defer mu.Unlock(); return now }
	pass := func(d time.Duration) { mu.Lock(); defer mu.Unlock(); now = now.Add(d) }
	s := mustOpen(t, "state", o)
	put := func(k, request string) error {
		_, err := s.Update(context.Background(), func(tx *Tx) error {
			return tx.PutReply(Reply{Key: k, Method: "Fork", Request: request, Body: []byte("body of " + k)})
		})
		return err
	}
	if err := put("k", "r1"); err != nil {
		t.Fatal(err)
	}
	wantFault(t, put("k", "r2"), fault.Exists, "key_reused")
	mustClose(t, s)
	s = mustOpen(t, "state", o)
	r, err := s.View().Reply("k")
	if err != nil || string(r.Body) != "body of k" || r.Method != "Fork" || !r.At.Equal(now) {
		t.Fatalf("got %+v, %v", r, err)
	}
	wantFault(t, put("k", "r2"), fault.Exists, "key_reused")
	pass(24*time.Hour + 1)
	_, err = s.View().Reply("k")
	wantFault(t, err, fault.NotFound, "reply_not_found")
	if err := put("k", "r2"); err != nil {
		t.Fatalf("an expired key can't be used again: %v", err)
	}
	for i := range 30 {
		pass(1)
		if err := put(fmt.Sprint("k", i), "r"); err != nil {
			t.Fatal(err)
		}
	}
	if n := s.View().count(replies, ""); n != 10 {
		t.Errorf("%d replies are kept, want 10", n)
	}
	if _, err := s.View().Reply("k29"); err != nil {
		t.Error(err)
	}
	pass(25 * time.Hour)
	if n, err := s.ExpireReplies(context.Background()); n != 10 || err != nil {
		t.Errorf("expired %d, %v; want 10", n, err)
	}
}
