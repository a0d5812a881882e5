// Command treebench measures the tree store beside the disk's own fdatasync, and prints
// one JSON line a figure; run.sh calls it. A node has 200 B of action, 5 effects and
// 3 labels. Appends are durable: Update returns after the flush. -long is the thorough form.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

func main() {
	dir := flag.String("dir", "", "a folder on the disk that is measured; what is made in it is removed")
	long := flag.Bool("long", false, "a million nodes, and more of the rest")
	flag.Parse()
	if *dir == "" {
		fmt.Fprintln(os.Stderr, "usage: treebench -dir FOLDER [-long]")
		os.Exit(2)
	}
	scratch, err := os.MkdirTemp(*dir, "boxwood-treebench")
	must(err)
	defer os.RemoveAll(scratch)
	b := &bench{dir: scratch, long: *long}
	b.appends()
	b.watchers()
	b.many()
	b.shapes()
}

type bench struct {
	dir  string
	long bool
}

// scale is n, or long in the thorough form.
func (b *bench) scale(n, long int) int {
	if b.long {
		return long
	}
	return n
}

func (b *bench) open(name string) *tree.Store {
	s, err := tree.Open(filepath.Join(b.dir, name), tree.Options{})
	must(err)
	return s
}

// appends: one durable node a change, by one writer and by 64, each beside what the
// disk takes for the bare write and fdatasync of as many bytes by one thread.
func (b *bench) appends() {
	n := b.scale(4_000, 40_000)
	raw := b.fdatasyncs(n)
	b.emit("fdatasync_per_s", rate(raw), "1/s", n, "baseline: write of 1 KiB and fdatasync, one thread")
	b.emit("fdatasync_ms.p99", ms(quantile(raw, .99)), "ms", n, "baseline")
	s := b.open("appends")
	root := plant(s)
	for _, w := range []struct{ writers, n int }{{1, n}, {64, 10 * n}} {
		used, start := cpuTime(), time.Now()
		took := b.append(s, root, w.writers, w.n)
		wall, cpu := time.Since(start), cpuTime()-used
		b.emit(fmt.Sprintf("append_per_s.w%d", w.writers), float64(w.n)/wall.Seconds(), "1/s", w.n, fmt.Sprintf("durable; %d writers", w.writers))
		b.emit(fmt.Sprintf("append_cpu_us.w%d", w.writers), float64(cpu.Microseconds())/float64(w.n), "us", w.n, "processor time of the whole process, the making of nodes and the log's own work included")
		name := "append_ms.p99"
		if w.writers == 1 {
			name += ".w1"
		}
		b.emit(name, ms(quantile(took, .99)), "ms", w.n, fmt.Sprintf("%d writers", w.writers))
	}
	b.reads(s, root)
	must(s.Close())
}

func (b *bench) fdatasyncs(n int) []time.Duration {
	f, err := os.Create(filepath.Join(b.dir, "raw"))
	must(err)
	defer f.Close()
	block := make([]byte, 1<<10)
	took := make([]time.Duration, n)
	for i := range took {
		start := time.Now()
		_, err := f.Write(block)
		must(errors.Join(err, unix.Fdatasync(int(f.Fd()))))
		took[i] = time.Since(start)
	}
	return took
}

func (b *bench) append(s *tree.Store, parent *tree.Node, writers, n int) []time.Duration {
	took := make([]time.Duration, n)
	var all sync.WaitGroup
	for w := range writers {
		all.Go(func() {
			for i := w; i < n; i += writers {
				child := child(parent)
				start := time.Now()
				_, err := s.Update(context.Background(), func(tx *tree.Tx) error { _, err := tx.AddNode(child); return err })
				must(err)
				took[i] = time.Since(start)
			}
		})
	}
	all.Wait()
	return took
}

// reads: nodes by id at random, by as many readers as there are cores.
func (b *bench) reads(s *tree.Store, root *tree.Node) {
	var all []ids.Node
	for n := range s.View().NodesOf(root.Tree) {
		all = append(all, n.ID)
	}
	n := b.scale(100_000, 1_000_000)
	start := time.Now()
	var readers sync.WaitGroup
	for range runtime.NumCPU() {
		readers.Go(func() {
			for range n {
				_, err := s.View().Node(all[rand.IntN(len(all))])
				must(err)
			}
		})
	}
	readers.Wait()
	total := n * runtime.NumCPU()
	b.emit("reads_per_s", float64(total)/time.Since(start).Seconds(), "1/s", total, fmt.Sprintf("a view and a node by id, %d readers, %d nodes", runtime.NumCPU(), len(all)))
}

// watchers: from the call of an append until each of 1,000 watchers of its tree has the event.
func (b *bench) watchers() {
	const watchers = 1000
	s := b.open("watched")
	root := plant(s)
	rounds := b.scale(30, 300)
	ctx, cancel := context.WithCancel(context.Background())
	type seen struct {
		at    time.Time
		index uint64
	}
	events := make(chan seen, watchers)
	var all sync.WaitGroup
	after := s.View().Index()
	for range watchers {
		w, err := s.Watch(ctx, root.Tree, after)
		must(err)
		all.Go(func() {
			defer w.Close()
			for {
				e, err := w.Next(ctx)
				if err != nil {
					return
				}
				events <- seen{time.Now(), e.Index}
			}
		})
	}
	var took []time.Duration
	for range rounds {
		start := time.Now()
		index, err := s.Update(ctx, func(tx *tree.Tx) error { _, err := tx.AddNode(child(root)); return err })
		must(err)
		for range watchers {
			e := <-events
			if e.index != index {
				must(fmt.Errorf("an event of change %d instead of %d", e.index, index))
			}
			took = append(took, e.at.Sub(start))
		}
	}
	cancel()
	all.Wait()
	must(s.Close())
	b.emit("watch_ms.p50", ms(quantile(took, .5)), "ms", len(took), "from the call of the append, its flush included, to one of 1,000 watchers of the tree")
	b.emit("watch_ms.p99", ms(quantile(took, .99)), "ms", len(took), "from the call of the append, its flush included, to one of 1,000 watchers of the tree")
}

// many: what many nodes cost in memory and on disk, to open again, and to prune.
func (b *bench) many() {
	count := b.scale(100_000, 1_000_000)
	const ofATree, pruned = 1_000, 100_000
	s := b.open("many")
	for range count / ofATree {
		grow(s, plant(s), ofATree-1)
	}
	must(s.Close())
	s = nil // or it would be counted
	before, used := heap(), cpuTime()
	start := time.Now()
	s = b.open("many")
	wall, cpu := time.Since(start), cpuTime()-used
	how := fmt.Sprintf("%d nodes in trees of %d", count, ofATree)
	b.emit("restart_1m_s", wall.Seconds()*1e6/float64(count), "s", count, how+scaled(count))
	b.emit("restart_1m_cpu_s", cpu.Seconds()*1e6/float64(count), "s", count, how+scaled(count))
	b.emit("node_bytes.memory", float64(heap()-before)/float64(count), "B", count, how+", the heap after opening, with the log's own caches")
	b.emit("node_bytes.disk", float64(size(filepath.Join(b.dir, "many")))/float64(count), "B", count, how+", compressed by the log")

	root := plant(s)
	top := grow(s, root, 1)
	grow(s, top, pruned)
	start = time.Now()
	var gone *tree.Pruned
	_, err := s.Update(context.Background(), func(tx *tree.Tx) (err error) { gone, err = tx.Prune(top.ID, true); return err })
	must(err)
	b.emit("prune_100k_s", time.Since(start).Seconds(), "s", len(gone.Nodes), fmt.Sprintf("one change that removes a chain of %d nodes, beside %d others", len(gone.Nodes), count))
	must(s.Close())
}

func scaled(count int) string {
	if count == 1_000_000 {
		return ""
	}
	return fmt.Sprintf(", times %d", 1_000_000/count)
}

// shapes: an append below 10,000 levels and below a node of 10,000 children, beside one in a
// small tree, by processor time, which doesn't depend on the disk.
func (b *bench) shapes() {
	s := b.open("shapes")
	roots := map[string]*tree.Node{"small": plant(s), "deep": grow(s, plant(s), 10_000), "wide": widen(s, plant(s), 10_000)}
	rounds := b.scale(8, 40)
	const n = 100
	took := map[string][]time.Duration{}
	for range rounds { // in turn, so that what else runs meets all of them
		for shape, at := range roots {
			used := cpuTime()
			b.append(s, at, 1, n)
			took[shape] = append(took[shape], (cpuTime()-used)/n)
		}
	}
	must(s.Close())
	for _, shape := range []string{"deep", "wide"} {
		b.emit("append_ratio."+shape, float64(quantile(took[shape], .5))/float64(quantile(took["small"], .5)), "ratio", rounds*n,
			"processor time of an append, 10,000 levels or children to a small tree, medians of rounds in turn")
	}
}

// ---- trees -----------------------------------------------------------------

// plant makes a tree with a captured root.
func plant(s *tree.Store) *tree.Node {
	t := tree.Tree{ID: ids.NewTree(), Root: ids.NewNode(), CreatedAt: time.Now()}
	_, err := s.Update(context.Background(), func(tx *tree.Tx) error {
		if err := tx.PutTree(t); err != nil {
			return err
		}
		if _, err := tx.AddNode(tree.Node{ID: t.Root, Tree: t.ID, Capture: tree.Recorded, TurnStatus: tree.Completed}); err != nil {
			return err
		}
		k := tree.Checkpoint{ID: ids.NewCheckpoint(), Tree: t.ID, Node: t.Root, Snapshot: ids.NewSnapshot(), Process: tree.Empty, CreatedAt: time.Now()}
		return tx.SetCaptured(k, time.Now(), false, 0)
	})
	must(err)
	n, err := s.View().Node(t.Root)
	must(err)
	return n
}

// grow adds a chain below a node and gives its end; widen adds children.
func grow(s *tree.Store, at *tree.Node, n int) *tree.Node {
	return add(s, at, n, func(_, added *tree.Node) *tree.Node { return added })
}

func widen(s *tree.Store, at *tree.Node, n int) *tree.Node {
	return add(s, at, n, func(parent, _ *tree.Node) *tree.Node { return parent })
}

func add(s *tree.Store, at *tree.Node, n int, next func(parent, added *tree.Node) *tree.Node) *tree.Node {
	const aChange = 1000
	for n > 0 {
		part := min(n, aChange)
		n -= part
		var end *tree.Node
		_, err := s.Update(context.Background(), func(tx *tree.Tx) error {
			end = at
			for range part {
				added, err := tx.AddNode(child(end))
				if err != nil {
					return err
				}
				end = next(end, added)
			}
			return nil
		})
		must(err)
		at = end
	}
	return at
}

// child is a turn that changed five files and shares the checkpoint of its parent.
func child(parent *tree.Node) tree.Node {
	now := time.Now()
	n := tree.Node{
		ID: ids.NewNode(), Tree: parent.Tree, Parent: parent.ID, TurnStatus: tree.Completed,
		Verdict: tree.None, Capture: parent.Capture, Checkpoint: parent.Checkpoint,
		Action:      tree.Action{Text: make([]byte, 200), Steps: 1},
		Observation: tree.Observation{Stdout: []byte("ok\n")},
		Labels:      map[string]string{"step": "12", "group": "g-7", "role": "policy"},
		StartedAt:   now, EndedAt: now, EffectCount: 5, Sandbox: someSandbox,
		Timings: tree.Timings{Command: 3 * time.Millisecond, Total: 5 * time.Millisecond},
	}
	for i := range n.Action.Text { // text that a compressor can't fold
		n.Action.Text[i] = byte(' ' + rand.IntN(95))
	}
	for i := range 5 {
		n.Effects = append(n.Effects, tree.Effect{Kind: tree.FileChanged, Subject: fmt.Appendf(nil, "/srv/app/file%d", rand.IntN(1000)+i)})
	}
	return n
}

var someSandbox = ids.NewSandbox()

// ---- measuring -------------------------------------------------------------

func cpuTime() time.Duration {
	var u unix.Rusage
	must(unix.Getrusage(unix.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func size(dir string) (total int64) {
	must(filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		i, err := d.Info()
		if err == nil {
			total += i.Size()
		}
		return err
	}))
	return total
}

func rate(took []time.Duration) float64 {
	var sum time.Duration
	for _, d := range took {
		sum += d
	}
	return float64(len(took)) / sum.Seconds()
}

func quantile(took []time.Duration, q float64) time.Duration {
	took = slices.Sorted(slices.Values(took))
	return took[int(q*float64(len(took)-1))]
}

func ms(d time.Duration) float64 { return float64(d) / 1e6 }

func (b *bench) emit(metric string, value float64, unit string, n int, how string) {
	var u unix.Utsname
	must(unix.Uname(&u))
	load, _ := os.ReadFile("/proc/loadavg")
	average, _, _ := strings.Cut(string(load), " ")
	must(json.NewEncoder(os.Stdout).Encode(struct {
		Bench      string  `json:"bench"`
		Metric     string  `json:"metric"`
		Value      float64 `json:"value"`
		Unit       string  `json:"unit"`
		N          int     `json:"n"`
		Conditions string  `json:"conditions"`
	}{"tree", metric, value, unit, n, fmt.Sprintf("%s; %d cores, Linux %s, load %s", how, runtime.NumCPU(), unix.ByteSliceToString(u.Release[:]), average)}))
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "treebench:", err)
		os.Exit(1)
	}
}
