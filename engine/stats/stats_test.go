package stats

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/ipc"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/hostload"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/sched"
	"github.com/boxwood-rl/boxwood/tree"
)

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)

func turn(i int, of ids.Tree) TurnRow {
	return TurnRow{
		Node: ids.Node(fmt.Sprintf("nd_%d", i)), Tree: of, Sandbox: "sb_1", StartedAt: epoch.Add(time.Duration(i) * time.Microsecond),
		Wall: 4 * time.Millisecond, Command: 2 * time.Millisecond,
		Verdict: tree.Files, TurnVerdict: tree.None, Status: tree.Completed, ExitCode: int32(i % 3),
		Effects: CountEffects([]tree.Effect{{Kind: tree.FileCreated}, {Kind: tree.FileCreated}, {Kind: tree.Unknown}}),
	}
}

func mustNew(t *testing.T, o Options) *Recorder {
	t.Helper()
	r, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func mustExport(t *testing.T, r *Recorder, table string, f Filter) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := r.Export(context.Background(), table, f, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// nodesIn gives the column "node" of a stream, and checks what every stream promises.
func nodesIn(t *testing.T, stream []byte) (nodes []string) {
	t.Helper()
	in, err := ipc.NewReader(bytes.NewReader(stream))
	if err != nil {
		t.Fatal(err)
	}
	defer in.Release()
	if v, _ := in.Schema().Metadata().GetValue("boxwood.schema_version"); v != fmt.Sprint(SchemaVersion) {
		t.Errorf("the schema's metadata says version %q", v)
	}
	at := in.Schema().FieldIndices("node")[0]
	for in.Next() {
		for i := range int(in.Record().NumRows()) {
			nodes = append(nodes, strings.Clone(in.Record().Column(at).(*array.String).Value(i)))
		}
	}
	if in.Err() != nil {
		t.Fatal(in.Err())
	}
	return nodes
}

func wantNodes(t *testing.T, got []string, from, to int) {
	t.Helper()
	if len(got) != to-from {
		t.Fatalf("%d rows, want %d", len(got), to-from)
	}
	for i, n := range got {
		if want := fmt.Sprintf("nd_%d", from+i); n != want {
			t.Fatalf("row %d is of %s, want %s: rows are lost, doubled or out of order", i, n, want)
		}
	}
}

func TestRowsComeBackInOrderFromMemoryAndDisk(t *testing.T) {
	for _, c := range []struct {
		name     string
		inMemory int
		rows     int
	}{
		{"none", 0, 0},
		{"pending only", 0, 10},
		{"several batches", 0, 3*batchRows + 7},
		{"spilled", 64, 5000},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			r := mustNew(t, Options{Dir: dir, MaxRowsInMemory: c.inMemory})
			for i := range c.rows {
				r.Turn(turn(i, "tr_a"))
				for c.inMemory > 0 && r.turns.full() {
					if err := r.turns.spillBatches(); err != nil { // as keepSpilling does, but now
						t.Fatal(err)
					}
				}
			}
			wantNodes(t, nodesIn(t, mustExport(t, r, Turns, Filter{})), 0, c.rows)
			if r.Dropped() != 0 {
				t.Errorf("%d rows dropped", r.Dropped())
			}
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}

			again := mustNew(t, Options{Dir: dir, MaxRowsInMemory: c.inMemory})
			again.Turn(turn(c.rows, "tr_a"))
			wantNodes(t, nodesIn(t, mustExport(t, again, Turns, Filter{})), 0, c.rows+1)
			if got := again.Tables()[0].Rows; got != int64(c.rows+1) {
				t.Errorf("Tables says %d rows, want %d", got, c.rows+1)
			}
		})
	}
}

// Another release of the same version may know fewer columns and words, and describe them otherwise; what it wrote is exported like
// the rest. If a column has become another, that is told, and is no gap.
func TestFilesOfAnOlderRelease(t *testing.T) {
	type row struct {
		of   string
		kind uint8
		n    int64
	}
	of := text("of", "Whose.", "nobody's", func(r *row) string { return r.of })
	kinds := func(doc string, words ...string) column[row] {
		return word("kind", doc, "unknown", words, func(r *row) uint8 { return r.kind })
	}
	n := number("n", "pieces", "How many.", func(r *row) int64 { return r.n })
	dir := t.TempDir()
	write := func(rows []row, columns ...column[row]) *series[row] {
		t.Helper()
		s, err := openSeries(define("things", "", columns...), Options{Dir: dir, MaxRowsInMemory: 10, MaxDiskBytes: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rows {
			s.add(r)
		}
		if err := s.flush(); err != nil {
			t.Fatal(err)
		}
		return s
	}
	read := func(s *series[row]) (text []string, err error) {
		err = s.each(context.Background(), func(rec arrow.Record) error {
			if !rec.Schema().Equal(s.def.schema) {
				t.Errorf("a batch of other columns: %s", rec.Schema())
			}
			line, err := rec.MarshalJSON()
			text = append(text, strings.ReplaceAll(string(line), "\n", ""))
			return err
		})
		return text, err
	}
	write([]row{{"a", 2, 0}}, of, kinds("What it is.", "one", "two"))
	now := write([]row{{"b", 3, 7}}, of, kinds("What kind it is of.", "one", "two", "three"), added(n))
	got, err := read(now)
	want := []string{`[{"kind":"two","n":null,"of":"a"}]`, `[{"kind":"three","n":7,"of":"b"}]`}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v", got, err)
	}
	for name, other := range map[string][]column[row]{
		`column "n" is not`:          {of, kinds("", "one", "two"), n},
		`column "of" is not`:         {number("of", "", "", func(*row) int64 { return 0 }), kinds("", "one", "two", "three")},
		`word "three" of its column`: {of, kinds("", "one", "two", "four"), added(n)},
	} {
		if got, err := read(write(nil, other...)); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

func (s *series[R]) full() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.batched >= s.options.MaxRowsInMemory/2
}

func TestMemoryIsBoundedWithoutDisk(t *testing.T) {
	r := mustNew(t, Options{MaxRowsInMemory: 100})
	for i := range 1000 {
		r.Turn(turn(i, "tr_a"))
	}
	nodes := nodesIn(t, mustExport(t, r, Turns, Filter{}))
	if len(nodes) > 150 {
		t.Fatalf("%d rows kept, the bound is 100 and a started batch", len(nodes))
	}
	if got := r.Dropped() + int64(len(nodes)); got != 1000 {
		t.Errorf("kept and dropped are %d rows, want 1000", got)
	}
	wantNodes(t, nodes, 1000-len(nodes), 1000)
}

func TestDiskIsBounded(t *testing.T) {
	dir := t.TempDir()
	r := mustNew(t, Options{Dir: dir, MaxRowsInMemory: 40, MaxDiskBytes: 1})
	for i := range 40 {
		r.Turn(turn(i, "tr_a"))
		if err := r.turns.flush(); err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, "turns-v1", "*", "*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%d files (%v), want the newest alone", len(files), err)
	}
	wantNodes(t, nodesIn(t, mustExport(t, r, Turns, Filter{})), 39, 40)
}

// A disk that fails must cost statistics, never the engine.
func TestFullDiskDropsTheOldest(t *testing.T) {
	dir := t.TempDir()
	r := mustNew(t, Options{Dir: filepath.Join(dir, "stats"), MaxRowsInMemory: 100})
	if err := os.RemoveAll(filepath.Join(dir, "stats")); err != nil {
		t.Fatal(err)
	}
	for i := range 1000 {
		r.Turn(turn(i, "tr_a"))
	}
	nodes := nodesIn(t, mustExport(t, r, Turns, Filter{}))
	wantNodes(t, nodes, 1000-len(nodes), 1000)
	if r.Dropped() == 0 {
		t.Error("rows are gone and Dropped says nothing")
	}
	if err := r.Close(); err == nil {
		t.Error("Close could not write and said nothing")
	}
}

func TestLeftoversOfAKilledDaemonAreRemoved(t *testing.T) {
	dir := t.TempDir()
	torn := filepath.Join(dir, "turns-v1", "date=1970-01-01", "00000000000000000001.tmp")
	older := filepath.Join(dir, "turns-v1-00000000000000000001-5.arrow.tmp")
	other := filepath.Join(dir, "turns-v0", "date=1970-01-01", "00000000000000000001-5-00000000.parquet")
	for _, path := range []string{torn, older, other} {
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := mustNew(t, Options{Dir: dir})
	wantNodes(t, nodesIn(t, mustExport(t, r, Turns, Filter{})), 0, 0)
	for _, path := range []string{torn, older} {
		if _, err := os.Stat(path); !os.IsNotExist(err) {
			t.Errorf("the torn file %s is still there", path)
		}
	}
	if _, err := os.Stat(other); err != nil {
		t.Error("a file of another schema version is not ours to remove")
	}
}

func TestExportOfOneTree(t *testing.T) {
	r := mustNew(t, Options{Dir: t.TempDir()})
	for i := range 9000 {
		r.Turn(turn(i, ids.Tree(fmt.Sprintf("tr_%d", i%3))))
	}
	got := nodesIn(t, mustExport(t, r, Turns, Filter{Tree: "tr_1"}))
	if len(got) != 3000 || got[0] != "nd_1" || got[2999] != "nd_8998" {
		t.Errorf("%d rows from %s to %s", len(got), got[0], got[len(got)-1])
	}
	if got := nodesIn(t, mustExport(t, r, Turns, Filter{Tree: "tr_unknown"})); len(got) != 0 {
		t.Errorf("%d rows of an unknown tree", len(got))
	}
}

// Each condition of a filter takes rows away, in memory as in files; all together take what each takes.
func TestFilters(t *testing.T) {
	for _, files := range []bool{false, true} {
		o := Options{}
		if files {
			o.Dir = t.TempDir()
		}
		r := mustNew(t, o)
		start := time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC)
		for i := range 100 {
			row := turn(i, []ids.Tree{"tr_a", "tr_b"}[i%2])
			row.StartedAt, row.Verdict = start.Add(time.Duration(i)*time.Minute), tree.Verdict(i%5) // 0: unknown, which is null
			if i == 99 {
				row.StartedAt = time.Time{}
			}
			r.Turn(row)
		}
		if files {
			if err := r.turns.flush(); err != nil {
				t.Fatal(err)
			}
		}
		want := map[string]struct {
			f  Filter
			is func(i int) bool
		}{
			"tree":     {Filter{Tree: "tr_b"}, func(i int) bool { return i%2 == 1 }},
			"since":    {Filter{Since: start.Add(50 * time.Minute)}, func(i int) bool { return i >= 50 && i < 99 }},
			"until":    {Filter{Until: start.Add(50 * time.Minute)}, func(i int) bool { return i < 50 }},
			"verdicts": {Filter{Verdicts: []string{"none", "both"}}, func(i int) bool { return i%5 == 1 || i%5 == 4 }},
			"all": {Filter{"tr_a", start.Add(10 * time.Minute), start.Add(30 * time.Minute), []string{"files"}},
				func(i int) bool { return i%2 == 0 && i >= 10 && i < 30 && i%5 == 2 }},
			"none of them": {Filter{Tree: "tr_c"}, func(int) bool { return false }},
		}
		for name, c := range want {
			var nodes []string
			for i := range 100 {
				if c.is(i) {
					nodes = append(nodes, fmt.Sprintf("nd_%d", i))
				}
			}
			if got := nodesIn(t, mustExport(t, r, Turns, c.f)); !slices.Equal(got, nodes) {
				t.Errorf("%s, files %v: %v, want %v", name, files, got, nodes)
			}
		}
	}
}

func TestFiltersThatMakeNoSense(t *testing.T) {
	r := mustNew(t, Options{})
	now := time.Now()
	for want, f := range map[string]Filter{
		"no_verdict_column": {Verdicts: []string{"none"}},
		"bad_times":         {Since: now, Until: now},
	} {
		if _, err := r.Schema(Forks, f); !fault.Is(err, fault.Invalid) || fault.As(err).Reason != want {
			t.Errorf("%s: %v", want, err)
		}
	}
	if _, err := r.Schema(Turns, Filter{Verdicts: []string{"some\x1b"}}); !fault.Is(err, fault.Invalid) || strings.Contains(err.Error(), "\x1b") {
		t.Errorf("a verdict that is none: %v", err)
	}
	for _, table := range r.Tables() {
		if _, err := r.Schema(table.Name, Filter{Since: now}); err != nil {
			t.Error(err)
		}
		if err := r.Export(context.Background(), table.Name, Filter{Until: now}, &bytes.Buffer{}); err != nil {
			t.Errorf("rows of %s have no time: %v", table.Name, err)
		}
	}
}

// What was recorded is in files at the end of each interval, however little it is, by the day.
func TestFilesAreWrittenInTime(t *testing.T) {
	dir := t.TempDir()
	r := mustNew(t, Options{Dir: dir, Rotate: 20 * time.Millisecond})
	r.Turn(turn(0, "tr_a"))
	day := time.Now().UTC()
	for want := filepath.Join(dir, "turns-v1", "date="+day.Format(time.DateOnly), "*-1-*.parquet"); ; <-time.After(time.Millisecond) {
		if files, _ := filepath.Glob(want); len(files) == 1 {
			break
		} else if time.Since(day) > time.Minute {
			t.Fatalf("there is no file %s after a minute", want)
		}
	}
	day = time.Date(2026, 1, 31, 23, 59, 0, 0, time.UTC)
	if got, want := r.turns.partition(day.In(time.FixedZone("", 2*3600))), filepath.Join(dir, "turns-v1", "date=2026-01-31"); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// A file that is damaged is an error of its export, neither a gap in it nor the end of the daemon; whatever byte it is.
func TestDamagedFilesAreTold(t *testing.T) {
	dir := t.TempDir()
	r := mustNew(t, Options{Dir: dir})
	for i := range 2000 {
		r.Turn(turn(i, "tr_a"))
	}
	if err := r.turns.flush(); err != nil {
		t.Fatal(err)
	}
	path := r.turns.files[0].path
	sound, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		broken := slices.Clone(sound)
		broken[random.IntN(len(broken))] ^= byte(1 + random.IntN(255))
		if random.IntN(4) == 0 {
			broken = broken[:random.IntN(len(broken))]
		}
		if err := os.WriteFile(path, broken, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := r.Export(context.Background(), Turns, Filter{}, io.Discard); err == nil || !strings.Contains(err.Error(), path) {
			t.Fatalf("an export of a damaged file gives %v", err)
		}
	}
}

// Releases that kept Arrow files left them in one folder: their rows come first.
func TestArrowFilesOfOlderReleases(t *testing.T) {
	dir := t.TempDir()
	old := mustNew(t, Options{})
	for i := range 10 {
		old.Turn(turn(i, "tr_a"))
	}
	f, err := os.Create(filepath.Join(dir, "turns-v1-00000000000000000007-10.arrow"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := WriteArrowFile(bytes.NewReader(mustExport(t, old, Turns, Filter{})), f); err != nil {
		t.Fatal(err)
	}
	r := mustNew(t, Options{Dir: dir})
	r.Turn(turn(10, "tr_a"))
	if err := r.turns.flush(); err != nil {
		t.Fatal(err)
	}
	r.Turn(turn(11, "tr_a"))
	wantNodes(t, nodesIn(t, mustExport(t, r, Turns, Filter{})), 0, 12)
}

func TestUnknownTable(t *testing.T) {
	err := mustNew(t, Options{}).Export(context.Background(), "turn\x1b[2J", Filter{}, &bytes.Buffer{})
	if !fault.Is(err, fault.NotFound) || !strings.Contains(fault.As(err).Hint, "turns, nodes, forks, captures, audits, scheduler, host, restores, replays, sandboxes") {
		t.Errorf("got %v", err)
	}
	if strings.Contains(err.Error(), "\x1b") {
		t.Error("a control character of the request is in the message")
	}
}

// source is a NodeSource whose read fails after its rows, if err is there.
type source struct {
	rows []NodeRow
	err  error
}

func (s source) Count() int { return len(s.rows) }

func (s source) Each(ids.Tree) iter.Seq2[NodeRow, error] {
	return func(yield func(NodeRow, error) bool) {
		for _, row := range s.rows {
			if !yield(row, nil) {
				return
			}
		}
		if s.err != nil {
			yield(NodeRow{}, s.err)
		}
	}
}

// If it fails, a table of nodes of which some can't be read looks like one that is whole.
func TestUnreadableNodesAreNoShorterTable(t *testing.T) {
	broken := fault.New(fault.Unavailable, "state_unreadable", "reading the log")
	r := mustNew(t, Options{Nodes: source{slices.Repeat([]NodeRow{{Node: &tree.Node{ID: "nd_1", Tree: "tr_1"}}}, 3000), broken}})
	var b bytes.Buffer
	if err := r.Export(context.Background(), Nodes, Filter{}, &b); err != broken {
		t.Fatalf("exporting gives %v, want %v", err, broken)
	}
	if in, err := ipc.NewReader(&b); err == nil {
		for in.Next() {
		}
		if in.Err() == nil {
			t.Error("the stream that was broken off reads like a whole one")
		}
	}
}

// Batches must fit a gRPC message however long the text in them is.
func TestBatchesStayBelow2MiB(t *testing.T) {
	node := &tree.Node{ID: "nd_1", Tree: "tr_1", Action: tree.Action{Text: bytes.Repeat([]byte("a"), 64<<10)}, Labels: map[string]string{}}
	for i := range 2000 {
		node.Labels[fmt.Sprint(i)] = strings.Repeat("l", 1000)
	}
	r := mustNew(t, Options{Nodes: source{rows: slices.Repeat([]NodeRow{{Node: node}}, 2000)}})
	stream := &largestWrite{}
	if err := r.Export(context.Background(), Nodes, Filter{}, stream); err != nil {
		t.Fatal(err)
	}
	in, err := ipc.NewReader(&stream.Buffer)
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	for in.Next() {
		rows += int(in.Record().NumRows())
	}
	if rows != 2000 || in.Err() != nil {
		t.Errorf("%d rows, %v", rows, in.Err())
	}
	if stream.largest >= 2<<20 {
		t.Errorf("one buffer has %d bytes", stream.largest)
	}
	// Nor when they come back from files.
	r = mustNew(t, Options{Dir: t.TempDir()})
	for range 2*batchRows + 7 {
		r.Audit(AuditRow{Files: strings.Repeat("f", maxText), Processes: strings.Repeat("p", maxText)})
	}
	if err := r.audits.flush(); err != nil {
		t.Fatal(err)
	}
	stream = &largestWrite{}
	if err := r.Export(context.Background(), Audits, Filter{}, stream); err != nil || stream.largest >= 2<<20 {
		t.Errorf("one buffer of %d bytes, %v", stream.largest, err)
	}
	labels := asJSON(node.Labels)
	if !json.Valid([]byte(labels)) || len(labels) > maxObject {
		t.Errorf("labels are cut to %d bytes and not JSON", len(labels))
	}
}

type largestWrite struct {
	bytes.Buffer
	largest int
}

func (w *largestWrite) Write(p []byte) (int, error) {
	w.largest = max(w.largest, len(p))
	return w.Buffer.Write(p)
}

func TestRewardsThatJSONDoesNotKnow(t *testing.T) {
	if got := asJSON(map[string]float64{"b": math.NaN(), "a": 0.5, "c": math.Inf(1)}); got != `{"a":0.5,"b":null,"c":null}` {
		t.Error(got)
	}
}

func TestRecordingWhileExporting(t *testing.T) {
	r := mustNew(t, Options{Dir: t.TempDir(), MaxRowsInMemory: 200})
	var wg sync.WaitGroup
	for range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 2000 {
				r.Fork(ForkRow{Node: "nd_1", Tree: "tr_1", Child: int64(i), Outcome: OK})
				r.Capture(CaptureRow{Node: "nd_1", Tree: "tr_1", Bytes: -1, Outcome: Withheld, Reason: "survivors"})
			}
		}()
	}
	for range 20 {
		mustExport(t, r, Forks, Filter{Tree: "tr_1"})
	}
	wg.Wait()
	if err := r.Close(); err != nil { // no spill runs any more
		t.Fatal(err)
	}
	kept := int64(len(nodesIn(t, mustExport(t, r, Forks, Filter{})))) + int64(len(nodesIn(t, mustExport(t, r, Captures, Filter{}))))
	if got := kept + r.Dropped(); got != 16000 {
		t.Errorf("kept and dropped are %d rows, want 16000", got)
	}
}

// Real clients read what we write, with types, values, nulls and metadata.
func TestRealClientsReadTheTables(t *testing.T) {
	python := testenv.Python("pyarrow", "polars", "duckdb")
	testenv.Require(t, python.Need)
	dir := t.TempDir()
	node := &tree.Node{ID: "nd_2", Tree: "tr_a", Parent: "nd_1", Depth: 1, Verdict: tree.Files, Capture: tree.Captured,
		Checkpoint: "ck_1", Rewards: map[string]float64{"tests": 1}, Action: tree.Action{Text: []byte("echo \xff")}}
	checkpoint := &tree.Checkpoint{ID: "ck_1", Node: "nd_2", Process: tree.Empty, Bytes: 4096}
	r := mustNew(t, Options{Dir: filepath.Join(dir, "spill"), Nodes: source{rows: []NodeRow{{Node: &tree.Node{ID: "nd_1", Tree: "tr_a"}}, {node, checkpoint, tree.Full}}}})
	for i := range 5000 {
		if i == 4500 {
			if err := r.turns.flush(); err != nil { // the stream joins a file's batches and memory's
				t.Fatal(err)
			}
		}
		r.Turn(turn(i, "tr_a"))
	}
	r.Fork(ForkRow{Request: "rq", Node: "nd_1", Tree: "tr_a", Outcome: Failed, Reason: "pool_full", Batch: 1})
	r.Capture(CaptureRow{Node: "nd_1", Tree: "tr_a", Kind: tree.Empty, Bytes: -1, Outcome: OK, Urgent: true})
	core := sched.New(sched.Config{Slots: 2})
	at := time.Unix(1_700_000_000, 0)
	done := core.Add(at, sched.Work{Class: sched.Shadow})
	core.Add(at, sched.Work{Class: sched.Fork})
	core.Plan(at.Add(3 * time.Millisecond))
	core.Fail(at.Add(10*time.Millisecond), done)
	for k, standing := range core.Snapshot(at.Add(time.Second)).Classes {
		if !standing.Idle() {
			r.Scheduler(SchedulerRow{At: at, Interval: time.Second, Line: LineCaptures, Class: sched.Class(k), Slots: 2, Standing: standing})
		}
	}
	r.Host(HostRow{At: at, Interval: time.Second, MemoryTotal: 1 << 30, Stalls: &hostload.Stalls{CPU: time.Millisecond}})
	r.Host(HostRow{At: at, Interval: time.Second, MemoryTotal: 1 << 30})
	sandbox := ids.NewSandbox()
	r.Sandbox(SandboxRow{Sandbox: sandbox, Tree: "tr_a", Head: "nd_2", EndedAt: time.Now().Truncate(time.Millisecond), Ended: GoneAtStart, Limits: tree.Limits{MemoryBytes: 1 << 30}})
	r.Sandbox(SandboxRow{Sandbox: "sb_odd", Ended: Released})
	r.Restore(RestoreRow{Purpose: ForTrial, Node: "nd_2", Tree: "tr_a", Kind: tree.Dump, Total: 5, Clone: 3, Outcome: Failed, Reason: "state_differs"})
	r.Replay(ReplayRow{Of: "nd_2", Tree: "tr_a", Took: time.Second, SameExit: true, Outcome: OK})
	for _, table := range r.Tables() {
		table := table.Name
		stream := mustExport(t, r, table, Filter{})
		path := filepath.Join(dir, table)
		if err := os.WriteFile(path+".arrows", stream, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, ext := range []string{".arrow", ".parquet"} {
			f, err := os.Create(path + ext)
			if err != nil {
				t.Fatal(err)
			}
			if ext == ".arrow" {
				_, err = WriteArrowFile(bytes.NewReader(stream), f)
			} else {
				_, err = WriteParquet(bytes.NewReader(stream), f)
			}
			if err != nil {
				t.Fatalf("writing %s%s: %v", table, ext, err)
			}
			f.Close()
		}
	}
	out, err := exec.Command(python.Path, "testdata/read_tables.py", dir).CombinedOutput()
	if err != nil {
		t.Fatalf("a client could not read the tables: %v\n%s", err, out)
	}
}

func BenchmarkTurn(b *testing.B) {
	r, err := New(Options{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	row := turn(1, "tr_a")
	b.ReportAllocs()
	for b.Loop() {
		r.Turn(row)
	}
}

func BenchmarkExportMillion(b *testing.B) {
	r, err := New(Options{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	for i := range 1_000_000 {
		r.Turn(turn(i, "tr_a"))
		if r.turns.full() {
			r.turns.spillBatches()
		}
	}
	for b.Loop() {
		n := &counted{}
		if err := r.Export(context.Background(), Turns, Filter{}, n); err != nil {
			b.Fatal(err)
		}
		b.SetBytes(n.bytes)
	}
	b.ReportMetric(1e6*float64(b.N)/b.Elapsed().Seconds(), "rows/s")
}

type counted struct{ bytes int64 }

func (c *counted) Write(p []byte) (int, error) { c.bytes += int64(len(p)); return len(p), nil }
