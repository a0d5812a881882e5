package pool_test

import (
	"context"
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/overlay"
	"github.com/boxwood-rl/boxwood/internal/overlay/overlaytest"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/tree"

	"os"
)

func p50(d []time.Duration) float64 {
	s := slices.Clone(d)
	slices.Sort(s)
	return float64(s[len(s)/2].Microseconds()) / 1000
}

func cpu() time.Duration {
	var ru syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &ru)
	return time.Duration(ru.Utime.Nano() + ru.Stime.Nano())
}

// BenchmarkFork clones one base 2,000 times, mounts each, snapshots a chain of
// 200, and releases all. It reports medians in ms of the first and the last tenth:
// neither may grow.
func BenchmarkFork(b *testing.B) {
	testenv.Require(b, testenv.Btrfs)
	for b.Loop() {
		p, err := pool.OpenBtrfs(pool.Options{Dir: b.TempDir(), SizeBytes: 8 << 30})
		if err != nil {
			b.Fatal(err)
		}
		layer := ids.Layer(fmt.Sprintf("sha256:%064d", 1))
		must(b, p.AddLayer(b.Context(), layer, func(dir string) error {
			for i := range 10000 {
				if err := os.WriteFile(fmt.Sprintf("%s/f%d", dir, i), []byte("some content of a file"), 0o644); err != nil {
					return err
				}
			}
			return nil
		}))
		base := ids.NewSnapshot()
		seal, err := p.AddBase(b.Context(), base, []ids.Layer{layer})
		must(b, err)
		ns := overlaytest.MustUserNS(b, 100000)
		var clone, mount []time.Duration
		var gens []ids.Generation
		for range 2000 {
			gens = append(gens, ids.NewGeneration())
			t0 := time.Now()
			up, err := p.Clone(b.Context(), base, seal, gens[len(gens)-1], 1<<30)
			must(b, err)
			t1 := time.Now()
			m, err := overlay.Mount(overlay.Options{Lower: up.Layers, Upper: up.Dir, Work: up.Work, UserNS: ns, IDBase: 100000})
			must(b, err)
			clone, mount = append(clone, t1.Sub(t0)), append(mount, time.Since(t1))
			m.Close()
		}
		b.ReportMetric(p50(clone[:200]), "clone-first")
		b.ReportMetric(p50(clone[1800:]), "clone-at-2000")
		b.ReportMetric(p50(mount[:200]), "mount-first")
		b.ReportMetric(p50(mount[1800:]), "mount-at-2000")
		chain(b, p, base, seal)
		t0, c0 := time.Now(), cpu()
		for _, g := range gens {
			must(b, p.Release(g))
		}
		b.ReportMetric(float64(time.Since(t0).Microseconds())/2e6, "release-call")
		ctx, cancel := context.WithTimeout(b.Context(), time.Minute)
		must(b, p.Drain(ctx))
		cancel()
		b.ReportMetric(float64(time.Since(t0).Microseconds())/2e6, "release-gone")
		b.ReportMetric(float64((cpu()-c0).Microseconds())/2e6, "release-cpu-ours")
		must(b, p.Close())
	}
}

// chain captures and forks 200 times in a row, each with a small change.
func chain(b *testing.B, p *pool.Btrfs, at ids.Snapshot, seal tree.Seal) {
	var snap, finish, clone []time.Duration
	for i := range 200 {
		t0 := time.Now()
		up, err := p.Clone(b.Context(), at, seal, ids.NewGeneration(), 1<<30)
		must(b, err)
		clone = append(clone, time.Since(t0))
		must(b, os.WriteFile(fmt.Sprintf("%s/f%d", up.Dir, i%20), []byte("a small change"), 0o644))
		must(b, p.Flush(b.Context(), up.Generation))
		at = ids.NewSnapshot()
		t1 := time.Now()
		pending, err := p.Snapshot(b.Context(), up.Generation, at)
		must(b, err)
		t2 := time.Now()
		seal, err = pending.Finish(b.Context())
		must(b, err)
		snap, finish = append(snap, t2.Sub(t1)), append(finish, time.Since(t2))
	}
	b.ReportMetric(p50(snap[:40]), "snapshot-first")
	b.ReportMetric(p50(snap[160:]), "snapshot-at-200")
	b.ReportMetric(p50(finish), "finish")
	b.ReportMetric(p50(clone[160:]), "chain-clone-at-200")
}

func must(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}
