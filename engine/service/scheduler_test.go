package service

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/apache/arrow/go/v17/arrow/ipc"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
)

// rows of a table, as words.
func (d *daemon) rows(t testing.TB, table string) (rows []map[string]string) {
	t.Helper()
	stream, err := d.client.ExportStats(ctx(t), &boxwoodv1.ExportStatsRequest{Table: table})
	if err != nil {
		t.Fatal(err)
	}
	var all bytes.Buffer
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		all.Write(m.GetData())
	}
	in, err := ipc.NewReader(&all)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Release()
	for in.Next() {
		rec := in.Record()
		for i := range int(rec.NumRows()) {
			row := map[string]string{}
			for k, col := range rec.Columns() {
				row[rec.ColumnName(k)] = col.ValueStr(i)
			}
			rows = append(rows, row)
		}
	}
	if err := in.Err(); err != nil {
		t.Fatal(err)
	}
	return rows
}

func number(t testing.TB, text string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// queues are the scheduler's, by line and class.
func (d *daemon) queues(t testing.TB) map[string]*boxwoodv1.Queue {
	t.Helper()
	info, err := d.client.GetInfo(ctx(t), &boxwoodv1.GetInfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]*boxwoodv1.Queue{}
	for _, q := range info.GetQueues() {
		out[q.GetLine()+" "+q.GetClass()] = q
	}
	return out
}

// What the scheduler did is told: as it stands by GetInfo, over time by the table "scheduler", and both say the same.
func TestSchedulerIsSeen(t *testing.T) {
	d := running(t)
	_, sb := d.newTree(t)
	before := d.queues(t)
	n := d.run(t, sb.GetId(), "echo x >/root/x").GetNode()
	d.captured(t, n.GetId())
	children := d.fork(t, n.GetId(), 8)
	did := func(of func(*boxwoodv1.Queue) int64, names ...string) (sum int64) {
		after := d.queues(t)
		for _, name := range names {
			sum += of(after[name]) - of(before[name])
		}
		return sum
	}
	if got := did((*boxwoodv1.Queue).GetDone, "clones fork", "boxes fork"); got < 16 {
		t.Errorf("8 children took %d clones and boxes", got)
	}
	if got := did((*boxwoodv1.Queue).GetTookNs, "boxes fork"); got <= 0 {
		t.Errorf("making them took %d ns", got)
	}
	until(t, "the capture is counted", func() bool { return did((*boxwoodv1.Queue).GetDone, "captures shadow", "captures urgent") > 0 })
	free(t, d, children...)
	until(t, "the removals are counted", func() bool { return did((*boxwoodv1.Queue).GetDone, "removals prune") >= 8 })

	until(t, "the table says what GetInfo says", func() bool {
		told, table := d.queues(t), map[string]int64{}
		for _, row := range d.rows(t, "scheduler") {
			if number(t, row["interval_ns"]) <= 0 {
				t.Fatalf("%v", row)
			}
			table[row["line"]+" "+row["class"]] += number(t, row["done"])
		}
		for name, q := range told {
			if q.GetLimit() < 1 || q.GetLimit() > q.GetSlots() {
				t.Fatalf("%s: %v", name, q)
			}
			if q.GetRunning()+q.GetWaiting() > 0 || table[name] != q.GetDone() {
				t.Logf("%s: %d, in the table %d", name, q.GetDone(), table[name])
				return false
			}
		}
		return true
	})
	host := d.rows(t, "host")
	if len(host) == 0 || number(t, host[len(host)-1]["memory_available"]) <= 0 || number(t, host[len(host)-1]["daemon_cpu_ns"]) < 0 {
		t.Errorf("the host: %v", host)
	}
	stream, err := d.client.ExportStats(ctx(t), &boxwoodv1.ExportStatsRequest{Table: "host", TreeId: sb.GetTreeId()})
	if err == nil {
		_, err = stream.Recv()
	}
	if reason(err) != "no_tree_column" {
		t.Errorf("rows of the host for one tree: %v", err)
	}
}

// The host is shared between clients: one with many trees, who came first, doesn't get more of it than another with one tree. In the best of a
// few tries, since how soon the second client's request gets to the daemon is the host's affair.
func TestClientsShareTheHost(t *testing.T) {
	d := running(t)
	const trees, many, few = 4, 96, 48
	grow := func(client string) (string, *boxwoodv1.Sandbox) {
		r, err := d.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{
			Start: &boxwoodv1.CreateTreeRequest_Image{Image: "mini"}, WithSandbox: true, Labels: map[string]string{engine.OwnerLabel: client},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _, _ = d.client.CloseTree(ctx(t), &boxwoodv1.CloseTreeRequest{TreeId: r.GetTree().GetId()}) })
		return r.GetRoot().GetId(), r.GetSandbox()
	}
	best := int64(trees * many)
	for try := 0; try < 3 && best > 2*few; try++ {
		var come, begun atomic.Int64
		var gangs sync.WaitGroup
		var mu sync.Mutex
		var all []*boxwoodv1.Sandbox
		take := func(node string, n int32, each func()) {
			stream, err := d.client.Fork(ctx(t), childrenOf(node, n))
			for err == nil {
				var m *boxwoodv1.ForkResult
				if m, err = stream.Recv(); err == nil && m.GetSandbox() != nil {
					mu.Lock()
					all = append(all, m.GetSandbox())
					mu.Unlock()
					each()
				}
			}
			if !errors.Is(err, io.EOF) {
				t.Error(err)
			}
		}
		for range trees {
			node, sb := grow("many")
			all = append(all, sb)
			gangs.Go(func() {
				first := true
				take(node, many, func() {
					if come.Add(1); first {
						begun.Add(1)
						first = false
					}
				})
			})
		}
		node, sb := grow("one")
		mu.Lock()
		all = append(all, sb)
		mu.Unlock()
		until(t, "all gangs have begun", func() bool { return begun.Load() == trees })
		before := come.Load()
		take(node, few, func() {})
		between := come.Load() - before
		gangs.Wait()
		free(t, d, all...)
		t.Logf("try %d: while one client got %d children, the other, with %d trees, got %d of %d", try, few, trees, between, trees*many)
		best = min(best, between)
	}
	if best > 2*few {
		t.Errorf("while one client got %d children, the other got %d", few, best)
	}
}

// Dumps wait in line for the disk, as work like any other.
func TestDumpsWaitForTheDisk(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	d := running(t)
	_, sb := d.newTree(t)
	before := d.queues(t)["writes persist"].GetDone()
	n := d.run(t, sb.GetId(), "sleep 100000 >/dev/null 2>&1 &").GetNode()
	if got := d.captured(t, n.GetId())[0]; got.GetCapture() == boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD {
		t.Fatal(got.GetWithheldReason())
	}
	until(t, "the dump is on the disk", func() bool { return d.queues(t)["writes persist"].GetDone() > before })
}
