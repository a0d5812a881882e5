package main

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"time"

	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// typical is what an agent's shell holds after a few turns.
const typical = `cd /tmp; export PYTHONPATH=/work TOKEN=abc; x=5; names=(a b c); declare -A m=([k]=v [l]=w)
f() { local a=$1; echo "$a ${x}"; }; alias ll='ls -l'; set -o pipefail; trap 'echo bye' EXIT; umask 027`

// withShell makes a sandbox with a session that holds something, and its captured node.
func (b *bench) withShell(ctx context.Context) (sandbox, node string) {
	made, err := b.client.CreateTree(ctx, &pb.CreateTreeRequest{Start: &pb.CreateTreeRequest_Image{Image: b.image}, WithSandbox: true})
	must(err)
	_, err = b.client.OpenSession(ctx, &pb.OpenSessionRequest{SandboxId: made.Sandbox.Id, Name: "main"})
	must(err)
	node = b.say(ctx, made.Sandbox.Id, typical).Id
	b.waitCaptured(ctx, node)
	return made.Sandbox.Id, node
}

func (b *bench) waitCaptured(ctx context.Context, nodes ...string) {
	done, err := b.client.WaitCaptured(ctx, &pb.WaitCapturedRequest{NodeIds: nodes})
	must(err)
	for _, n := range done.Nodes {
		if n.Capture == pb.CaptureStatus_CAPTURE_STATUS_WITHHELD {
			must(fmt.Errorf("node %s is withheld: %s", n.Id, n.WithheldReason))
		}
	}
}

// shells measures forks of a node with one session. The floor is a spawn and the start of one bash.
func (b *bench) shells(ctx context.Context, zygotes int64) {
	_, node := b.withShell(ctx)
	var ready, floors, firsts []float64
	n := b.scale(60, 1000)
	for i := range n + 3 {
		spawn, _ := b.spawn.run("all", 1)
		bash, _ := b.spawn.run("shell", 1)
		start := time.Now()
		child := b.fork(ctx, node, 1)
		took := ms(time.Since(start))
		b.say(ctx, child[0], "true")
		first := ms(time.Since(start))
		b.release(ctx, child...)
		b.settle(ctx, zygotes)
		if i >= 3 {
			ready, floors, firsts = append(ready, took), append(floors, ms(spawn+bash)), append(firsts, first)
		}
	}
	b.emit("shells.floor_ms.p50", quantile(floors, .5), "ms", len(floors), "a spawn of /bin/true and one of bash --norc --noprofile -c :, interleaved with shells.ready_ms")
	b.emit("shells.ready_ms.p50", quantile(ready, .5), "ms", len(ready), "client's request to ready, forks of one node with one session")
	b.emit("shells.ready_ms.p95", quantile(ready, .95), "ms", len(ready), "client's request to ready, forks of one node with one session")
	b.emit("shells.ratio_to_floor.p50", quantile(ready, .5)/quantile(floors, .5), "ratio", len(ready), "medians of the same interleaved run")
	b.emit("shells.first_true_ms.p50", quantile(firsts, .5), "ms", len(firsts), "client's request to the answer of true in the child's session, its node included")
	var whole []float64
	for range b.scale(5, 50) {
		start := time.Now()
		children := b.fork(ctx, node, 64)
		whole = append(whole, ms(time.Since(start)))
		b.release(ctx, children...)
		b.settle(ctx, zygotes)
	}
	b.emit("shells.n64_total_ms", quantile(whole, .5), "ms", len(whole), "one request for 64 children, median until the last is ready")
}

// captures measures how long sandboxes stand still for a capture.
func (b *bench) captures(ctx context.Context) {
	info, err := b.client.GetInfo(ctx, &pb.GetInfoRequest{})
	must(err)
	b.conditions = fmt.Sprintf("%d cores, Linux %s, other load %s", runtime.NumCPU(), info.Kernel, loadAverage())
	seen := 0
	freezes := func(n int, turn func(i int) string) (took []float64) {
		for i := range n {
			b.waitCaptured(ctx, turn(i))
		}
		// The recorder is told after the node is.
		for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			if all := b.column(ctx, "captures", "freeze_ns"); len(all) >= seen+n {
				took, seen = all[seen:], len(all)
				return took
			}
		}
		must(fmt.Errorf("captures of %d turns aren't told", n))
		return nil
	}
	made, err := b.client.CreateTree(ctx, &pb.CreateTreeRequest{Start: &pb.CreateTreeRequest_Image{Image: b.image}, WithSandbox: true})
	must(err)
	write := func(i int) string { return b.turn(ctx, made.Sandbox.Id, "/bin/touch", fmt.Sprintf("/f%d", i)).Id }
	n := b.scale(100, 1000)
	files := freezes(n, write)
	b.emit("files.freeze_ms.p50", quantile(files, .5), "ms", len(files), "one new file a turn, from the freeze to the thaw")
	b.emit("files.freeze_ms.p95", quantile(files, .95), "ms", len(files), "one new file a turn, from the freeze to the thaw")

	sandbox, _ := b.withShell(ctx)
	seen = len(b.column(ctx, "captures", "freeze_ns"))
	shells := freezes(n, func(i int) string { return b.say(ctx, sandbox, fmt.Sprintf("x=%d", i)).Id })
	b.emit("shells.freeze_ms.p50", quantile(shells, .5), "ms", len(shells), "one variable of a session a turn, from the freeze to the thaw")
	b.emit("shells.freeze_ms.p95", quantile(shells, .95), "ms", len(shells), "one variable of a session a turn, from the freeze to the thaw")

	// Four others write as long as this lasts; what they write isn't captured meanwhile.
	busy, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	for range 4 {
		other, err := b.client.CreateTree(ctx, &pb.CreateTreeRequest{Start: &pb.CreateTreeRequest_Image{Image: b.image}, WithSandbox: true})
		must(err)
		wg.Add(1)
		go func() {
			defer wg.Done()
			events, err := b.client.RunTurn(busy, &pb.RunTurnRequest{SandboxId: other.Sandbox.Id, Command: &pb.Command{
				Shell: []byte(`i=0; while :; do printf -v x '%65536s' $i; echo "$x$x$x$x" > /tmp/f$((i++ % 200)); done`)}})
			for err == nil {
				_, err = events.Recv()
			}
		}()
	}
	beside := freezes(n, func(i int) string { return write(n + i) })
	stop()
	wg.Wait()
	b.emit("files.freeze_busy_ms.p50", quantile(beside, .5), "ms", len(beside), "as files.freeze_ms, beside four sandboxes that write 256 KiB files without a pause")
	b.emit("files.freeze_busy_ms.p95", quantile(beside, .95), "ms", len(beside), "as files.freeze_ms, beside four sandboxes that write 256 KiB files without a pause")
}
