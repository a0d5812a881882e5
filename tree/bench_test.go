package tree

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/ids"
)

// The disk that is measured: $BOXWOOD_BENCH_DIR, else the test's own folder.
func benchDir(b *testing.B) string {
	if d := os.Getenv("BOXWOOD_BENCH_DIR"); d != "" {
		d, err := os.MkdirTemp(d, "tree")
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { os.RemoveAll(d) })
		return d
	}
	return b.TempDir()
}

// BenchmarkAppend is one durable node an operation: 200 B of action, 5
// effects, 3 labels.
func BenchmarkAppend(b *testing.B) {
	for _, writers := range []int{1, 64} {
		b.Run(fmt.Sprintf("w%d", writers), func(b *testing.B) {
			s := mustOpen(b, benchDir(b), Options{})
			tr := mustTree(b, s)
			root, _ := s.View().Node(tr.Root)
			took := make([]time.Duration, b.N)
			next := make(chan int, b.N)
			for i := range b.N {
				next <- i
			}
			close(next)
			used := cpuTime()
			b.ResetTimer()
			var wg sync.WaitGroup
			for range writers {
				wg.Go(func() {
					for i := range next {
						n := typicalNode(root)
						start := time.Now()
						if _, err := s.Update(context.Background(), func(tx *Tx) error {
							_, err := tx.AddNode(n)
							return err
						}); err != nil {
							b.Error(err)
						}
						took[i] = time.Since(start)
					}
				})
			}
			wg.Wait()
			b.StopTimer()
			// What doesn't depend on who else uses the machine.
			b.ReportMetric(float64((cpuTime()-used).Microseconds())/float64(b.N), "cpu-us/op")
			slices.Sort(took)
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "appends/s")
			b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
		})
	}
}

func cpuTime() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkReopen opens a store of 100,000 nodes in 100 trees and says what a
// node costs in memory and on disk.
func BenchmarkReopen(b *testing.B) {
	const count = 100_000
	dir := benchDir(b)
	s, err := Open(dir, Options{AllowTmpfs: true})
	if err != nil {
		b.Fatal(err)
	}
	for range 100 {
		tr := mustTree(b, s)
		for range 10 {
			mustUpdate(b, s, func(tx *Tx) error {
				p, _ := tx.Node(tr.Root)
				for range count / 1000 {
					var err error
					if p, err = tx.AddNode(typicalNode(p)); err != nil {
						return err
					}
				}
				return nil
			})
		}
	}
	mustClose(b, s)
	s = nil // or it would be counted
	heap := func() float64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	before := heap()
	used := cpuTime()
	for b.Loop() {
		if s != nil {
			b.StopTimer()
			mustClose(b, s)
			b.StartTimer()
		}
		var err error
		if s, err = Open(dir, Options{AllowTmpfs: true}); err != nil { // mustOpen would keep each
			b.Fatal(err)
		}
	}
	b.Cleanup(func() { s.Close() })
	b.ReportMetric((cpuTime()-used).Seconds()/float64(b.N), "cpu-s/op")
	b.ReportMetric((heap()-before)/count, "B/node")
	var disk int64
	entries, _ := os.ReadDir(dir + "/log")
	for _, e := range entries {
		if i, err := e.Info(); err == nil {
			disk += i.Size()
		}
	}
	b.ReportMetric(float64(disk)/count, "disk-B/node")
}

// BenchmarkShape: what one append and one read of the children costs below a
// node that is deep or has many children, next to a small tree.
func BenchmarkShape(b *testing.B) {
	for _, shape := range []string{"small", "deep", "wide"} {
		b.Run(shape, func(b *testing.B) {
			s := mustOpen(b, benchDir(b), Options{})
			tr := mustTree(b, s)
			at := shapeTree(b, s, tr, shape)
			used := cpuTime()
			defer func() { b.ReportMetric(float64((cpuTime()-used).Microseconds())/float64(b.N), "cpu-us/op") }()
			b.ResetTimer()
			for b.Loop() {
				mustUpdate(b, s, func(tx *Tx) error {
					p, _ := tx.Node(at)
					n, err := tx.AddNode(typicalNode(p))
					if err != nil {
						return err
					}
					_, err = tx.Prune(n.ID, false)
					return err
				})
			}
		})
	}
}

// shapeTree grows a tree of 10,000 levels or 10,000 children and gives the
// node to go on from.
func shapeTree(t testing.TB, s *Store, tr *Tree, shape string) ids.Node {
	at := tr.Root
	if shape == "small" {
		return at
	}
	mustUpdate(t, s, func(tx *Tx) error {
		p, _ := tx.Node(tr.Root)
		for range 10_000 {
			n, err := tx.AddNode(typicalNode(p))
			if err != nil {
				return err
			}
			if shape == "deep" {
				p, at = n, n.ID
			}
		}
		return nil
	})
	return at
}

// BenchmarkPrune removes a chain of 100,000 nodes in one change, beside another.
func BenchmarkPrune(b *testing.B) {
	s := mustOpen(b, benchDir(b), Options{})
	for b.Loop() {
		b.StopTimer()
		tr := mustTree(b, s)
		top := mustNode(b, s, tr.Root)
		for range 100 {
			mustUpdate(b, s, func(tx *Tx) error {
				p := top
				for range 1000 {
					var err error
					if p, err = tx.AddNode(typicalNode(p)); err != nil {
						return err
					}
				}
				return nil
			})
		}
		b.StartTimer()
		mustPrune(b, s, top.ID, true)
	}
}
