package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/apache/arrow/go/v17/arrow/flight"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"google.golang.org/grpc"

	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/ids"
	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

// historyRows is how many turns a daemon that is measured has behind it.
const historyRows = 1_000_000

// history makes the files of as many turns as differ from each other in what turns differ in.
func history(dir string) {
	r, err := stats.New(stats.Options{Dir: dir, MaxRowsInMemory: historyRows})
	must(err)
	start := time.Now().Add(-historyRows * time.Millisecond)
	of := [...]ids.Tree{ids.NewTree(), ids.NewTree(), ids.NewTree(), ids.NewTree()}
	for i := range historyRows {
		r.Turn(stats.TurnRow{Node: ids.NewNode(), Tree: of[i%len(of)], Sandbox: ids.Sandbox("sb" + string(of[i/50%len(of)])[2:]),
			StartedAt: start.Add(time.Duration(i) * time.Millisecond), Wall: time.Duration(i*7919%3_000_000) * time.Microsecond,
			Command: time.Duration(i*7907%2_900_000) * time.Microsecond, Barrier: time.Duration(i % 300_000), Record: time.Duration(i % 2_000_000),
			Verdict: tree.Verdict(1 + i%4), TurnVerdict: tree.Verdict(1 + i%3), EffectCount: int64(i % 40), ExitCode: int32(i % 3),
			OutputBytes: int64(i * 31 % 10_000), BytesWritten: int64(i * 37 % 100_000), ProcessesStarted: int64(i % 9)})
	}
	must(r.Close())
}

// stats: the table of turns through the service and through Arrow Flight, beside what making its batches of the same files takes by itself.
func (b *bench) stats(ctx context.Context, conn *grpc.ClientConn, dir, daemon string) {
	info, err := b.client.GetInfo(ctx, &pb.GetInfoRequest{})
	must(err)
	b.conditions = fmt.Sprintf("%d turns of 31 columns, unix socket, %d cores, Linux %s, other load %s", historyRows, runtime.NumCPU(), info.Kernel, loadAverage())
	files, err := stats.New(stats.Options{Dir: dir})
	must(err)
	resident := residentBytes(daemon)
	var bare, service, byFlight []float64
	for range b.scale(5, 20) {
		start := time.Now()
		must(files.Export(ctx, stats.Turns, stats.Filter{}, io.Discard))
		bare = append(bare, historyRows/time.Since(start).Seconds())

		start = time.Now()
		service = append(service, rowsASecond(b.openTable(ctx, stats.Turns), start))

		start = time.Now()
		got, err := flight.NewClientFromConn(conn, nil).DoGet(ctx, &flight.Ticket{Ticket: []byte(`{"table":"turns"}`)})
		must(err)
		flown, err := flight.NewRecordReader(got)
		must(err)
		byFlight = append(byFlight, rowsASecond(flown.Reader, start))
	}
	b.emit("export_bare_rows_per_s", quantile(bare, .5), "1/s", len(bare), "baseline: the same files read and made into the same stream in one process, which is thrown away; interleaved")
	b.emit("export_rows_per_s", quantile(service, .5), "1/s", len(service), "ExportStats, read as record batches by a Go client on the same cores")
	b.emit("flight_rows_per_s", quantile(byFlight, .5), "1/s", len(byFlight), "DoGet, likewise")
	b.emit("daemon_growth_mib", float64(residentBytes(daemon)-resident)/(1<<20), "MiB", len(service)+len(byFlight), "resident memory of the daemon, after all exports against before")
}

// chunked is an export as a reader.
type chunked struct {
	chunks grpc.ServerStreamingClient[pb.ExportStatsChunk]
	rest   []byte
}

func (c *chunked) Read(p []byte) (int, error) {
	for len(c.rest) == 0 {
		chunk, err := c.chunks.Recv()
		if err != nil {
			return 0, err
		}
		c.rest = chunk.Data
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

func rowsASecond(in *ipc.Reader, start time.Time) float64 {
	defer in.Release()
	var rows int64
	for in.Next() {
		rows += in.Record().NumRows()
	}
	must(in.Err())
	if rows != historyRows {
		must(fmt.Errorf("%d rows came of %d", rows, historyRows))
	}
	return float64(rows) / time.Since(start).Seconds()
}

// residentBytes is the memory of a process, its highest so far.
func residentBytes(pid string) int64 {
	status, err := os.ReadFile("/proc/" + pid + "/status")
	must(err)
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	must(err)
	return kib << 10
}
