package tree

import (
	"context"
	"flag"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/ids"
)

var (
	soakTurns = flag.Int("soak.turns", 96, "turns a day of the soak; `make soak` has 100,000")
	soakSeed  = flag.Uint64("soak.seed", 0, "repeat a soak of this seed; 0: another each time")
)

// soak is a trainer's month: each day some trees grow, are closed, lose the states beyond a policy, and are
// pruned when they are keep days old, while others grow, closed ones leave memory, and what nobody needs is given back. Saved
// states lie in a pool that only counts.
type soak struct {
	*testing.T
	s     *Store
	now   atomic.Int64  // the store's clock: days, in ns
	trees [][]ids.Tree  // by day
	done  chan struct{} // cap 1: a tree was closed

	mu       sync.Mutex
	saved    map[ids.Snapshot]bool
	dumps    map[ids.Process]bool
	behind   int // the most that was condemned at the end of a day
	released int
}

const (
	soakDays    = 30
	soakKeep    = 3    // days that a tree is kept
	soakStates  = 25   // one saved state is kept for so many turns, once a tree is closed
	soakWriters = 8    // trees that grow at once
	soakTree    = 1000 // turns of a tree, at most
)

// If it fails, a daemon that runs for a month fills its memory or its disk, or saved states pile up that nobody has.
// A day is -soak.turns turns: 20 % change files, 5 % leave processes, each has 10 KiB of output.
func TestSoak(t *testing.T) {
	seed := *soakSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-args -soak.seed %d", seed)
	k := &soak{T: t, saved: map[ids.Snapshot]bool{}, dumps: map[ids.Process]bool{}, done: make(chan struct{}, 1)}
	dir := t.TempDir()
	k.s = mustOpen(t, dir, Options{Clock: func() time.Time { return time.Unix(0, k.now.Load()).UTC() }})
	long := *soakTurns >= 10_000
	var heaps, disks []int64
	for day := range soakDays {
		k.now.Store(int64(day+1) * int64(24*time.Hour))
		before := k.released
		k.day(day, rand.New(rand.NewPCG(seed, uint64(day))))
		k.behind = max(k.behind, k.condemned())
		if due := k.released - before + k.condemned(); long && k.condemned() > due/2 {
			t.Errorf("day %d: of %d states to be given back %d still wait", day, due, k.condemned())
		}
		k.clear()

		v := k.s.View()
		if n := v.CheckpointCount(""); n != len(k.saved) {
			t.Fatalf("day %d: the pool has %d snapshots, and %d checkpoints need one", day, len(k.saved), n)
		}
		states := 0
		for range v.Processes() {
			states++
		}
		if states != len(k.dumps) {
			t.Fatalf("day %d: the pool has %d dumps, and %d are known", day, len(k.dumps), states)
		}
		if most := soakKeep * len(k.trees[day]) * (k.states() + 1); len(k.saved) > most {
			t.Fatalf("day %d: the pool has %d snapshots, and the policy keeps %d", day, len(k.saved), most)
		}
		if n, most := v.NodeCount(""), soakKeep**soakTurns+soakKeep*len(k.trees[day]); n > most {
			t.Fatalf("day %d: %d nodes are left of trees of %d days, at most %d", day, n, soakKeep, most)
		}
		resident := 0
		for range v.allNodes() {
			resident++
		}
		if resident > 0 {
			t.Fatalf("day %d: all trees are closed, and %d nodes are in memory", day, resident)
		}
		if !long { // what has no use is given back when pebble gets to it: here it is made to
			if err := k.s.log.db.Flush(); err != nil {
				t.Fatal(err)
			}
			if err := k.s.log.db.Compact(context.Background(), []byte{0}, []byte{0xff}, false); err != nil {
				t.Fatal(err)
			}
		}
		heaps, disks = append(heaps, heapNow()), append(disks, bytesOfTables(t, dir))
	}
	policy := int64(soakKeep**soakTurns) * (10<<10 + 2<<10)
	bound := 2*policy + 1<<20
	if long {
		bound = 3*policy + 256<<20
	}
	t.Logf("disk by day, MiB: %v; the trees that are kept have %d", mib(disks), policy>>20)
	t.Logf("heap by day, MiB: %v", mib(heaps))
	t.Logf("%d states given back, at most %d waited at the end of a day", k.released, k.behind)
	if most := slices.Max(disks); most > bound {
		t.Errorf("the log took %d bytes, at most %d are due", most, bound)
	}
	if early, late := slices.Max(heaps[soakKeep:soakDays/2]), slices.Max(heaps[soakDays/2:]); late > early*5/4+64<<20 {
		t.Errorf("the heap grew from %d to %d bytes", early, late)
	}
}

// If it fails, something of a tree that is gone stays in memory. Objects are counted and not bytes: of those the log has what
// it needs for its tables, up to a bound of its own.
func TestTreesThatAreGoneLeaveNothing(t *testing.T) {
	const removals, live, warm, trees, turns = 100, 10, 100, 250, 20
	k := &soak{T: t, saved: map[ids.Snapshot]bool{}, dumps: map[ids.Process]bool{}, done: make(chan struct{}, 1)}
	k.s = mustOpen(t, t.TempDir(), Options{MaxRemovals: removals, Clock: func() time.Time { return time.Unix(0, k.now.Load()).UTC() }})
	rnd := rand.New(rand.NewPCG(1, 0))
	var grown [live]ids.Tree
	var was uint64
	for i := range trees {
		k.now.Store(int64(i+1) * int64(time.Hour))
		tr := k.tree(rnd, turns)
		k.end(tr, grown[i%live])
		grown[i%live] = tr
		k.clear()
		if i != warm && i != trees-1 {
			continue
		}
		if err := k.s.log.db.Flush(); err != nil {
			t.Fatal(err)
		}
		if err := k.s.log.db.Compact(context.Background(), []byte{0}, []byte{0xff}, false); err != nil {
			t.Fatal(err)
		}
		heapNow()
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		t.Logf("after %d trees: %d objects, %d bytes", i+1, m.HeapObjects, m.HeapAlloc)
		if i == warm {
			was = m.HeapObjects
		} else if grew := int(m.HeapObjects) - int(was); grew > 5*(trees-warm) {
			t.Errorf("%d trees that are gone left %d objects", trees-warm, grew)
		}
	}
}

func soakTrees() int { return max(soakWriters, (*soakTurns+soakTree-1)/soakTree) }

// states are how many a closed tree keeps beside its root's.
func (k *soak) states() int { return max(1, *soakTurns/soakTrees()/soakStates) }

// day is one of turns on several trees at once. With each tree that ends one of some days ago is pruned; beside that the
// closed ones leave memory and states that nobody needs any more are given back.
func (k *soak) day(day int, rnd *rand.Rand) {
	var growing, clearing sync.WaitGroup
	type job struct {
		*rand.Rand
		old ids.Tree
	}
	trees := soakTrees()
	jobs := make(chan job, trees)
	for i := range trees {
		j := job{Rand: rand.New(rand.NewPCG(rnd.Uint64(), 0))}
		if day >= soakKeep {
			j.old = k.trees[day-soakKeep][i]
		}
		jobs <- j
	}
	close(jobs)
	over := make(chan struct{})
	clearing.Go(func() {
		for {
			select {
			case <-over:
				return
			case <-k.done:
				k.clear()
			}
		}
	})
	today := make([]ids.Tree, 0, trees)
	for range soakWriters {
		growing.Go(func() {
			for j := range jobs {
				tr := k.tree(j.Rand, *soakTurns/trees)
				k.end(tr, j.old)
				k.mu.Lock()
				today = append(today, tr)
				k.mu.Unlock()
			}
		})
	}
	growing.Wait()
	close(over)
	clearing.Wait()
	k.trees = append(k.trees, today)
}

// tree grows one tree by turns that hang below some recent node.
func (k *soak) tree(rnd *rand.Rand, turns int) ids.Tree {
	tr := Tree{ID: ids.NewTree(), Root: ids.NewNode(), CreatedAt: k.s.o.Clock()}
	captured := k.save(tr.ID, tr.Root, false)
	k.update(func(tx *Tx) error {
		if err := tx.PutTree(tr); err != nil {
			return err
		}
		if _, err := tx.AddNode(Node{ID: tr.Root, Tree: tr.ID, Capture: Recorded, TurnStatus: Completed}); err != nil {
			return err
		}
		return captured(tx)
	})
	recent := []ids.Node{tr.Root}
	for range turns {
		parent := recent[rnd.IntN(len(recent))]
		id, half := ids.NewNode(), rnd.IntN(100)
		output := make([]byte, 10<<10)
		for i := 0; i < len(output); i += 8 { // text that a compressor can't fold
			for j, x := 0, rnd.Uint64(); j < 8; j, x = j+1, x>>8 {
				output[i+j] = ' ' + byte(x)%95
			}
		}
		k.update(func(tx *Tx) error {
			p, err := tx.Node(parent)
			if err != nil {
				return err
			}
			n := Node{ID: id, Tree: tr.ID, Parent: parent, Capture: p.Capture, Checkpoint: p.Checkpoint, TurnStatus: Completed,
				Action: Action{Text: []byte("make test")}, Observation: Observation{Stdout: output}}
			if half < 25 {
				n.Capture, n.Checkpoint = Recorded, ""
			}
			_, err = tx.AddNode(n)
			return err
		})
		if half < 25 {
			k.update(k.save(tr.ID, id, half < 5))
		}
		if half%10 == 0 {
			k.update(func(tx *Tx) error { _, err := tx.Backup([]BackupItem{{id, float64(half)}}, Mean, 0); return err })
		}
		if recent = append(recent, id); len(recent) > 16 {
			recent = recent[1:]
		}
	}
	return tr.ID
}

func (k *soak) update(change func(tx *Tx) error) {
	if _, err := k.s.Update(context.Background(), change); err != nil {
		k.Error(err)
	}
}

// save puts states into the pool; what it gives records them.
func (k *soak) save(tr ids.Tree, n ids.Node, dump bool) func(tx *Tx) error {
	c := checkpointOf(tr, n)
	p := ProcessState{ID: ids.NewProcess(), Kind: Dump, Digest: string(n), Bytes: 1 << 20}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.saved[c.Snapshot] = true
	if dump {
		k.dumps[p.ID] = true
		c.Process, c.State = Dump, p.ID
	}
	return func(tx *Tx) error {
		if dump {
			if err := tx.PutProcess(p); err != nil {
				return err
			}
		}
		return tx.SetCaptured(c, c.CreatedAt, false, 0)
	}
}

// end closes a tree, gives up its oldest states beyond the policy, and prunes an old one, if there is one.
func (k *soak) end(tr, old ids.Tree) {
	k.update(func(tx *Tx) error {
		t, err := tx.Tree(tr)
		if err != nil {
			return err
		}
		c := *t
		c.Closed = true
		if err := tx.PutTree(c); err != nil {
			return err
		}
		var own []*Checkpoint
		for x := range tx.CheckpointsOf(tr) {
			if x.Node != t.Root {
				own = append(own, x)
			}
		}
		slices.SortFunc(own, func(a, b *Checkpoint) int { return a.CreatedAt.Compare(b.CreatedAt) })
		for _, x := range own[:max(0, len(own)-k.states())] {
			for _, n := range slices.Collect(tx.CheckpointUsers(x.ID)) {
				if err := tx.SetWithheld(n.ID, "evicted by policy"); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if old != "" {
		k.update(func(tx *Tx) error {
			t, err := tx.Tree(old)
			if err != nil {
				return err
			}
			_, err = tx.Prune(t.Root, false)
			return err
		})
	}
	select {
	case k.done <- struct{}{}:
	default:
	}
}

func (k *soak) condemned() int {
	v := k.s.View()
	return len(slices.Collect(v.Condemned())) + len(slices.Collect(v.CondemnedProcesses()))
}

// clear takes closed trees out of memory, but for those that are about to be pruned, and gives back what is condemned.
func (k *soak) clear() {
	if _, err := k.s.ArchiveIdle(context.Background(), time.Nanosecond); err != nil {
		k.Error(err)
	}
	k.reap()
}

// reap gives back what is condemned.
func (k *soak) reap() {
	v := k.s.View()
	gone := slices.Collect(v.Condemned())
	var dumps []ids.Process
	for p := range v.CondemnedProcesses() {
		dumps = append(dumps, p.ID)
	}
	if len(gone)+len(dumps) == 0 {
		return
	}
	k.mu.Lock()
	for _, id := range gone {
		if !k.saved[id] {
			k.Errorf("snapshot %s is condemned, and isn't there", id)
		}
		delete(k.saved, id)
	}
	for _, id := range dumps {
		delete(k.dumps, id)
	}
	k.released += len(gone) + len(dumps)
	k.mu.Unlock()
	k.update(func(tx *Tx) error {
		if err := tx.FinishRemoval(gone); err != nil {
			return err
		}
		return tx.FinishProcessRemoval(dumps)
	})
}

func heapNow() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// bytesOfTables are those of the log's tables; its write-ahead files have a bound of their own.
func bytesOfTables(t *testing.T, dir string) (total int64) {
	t.Helper()
	if err := filepath.WalkDir(filepath.Join(dir, "log"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".sst" {
			return err
		}
		if i, err := d.Info(); err == nil {
			total += i.Size()
		} else if !os.IsNotExist(err) {
			return err
		}
		return nil
	}); err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return total
}

func mib(bytes []int64) (out []int64) {
	for _, b := range bytes {
		out = append(out, b>>20)
	}
	return out
}
