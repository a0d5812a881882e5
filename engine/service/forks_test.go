package service

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// rootOf finds a sandbox's root as the sandbox sees it: /proc/<pid 1>/root of
// the process whose machine-id is that of the generation. It shares no code
// with capture or restore.
func (d *daemon) rootOf(t testing.TB, generation string) string {
	t.Helper()
	sum := sha256.Sum256([]byte("machine-id/" + generation))
	want := hex.EncodeToString(sum[:16])
	var found string
	base := filepath.Join(v2Mount(t), "boxwood-test-"+filepath.Base(d.dir))
	err := filepath.WalkDir(base, func(p string, e fs.DirEntry, err error) error {
		if err != nil || e.Name() != "cgroup.procs" || found != "" {
			return nil
		}
		pids, _ := os.ReadFile(p)
		for _, pid := range strings.Fields(string(pids)) {
			proc := filepath.Join("/proc", pid)
			id, err := os.ReadFile(filepath.Join(proc, "root/etc/machine-id"))
			if err != nil || strings.TrimSpace(string(id)) != want {
				continue
			}
			if first := pidOne(proc); first != 0 { // others may end while their root is looked at
				found = fmt.Sprintf("/proc/%d/root", first)
				break
			}
		}
		return nil
	})
	if err != nil || found == "" {
		t.Fatalf("no process of generation %s: %v", generation, err)
	}
	return found
}

func v2Mount(t testing.TB) string {
	m, err := cgroup.FindMounts("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return m.V2
}

func digest(t testing.TB, root string) ([]string, string) {
	t.Helper()
	st, err := os.Stat(root)
	if err != nil {
		t.Fatal(err)
	}
	// Each box has host ids of its own.
	base := st.Sys().(*syscall.Stat_t).Uid
	if base < 100_000 {
		t.Fatalf("the root of the box belongs to host id %d", base)
	}
	lines, sum, err := treewalk.Digest(root, treewalk.Options{IDBase: base})
	if err != nil {
		t.Fatal(err)
	}
	if len(lines) < 10 {
		t.Fatalf("the walker saw only %d entries of %s", len(lines), root)
	}
	return lines, sum
}

// 64 children of one past node: 64 equal file trees, seen by a walker that
// shares no code with capture or restore; then each writes and no other sees it.
func TestSixtyFourForksAreEqualAndIndependent(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	d.ok(t, sb.GetId(), "mkdir -p /w/a/b && for i in $(seq 200); do echo $i > /w/a/f$i; done; ln /w/a/f1 /w/hard; ln -s a /w/soft; chmod 4755 /w/a/f2; rm /etc/passwd; mkfifo /w/pipe")
	past := d.run(t, sb.GetId(), "echo past > /w/state; rm -rf /w/a/f9; mv /w/a/b /w/c; truncate -s 10M /w/sparse").GetNode()
	d.captured(t, past.GetId())
	want, sum := digest(t, d.rootOf(t, sb.GetGeneration()))
	d.ok(t, sb.GetId(), "echo future > /w/state; rm -rf /w/a /usr/bin/true")

	children := d.fork(t, past.GetId(), 64)
	for _, c := range children {
		got, s := digest(t, d.rootOf(t, c.GetGeneration()))
		if s != sum {
			t.Fatalf("child %s differs from its parent's past:\n%s", c.GetId(), strings.Join(treewalk.Diff(want, got, 20), "\n"))
		}
	}
	for i, c := range children {
		d.ok(t, c.GetId(), fmt.Sprintf("echo %d > /w/state; echo %d >> /w/a/f1; rm /w/a/f3; touch /w/own%d", i, i, i))
	}
	for i, c := range children {
		if got := d.ok(t, c.GetId(), "cat /w/state; cat /w/hard; ls /w | grep own"); got != fmt.Sprintf("%d\n1\n%d\nown%d\n", i, i, i) {
			t.Fatalf("child %d sees %q", i, got)
		}
	}
	again := d.fork(t, past.GetId(), 1)[0]
	if got, s := digest(t, d.rootOf(t, again.GetGeneration())); s != sum {
		t.Fatalf("after its children wrote, the node forks to something else:\n%s", strings.Join(treewalk.Diff(want, got, 20), "\n"))
	}
	free(t, d, children...)
}

// A child of one tree doesn't stand behind all that another tree asked for before: in the best of a few tries, since how soon the
// second request gets to the daemon is the host's affair.
func TestABigForkHoldsNoSmallOneUp(t *testing.T) {
	d := running(t)
	const many = 128
	var before int64
	for try := range 10 {
		big, one := d.newTree(t)
		small, other := d.newTree(t)
		d.captured(t, big.GetId(), small.GetId())
		stream, err := d.client.Fork(ctx(t), &boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: big.GetId()}, Count: many}}})
		if err != nil {
			t.Fatal(err)
		}
		all := []*boxwoodv1.Sandbox{one, other}
		next := func() bool {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				return false
			}
			if err != nil || m.GetSandbox() == nil {
				t.Errorf("%v, %v", m, err)
				return false
			}
			all = append(all, m.GetSandbox())
			return true
		}
		next()
		var come atomic.Int64
		rest := make(chan struct{})
		go func() {
			defer close(rest)
			for next() {
				come.Add(1)
			}
		}()
		child := d.fork(t, small.GetId(), 1)
		before = come.Load()
		<-rest
		free(t, d, append(all, child...)...)
		t.Logf("try %d: %d of %d children came before the one of the other tree", try, before+1, many)
		if before < many*3/4 {
			return
		}
	}
	t.Fatalf("%d of %d children of an earlier call came first", before+1, many)
}

func free(t testing.TB, d *daemon, list ...*boxwoodv1.Sandbox) {
	t.Helper()
	var ids []string
	for _, c := range list {
		ids = append(ids, c.GetId())
	}
	r, err := d.client.Release(ctx(t), &boxwoodv1.ReleaseRequest{SandboxIds: ids})
	if err != nil || r.GetReleased() != int64(len(ids)) {
		t.Fatalf("released %d of %d, %v", r.GetReleased(), len(ids), err)
	}
}

func TestScratchForksWriteNoNodes(t *testing.T) {
	d := running(t)
	root, _ := d.newTree(t)
	r := d.tryFork(t, &boxwoodv1.ForkRequest{Scratch: true, Wants: []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: root.GetId()}, Count: 2}}})
	for _, c := range r {
		res := d.run(t, c.GetSandbox().GetId(), "echo x > /root/x")
		if res.GetNode().GetId() != "" {
			t.Fatalf("a scratch turn made node %s", res.GetNode().GetId())
		}
		if got := d.ok(t, c.GetSandbox().GetId(), "cat /root/x"); got != "x\n" {
			t.Fatalf("the scratch sandbox sees %q", got)
		}
	}
	trees, err := d.client.ListTrees(ctx(t), &boxwoodv1.ListTreesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, tr := range trees.GetTrees() {
		if tr.GetId() == root.GetTreeId() && tr.GetNodeCount() != 1 {
			t.Fatalf("the tree has %d nodes", tr.GetNodeCount())
		}
	}
}

// Each child succeeds or fails alone, and the limit on sandboxes is kept.
func TestForkRefusals(t *testing.T) {
	d := running(t)
	root, sb := d.newTree(t)
	fail := func(req *boxwoodv1.ForkRequest) string {
		t.Helper()
		s, err := d.client.Fork(ctx(t), req)
		if err == nil {
			_, err = s.Recv()
		}
		if err == nil {
			t.Fatal("a bad fork was accepted")
		}
		return reason(err)
	}
	want := func(id string, n int32) []*boxwoodv1.ForkRequest_Want {
		return []*boxwoodv1.ForkRequest_Want{{From: &boxwoodv1.ForkRequest_Want_NodeId{NodeId: id}, Count: n}}
	}
	for name, c := range map[string]struct {
		req    *boxwoodv1.ForkRequest
		reason string
	}{
		"no children":      {&boxwoodv1.ForkRequest{Wants: want(root.GetId(), 0)}, "bad_count"},
		"a million":        {&boxwoodv1.ForkRequest{Wants: want(root.GetId(), 1e6)}, "bad_count"},
		"nothing":          {&boxwoodv1.ForkRequest{}, "bad_count"},
		"a sandbox's id":   {&boxwoodv1.ForkRequest{Wants: want(sb.GetId(), 1)}, "bad_id"},
		"an unknown node":  {&boxwoodv1.ForkRequest{Wants: want("nd_01jd9m00000000000000000000", 1)}, "node_not_found"},
		"past the limit":   {&boxwoodv1.ForkRequest{Wants: append(want(root.GetId(), 1024), want(root.GetId(), 1024)...)}, "too_many_sandboxes"},
		"neither is named": {&boxwoodv1.ForkRequest{Wants: []*boxwoodv1.ForkRequest_Want{{Count: 1}}}, "bad_fork"},
	} {
		if got := fail(c.req); got != c.reason {
			t.Errorf("%s: reason %q, want %q", name, got, c.reason)
		}
	}
}
