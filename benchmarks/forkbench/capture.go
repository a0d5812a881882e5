package main

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// captures measures how long sandboxes stand still for a capture.
func (b *bench) captures(ctx context.Context) {
	info, err := b.client.GetInfo(ctx, &pb.GetInfoRequest{})
	must(err)
	b.conditions = fmt.Sprintf("%d cores, Linux %s, other load %s", runtime.NumCPU(), info.Kernel, loadAverage())
	made, err := b.client.CreateTree(ctx, &pb.CreateTreeRequest{Start: &pb.CreateTreeRequest_Image{Image: b.image}, WithSandbox: true})
	must(err)
	write := func(i int) string { return b.turn(ctx, made.Sandbox.Id, "/bin/touch", fmt.Sprintf("/f%d", i)).Id }
	n := b.scale(100, 1000)
	files := b.freezes(ctx, n, write)
	b.emit("files.freeze_ms.p50", quantile(files, .5), "ms", len(files), "one new file a turn, from the freeze to the thaw")
	b.emit("files.freeze_ms.p95", quantile(files, .95), "ms", len(files), "one new file a turn, from the freeze to the thaw")

	sandbox, _ := b.withShell(ctx)
	shells := b.freezes(ctx, n, func(i int) string { return b.say(ctx, sandbox, fmt.Sprintf("x=%d", i)).Id })
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
	beside := b.freezes(ctx, n, func(i int) string { return write(n + i) })
	stop()
	wg.Wait()
	b.emit("files.freeze_busy_ms.p50", quantile(beside, .5), "ms", len(beside), "as files.freeze_ms, beside four sandboxes that write 256 KiB files without a pause")
	b.emit("files.freeze_busy_ms.p95", quantile(beside, .95), "ms", len(beside), "as files.freeze_ms, beside four sandboxes that write 256 KiB files without a pause")
	b.capturedDumps(ctx)
}

// freezes makes n turns, each captured before the next, and says in milliseconds how long each of these captures
// froze its sandbox.
func (b *bench) freezes(ctx context.Context, n int, turn func(i int) string) []float64 {
	nodes := make([]string, n)
	for i := range nodes {
		nodes[i] = turn(i)
		b.waitCaptured(ctx, nodes[i])
	}
	return b.ofCaptures(ctx, "freeze_ns", nodes, 1e6)
}

// ofCaptures gives a column of the captures of these nodes, in units of that many.
func (b *bench) ofCaptures(ctx context.Context, column string, nodes []string, unit float64) []float64 {
	// The recorder is told after the node is.
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		of := map[string]float64{}
		b.table(ctx, "captures", func(r arrow.Record) {
			names := r.Column(r.Schema().FieldIndices("node")[0]).(*array.String)
			for i, v := range r.Column(r.Schema().FieldIndices(column)[0]).(*array.Int64).Int64Values() {
				of[names.Value(i)] = float64(v) / unit
			}
		})
		values := make([]float64, 0, len(nodes))
		for _, n := range nodes {
			if v, ok := of[n]; ok {
				values = append(values, v)
			}
		}
		if len(values) == len(nodes) {
			return values
		}
	}
	must(fmt.Errorf("captures of %d turns aren't told", len(nodes)))
	return nil
}
