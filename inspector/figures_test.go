package inspector

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
	"gonum.org/v1/gonum/stat"

	"github.com/boxwood-rl/boxwood/tree"
)

// The benchmark "inspector": benchmarks/inspector.sh runs it and says what it prints.
var (
	figuresOut  = flag.String("figures.out", "", "file for JSON lines of BenchmarkFigures")
	figuresLong = flag.Bool("figures.long", false, "the thorough form, with wall times")
)

// figures writes metrics as JSON lines.
type figures struct {
	b   *testing.B
	out *json.Encoder
	how string
}

func (f *figures) emit(metric string, value float64, unit string, n int, how string) {
	err := f.out.Encode(struct {
		Bench      string  `json:"bench"`
		Metric     string  `json:"metric"`
		Value      float64 `json:"value"`
		Unit       string  `json:"unit"`
		N          int     `json:"n"`
		Conditions string  `json:"conditions"`
	}{"inspector", metric, value, unit, n, how + "; " + f.how})
	if err != nil {
		f.b.Fatal(err)
	}
}

// scale is n, or the thorough form's count.
func scale(n, long int) int {
	if *figuresLong {
		return long
	}
	return n
}

func BenchmarkFigures(b *testing.B) {
	if *figuresOut == "" {
		b.Skip("writes a file: make bench NAME=inspector")
	}
	mustHost(b)
	file, err := os.Create(*figuresOut)
	if err != nil {
		b.Fatal(err)
	}
	defer file.Close()
	var u unix.Utsname
	unix.Uname(&u)
	load, _ := os.ReadFile("/proc/loadavg")
	first, _, _ := strings.Cut(string(load), " ")
	f := &figures{b, json.NewEncoder(file), fmt.Sprintf("%d cores, Linux %s, other load %s", runtime.NumCPU(), unix.ByteSliceToString(u.Release[:]), first)}
	f.calls()
	f.barriers()
	f.events()
	for _, w := range workloads {
		f.share(w)
	}
	if *figuresLong {
		for _, w := range workloads {
			f.overhead(w)
		}
	}
}

// costs runs the program that times calls: a call that the table lets go at once, a
// write to a file, and one to /dev/null, in ns.
func (f *figures) costs(b *box) (c [3]float64) {
	out, err := b.try("/ways", "costs")
	if err != nil {
		f.b.Fatal(err, out)
	}
	if _, err := fmt.Sscan(out, &c[0], &c[1], &c[2]); err != nil {
		f.b.Fatal(err, out)
	}
	return c
}

// calls measures what a call costs more, in rounds of: not loaded, loaded, watched.
func (f *figures) calls() {
	b := mustBox(f.b, nil)
	var absent, loaded, watched [3][]float64
	note := func(to *[3][]float64) {
		for i, v := range f.costs(b) {
			to[i] = append(to[i], v)
		}
	}
	rounds := scale(7, 40)
	for range rounds {
		note(&absent)
		k, err := Open(Options{})
		if err != nil {
			f.b.Fatal(err)
		}
		note(&loaded)
		w, err := k.Watch(b.subject)
		if err != nil {
			f.b.Fatal(err)
		}
		note(&watched)
		w.Close()
		k.Close()
	}
	// What else the machine does makes a call dearer, never cheaper.
	more := func(with [3][]float64, i int) float64 { return slices.Min(with[i]) - slices.Min(absent[i]) }
	how := func(what string, i int) string {
		return fmt.Sprintf("ns more than not loaded (%.0f), the least of interleaved rounds of the best of 20 x 10,000 calls; %s", slices.Min(absent[i]), what)
	}
	f.emit("syscall_ns.watched", more(watched, 0), "ns", rounds, how("getppid, which every call costs", 0))
	f.emit("syscall_ns.unwatched", more(loaded, 0), "ns", rounds, how("getppid in a process that isn't watched", 0))
	f.emit("syscall_ns.watched_write", more(watched, 1), "ns", rounds, how("pwrite of a byte to a file of the sandbox", 1))
	f.emit("syscall_ns.unwatched_write", more(loaded, 1), "ns", rounds, how("the same, not watched", 1))
}

// barriers measures turns of a sandbox with 1,000 files of its own.
func (f *figures) barriers() {
	k := mustKernel(f.b, Options{})
	b := mustBox(f.b, func(upper string) {
		for i := range 1000 {
			dir := filepath.Join(upper, "w", fmt.Sprintf("dir%d", i/20))
			os.MkdirAll(dir, 0o755)
			os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), []byte("x"), 0o644)
		}
	})
	w := mustWatch(f.b, k, b)
	var took []float64
	n := scale(40, 500)
	for i := range 4 * n {
		w.BeginTurn()
		b.turn("/ways", []string{"quiet", "create_unlink", "mkdtemp_", "write_"}[i%4])
		r := barrier(w)
		if i >= 4 {
			took = append(took, r.Barrier.Seconds()*1e3)
		}
		if i%4 == 3 {
			b.freeze()
			w.NewEpoch(b.snapshot())
			b.thaw()
		}
	}
	how := "1,000 files; turns that change nothing, make and delete a file, a folder with modes, write to an old file, in equal parts"
	f.emit("barrier_ms.p50", quantile(took, .5), "ms", len(took), how)
	f.emit("barrier_ms.p95", quantile(took, .95), "ms", len(took), how)
	w.Close()
	k.Close()
}

// events measures how many the kernel side takes in.
func (f *figures) events() {
	k := mustKernel(f.b, Options{})
	defer k.Close()
	var boxes []*box
	var watches []Watch
	for range 2 {
		b := mustBox(f.b, nil)
		boxes, watches = append(boxes, b), append(watches, mustWatch(f.b, k, b))
	}
	began := time.Now()
	done := make(chan error)
	for _, b := range boxes {
		go func() {
			_, err := b.try("/ways", "storm")
			done <- err
		}()
	}
	for range boxes {
		if err := <-done; err != nil {
			f.b.Fatal(err)
		}
	}
	took, sum := time.Since(began).Seconds(), uint64(0)
	for _, w := range watches {
		sum += atomic.LoadUint64(&w.(*watch).box.Events)
		w.Close()
	}
	f.emit("events_per_s.max", float64(sum)/took, "1/s", int(sum), "calls and file-system events that were classed, from two sandboxes that do nothing else; none lost")
	if k.LostEvents() > 0 {
		f.b.Errorf("%d events were lost", k.LostEvents())
	}
}

type workload struct{ name, prepare, run string }

var workloads = []workload{
	{"compile", `for i in $(seq 12); do printf '#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\nint f%d(char *s) { char b[99]; snprintf(b, 99, "%%s", s); return atoi(b) + (int)strlen(s); }\n' $i >c$i.c; done; echo 'int main(void) { return 0; }' >m.c`,
		"for i in $(seq 12); do gcc -O2 -Wall -c c$i.c; done; gcc -o prog m.c c*.o; ./prog; rm -f *.o prog"},
	{"tests", `mkdir t; for i in $(seq 20); do printf 'import unittest, json, tempfile, os\nclass T(unittest.TestCase):\n  def test_a(self):\n    self.assertEqual(json.loads(json.dumps({str(i): i for i in range(2000)}))["7"], 7)\n  def test_b(self):\n    with tempfile.TemporaryDirectory() as d:\n      open(os.path.join(d, "f"), "w").write("x" * 1000)\n      self.assertEqual(os.path.getsize(os.path.join(d, "f")), 1000)\n' >t/test_$i.py; done`,
		"python3 -B -m unittest discover -s t -q 2>/dev/null"},
	{"git", `git init -q r; cd r; git config user.email a@b; git config user.name a; for i in $(seq 200); do echo $i >f$i; done; git add .; git commit -qm one`,
		"cd r; for i in 1 2 3 4 5; do date +%s%N >f$i; git status -s; git diff --stat; git add -A; git commit -qm more; git log --oneline | tail -1; done >/dev/null"},
}

func (f *figures) script(b *box, script string) {
	if out, err := b.try("/bin/sh", "-c", script); err != nil {
		f.b.Fatalf("%v: %s", err, out)
	}
}

func cpu(who int) time.Duration {
	var r unix.Rusage
	unix.Getrusage(who, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// runs is how often a program ran since it was loaded, and how long.
type runs struct {
	n    uint64
	took time.Duration
}

func (f *figures) inPrograms(programs ...*ebpf.Program) []runs {
	out := make([]runs, len(programs))
	for i, p := range programs {
		s, err := p.Stats()
		if err != nil {
			f.b.Fatal(err)
		}
		out[i] = runs{s.RunCount, s.Runtime}
	}
	return out
}

// empty is what the kernel's own measuring says a program takes that does nothing.
func (f *figures) empty(b *box, load workload) time.Duration {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.Tracing, AttachType: ebpf.AttachTraceRawTp, AttachTo: "sys_exit", Instructions: inert(), License: "GPL"})
	if err != nil {
		f.b.Fatal(err)
	}
	defer p.Close()
	links, err := attach(p)
	if err != nil {
		f.b.Fatal(err)
	}
	f.script(b, load.run)
	r := f.inPrograms(p)[0]
	for _, l := range links {
		l.Close()
	}
	return r.took / time.Duration(r.n)
}

// share is the time of the programs and of the daemon as a share of the workload's. Files that
// changed are captured after each turn, as the engine does.
func (f *figures) share(load workload) {
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		f.b.Fatal(err)
	}
	defer stats.Close()
	b := mustBox(f.b, nil)
	f.script(b, load.prepare)
	empty := f.empty(b, load)
	k := mustKernel(f.b, Options{})
	defer k.Close()
	w := mustWatch(f.b, k, b)
	defer w.Close()
	var working, daemon time.Duration
	each := make([]runs, len(k.progs))
	daemons := func(do func()) {
		before := cpu(unix.RUSAGE_SELF)
		do()
		daemon += cpu(unix.RUSAGE_SELF) - before
	}
	// capture returns when the next epoch has begun. What is not the inspector's isn't counted.
	capture := func() {
		b.freeze()
		base := b.snapshot()
		daemons(func() { w.NewEpoch(base) })
		b.thaw()
	}
	w.BeginTurn()
	barrier(w)
	capture()
	daemon = 0
	n := scale(4, 30)
	for range n {
		daemons(w.BeginTurn)
		before := f.inPrograms(k.progs...)
		children := cpu(unix.RUSAGE_CHILDREN)
		f.script(b, load.run)
		working += cpu(unix.RUSAGE_CHILDREN) - children
		for i, r := range f.inPrograms(k.progs...) {
			each[i].n += r.n - before[i].n
			each[i].took += r.took - before[i].took
		}
		var r Report
		daemons(func() { r = barrier(w) })
		if r.Verdict != tree.None {
			capture()
		}
	}
	var sum runs
	var names []string
	for i, r := range each {
		sum.n, sum.took = sum.n+r.n, sum.took+r.took
		if r.n > 0 {
			name, _, _ := strings.Cut(strings.TrimPrefix(k.progs[i].String(), "Tracing("), ")")
			names = append(names, fmt.Sprintf("%s %d of %d ns", name, r.n/uint64(n), r.took.Nanoseconds()/int64(r.n)))
		}
	}
	pct := func(d time.Duration) float64 { return 100 * d.Seconds() / working.Seconds() }
	how := fmt.Sprintf("other processes of the host included; with the daemon's CPU (%.2f %%), by the workload's CPU of %.3f s a run", pct(daemon), working.Seconds()/float64(n))
	f.emit(load.name+".bpf_share_pct", pct(sum.took+daemon), "%", n,
		fmt.Sprintf("run time of all programs as bpf_stats has it, %d ns for each of %d runs a turn (%s), %d ns of which it says of an empty program, too; %s",
			sum.took.Nanoseconds()/int64(sum.n), sum.n/uint64(n), strings.Join(names, ", "), empty.Nanoseconds(), how))
	net := sum.took - empty*time.Duration(sum.n)
	f.emit(load.name+".bpf_share_net_pct", pct(net+daemon), "%", n, "the same without what bpf_stats says of an empty program, which is its own cost; "+how)
}

// overhead compares wall times, with and without, in pairs.
func (f *figures) overhead(load workload) {
	b := mustBox(f.b, nil)
	f.script(b, load.prepare)
	k := mustKernel(f.b, Options{})
	defer k.Close()
	w := mustWatch(f.b, k, b)
	defer w.Close()
	w.BeginTurn()
	barrier(w)
	// From here on the programs stay loaded, and are attached for a watched run only.
	detach := func() {
		for _, l := range k.links {
			l.Close()
		}
		k.links = nil
	}
	detach()
	plain := func() float64 {
		began := time.Now()
		f.script(b, load.run)
		return time.Since(began).Seconds()
	}
	watched := func() float64 {
		var err error
		if k.links, err = attach(k.progs...); err != nil {
			f.b.Fatal(err)
		}
		defer detach()
		// What ran meanwhile wasn't seen: the new epoch's base is read, which isn't timed.
		inner := w.(*watch)
		inner.stale = true
		b.freeze()
		w.NewEpoch(b.snapshot())
		b.thaw()
		if _, err := inner.base.list(context.Background(), k.opts.MaxEntries); err != nil {
			f.b.Fatal(err)
		}
		began := time.Now()
		w.BeginTurn()
		f.script(b, load.run)
		barrier(w)
		return time.Since(began).Seconds()
	}
	plain()
	watched()
	var without, more []float64
	const n = 40
	for i := range 2 * n {
		// The order changes: what comes second may find warmer caches.
		var p, q float64
		if i%2 == 0 {
			p = plain()
			q = watched()
		} else {
			q = watched()
			p = plain()
		}
		without, more = append(without, p), append(more, q-p)
	}
	base := stat.Mean(without, nil)
	mean, sd := stat.MeanStdDev(more, nil)
	half := 1.96 * sd / math.Sqrt(float64(len(more)))
	how := fmt.Sprintf("wall time of a watched turn with its barrier less one with the programs detached, by the latter (%.3f s), mean of pairs; 95 %% interval of the mean", base)
	f.emit(load.name+".overhead_pct", 100*mean/base, "%", len(more), how)
	f.emit(load.name+".overhead_pct.ci_low", 100*(mean-half)/base, "%", len(more), how)
	f.emit(load.name+".overhead_pct.ci_high", 100*(mean+half)/base, "%", len(more), how)
}

func quantile(v []float64, q float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return s[int(q*float64(len(s)-1))]
}
