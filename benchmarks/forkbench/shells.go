package main

import (
	"context"
	"fmt"
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
