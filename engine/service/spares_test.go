package service

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/btrfs"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// pool is the daemon's pool, seen through its mount namespace.
func (d *daemon) pool() string {
	return filepath.Join(fmt.Sprintf("/proc/%d/root", d.cmd.Process.Pid), d.dir, "pool")
}

// uppers are the generations that have an upper.
func (d *daemon) uppers(t testing.TB) map[string]bool {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(d.pool(), "uppers/*/*"))
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, p := range paths {
		names[filepath.Base(p)] = true
	}
	return names
}

// A node that was forked gets spares. The next children are made of them, and
// differ in nothing from others: content, a name and seed of their own, a watch
// that saw all.
func TestSparesBecomeChildren(t *testing.T) {
	d := startDaemon(t, "")
	d.importRoot(t)
	_, sb := d.newTree(t)
	node := d.run(t, sb.GetId(), "echo state > /root/state").GetNode()
	first := d.fork(t, node.GetId(), 4)
	d.settle(t)
	spare := d.uppers(t)
	results := d.tryFork(t, &boxwoodv1.ForkRequest{Seed: 7, Wants: []*boxwoodv1.ForkRequest_Want{
		{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: node.GetId()}, Count: 4}}})
	seen := map[string]bool{}
	for _, s := range first {
		seen[d.ok(t, s.GetId(), "cat /etc/machine-id; hostname")] = true
	}
	for _, r := range results {
		child := r.GetSandbox()
		if !spare[child.GetGeneration()] {
			t.Errorf("child %d wasn't a spare: %s", r.GetChild(), r.GetMessage())
		}
		own := d.ok(t, child.GetId(), "cat /etc/machine-id; hostname")
		if seen[own] {
			t.Errorf("two children are called %q", own)
		}
		seen[own] = true
		if seed := d.ok(t, child.GetId(), "echo $BOXWOOD_SEED"); seen[seed] || len(seed) < 2 {
			t.Errorf("child %d has seed %q", r.GetChild(), seed)
		} else {
			seen[seed] = true
		}
		read := d.run(t, child.GetId(), "cat /root/state").GetNode()
		if got := string(read.GetObservation().GetStdout()); got != "state\n" || read.GetVerdict() != boxwoodv1.Verdict_VERDICT_NONE {
			t.Errorf("a child shows %q, judged %v", got, read.GetVerdict())
		}
		wrote := d.run(t, child.GetId(), "echo more >> /root/state").GetNode()
		if wrote.GetVerdict() != boxwoodv1.Verdict_VERDICT_FILES {
			t.Errorf("a child that writes was judged %v", wrote.GetVerdict())
		}
		d.forksAlike(t, child, wrote.GetId())
	}
}

// How many spares a node gets follows from how it is forked: half of what may be at first, and as many as are asked for together once that is known. They, and the
// zygotes that children took, are made as work that is counted.
func TestSparesFollowDemand(t *testing.T) {
	d := startDaemon(t, "")
	d.importRoot(t)
	_, sb := d.newTree(t)
	node := d.run(t, sb.GetId(), "echo state > /root/state").GetNode()
	d.captured(t, node.GetId())
	d.settle(t)
	before := d.queues(t)
	made := func(line string) int64 {
		return d.queues(t)[line+" refill"].GetDone() - before[line+" refill"].GetDone()
	}
	const children = 8 // as many zygotes, at least, wait in a test's daemon
	free(t, d, d.fork(t, node.GetId(), children)...)
	until(t, "4 spares are made, and the zygotes that the children took", func() bool { return made("clones") >= 4 && made("boxes")-4 >= children })
	d.settle(t)
	if spares := made("clones"); spares != 4 {
		t.Errorf("%d spares were made when nothing was known, want 4", spares)
	}
	if took := d.queues(t)["boxes refill"].GetTookNs(); took <= before["boxes refill"].GetTookNs() {
		t.Error("making them took no time")
	}
	// On a slow host calls are of one burst until they come later than 8 spares take.
	until(t, "all children of a fork were spares", func() bool {
		spare, all := d.uppers(t), true
		list := d.fork(t, node.GetId(), children)
		for _, child := range list {
			all = all && spare[child.GetGeneration()]
		}
		free(t, d, list...)
		d.settle(t)
		return all
	})
}

// Spares of one tree become children of another that stands on the same snapshot.
func TestSparesOfAnotherTree(t *testing.T) {
	d := startDaemon(t, "")
	d.importRoot(t)
	d.newTree(t)
	d.settle(t)
	spare := d.uppers(t)
	root, sb := d.newTree(t)
	if !spare[sb.GetGeneration()] {
		t.Fatal("the second tree's sandbox wasn't a spare")
	}
	none := d.run(t, sb.GetId(), "cat /etc/passwd").GetNode()
	if none.GetTreeId() != root.GetTreeId() || none.GetCheckpointId() != root.GetCheckpointId() {
		t.Fatalf("a turn that only reads stands at checkpoint %s of tree %s, its root at %s of %s",
			none.GetCheckpointId(), none.GetTreeId(), root.GetCheckpointId(), root.GetTreeId())
	}
}

// A spare that was right when it was made isn't handed out once its snapshot
// isn't what was saved: with spares a fork refuses what it would refuse without.
func TestNoSpareOfAChangedSnapshot(t *testing.T) {
	d := startDaemon(t, "")
	d.importRoot(t)
	_, sb := d.newTree(t)
	before, err := filepath.Glob(filepath.Join(d.pool(), "snapshots/*"))
	if err != nil {
		t.Fatal(err)
	}
	node := d.run(t, sb.GetId(), "echo saved > /root/state").GetNode()
	d.captured(t, node.GetId())
	d.fork(t, node.GetId(), 1)
	d.settle(t)
	after, err := filepath.Glob(filepath.Join(d.pool(), "snapshots/*"))
	if err != nil || len(after) != len(before)+1 {
		t.Fatalf("%d snapshots after one capture, %d before: %v", len(after), len(before), err)
	}
	for _, path := range after {
		if _, err := os.Stat(filepath.Join(path, "upper/root/state")); err == nil {
			spoil(t, path)
			expected.Store(d.dir, "lost_state")
		}
	}
	r := d.tryFork(t, &boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{
		{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: node.GetId()}, Count: 1}}})
	if len(r) != 1 || r[0].GetError().GetReason() != "snapshot_changed" {
		t.Fatalf("a fork of a changed snapshot: %v", r)
	}
}

func spoil(t testing.TB, snapshot string) {
	t.Helper()
	f, err := os.Open(snapshot)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := btrfs.SetReadOnly(f, false); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(snapshot, "upper/root/state"), []byte("changed\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := btrfs.SetReadOnly(f, true); err != nil {
		t.Fatal(err)
	}
}

// Children that a client has heard of outlive a daemon that is killed at that
// very moment, before their records can have reached the disk; released ones don't
// come back.
func TestChildrenOutliveADaemonKilledAtOnce(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	dir := stateDir(t)
	d := startDaemon(t, dir)
	d.importRoot(t)
	_, sb := d.newTree(t)
	node := d.run(t, sb.GetId(), "echo state > /root/state").GetNode()
	d.captured(t, node.GetId())
	want := map[string]bool{sb.GetId(): true}
	for range 3 {
		gone := d.fork(t, node.GetId(), 1)[0]
		if _, err := d.client.Release(ctx(t), &boxwoodv1.ReleaseRequest{SandboxIds: []string{gone.GetId()}}); err != nil {
			t.Fatal(err)
		}
		for _, child := range d.fork(t, node.GetId(), 2) {
			want[child.GetId()] = true
		}
		d.kill()
		d = startDaemon(t, dir)
		live := d.list(t)
		for _, s := range live {
			if !want[s.GetId()] {
				t.Fatalf("sandbox %s came back", s.GetId())
			}
			if got := d.ok(t, s.GetId(), "cat /root/state"); got != "state\n" {
				t.Fatalf("an adopted child shows %q", got)
			}
		}
		if len(live) != len(want) {
			t.Fatalf("%d of %d sandboxes were adopted", len(live), len(want))
		}
	}
}

// An image can go although spares lie on its layers: they go first.
func TestSparesLeaveTheirImage(t *testing.T) {
	d := startDaemon(t, "")
	d.importRoot(t)
	root, _ := d.newTree(t)
	d.settle(t)
	if len(d.uppers(t)) != 2 {
		t.Fatalf("a sandbox and its spare have the uppers %v", d.uppers(t))
	}
	if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: root.GetTreeId()}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: root.GetId()}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.client.RemoveImage(ctx(t), &boxwoodv1.RemoveImageRequest{Image: "mini"}); err != nil {
		t.Fatal("removing the image: ", err)
	}
	d.settle(t)
	if left := d.uppers(t); len(left) > 0 {
		t.Fatalf("the uppers %v outlive their image", left)
	}
}
