package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/boxwood-rl/boxwood/engine"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// holding is a sandbox with one process beside pid 1, which holds memory (benchmarks/holder).
type holding struct {
	sandbox, node string // the node is captured
	pid           int    // of the process, inside
	touched       int
}

func (b *bench) hold(ctx context.Context, mib int) *holding {
	made, err := b.client.CreateTree(ctx, &pb.CreateTreeRequest{Start: &pb.CreateTreeRequest_Image{Image: b.image}, WithSandbox: true})
	must(err)
	n := b.turn(ctx, made.Sandbox.Id, "/bin/holder", strconv.Itoa(mib))
	h := &holding{sandbox: made.Sandbox.Id, node: n.Id}
	_, err = fmt.Sscan(string(n.Observation.Stdout), &h.pid)
	must(err)
	b.waitCaptured(ctx, n.Id)
	b.held++
	return h
}

// touch has one page in a hundred altered and returns the node of that turn, for the caller to wait for its capture.
func (b *bench) touch(ctx context.Context, h *holding) string {
	h.touched++
	b.held++
	return b.command(ctx, h.sandbox, &pb.Command{Shell: fmt.Appendf(nil,
		"kill -USR1 %d; until [ -e /holder.%d ]; do :; done", h.pid, h.touched)}).Id
}

// pid1 finds the host's pid of the first process of the sandbox that a holder runs in. There is
// one such sandbox.
func (h *holding) pid1() int {
	status := func(pid int, key string) []string {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)) // none: it has ended
		for line := range strings.Lines(string(text)) {
			if values, ok := strings.CutPrefix(line, key+":"); ok {
				return strings.Fields(values)
			}
		}
		return nil
	}
	all, err := os.ReadDir("/proc")
	must(err)
	for _, e := range all {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || !slices.Equal(status(pid, "Name"), []string{"holder"}) {
			continue
		}
		if ids := status(pid, "NSpid"); len(ids) == 2 && ids[1] == strconv.Itoa(h.pid) {
			parent, err := strconv.Atoi(status(pid, "PPid")[0])
			must(err)
			return parent // what it was started by has ended
		}
	}
	must(fmt.Errorf("the holder isn't there"))
	return 0
}

// beside prepares bare restores of the dump that was made last.
func (b *bench) beside(h *holding) *bare {
	dumps, err := filepath.Glob(filepath.Join(engine.FindRunDir(b.state), "dumps", "ps_*"))
	must(err)
	if len(dumps) != 1 {
		must(fmt.Errorf("%d dumps are in memory, and not one", len(dumps)))
	}
	made := newBare(b.root, b.group, dumps[0])
	made.fill(h.pid1())
	return made
}

// dumps measures forks of a node with a process that has to be dumped, beside bare restores of
// the same images.
func (b *bench) dumps(ctx context.Context, zygotes int64) {
	h := b.hold(ctx, 1)
	beside := b.beside(h)
	defer beside.close()
	var ready, bares, more []float64
	n := b.scale(30, 300)
	for i := range n + 3 {
		pid, bare := beside.restore()
		beside.end(pid)
		start := time.Now()
		child := b.fork(ctx, h.node, 1)
		took := time.Since(start)
		b.release(ctx, child...)
		b.settle(ctx, zygotes)
		if i >= 3 {
			ready, bares, more = append(ready, ms(took)), append(bares, ms(bare)), append(more, ms(took-bare))
		}
	}
	b.emit("dump.bare_ms.p50", quantile(bares, .5), "ms", n, "CRIU by itself restores the same images, through a swrk that runs already, onto a plain folder; interleaved with dump.ready_ms")
	b.emit("dump.ready_ms.p50", quantile(ready, .5), "ms", n, "client's request to ready, forks of one node with a process that holds 1 MiB")
	b.emit("dump.ready_ms.p95", quantile(ready, .95), "ms", n, "client's request to ready, forks of one node with a process that holds 1 MiB")
	b.emit("dump.minus_bare_ms.p50", quantile(more, .5), "ms", n, "median of the differences of neighbours")
	for _, n := range []int32{8, 64} {
		var whole []float64
		for range b.scale(3, 20) {
			start := time.Now()
			children := b.fork(ctx, h.node, n)
			whole = append(whole, ms(time.Since(start)))
			b.release(ctx, children...)
			b.settle(ctx, zygotes)
		}
		metric := map[int32]string{8: "dump.n8_total_ms", 64: "dump.n64_total_ms"}[n]
		b.emit(metric, quantile(whole, .5), "ms", len(whole), fmt.Sprintf("one request for %d children, median until the last is ready", n))
	}
	b.release(ctx, h.sandbox)
	b.settle(ctx, zygotes)
}
