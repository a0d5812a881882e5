package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"time"

	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// honest are the sandboxes that an attacker is next to.
const honest = 16

// attacks take all that they can get until their deadline.
var attacks = []struct{ metric, script string }{
	{"fairness.cpu.slowdown.p50", `for i in {1..32}; do while :; do :; done & done; wait`},
	{"fairness.forks.slowdown.p50", `f() { f | f & }; f; while :; do (:) & done`},
	{"fairness.memory.slowdown.p50", `while :; do (x=xxxxxxxx; while :; do x=$x$x; done); done`},
	{"fairness.disk.slowdown.p50", `printf -v x '%1048576s'; while :; do printf %s "$x" >>/big || : >/big; done`},
	{"fairness.files.slowdown.p50", `mkdir -p /many; while :; do : >/many/$((i++)); done`},
	{"fairness.output.slowdown.p50", `printf -v x '%65536s'; while :; do printf %s "$x"; done`},
}

// isolation measures what sandboxes do to each other: the turns of honest ones next to an attacker, and what one waits for while
// another has much dirty data.
func (b *bench) isolation(ctx context.Context) {
	info, err := b.client.GetInfo(ctx, &pb.GetInfoRequest{})
	must(err)
	b.conditions = fmt.Sprintf("%d cores, Linux %s, other load %s", runtime.NumCPU(), info.Kernel, loadAverage())
	made, err := b.client.CreateTree(ctx, &pb.CreateTreeRequest{Start: &pb.CreateTreeRequest_Image{Image: b.image}})
	must(err)
	b.fairness(ctx, made.Root.Id)
	b.settle(ctx, info.ZygotesReady)
	b.neighbours(ctx, made.Root.Id)
}

// scratchFork makes sandboxes that write no nodes.
func (b *bench) scratchFork(ctx context.Context, node string, n int32) (ids []string) {
	results, err := b.client.Fork(ctx, &pb.ForkRequest{Scratch: true, MinReady: n, Wants: []*pb.ForkRequest_Want{{From: &pb.ForkRequest_Want_NodeId{NodeId: node}, Count: n}}})
	must(err)
	for len(ids) < int(n) {
		r, err := results.Recv()
		must(err)
		ids = append(ids, r.GetSandbox().GetId())
	}
	return ids
}

func (b *bench) fairness(ctx context.Context, root string) {
	sandboxes := b.scratchFork(ctx, root, honest)
	defer b.release(ctx, sandboxes...)
	each := b.scale(25, 200)
	var mu sync.Mutex
	// turns of all honest sandboxes at once.
	turns := func() (took []float64) {
		var wg sync.WaitGroup
		for _, sb := range sandboxes {
			wg.Go(func() {
				for range each {
					start := time.Now()
					b.turn(ctx, sb, "/bin/true")
					mu.Lock()
					took = append(took, ms(time.Since(start)))
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		return took
	}
	turns()
	for _, i := range rand.Perm(len(attacks)) {
		a := attacks[i]
		before := turns()
		attacker := b.scratchFork(ctx, root, 1)
		attack, stop := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			events, err := b.client.RunTurn(attack, &pb.RunTurnRequest{SandboxId: attacker[0], ResultOnly: true,
				Command: &pb.Command{Shell: []byte(a.script), DeadlineNs: int64(5 * time.Minute)}})
			for err == nil {
				_, err = events.Recv()
			}
		}()
		time.Sleep(300 * time.Millisecond) // until it is at its worst
		during := turns()
		stop()
		<-done
		b.release(ctx, attacker...)
		after := turns()
		quiet := append(before, after...)
		how := fmt.Sprintf("median turn of /bin/true of %d sandboxes that all run turns, next to one that attacks, by the same without it before and after (%.2f ms)", honest, quantile(quiet, .5))
		b.emit(a.metric, quantile(during, .5)/quantile(quiet, .5), "ratio", len(during), how)
		b.emit(strings.TrimSuffix(a.metric, "p50")+"p95", quantile(during, .95)/quantile(quiet, .95), "ratio", len(during), "the same at the 95th percentile")
	}
}

// neighbours measures a sync, a capture and a release while another sandbox has just written 64 MiB, and alone.
func (b *bench) neighbours(ctx context.Context, root string) {
	type figures struct{ sync, capture, release []float64 }
	one := func(f *figures, i int) {
		sb := b.fork(ctx, root, 1)[0]
		node := b.turn(ctx, sb, "/bin/touch", fmt.Sprintf("/f%d", i)).Id
		start := time.Now()
		_, err := b.client.WaitCaptured(ctx, &pb.WaitCapturedRequest{NodeIds: []string{node}})
		must(err)
		f.capture = append(f.capture, ms(time.Since(start)))
		start = time.Now()
		b.turn(ctx, sb, "/bin/sync")
		f.sync = append(f.sync, ms(time.Since(start)))
		start = time.Now()
		b.release(ctx, sb)
		f.release = append(f.release, ms(time.Since(start)))
	}
	n := b.scale(12, 60)
	var alone, beside figures
	for i := range n {
		one(&alone, i)
	}
	writer := b.scratchFork(ctx, root, 1)[0]
	for i := range n {
		b.turn(ctx, writer, "/bin/bash", "-c", fmt.Sprintf(`printf -v x '%%1048576s'; for i in {1..64}; do printf %%s "$x"; done >/big%d`, i%4))
		one(&beside, i)
	}
	b.release(ctx, writer)
	for metric, f := range map[string][2][]float64{
		"neighbour.sync_ms.p50": {alone.sync, beside.sync}, "neighbour.capture_ms.p50": {alone.capture, beside.capture},
		"neighbour.release_ms.p50": {alone.release, beside.release},
	} {
		how := fmt.Sprintf("next to a sandbox that wrote 64 MiB a moment before; %.2f ms alone", quantile(f[0], .5))
		b.emit(metric, quantile(f[1], .5), "ms", len(f[1]), how)
		b.emit(strings.Replace(metric, "_ms", "_ratio", 1), quantile(f[1], .5)/quantile(f[0], .5), "ratio", len(f[1]), how)
	}
}
