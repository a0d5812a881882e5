// Package pooltest is the contract of pool.Pool as tests: every implementation
// runs the suite. Each test says what would break if it failed.
package pooltest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
	"github.com/boxwood-rl/boxwood/tree"
)

// Subject is an implementation under test.
type Subject struct {
	// Open opens the pool of a state folder, and makes it if there is none.
	Open func(dir string) (pool.Pool, error)
	// Mount shows the merged tree of an upper: its path, and how to take it away.
	Mount func(t testing.TB, up *pool.Upper) (root string, unmount func())
	// Tamper flips a byte of upper/<file> of a snapshot behind the pool's back, and
	// leaves the snapshot as it was otherwise. dir is the state folder.
	Tamper func(t testing.TB, dir string, id ids.Snapshot, file string)
	// Inodes: a clone has the inode numbers of what it was cloned from.
	Inodes bool
}

// Run runs the suite.
func Run(t *testing.T, s Subject) {
	for _, tc := range []struct {
		name string
		run  func(t *testing.T, e *env)
	}{
		{"layers are atomic and shared", testLayers},
		{"a stack shows what overlays show", testStack},
		{"clones are independent", testIndependent},
		{"a clone of a clone is the same tree", testCloneOfClone},
		{"inode numbers are unique over the merged tree", testUniqueInodes},
		{"a changed snapshot is noticed", testSeal},
		{"an unfinished snapshot doesn't survive", testPending},
		{"restart finds everything again", testRestart},
		{"reconcile removes what isn't named", testReconcile},
		{"names are checked and failures typed", testFailures},
	} {
		t.Run(tc.name, func(t *testing.T) { tc.run(t, newEnv(t, s)) })
	}
}

type env struct {
	Subject
	t   *testing.T
	dir string
	p   pool.Pool
	ctx context.Context
}

func newEnv(t *testing.T, s Subject) *env {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	e := &env{Subject: s, t: t, dir: t.TempDir(), ctx: ctx}
	t.Cleanup(cancel)
	t.Cleanup(func() {
		if e.p != nil {
			if err := e.p.Close(); err != nil {
				t.Errorf("closing: %v", err)
			}
		}
	})
	e.open()
	return e
}

func (e *env) open() {
	e.t.Helper()
	var err error
	if e.p, err = e.Open(e.dir); err != nil {
		e.p = nil
		e.t.Fatalf("opening: %v", err)
	}
}

func (e *env) reopen() {
	e.t.Helper()
	if err := e.p.Close(); err != nil {
		e.t.Fatalf("closing: %v", err)
	}
	e.open()
}

func (e *env) must(err error) {
	e.t.Helper()
	if err != nil {
		e.t.Fatal(err)
	}
}

// layerID makes an id from a word.
func layerID(word string) ids.Layer {
	return ids.Layer(fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(word))))
}

// layer adds a layer of files; a name that ends in "/" is a folder.
func (e *env) layer(word string, files map[string]string) ids.Layer {
	e.t.Helper()
	id := layerID(word)
	e.must(e.p.AddLayer(e.ctx, id, func(dir string) error { return write(dir, files) }))
	return id
}

func write(dir string, files map[string]string) error {
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if name[len(name)-1] == '/' {
			if err := os.MkdirAll(path, 0o755); err != nil {
				return err
			}
		} else if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// many are n small files in two folders.
func many(prefix string, n int) map[string]string {
	files := map[string]string{}
	for i := range n {
		files[fmt.Sprintf("%s/%d/f%d", prefix, i%2, i)] = fmt.Sprint(prefix, i)
	}
	return files
}

// ref is a snapshot with its seal.
type ref struct {
	id   ids.Snapshot
	seal tree.Seal
}

func (e *env) base(layers ...ids.Layer) ref {
	e.t.Helper()
	id := ids.NewSnapshot()
	seal, err := e.p.AddBase(e.ctx, id, layers)
	e.must(err)
	return ref{id, seal}
}

func (e *env) clone(from ref) *pool.Upper {
	e.t.Helper()
	up, err := e.p.Clone(e.ctx, from.id, from.seal, ids.NewGeneration(), 0)
	e.must(err)
	return up
}

// snapshot flushes, snapshots and finishes, as a capture does.
func (e *env) snapshot(of *pool.Upper) ref {
	e.t.Helper()
	id := ids.NewSnapshot()
	e.must(e.p.Flush(e.ctx, of.Generation))
	pending, err := e.p.Snapshot(e.ctx, of.Generation, id)
	e.must(err)
	seal, err := pending.Finish(e.ctx)
	e.must(err)
	return ref{id, seal}
}

// in runs fn in the merged tree of an upper.
func (e *env) in(up *pool.Upper, fn func(root string)) {
	e.t.Helper()
	root, unmount := e.Mount(e.t, up)
	defer unmount()
	fn(root)
}

func (e *env) lines(up *pool.Upper) (lines []string) {
	e.t.Helper()
	e.in(up, func(root string) {
		var err error
		lines, _, err = treewalk.Digest(root, treewalk.Options{Inodes: e.Inodes})
		e.must(err)
	})
	return lines
}

func (e *env) same(what string, got, want []string) {
	e.t.Helper()
	if d := treewalk.Diff(want, got, 20); len(d) > 0 {
		e.t.Errorf("%s differs:\n%s", what, joinLines(d))
	}
	if len(want) < 2 {
		e.t.Errorf("%s: only %d lines to compare", what, len(want))
	}
}

func joinLines(lines []string) string {
	out := ""
	for _, l := range lines {
		out += l + "\n"
	}
	return out
}

func wantKind(t testing.TB, what string, err error, kind fault.Kind) {
	t.Helper()
	if !fault.Is(err, kind) {
		t.Errorf("%s: %v, want a fault of kind %d", what, err, kind)
	}
}

func testLayers(t *testing.T, e *env) {
	broken := errors.New("the archive ends here")
	id := layerID("a")
	err := e.p.AddLayer(e.ctx, id, func(dir string) error {
		if err := write(dir, map[string]string{"half": "x"}); err != nil {
			return err
		}
		return broken
	})
	if !errors.Is(err, broken) {
		t.Errorf("a failed fill gave %v", err)
	}
	if e.p.HasLayer(id) {
		t.Error("a layer whose fill failed is there: half an image would be handed out")
	}
	fills := 0
	for range 2 {
		e.must(e.p.AddLayer(e.ctx, id, func(dir string) error {
			fills++
			return write(dir, map[string]string{"whole": "x"})
		}))
	}
	if fills != 1 || !e.p.HasLayer(id) {
		t.Errorf("two calls filled %d times, there: %v", fills, e.p.HasLayer(id))
	}
	f, err := e.p.OpenLayer(id)
	e.must(err)
	names, err := f.Readdirnames(-1)
	f.Close()
	if err != nil || len(names) != 1 || names[0] != "whole" {
		t.Errorf("the layer holds %v (%v): the failed one's files are mixed in", names, err)
	}
	base := e.base(id)
	up := e.clone(base)
	_, err = e.p.RemoveLayer(e.ctx, id)
	wantKind(t, "removing a layer below a base", err, fault.Precondition)
	e.must(e.p.Remove(base.id))
	_, err = e.p.RemoveLayer(e.ctx, id)
	wantKind(t, "removing a layer below a live upper", err, fault.Precondition)
	e.must(e.p.Release(up.Generation))
	if _, err := e.p.RemoveLayer(e.ctx, id); err != nil || e.p.HasLayer(id) {
		t.Errorf("removing an unused layer: %v, still there: %v", err, e.p.HasLayer(id))
	}
	e.must(e.p.AddLayer(e.ctx, id, func(dir string) error { return nil })) // and again
}

func testIndependent(t *testing.T, e *env) {
	base := e.base(e.layer("a", map[string]string{"f": "image", "g": "image"}))
	one, two := e.clone(base), e.clone(base)
	e.in(one, func(root string) { e.must(write(root, map[string]string{"f": "one", "new": "one"})) })
	e.in(two, func(root string) {
		if b, err := os.ReadFile(root + "/f"); err != nil || string(b) != "image" {
			t.Errorf("f is %q (%v) in the sibling", b, err)
		}
		if _, err := os.Lstat(root + "/new"); err == nil {
			t.Error("a sibling's new file shows")
		}
		e.must(os.Remove(root + "/g"))
	})
	snap := e.snapshot(one)
	before := e.lines(e.clone(snap))
	e.in(one, func(root string) { e.must(write(root, map[string]string{"f": "later", "late": "x"})) })
	e.same("a snapshot, after its upper moved on,", e.lines(e.clone(snap)), before)
	e.in(e.clone(base), func(root string) {
		if b, err := os.ReadFile(root + "/g"); err != nil || string(b) != "image" {
			t.Errorf("the base changed: g is %q (%v)", b, err)
		}
	})
}

func testSeal(t *testing.T, e *env) {
	up := e.clone(e.base(e.layer("a", map[string]string{"f": "x"})))
	e.in(up, func(root string) { e.must(write(root, map[string]string{"saved": "state"})) })
	good, bad := e.snapshot(up), e.snapshot(up)
	e.must(e.p.Verify(bad.id, bad.seal))
	for range 3 { // being cloned is no change
		e.clone(bad)
	}
	e.must(e.p.Verify(bad.id, bad.seal))
	wantKind(t, "the seal of another snapshot", e.p.Verify(bad.id, good.seal), fault.DataLoss)
	e.Tamper(t, e.dir, bad.id, "saved")
	wantKind(t, "a flipped byte", e.p.Verify(bad.id, bad.seal), fault.DataLoss)
	_, err := e.p.Clone(e.ctx, bad.id, bad.seal, ids.NewGeneration(), 0)
	wantKind(t, "a clone of a changed snapshot", err, fault.DataLoss)
	e.must(e.p.Verify(good.id, good.seal))
	e.must(e.p.Remove(good.id))
	wantKind(t, "a snapshot that is gone", e.p.Verify(good.id, good.seal), fault.DataLoss)
	if u, err := e.p.Usage(); err != nil || u.Uppers != 4 {
		t.Errorf("%d uppers (%v): a refused clone left one behind", u.Uppers, err)
	}
	// Without a look at the seal in between, too: the clone itself must notice.
	again := e.snapshot(up)
	e.Tamper(t, e.dir, again.id, "saved")
	_, err = e.p.Clone(e.ctx, again.id, again.seal, ids.NewGeneration(), 0)
	wantKind(t, "a clone of a snapshot changed just now", err, fault.DataLoss)
}

func testPending(t *testing.T, e *env) {
	up := e.clone(e.base(e.layer("a", map[string]string{"f": "x"})))
	aborted, unfinished, cancelled := ids.NewSnapshot(), ids.NewSnapshot(), ids.NewSnapshot()
	pending, err := e.p.Snapshot(e.ctx, up.Generation, aborted)
	e.must(err)
	pending.Abort()
	pending, err = e.p.Snapshot(e.ctx, up.Generation, cancelled)
	e.must(err)
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	if _, err := pending.Finish(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("finishing after a cancel: %v", err)
	}
	_, err = e.p.Snapshot(e.ctx, up.Generation, unfinished)
	e.must(err)
	e.reopen()
	for what, id := range map[string]ids.Snapshot{"aborted": aborted, "unfinished": unfinished, "cancelled": cancelled} {
		if f, err := e.p.OpenSnapshot(id); err == nil {
			f.Close()
			t.Errorf("the %s snapshot is there", what)
		}
	}
	if u, err := e.p.Usage(); err != nil || u.Snapshots != 1 {
		t.Errorf("%d snapshots (%v), want the base alone", u.Snapshots, err)
	}
	e.snapshot(up)
}

func testRestart(t *testing.T, e *env) {
	base := e.base(e.layer("a", many("image", 20)))
	up := e.clone(base)
	e.in(up, func(root string) { e.must(write(root, many("upper", 20))) })
	snap := e.snapshot(up)
	before := e.lines(up)
	e.reopen()
	again, err := e.p.FindUpper(up.Generation)
	e.must(err)
	if fmt.Sprint(*again) != fmt.Sprint(*up) {
		t.Errorf("found %+v, was %+v", *again, *up)
	}
	e.must(e.p.Verify(base.id, base.seal))
	e.must(e.p.Verify(snap.id, snap.seal))
	e.same("the clone of a snapshot after a restart", e.lines(e.clone(snap)), before)
}

func testReconcile(t *testing.T, e *env) {
	base := e.base(e.layer("a", map[string]string{"f": "x"}))
	keep, lose := e.clone(base), e.clone(base)
	kept, lost := e.snapshot(keep), e.snapshot(lose)
	n, err := e.p.Reconcile(map[ids.Generation]bool{keep.Generation: true}, map[ids.Snapshot]bool{base.id: true, kept.id: true})
	if err != nil || n != 2 {
		t.Errorf("removed %d (%v), want 2", n, err)
	}
	if _, err := e.p.FindUpper(keep.Generation); err != nil {
		t.Errorf("the named upper is gone: %v", err)
	}
	e.must(e.p.Verify(kept.id, kept.seal))
	_, err = e.p.FindUpper(lose.Generation)
	wantKind(t, "the upper that nobody named", err, fault.NotFound)
	_, err = e.p.OpenSnapshot(lost.id)
	wantKind(t, "the snapshot that nobody named", err, fault.NotFound)
	if n, err := e.p.Reconcile(map[ids.Generation]bool{keep.Generation: true}, map[ids.Snapshot]bool{base.id: true, kept.id: true}); n != 0 || err != nil {
		t.Errorf("a second time removed %d (%v)", n, err)
	}
}

func testFailures(t *testing.T, e *env) {
	base := e.base(e.layer("a", map[string]string{"f": "x"}))
	up := e.clone(base)
	snap := e.snapshot(up)
	clone := func(from ids.Snapshot, as ids.Generation) error {
		_, err := e.p.Clone(e.ctx, from, base.seal, as, 0)
		return err
	}
	snapshot := func(of ids.Generation, as ids.Snapshot) error { _, err := e.p.Snapshot(e.ctx, of, as); return err }
	addBase := func(id ids.Snapshot, l ...ids.Layer) error { _, err := e.p.AddBase(e.ctx, id, l); return err }
	for _, tc := range []struct {
		name string
		err  error
		kind fault.Kind
	}{
		{"a generation twice", clone(base.id, up.Generation), fault.Exists},
		{"a path as generation", clone(base.id, "../../etc"), fault.Invalid},
		{"a hidden name as generation", clone(base.id, ".new-x"), fault.Invalid},
		{"a path as snapshot", clone("../layers", ids.NewGeneration()), fault.Invalid},
		{"a snapshot that isn't there", clone(ids.NewSnapshot(), ids.NewGeneration()), fault.DataLoss},
		{"a snapshot twice", snapshot(up.Generation, snap.id), fault.Exists},
		{"a snapshot of nothing", snapshot(ids.NewGeneration(), ids.NewSnapshot()), fault.NotFound},
		{"a flush of nothing", e.p.Flush(e.ctx, ids.NewGeneration()), fault.NotFound},
		{"a base of no layers", addBase(ids.NewSnapshot()), fault.Invalid},
		{"a base of an unknown layer", addBase(ids.NewSnapshot(), layerID("nowhere")), fault.NotFound},
		{"a base twice", addBase(base.id, layerID("a")), fault.Exists},
		{"a layer with a path as id", e.p.AddLayer(e.ctx, "sha256:../x", func(string) error { return nil }), fault.Invalid},
		{"releasing a path", e.p.Release("../snapshots"), fault.Invalid},
	} {
		wantKind(t, tc.name, tc.err, tc.kind)
	}
	for range 2 { // what is gone already is no error
		e.must(e.p.Release(up.Generation))
		e.must(e.p.Remove(snap.id))
	}
	cancelled, cancel := context.WithCancel(e.ctx)
	cancel()
	if err := e.p.AddLayer(cancelled, layerID("late"), func(string) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("adding a layer after a cancel: %v", err)
	}
	e.must(e.p.Close())
	e.must(e.p.Close())
	e.open()
}
