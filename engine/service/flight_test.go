package service

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow/flight"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

// Arrow Flight's own client reads the tables, DuckDB and Polars what it has read, and an account gets by it what ExportStats would give it.
func TestFlights(t *testing.T) {
	python := testenv.Python("pyarrow", "polars", "duckdb")
	testenv.Require(t, python.Need)
	h := heldDaemon(t, Account{Name: "alice", TokenSHA256: sumOf("token of alice")}, Account{Name: "writer", TokenSHA256: sumOf("token of writer"), Verbs: []string{"run"}})
	alice := h.as("token of alice")
	made, err := alice.client.CreateTree(ctx(t), &boxwoodv1.CreateTreeRequest{Start: &boxwoodv1.CreateTreeRequest_Image{Image: "mini"}, WithSandbox: true})
	if err != nil {
		t.Fatal(err)
	}
	sb := made.GetSandbox().GetId()
	alice.run(t, sb, "true")
	h.captured(t, alice.run(t, sb, "echo x >/root/x").GetNode().GetId())
	theirs, other := h.newTree(t)
	h.run(t, other.GetId(), "true")

	told := map[string]any{
		"unix": "grpc+unix://" + filepath.Join(h.dir, "sock"), "tls": "grpc+tls://" + h.address, "authority": filepath.Join(h.dir, "ca.pem"),
		"token": "token of alice", "writer": "token of writer", "mine": made.GetTree().GetId(), "theirs": theirs.GetTreeId(),
		"rows": map[string]int{"turns": 2, "nodes": 3, "captures": 1, "forks": 1, "sandboxes": 0, "replays": 0},
	}
	tables, err := h.client.ListTables(ctx(t), &boxwoodv1.ListTablesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, table := range tables.GetTables() {
		names = append(names, table.GetName())
	}
	told["tables"] = names
	text, err := json.Marshal(told)
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(ctx(t), python.Path, "testdata/flight_client.py", string(text)).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	// What there isn't is no failure of the daemon's.
	put, err := flight.NewClientFromConn(h.conn, nil).DoPut(ctx(t))
	if err == nil {
		_, err = put.Recv()
	}
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("DoPut: %v", err)
	}
	until(t, "the call is in the log", func() bool { return strings.Contains(h.log.String(), "reason=no_such_call") })
	for line := range strings.Lines(h.log.String()) {
		if strings.Contains(line, "FlightService/DoPut") && !strings.Contains(line, "level=DEBUG") {
			t.Errorf("the log says: %s", line)
		}
	}
}

// A long table goes through the daemon in pieces, however slow its reader is, and a reader that goes away ends the call.
func TestFlightsOfLongTables(t *testing.T) {
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs)
	const rows = 300_000 // of about 300 bytes
	dir := stateDir(t)
	history, err := stats.New(stats.Options{Dir: filepath.Join(dir, "stats"), MaxRowsInMemory: rows})
	if err != nil {
		t.Fatal(err)
	}
	for i := range rows {
		history.Turn(stats.TurnRow{Node: ids.Node(fmt.Sprintf("nd_%026d", i)), Tree: "tr_a", Sandbox: "sb_a", StartedAt: time.Unix(1_700_000_000, int64(i)), Verdict: tree.Files})
	}
	if err := history.Close(); err != nil {
		t.Fatal(err)
	}
	d := startDaemon(t, dir)
	client := flight.NewClientFromConn(d.conn, nil)
	get := func(ctx context.Context) flight.FlightService_DoGetClient {
		stream, err := client.DoGet(ctx, &flight.Ticket{Ticket: []byte(`{"table": "turns"}`)})
		if err != nil {
			t.Fatal(err)
		}
		return stream
	}
	read := func() (n int64) {
		r, err := flight.NewRecordReader(get(ctx(t)))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Release()
		for r.Next() {
			n += r.Record().NumRows()
		}
		if err := r.Err(); err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := d.resident(t)
	for range 2 {
		if n := read(); n != rows {
			t.Fatalf("%d rows of %d", n, rows)
		}
	}
	// Readers that read nothing.
	cancelled, cancel := context.WithCancel(ctx(t))
	var slow []flight.FlightService_DoGetClient
	for range 4 {
		slow = append(slow, get(cancelled))
		if _, err := slow[len(slow)-1].Recv(); err != nil {
			t.Fatal(err)
		}
	}
	if grown := d.resident(t) - before; grown > 64<<20 {
		t.Errorf("the daemon has grown by %d MiB", grown>>20)
	}
	cancel()
	until(t, "their calls have ended", func() bool {
		return strings.Count(d.log.String(), "method=/arrow.flight.protocol.FlightService/DoGet") >= 2+len(slow)
	})
	for _, s := range slow {
		var err error
		for err == nil {
			_, err = s.Recv()
		}
		if err == io.EOF {
			t.Error("a call that was cancelled came to its end")
		}
	}
}

// resident is the most memory that the daemon has had since it was asked last.
func (d *daemon) resident(t testing.TB) (bytes int64) {
	t.Helper()
	proc := fmt.Sprintf("/proc/%d/", d.cmd.Process.Pid)
	text, err := os.ReadFile(proc + "status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if kib, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			bytes = number(t, strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(kib), "kB"))) << 10
		}
	}
	if err := os.WriteFile(proc+"clear_refs", []byte("5"), 0); err != nil {
		t.Fatal(err)
	}
	return bytes
}

// FuzzTickets: whatever a ticket says, it is refused or asks for what it says.
func FuzzTickets(f *testing.F) {
	for _, seed := range []string{`{"table":"turns"}`, `{"table":"turns","treeId":"tr_1"}`, `{"table":"turns","tree_id":"tr_1","tree_id":"tr_2"}`, ``, `[]`, `{"table":null}`, "\xff", strings.Repeat("[", 5000)} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, ticket []byte) {
		held, err := flightAsks(&flight.Ticket{Ticket: ticket})
		asked, err2 := flightAsks(&flight.FlightDescriptor{Type: flight.DescriptorCMD, Cmd: ticket})
		if (err == nil) != (err2 == nil) {
			t.Fatalf("%v as a ticket, %v as a command", err, err2)
		}
		if err != nil {
			if reason(toStatus("", err)) != "bad_ticket" {
				t.Fatal(err)
			}
			return
		}
		a, b := held.(*boxwoodv1.ExportStatsRequest), asked.(*boxwoodv1.ExportStatsRequest)
		if a.GetTable() != b.GetTable() || a.GetTreeId() != b.GetTreeId() {
			t.Fatalf("%v as a ticket, %v as a command", a, b)
		}
	})
}
