package inspector

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/tree"
)

// BenchmarkWatch is what the fork path pays.
func BenchmarkWatch(b *testing.B) {
	k := mustKernel(b, Options{})
	box := mustBox(b, nil)
	for b.Loop() {
		w, err := k.Watch(box.subject)
		if err != nil {
			b.Fatal(err)
		}
		w.Close()
	}
}

func benchBarrier(b *testing.B, files int, script string, want tree.Verdict) {
	k := mustKernel(b, Options{})
	box := mustBox(b, func(upper string) {
		for i := range files {
			dir := filepath.Join(upper, "w", fmt.Sprintf("dir%d", i/20))
			os.MkdirAll(dir, 0o755)
			os.WriteFile(filepath.Join(dir, fmt.Sprintf("f%d", i)), []byte("x"), 0o644)
		}
	})
	w := mustWatch(b, k, box)
	w.BeginTurn()
	box.turn("/bin/sh", "-c", "touch t; rm t") // the base is listed once for all
	barrier(w)
	b.ResetTimer()
	var took []time.Duration
	for b.Loop() {
		b.StopTimer()
		w.BeginTurn()
		box.turn("/bin/sh", "-c", script)
		b.StartTimer()
		r := barrier(w)
		if r.Verdict != want {
			b.Fatalf("verdict %d: %q", r.Verdict, r.Reasons)
		}
		took = append(took, r.Barrier)
	}
	slices.Sort(took)
	b.ReportMetric(took[len(took)/2].Seconds()*1e3, "p50_ms")
	b.ReportMetric(took[len(took)*95/100].Seconds()*1e3, "p95_ms")
}

func BenchmarkBarrier(b *testing.B) {
	for _, files := range []int{10, 1000, 20000} {
		for _, turn := range []struct {
			name, script string
			want         tree.Verdict
		}{
			{"quiet", "true", tree.None},
			{"temp", "echo x >t; rm t", tree.None},
			{"temp_chmod", "echo x >t; chmod 600 t; rm t", tree.None},
			{"changed", "echo x >>w", tree.Files},
		} {
			b.Run(fmt.Sprintf("%s/files=%d", turn.name, files), func(b *testing.B) {
				benchBarrier(b, files, turn.script, turn.want)
			})
		}
	}
}

// BenchmarkCalls reports ns per call: not loaded, loaded but not watched, watched.
func BenchmarkCalls(b *testing.B) {
	mustHost(b)
	box := mustBox(b, nil)
	report := func(kind string) {
		out, err := box.try("/ways", "costs")
		if err != nil {
			b.Fatal(err, out)
		}
		var getppid, write, null float64
		fmt.Sscan(out, &getppid, &write, &null)
		b.ReportMetric(getppid, kind+"_getppid_ns")
		b.ReportMetric(write, kind+"_write_ns")
		b.ReportMetric(null, kind+"_null_ns")
	}
	report("absent")
	k := mustKernel(b, Options{})
	report("unwatched")
	w := mustWatch(b, k, box)
	w.BeginTurn()
	report("watched")
}

// BenchmarkManyFolders is what git leaves to a barrier: new files in many folders and a few old
// ones written, then a capture. It reports the daemon's CPU for a turn.
func BenchmarkManyFolders(b *testing.B) {
	k := mustKernel(b, Options{})
	box := mustBox(b, func(upper string) {
		for i := range 1200 {
			dir := filepath.Join(upper, "w/r/objects", fmt.Sprintf("%02x", i%200))
			os.MkdirAll(dir, 0o755)
			os.WriteFile(filepath.Join(dir, fmt.Sprintf("f%d", i)), []byte("x"), 0o644)
		}
	})
	w := mustWatch(b, k, box)
	var spent time.Duration
	turn := func(i int) {
		var script strings.Builder
		for j := range 20 {
			fmt.Fprintf(&script, "echo x >r/objects/%02x/n%d\n", (i*20+j)*7%200, i)
		}
		w.BeginTurn()
		box.turn("/bin/sh", "-c", script.String()+"echo x >>old; echo x >>other")
		before := cpu(unix.RUSAGE_SELF)
		r := barrier(w)
		spent += cpu(unix.RUSAGE_SELF) - before
		if r.Verdict != tree.Files || r.Count != 22 {
			b.Fatalf("verdict %d, %d effects: %q", r.Verdict, r.Count, effectsOf(r))
		}
		box.freeze()
		base := box.snapshot()
		before = cpu(unix.RUSAGE_SELF)
		w.NewEpoch(base)
		spent += cpu(unix.RUSAGE_SELF) - before
		box.thaw()
	}
	turn(0)
	spent = 0
	n := 0
	for b.Loop() {
		n++
		turn(n)
	}
	b.ReportMetric(spent.Seconds()*1e6/float64(n), "daemon_us/turn")
}
