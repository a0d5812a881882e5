package box

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/internal/cgroup"
)

// Every benchmark reports beside its own time what a spawn of /bin/true costs in
// the same run, interleaved: times on shared machines mean little alone.

func spawnTrue(b *testing.B) time.Duration {
	start := time.Now()
	if err := exec.Command("/bin/true").Run(); err != nil {
		b.Fatal(err)
	}
	return time.Since(start)
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

func report(b *testing.B, name string, d []time.Duration) {
	b.ReportMetric(float64(median(d).Microseconds()), name+"-us")
}

// BenchmarkStart is a fork of kind empty without the clone of its upper: request
// to ready, one zygote ahead.
func BenchmarkStart(b *testing.B) {
	h := openHost(b, func(c *Config) { c.Zygotes = 4 })
	var ready, first, kill, spawn []time.Duration
	for b.Loop() {
		root := newRoot(b)
		if err := h.WaitReady(context.Background(), 4); err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		box, err := h.Start(context.Background(), root, testIdentity)
		if err != nil {
			b.Fatal(err)
		}
		ready = append(ready, time.Since(start))
		if e, err := box.Exec(context.Background(), Command{Argv: []string{"/bin/true"}}); err != nil || e.Code != 0 {
			b.Fatal(e, err)
		}
		first = append(first, time.Since(start))
		start = time.Now()
		mustKill(b, box)
		kill = append(kill, time.Since(start))
		spawn = append(spawn, spawnTrue(b))
	}
	report(b, "ready", ready)
	report(b, "first-true", first)
	report(b, "kill", kill)
	report(b, "spawn", spawn)
}

// BenchmarkStart64 starts 64 boxes at once.
func BenchmarkStart64(b *testing.B) {
	const n = 64
	h := openHost(b, func(c *Config) { c.Zygotes = n })
	var all, spawn []time.Duration
	for b.Loop() {
		roots := make([]Root, n)
		for i := range roots {
			roots[i] = newRoot(b)
		}
		if err := h.WaitReady(context.Background(), n); err != nil {
			b.Fatal(err)
		}
		boxes := make([]Box, n)
		var group sync.WaitGroup
		start := time.Now()
		for i := range n {
			group.Go(func() {
				box, err := h.Start(context.Background(), roots[i], testIdentity)
				if err != nil {
					b.Error(err)
					return
				}
				boxes[i] = box
			})
		}
		group.Wait()
		all = append(all, time.Since(start))
		for _, box := range boxes {
			if box != nil {
				mustKill(b, box)
			}
		}
		spawn = append(spawn, spawnTrue(b))
	}
	report(b, "ready64", all)
	report(b, "spawn", spawn)
}

// BenchmarkExec is /bin/true in a box.
func BenchmarkExec(b *testing.B) {
	h := openHost(b)
	box := startBox(b, h)
	var inside, spawn []time.Duration
	for b.Loop() {
		start := time.Now()
		if e, err := box.Exec(context.Background(), Command{Argv: []string{"/bin/true"}}); err != nil || e.Code != 0 {
			b.Fatal(e, err)
		}
		inside = append(inside, time.Since(start))
		spawn = append(spawn, spawnTrue(b))
	}
	report(b, "true", inside)
	report(b, "spawn", spawn)
}

// BenchmarkZygote makes zygotes and throws them away.
func BenchmarkZygote(b *testing.B) {
	h := openHost(b, func(c *Config) { c.Zygotes = 0 })
	var made, gone []time.Duration
	for b.Loop() {
		start := time.Now()
		z, err := h.newZygote()
		if err != nil {
			b.Fatal(err)
		}
		made = append(made, time.Since(start))
		start = time.Now()
		if err := z.discard(); err != nil {
			b.Fatal(err)
		}
		gone = append(gone, time.Since(start))
	}
	report(b, "made", made)
	report(b, "gone", gone)
}

// BenchmarkOutput relays 100 MB.
func BenchmarkOutput(b *testing.B) {
	h := openHost(b)
	box := startBox(b, h)
	const size = 100 << 20
	b.SetBytes(size)
	for b.Loop() {
		n := 0
		e, err := box.Exec(context.Background(), Command{Argv: []string{"/bin/head", "-c", "104857600", "/dev/zero"}, Stdout: func(p []byte) { n += len(p) }})
		if err != nil || e.Code != 0 || n != size {
			b.Fatal(e, err, n)
		}
	}
}

// BenchmarkCPU is the processor time of a whole life, refill of the pool
// included: zygote, start, one command, kill. It is that of a cgroup with this
// process, the nursery and the boxes in it; kernel threads are not counted.
func BenchmarkCPU(b *testing.B) {
	used := joinMeasured(b)
	h := openHost(b, func(c *Config) { c.Zygotes = 8 })
	if err := h.WaitReady(context.Background(), 8); err != nil {
		b.Fatal(err)
	}
	roots := make([]Root, b.N)
	for i := range roots {
		roots[i] = newRoot(b)
	}
	b.ResetTimer()
	before := used()
	for i := range b.N {
		box, err := h.Start(context.Background(), roots[i], testIdentity)
		if err != nil {
			b.Fatal(err)
		}
		if e, err := box.Exec(context.Background(), Command{Argv: []string{"/bin/true"}}); err != nil || e.Code != 0 {
			b.Fatal(e, err)
		}
		mustKill(b, box)
	}
	if err := h.WaitReady(context.Background(), 8); err != nil {
		b.Fatal(err)
	}
	life := used() - before
	before = used()
	for range b.N {
		spawnTrue(b)
	}
	spawn := used() - before
	b.ReportMetric(float64(life)/float64(b.N), "cpu-us/life")
	b.ReportMetric(float64(spawn)/float64(b.N), "cpu-us/spawn")
	b.ReportMetric(float64(life)/float64(spawn), "spawns/life")
}

// joinMeasured moves this process below the group of all boxes of this test; the
// function it returns tells the microseconds that the group has used.
func joinMeasured(b *testing.B) func() int64 {
	b.Helper()
	mounts, err := cgroup.FindMounts("/proc/self/mountinfo")
	if err != nil {
		b.Fatal(err)
	}
	dir := filepath.Join(mounts.V2, testGroup)
	self := filepath.Join(dir, "self")
	move := func(to string) {
		if err := os.WriteFile(to+"/cgroup.procs", []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			b.Fatal(err)
		}
	}
	if err := os.MkdirAll(self, 0o755); err != nil {
		b.Fatal(err)
	}
	move(self)
	b.Cleanup(func() { move(mounts.V2); os.Remove(self) })
	return func() int64 {
		text, err := os.ReadFile(dir + "/cpu.stat")
		if err != nil {
			b.Fatal(err)
		}
		var us int64
		fmt.Sscanf(string(text), "usage_usec %d", &us)
		return us
	}
}
