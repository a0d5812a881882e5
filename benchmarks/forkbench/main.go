// Command forkbench measures forks against a spawn of /bin/true, the start of a bash and CRIU by itself,
// interleaved, or captures, through the service as a client sees it. benchmarks/run.sh runs it.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

func main() {
	image := flag.String("image", "", "image with /bin/true and /bin/touch")
	spawn := flag.String("spawn", "", "the baseline's program")
	state := flag.String("state", "", "the daemon's state folder")
	root := flag.String("root", "", "a folder like the image, for CRIU by itself")
	group := flag.String("group", "", "a cgroup of our own, which is made, for CRIU by itself")
	captures := flag.Bool("captures", false, "measure captures instead of forks")
	isolation := flag.Bool("isolation", false, "measure what sandboxes do to each other instead")
	density := flag.Bool("density", false, "measure many sandboxes that wait for models instead")
	rows := flag.String("rows", "", "of density, only these, separated by commas: idle, n16, n64, n256, n16_zero_wait")
	each := flag.Int("each", 0, "of density, how many seconds a sandbox waits in each arm, or turns it does where none waits, instead of what the form has")
	made := flag.String("history", "", "make the statistics of many turns in this folder, and nothing else")
	exports := flag.String("stats", "", "measure exports of that folder's statistics, which are this daemon's, instead")
	daemon := flag.String("daemon", "", "the daemon's process id, for its memory")
	long := flag.Bool("long", false, "the thorough form")
	flag.Parse()
	log.SetFlags(0)
	log.SetPrefix("forkbench: ")
	if *made != "" {
		history(*made)
		return
	}
	conn, err := grpc.NewClient("unix:"+os.Getenv("BOXWOOD_ADDRESS"), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20)))
	must(err)
	defer conn.Close()
	b := &bench{client: pb.NewBoxwoodClient(conn), image: *image, state: *state, root: *root, group: *group, spawn: startSpawner(*spawn), long: *long, name: "fork"}
	if *captures {
		b.name = "capture"
		b.captures(context.Background())
		return
	}
	if *isolation {
		b.name = "isolation"
		b.isolation(context.Background())
		return
	}
	if *density {
		b.name = "density"
		b.density(context.Background(), *rows, *each)
		return
	}
	if *exports != "" {
		b.name = "stats"
		b.stats(context.Background(), conn, *exports, *daemon)
		return
	}
	b.run(context.Background())
}

type bench struct {
	client     pb.BoxwoodClient
	image      string
	state      string
	root       string
	group      string
	spawn      *spawner
	long       bool
	name       string
	conditions string
	held       int // dumps that were made
}

// scale is n, or the thorough form's count.
func (b *bench) scale(n, long int) int {
	if b.long {
		return long
	}
	return n
}

func (b *bench) run(ctx context.Context) {
	info, err := b.client.GetInfo(ctx, &pb.GetInfoRequest{})
	must(err)
	b.conditions = fmt.Sprintf("%d cores, Linux %s, pool %d GiB, %d zygotes, other load %s", runtime.NumCPU(), info.Kernel,
		info.PoolBytesTotal>>30, info.ZygotesReady, loadAverage())

	var creates []float64
	for range b.scale(15, 100) {
		start := time.Now()
		made, err := b.client.CreateTree(ctx, &pb.CreateTreeRequest{Start: &pb.CreateTreeRequest_Image{Image: b.image}, WithSandbox: true})
		must(err)
		creates = append(creates, ms(time.Since(start)))
		b.release(ctx, made.Sandbox.Id)
		b.settle(ctx, info.ZygotesReady)
	}
	b.emit("create_ms.p50", quantile(creates, .5), "ms", len(creates), "")

	made, err := b.client.CreateTree(ctx, &pb.CreateTreeRequest{Start: &pb.CreateTreeRequest_Image{Image: b.image}, WithSandbox: true})
	must(err)
	node := b.turn(ctx, made.Sandbox.Id, "/bin/touch", "/file").Id
	_, err = b.client.WaitCaptured(ctx, &pb.WaitCapturedRequest{NodeIds: []string{node}})
	must(err)

	ready, spawns := b.interleaved(ctx, same(node), b.scale(60, 1000), info.ZygotesReady)
	b.emit("spawn_ms.p50", quantile(spawns, .5), "ms", len(spawns), "posix_spawn, exec and wait of /bin/true from a static C program, interleaved with empty.ready_ms")
	b.emit("empty.ready_ms.p50", quantile(ready, .5), "ms", len(ready), "client's request to ready, forks of one node")
	b.emit("empty.ready_ms.p95", quantile(ready, .95), "ms", len(ready), "client's request to ready, forks of one node")
	b.emit("empty.ratio_to_spawn.p50", quantile(ready, .5)/quantile(spawns, .5), "ratio", len(ready), "medians of the same interleaved run")

	var whole []float64
	for range b.scale(5, 50) {
		start := time.Now()
		children := b.fork(ctx, node, 64)
		whole = append(whole, ms(time.Since(start)))
		b.release(ctx, children...)
		b.settle(ctx, info.ZygotesReady)
	}
	b.emit("empty.n64_total_ms", quantile(whole, .5), "ms", len(whole), "one request for 64 children, median until the last is ready")

	b.shells(ctx, info.ZygotesReady)
	b.dumps(ctx, info.ZygotesReady)
	b.sustained(ctx, node, info.ZygotesReady)
	grown := b.grow(ctx, node, 2000)
	b.settle(ctx, info.ZygotesReady)
	later, again := b.interleaved(ctx, same(node), b.scale(60, 1000), info.ZygotesReady)
	b.emit("empty.at_2000_ratio", quantile(later, .5)/quantile(again, .5)/(quantile(ready, .5)/quantile(spawns, .5)), "ratio", len(later),
		fmt.Sprintf("ready_ms over spawn_ms with 2,000 captured nodes of the image (%.2f / %.2f ms), by the same without (%.2f / %.2f ms)",
			quantile(later, .5), quantile(again, .5), quantile(ready, .5), quantile(spawns, .5)))
	first, beside := b.interleaved(ctx, func(i int) string { return grown[i] }, b.scale(60, 1000), info.ZygotesReady)
	b.emit("empty.first_ready_ms.p50", quantile(first, .5), "ms", len(first),
		fmt.Sprintf("each fork is the first of its node, so that nothing was made ahead of it but zygotes; spawn %.2f ms beside it", quantile(beside, .5)))
	snapshots := b.column(ctx, "captures", "snapshot_ns")
	b.emit("snapshot_ms.p50", quantile(snapshots, .5), "ms", len(snapshots), "the snapshot inside the freeze, of the captures of this run")
}

func same(node string) func(int) string { return func(int) string { return node } }

// interleaved measures a fork and a spawn in turn; node says which node is forked.
func (b *bench) interleaved(ctx context.Context, node func(int) string, n int, zygotes int64) (ready, spawns []float64) {
	for i := range n + 3 {
		wall, _ := b.spawn.run("all", 1)
		start := time.Now()
		child := b.fork(ctx, node(i), 1)
		took := ms(time.Since(start))
		b.release(ctx, child...)
		b.settle(ctx, zygotes)
		if i >= 3 { // the first warm caches up
			ready, spawns = append(ready, took), append(spawns, ms(wall))
		}
	}
	return ready, spawns
}

// sustained forks, runs and releases without a pause, until all of it is gone.
func (b *bench) sustained(ctx context.Context, node string, zygotes int64) {
	rounds := b.scale(4, 20)
	const baseline = 300
	// Before and after: neighbours' load is in all three figures.
	spawns := func() float64 {
		from := cpuBusy()
		b.spawn.run("all", baseline)
		return float64(cpuBusy()-from) / baseline
	}
	perSpawn := spawns()

	before, start := cpuBusy(), time.Now()
	for range rounds {
		children := b.fork(ctx, node, 64)
		var wg sync.WaitGroup
		for _, part := range chunks(children, 8) {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for _, child := range part {
					b.turn(ctx, child, "/bin/true")
				}
			}()
		}
		wg.Wait()
		b.release(ctx, children...)
	}
	b.settle(ctx, zygotes)
	took, forks, used := time.Since(start), 64*rounds, cpuBusy()-before
	perSpawn = (perSpawn + spawns()) / 2
	how := "64 forks, one true each, release, until every mount, namespace and subvolume is gone and the zygotes are back"
	b.emit("empty.sustained_forks_per_s", float64(forks)/took.Seconds(), "1/s", forks, how)
	b.emit("empty.cpu_spawns_per_fork", float64(used)/float64(forks)/perSpawn, "spawns", forks,
		how+"; all CPU time of the machine but idle, from /proc/stat, by the same of a spawn")
}

// grow makes n nodes below node, and returns them when each has its checkpoint.
func (b *bench) grow(ctx context.Context, node string, n int) []string {
	const walkers = 8
	children := b.fork(ctx, node, walkers)
	made := make([][]string, walkers)
	var wg sync.WaitGroup
	for w, child := range children {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range n / walkers {
				made[w] = append(made[w], b.turn(ctx, child, "/bin/touch", fmt.Sprintf("/grown%d-%d", w, i)).Id)
			}
		}()
	}
	wg.Wait()
	all := slices.Concat(made...)
	_, err := b.client.WaitCaptured(ctx, &pb.WaitCapturedRequest{NodeIds: all})
	must(err)
	b.release(ctx, children...)
	return all
}

func (b *bench) fork(ctx context.Context, node string, n int32) (ids []string) {
	results, err := b.client.Fork(ctx, &pb.ForkRequest{MinReady: n, Wants: []*pb.ForkRequest_Want{{From: &pb.ForkRequest_Want_NodeId{NodeId: node}, Count: n}}})
	must(err)
	for {
		r, err := results.Recv()
		if errors.Is(err, io.EOF) {
			return ids
		}
		must(err)
		if r.GetSandbox() == nil {
			log.Fatalf("a child failed: %s", r.Message)
		}
		if ids = append(ids, r.GetSandbox().Id); len(ids) == int(n) {
			return ids // all are ready: the end of the stream is not waited for
		}
	}
}

func (b *bench) turn(ctx context.Context, sandbox string, argv ...string) *pb.Node {
	command := &pb.Command{}
	for _, a := range argv {
		command.Argv = append(command.Argv, []byte(a))
	}
	return b.command(ctx, sandbox, command)
}

// say runs text in the session "main".
func (b *bench) say(ctx context.Context, sandbox, text string) *pb.Node {
	return b.command(ctx, sandbox, &pb.Command{Session: "main", Shell: []byte(text)})
}

func (b *bench) command(ctx context.Context, sandbox string, command *pb.Command) *pb.Node {
	events, err := b.client.RunTurn(ctx, &pb.RunTurnRequest{SandboxId: sandbox, Command: command})
	must(err)
	for {
		ev, err := events.Recv()
		must(err)
		if r := ev.GetResult(); r != nil {
			if code := r.Node.GetObservation().GetExitCode(); code != 0 {
				log.Fatalf("%v ended with %d: %s", command, code, r.Node.Observation.Stderr)
			}
			return r.Node
		}
	}
}

func (b *bench) release(ctx context.Context, ids ...string) {
	_, err := b.client.Release(ctx, &pb.ReleaseRequest{SandboxIds: ids})
	must(err)
}

// settle waits until what was released is gone and the zygotes are back.
func (b *bench) settle(ctx context.Context, zygotes int64) {
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		info, err := b.client.GetInfo(ctx, &pb.GetInfoRequest{})
		must(err)
		if info.PendingRemovals == 0 && info.ZygotesReady >= zygotes {
			return
		}
		if time.Now().After(deadline) {
			log.Fatalf("after 30 s %d removals are pending and %d of %d zygotes ready", info.PendingRemovals, info.ZygotesReady, zygotes)
		}
	}
}

// column gives a table's column of durations in milliseconds.
func (b *bench) column(ctx context.Context, table, column string) (values []float64) {
	b.table(ctx, table, func(r arrow.Record) {
		for _, v := range r.Column(r.Schema().FieldIndices(column)[0]).(*array.Int64).Int64Values() {
			values = append(values, float64(v)/1e6)
		}
	})
	return values
}

// table reads one.
func (b *bench) table(ctx context.Context, table string, part func(arrow.Record)) {
	in := b.openTable(ctx, table)
	defer in.Release()
	for in.Next() {
		part(in.Record())
	}
	must(in.Err())
}

// openTable reads one as it comes.
func (b *bench) openTable(ctx context.Context, table string) *ipc.Reader {
	chunks, err := b.client.ExportStats(ctx, &pb.ExportStatsRequest{Table: table})
	must(err)
	in, err := ipc.NewReader(bufio.NewReader(&chunked{chunks: chunks}))
	must(err)
	return in
}

func (b *bench) emit(metric string, value float64, unit string, n int, how string) {
	conditions := b.conditions
	if how != "" {
		conditions = how + "; " + conditions
	}
	must(json.NewEncoder(os.Stdout).Encode(struct {
		Bench      string  `json:"bench"`
		Metric     string  `json:"metric"`
		Value      float64 `json:"value"`
		Unit       string  `json:"unit"`
		N          int     `json:"n"`
		Conditions string  `json:"conditions"`
	}{b.name, metric, value, unit, n, conditions}))
}

// spawner is the baseline's program as a co-process.
type spawner struct {
	in  io.Writer
	out *bufio.Reader
}

func startSpawner(path string) *spawner {
	cmd := exec.Command(path)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(err)
	out, err := cmd.StdoutPipe()
	must(err)
	must(cmd.Start()) // it ends with our end of its standard input
	return &spawner{in, bufio.NewReader(out)}
}

// run makes n spawns ("all": of /bin/true, "shell": of a bash that runs nothing) and gives their
// wall and CPU time.
func (s *spawner) run(what string, n int) (wall, cpu time.Duration) {
	_, err := fmt.Fprintf(s.in, "%s %d\n", what, n)
	must(err)
	line, err := s.out.ReadString('\n')
	must(err)
	_, err = fmt.Sscan(line, (*int64)(&wall), (*int64)(&cpu))
	must(err)
	return wall, cpu
}

// cpuBusy is the machine's CPU time so far in ticks, without idle and waiting.
func cpuBusy() (ticks int64) {
	data, err := os.ReadFile("/proc/stat")
	must(err)
	line, _, _ := strings.Cut(string(data), "\n")
	for i, field := range strings.Fields(line)[1:9] {
		if v, err := strconv.ParseInt(field, 10, 64); err == nil && i != 3 && i != 4 {
			ticks += v
		}
	}
	return ticks
}

func loadAverage() string {
	data, _ := os.ReadFile("/proc/loadavg") // for the reader of the figures only
	first, _, _ := strings.Cut(string(data), " ")
	return first
}

func chunks(ids []string, n int) [][]string {
	return slices.Collect(slices.Chunk(ids, max(1, len(ids)/n)))
}

func quantile(values []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	if len(sorted) == 0 {
		return 0
	}
	return sorted[int(q*float64(len(sorted)-1))]
}

func ms(d time.Duration) float64 { return float64(d) / 1e6 }

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
