package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"gonum.org/v1/gonum/stat"
	"gonum.org/v1/gonum/stat/distuv"

	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// recordedWaits are waits for models, with their source.
//
//go:embed waits.json
var recordedWaits []byte

// longestWait: one that is longer stands for this, or a single one of the recorded 530 s would be most of a run. 93 of 14,069 are.
const longestWait = 60 * time.Second

// aTree is how many sandboxes stand in one tree.
const aTree = 8

// load is one size of the benchmark.
type load struct {
	name      string
	sandboxes int
	faster    float64 // than recorded are the waits; 0: nobody waits
	each      int     // seconds that each sandbox waits in each arm, of its own; turns of it, if nobody waits
	pairs     int     // of an arm that captures and one that doesn't
}

// density measures many sandboxes that run turns and wait for their models, with captures and without: the rows that are named, or all of them,
// and each as long as is said, if it is.
func (b *bench) density(ctx context.Context, rows string, each int) {
	loads := []load{
		{"n16", 16, 8, b.scale(10, 60), b.scale(3, 8)},
		{"n64", 64, 4, b.scale(10, 60), b.scale(3, 8)},
		{"n256", 256, 2, b.scale(12, 60), b.scale(2, 5)},
		{"n16_zero_wait", 16, 0, b.scale(30, 200), b.scale(3, 8)},
	}
	all := []string{"idle"}
	for _, l := range loads {
		all = append(all, l.name)
	}
	only := all
	if rows != "" {
		only = strings.Split(rows, ",")
	}
	for _, name := range only {
		if !slices.Contains(all, name) {
			log.Fatalf("density has no row %q: it has %s", name, strings.Join(all, ", "))
		}
	}
	info, err := b.client.GetInfo(ctx, &pb.GetInfoRequest{})
	must(err)
	b.conditions = fmt.Sprintf("%d cores, Linux %s, %d zygotes, other load %s", runtime.NumCPU(), info.Kernel, info.ZygotesReady, loadAverage())
	var recorded struct{ Runs [][]float64 }
	must(json.Unmarshal(recordedWaits, &recorded))
	if slices.Contains(only, "idle") {
		b.idle(ctx, info.ZygotesReady)
	}
	for _, l := range loads {
		if each > 0 {
			l.each = each
		}
		if slices.Contains(only, l.name) {
			b.underLoad(ctx, l, recorded.Runs, info.ZygotesReady)
		}
	}
}

// idle measures what sandboxes hold that do nothing, with a shell and without.
func (b *bench) idle(ctx context.Context, zygotes int64) {
	const n = 256
	root := b.newRoot(ctx)
	held := func() float64 {
		b.settle(ctx, zygotes)
		return b.groupMemory()
	}
	before := held()
	children := b.fork(ctx, root, n)
	bare := held()
	for _, sb := range children {
		_, err := b.client.OpenSession(ctx, &pb.OpenSessionRequest{SandboxId: sb, Name: "main"})
		must(err)
		b.say(ctx, sb, "x=1")
	}
	shells := held()
	b.release(ctx, children...)
	b.settle(ctx, zygotes)
	how := fmt.Sprintf("what the sandboxes' cgroup is charged more, the kernel's memory and cached pages included, with %d children of one node", n)
	b.emit("idle_sandbox_kib", (bare-before)/n/1024, "KiB", n, how+", by their number")
	b.emit("idle_shell_sandbox_kib", (shells-before)/n/1024, "KiB", n, how+", each with a session that has run a command, by their number")
}

// groupMemory is what the daemon's sandboxes and zygotes are charged together.
func (b *bench) groupMemory() float64 {
	name := strings.TrimSuffix(b.group, "-bare")
	for _, file := range []string{"/sys/fs/cgroup/memory/" + name + "/memory.usage_in_bytes", "/sys/fs/cgroup/" + name + "/memory.current"} {
		text, err := os.ReadFile(file)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		must(err)
		bytes, err := strconv.ParseFloat(strings.TrimSpace(string(text)), 64)
		must(err)
		return bytes
	}
	log.Fatalf("no memory controller counts the cgroup %s", name)
	return 0
}

func (b *bench) newRoot(ctx context.Context) string {
	made, err := b.client.CreateTree(ctx, &pb.CreateTreeRequest{Start: &pb.CreateTreeRequest_Image{Image: b.image}})
	must(err)
	b.waitCaptured(ctx, made.Root.Id)
	return made.Root.Id
}

// step is a turn, and how long the model takes before the next.
type step struct {
	script string
	wait   time.Duration
}

// steps of one sandbox: as many as fill its time with waits, so that all end together but for what they do themselves. Both arms of a
// pair have the same.
func (l load) steps(rnd *rand.Rand, runs [][]float64) (out []step) {
	waits := runs[rnd.IntN(len(runs))]
	at := rnd.IntN(len(waits))
	left := time.Duration(l.each) * time.Second
	for i := 0; l.faster > 0 && left > 0 || l.faster == 0 && i < l.each; i++ {
		rounds := 10_000
		if rnd.IntN(100) == 0 {
			rounds = 1_000_000
		}
		s := fmt.Sprintf("for ((i = 0; i < %d; i++)); do :; done", rounds)
		switch n := rnd.IntN(100); {
		case n < 17:
			s += fmt.Sprintf("; echo %d >/changed%d", i, i)
		case n < 25: // one server at a time
			s += "; read -r pid </server 2>/dev/null && kill -9 $pid; holder 1 >/server"
		}
		next := step{script: s}
		if l.faster > 0 {
			wait := min(time.Duration(waits[(at+i)%len(waits)]*float64(time.Second)), longestWait)
			next.wait = min(time.Duration(float64(wait)/l.faster), left)
			left -= next.wait
		}
		out = append(out, next)
	}
	return out
}

const densityMix = "of turns 17 % change a file and 8 % start a server of 1 MiB in place of the last one; each runs a loop of bash of 10,000 rounds, one in a hundred of a million"

// played is what came of the steps of one sandbox.
type played struct {
	took, waited, exposed time.Duration
	after                 []float64 // exposed delays after turns that were captured, in ms
}

func (b *bench) play(ctx context.Context, sandbox string, steps []step) (p played) {
	start := time.Now()
	captured := false
	for _, s := range steps {
		events, err := b.client.RunTurn(ctx, &pb.RunTurnRequest{SandboxId: sandbox, ResultOnly: true, Command: &pb.Command{Argv: [][]byte{[]byte("/bin/bash"), []byte("-c"), []byte(s.script)}}})
		must(err)
		var r *pb.TurnResult
		for r == nil {
			ev, err := events.Recv()
			must(err)
			r = ev.GetResult()
		}
		if code := r.Node.GetObservation().GetExitCode(); code != 0 {
			must(fmt.Errorf("%q ended with %d: %s", s.script, code, r.Node.Observation.Stderr))
		}
		exposed := time.Duration(r.Timings.CaptureWaitNs)
		p.exposed += exposed
		if captured {
			p.after = append(p.after, ms(exposed))
		}
		captured = r.Node.GetId() != "" && r.Node.Verdict != pb.Verdict_VERDICT_NONE
		time.Sleep(s.wait)
		p.waited += s.wait
	}
	p.took = time.Since(start)
	return p
}

// arm plays all sandboxes at once.
func (b *bench) arm(ctx context.Context, sandboxes []string, steps [][]step) []played {
	out := make([]played, len(sandboxes))
	var all sync.WaitGroup
	for i, sb := range sandboxes {
		all.Go(func() { out[i] = b.play(ctx, sb, steps[i]) })
	}
	all.Wait()
	return out
}

// mean task time of an arm's sandboxes in seconds, with the waits for models and without.
func mean(arm []played) (task, own float64) {
	for _, p := range arm {
		task += p.took.Seconds() / float64(len(arm))
		own += (p.took - p.waited).Seconds() / float64(len(arm))
	}
	return task, own
}

func (b *bench) underLoad(ctx context.Context, l load, runs [][]float64, zygotes int64) {
	var roots []string
	for range l.sandboxes / aTree {
		roots = append(roots, b.newRoot(ctx))
	}
	children := func(fork func(context.Context, string, int32) []string) (ids []string) {
		for _, root := range roots {
			ids = append(ids, fork(ctx, root, aTree)...)
		}
		return ids
	}
	var captured []played
	turns := 0
	var seconds, engine float64
	var forks, quiet, slower, slowerOwn []float64
	failed := 0
	for pair := range l.pairs {
		rnd := rand.New(rand.NewPCG(7, uint64(pair)))
		steps := make([][]step, l.sandboxes)
		for i := range steps {
			steps[i] = l.steps(rnd, runs)
			turns += len(steps[i])
		}
		var with, without []played
		capturing := func() {
			ids := children(b.fork)
			load, stop := context.WithCancel(ctx)
			var forker sync.WaitGroup
			forker.Go(func() {
				ready, bad := b.forkNow(load, ids, 250*time.Millisecond, math.MaxInt)
				forks, failed = append(forks, ready...), failed+bad
			})
			before, err := b.client.GetInfo(ctx, &pb.GetInfoRequest{})
			must(err)
			start := time.Now()
			with = b.arm(ctx, ids, steps)
			seconds += time.Since(start).Seconds()
			after, err := b.client.GetInfo(ctx, &pb.GetInfoRequest{})
			must(err)
			engine += float64(after.Host.DaemonCpuNs-before.Host.DaemonCpuNs) / 1e9
			stop()
			forker.Wait()
			b.settle(ctx, zygotes)
			ready, bad := b.forkNow(ctx, ids, 50*time.Millisecond, 20)
			quiet, failed = append(quiet, ready...), failed+bad
			b.release(ctx, ids...)
		}
		uncaptured := func() {
			ids := children(b.scratchFork)
			load, stop := context.WithCancel(ctx)
			var forker sync.WaitGroup
			forker.Go(func() { b.forkNow(load, roots, 250*time.Millisecond, math.MaxInt) })
			without = b.arm(ctx, ids, steps)
			stop()
			forker.Wait()
			b.release(ctx, ids...)
		}
		for _, arm := range [][]func(){{capturing, uncaptured}, {uncaptured, capturing}}[pair%2] {
			arm()
			b.settle(ctx, zygotes)
		}
		captured = append(captured, with...)
		task, own := mean(with)
		bareTask, bareOwn := mean(without)
		slower, slowerOwn = append(slower, 100*(task/bareTask-1)), append(slowerOwn, 100*(own/bareOwn-1))
	}

	waits := fmt.Sprintf("waits as recorded (mini-swe-agent, see waits.json; at most %s), %g times as fast", longestWait, l.faster)
	if l.faster == 0 {
		waits = "nobody waits for a model"
	}
	how := fmt.Sprintf("%d sandboxes in trees of %d, %d times; %s; %s", l.sandboxes, aTree, l.pairs, densityMix, waits)
	b.emit(l.name+".turns_per_s", float64(turns)/seconds, "1/s", turns, how)
	var after, share, ownShare []float64
	for _, p := range captured {
		after = append(after, p.after...)
		share = append(share, 100*float64(p.exposed)/float64(p.took))
		ownShare = append(ownShare, 100*float64(p.exposed)/float64(p.took-p.waited))
	}
	for _, q := range []struct {
		name string
		q    float64
	}{{"p50", .5}, {"p95", .95}, {"p99", .99}} {
		b.emit(l.name+".exposed_ms."+q.name, quantile(after, q.q), "ms", len(after), "what a turn waited for the capture of the turn before it, where there was one; "+how)
	}
	b.emit(l.name+".exposed_share_pct.p95", quantile(share, .95), "%", len(share), "of a sandbox's task time, the waits for models included; "+how)
	b.emit(l.name+".exposed_nonwait_share_pct.p95", quantile(ownShare, .95), "%", len(ownShare), "of a sandbox's task time without the waits for models; "+how)
	b.emit(l.name+".fork_ms.p50", quantile(forks, .5), "ms", len(forks), "a child of a random sandbox's node, four times a second beside the load, from the request to ready; "+how)
	b.emit(l.name+".fork_ms.p99", quantile(forks, .99), "ms", len(forks), fmt.Sprintf("as fork_ms.p50; %d forks failed", failed))
	b.emit(l.name+".fork_p99_to_idle_p50", quantile(forks, .99)/quantile(quiet, .5), "ratio", len(forks), fmt.Sprintf("fork_ms.p99 by the median of %d of the same forks with all at rest (%.2f ms)", len(quiet), quantile(quiet, .5)))
	b.emit(l.name+".engine_cpu_pct", 100*engine/seconds, "%", 1, "the daemon's processor time, of one core, without CRIU's; "+how)
	against := "mean task time of sandboxes that are captured, by that of scratch sandboxes with the same turns and waits, in alternating arms, less 1. Scratch turns make no node either, so that its cost is in it"
	b.interval(l.name+".slowdown_vs_uncaptured_pct", slower, against+"; "+how)
	b.interval(l.name+".slowdown_nonwait_pct", slowerOwn, against+"; without the waits for models; "+how)
}

// interval tells a mean of pairs with its 95 % interval, by Student's t.
func (b *bench) interval(metric string, pairs []float64, how string) {
	mean, deviation := stat.MeanStdDev(pairs, nil)
	n := float64(len(pairs))
	half := distuv.StudentsT{Mu: 0, Sigma: 1, Nu: n - 1}.Quantile(.975) * deviation / math.Sqrt(n)
	b.emit(metric, mean, "%", len(pairs), how)
	b.emit(metric+".ci_low", mean-half, "%", len(pairs), "the interval of "+metric+" at 95 %, over its pairs of arms")
	b.emit(metric+".ci_high", mean+half, "%", len(pairs), "the interval of "+metric+" at 95 %, over its pairs of arms")
}

// forkNow makes a child again and again, of the node of a random one of what is named (sandboxes, or nodes), and releases it.
func (b *bench) forkNow(ctx context.Context, of []string, every time.Duration, most int) (ready []float64, failed int) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for range most {
		select {
		case <-ctx.Done():
			return ready, failed
		case <-tick.C:
		}
		want := &pb.ForkRequest_Want{Count: 1}
		if id := of[rand.IntN(len(of))]; id[:2] == "sb" {
			want.From = &pb.ForkRequest_Want_SandboxId{SandboxId: id}
		} else {
			want.From = &pb.ForkRequest_Want_NodeId{NodeId: id}
		}
		calm := context.WithoutCancel(ctx)
		start := time.Now()
		results, err := b.client.Fork(calm, &pb.ForkRequest{Scratch: true, Wants: []*pb.ForkRequest_Want{want}})
		must(err)
		var child string
		for {
			r, err := results.Recv()
			if err != nil {
				break // the end, or a node that is withheld, which is counted
			}
			if child = r.GetSandbox().GetId(); child != "" {
				ready = append(ready, ms(time.Since(start)))
			}
		}
		if child == "" {
			failed++
			continue
		}
		b.release(calm, child)
	}
	return ready, failed
}
