package service

import (
	"bufio"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

var (
	soakDays  = flag.Int("soak.days", 4, "days of TestSoak; `make soak` has 30")
	soakTrees = flag.Int("soak.trees", 2, "trees that grow at once, each day")
	soakTurns = flag.Int("soak.turns", 12, "turns of each")
	soakSeed  = flag.Uint64("soak.seed", 0, "repeats a soak; 0: another each time")
)

const (
	soakKeep   = 2 // days that a closed tree is kept
	soakStates = 3 // that the policy leaves each tree
)

// If it fails, a daemon that runs for long fills its disk or its memory, falls behind with what is to be removed, or
// leaves something: days of a trainer, of whose turns a fifth change files and a twentieth leave processes, on
// trees that are closed in the evening and pruned some days later.
func TestSoak(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	seed := *soakSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-args -soak.seed %d", seed)
	t.Setenv(keepStates, fmt.Sprint(soakStates))
	d := startDaemon(t, "")
	d.importRoot(t)
	var days [][]*boxwoodv1.Tree
	var pool, memory []int64
	for day := range *soakDays {
		trees := make([]*boxwoodv1.Tree, *soakTrees)
		var growing sync.WaitGroup
		for i := range trees {
			growing.Go(func() { trees[i] = d.soakTree(t, rand.New(rand.NewPCG(seed, uint64(day**soakTrees+i)))) })
		}
		growing.Wait()
		if t.Failed() {
			return
		}
		if days = append(days, trees); len(days) > soakKeep {
			for _, tr := range days[len(days)-1-soakKeep] {
				if _, err := d.client.Prune(ctx(t), &boxwoodv1.PruneRequest{NodeId: tr.GetRootId()}); err != nil {
					t.Fatalf("day %d: pruning: %v", day, err)
				}
			}
		}
		var state string
		until(t, "the policy is kept and nothing waits to be removed", func() bool {
			i, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
			if err != nil {
				t.Fatal(err)
			}
			r, err := d.client.ListTrees(ctx(t), &boxwoodv1.ListTreesRequest{})
			if err != nil {
				t.Fatal(err)
			}
			most := int64(0)
			for _, tr := range r.GetTrees() {
				most = max(most, tr.GetCheckpointCount())
			}
			state = fmt.Sprintf("%d trees, up to %d states each, %d removals pending", len(r.GetTrees()), most, i.GetPendingRemovals())
			return len(r.GetTrees()) == min(len(days), soakKeep)**soakTrees && most <= soakStates && i.GetPendingRemovals() == 0
		})
		i, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("day %d: %s, %d sandboxes", day, state, i.GetSandboxes())
		if i.GetSandboxes() != 0 {
			t.Fatalf("day %d: %d sandboxes live, and all trees are closed", day, i.GetSandboxes())
		}
		pool, memory = append(pool, i.GetPoolBytesUsed()), append(memory, residentBytes(t, d.cmd.Process.Pid))
	}
	t.Logf("MiB by day: the pool %v, the daemon %v", inMiB(pool), inMiB(memory))
	// A month is held to what its first days came to; a short soak to room for what is behind with.
	settled := min(len(pool), soakKeep+2)
	if first, last := slices.Max(pool[:settled]), pool[len(pool)-1]; last > 2*first+64<<20 {
		t.Errorf("the pool has %d bytes, and had at most %d in the first days", last, first)
	}
	if first, last := slices.Max(memory[:settled]), memory[len(memory)-1]; last > 2*first+64<<20 {
		t.Errorf("the daemon has %d bytes of memory, and had at most %d in the first days", last, first)
	}
	d.stop()
	for _, f := range inspected(d.dir) {
		t.Errorf("after an orderly end: %s", f)
	}
}

// soakTree grows a tree and closes it.
func (d *daemon) soakTree(t *testing.T, rnd *rand.Rand) *boxwoodv1.Tree {
	r, err := d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{Start: &boxwoodv1.CreateTreeRequest_Image{Image: "mini"}, WithSandbox: true})
	if err != nil {
		t.Error(err)
		return nil
	}
	for i := range *soakTurns {
		act := "true"
		switch dice := rnd.IntN(100); {
		case dice < 5 && testenv.CRIUPath() != "":
			act = "sleep 1000 >/dev/null 2>&1 &"
		case dice < 25:
			act = fmt.Sprintf("head -c 65536 /dev/urandom > /root/%d", i%8)
		}
		shell := fmt.Sprintf("%s\nhead -c 10240 /dev/zero | tr '\\0' x", act)
		if _, err := d.tryRun(t, &boxwoodv1.RunTurnRequest{SandboxId: r.GetSandbox().GetId(), Command: &boxwoodv1.Command{Shell: []byte(shell)}, BusyWaitNs: int64(time.Minute)}); err != nil {
			t.Errorf("turn %d: %v", i, err)
			return nil
		}
	}
	if _, err := d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: r.GetTree().GetId()}); err != nil {
		t.Error(err)
	}
	return r.GetTree()
}

// residentBytes of a process.
func residentBytes(t *testing.T, pid int) int64 {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for in := bufio.NewScanner(f); in.Scan(); {
		var kib int64
		if _, err := fmt.Sscanf(in.Text(), "VmRSS: %d kB", &kib); err == nil {
			return kib << 10
		}
	}
	t.Fatalf("process %d has no resident memory", pid)
	return 0
}

func inMiB(bytes []int64) (out []int64) {
	for _, b := range bytes {
		out = append(out, b>>20)
	}
	return out
}
