package stats

import (
	"context"
	"errors"
	"io"
	"iter"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/ipc"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// Options of a Recorder. The zero value keeps recent rows in memory only.
type Options struct {
	// Dir is where rows go that memory has no room for; empty: nowhere.
	Dir string
	// MaxRowsInMemory of each table; 0: 32768 (about 10 MiB a table).
	MaxRowsInMemory int
	// MaxDiskBytes of each table, beyond which its oldest files are removed; 0: 256 MiB.
	MaxDiskBytes int64
	// Rotate is the interval at whose end rows in memory go to files, in UTC; 0: an hour.
	Rotate time.Duration
	// Nodes are the rows of the table "nodes"; nil: it is empty.
	Nodes NodeSource
}

// NodeSource has the nodes of all trees.
type NodeSource interface {
	Count() int
	// Each gives the nodes of one tree, or of all if the tree is empty. An error, of a node that can't be read, ends it.
	Each(ids.Tree) iter.Seq2[NodeRow, error]
}

// Recorder holds the tables. It is safe for concurrent use.
type Recorder struct {
	options  Options
	turns    *series[TurnRow]
	forks    *series[ForkRow]
	captures *series[CaptureRow]
	audits   *series[AuditRow]

	scheduler *series[SchedulerRow]
	host      *series[HostRow]

	restores  *series[RestoreRow]
	replays   *series[ReplayRow]
	sandboxes *series[SandboxRow]

	stop sync.Once
	done chan struct{}
	wg   sync.WaitGroup
}

// New finds the files of earlier recorders below Dir and starts recording.
func New(o Options) (*Recorder, error) {
	if o.MaxRowsInMemory <= 0 {
		o.MaxRowsInMemory = 32 << 10
	}
	if o.MaxDiskBytes <= 0 {
		o.MaxDiskBytes = 256 << 20
	}
	if o.Rotate <= 0 {
		o.Rotate = time.Hour
	}
	if o.Dir != "" {
		if err := os.MkdirAll(o.Dir, 0o700); err != nil {
			return nil, fault.New(fault.Internal, "stats_dir", "opening the folder of statistics: %w", err)
		}
	}
	r := &Recorder{options: o, done: make(chan struct{})}
	var errs [9]error
	r.turns, errs[0] = openSeries(turnsTable, o)
	r.forks, errs[1] = openSeries(forksTable, o)
	r.captures, errs[2] = openSeries(capturesTable, o)
	r.audits, errs[3] = openSeries(auditsTable, o)
	r.scheduler, errs[4] = openSeries(schedulerTable, o)
	r.host, errs[5] = openSeries(hostTable, o)
	r.restores, errs[6] = openSeries(restoresTable, o)
	r.replays, errs[7] = openSeries(replaysTable, o)
	r.sandboxes, errs[8] = openSeries(sandboxesTable, o)
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fault.New(fault.Internal, "stats_dir", "opening the folder of statistics: %w", err)
	}
	for _, s := range r.all() {
		r.wg.Add(1)
		go func() {
			defer r.wg.Done()
			s.keepSpilling(r.done)
		}()
	}
	return r, nil
}

// table is what a Recorder does with each of its series.
type table interface {
	definition() (name, doc string, schema *arrow.Schema)
	count() int64
	lost() int64
	keepSpilling(stop <-chan struct{})
	flush() error
	each(ctx context.Context, emit func(arrow.Record) error) error
}

func (r *Recorder) all() []table {
	return []table{r.turns, r.forks, r.captures, r.audits, r.scheduler, r.host, r.restores, r.replays, r.sandboxes}
}

// Turn and its like record one row. They don't block on disk or readers.
func (r *Recorder) Turn(row TurnRow)       { r.turns.add(row) }
func (r *Recorder) Fork(row ForkRow)       { r.forks.add(row) }
func (r *Recorder) Capture(row CaptureRow) { r.captures.add(row) }
func (r *Recorder) Audit(row AuditRow)     { r.audits.add(row) }

func (r *Recorder) Scheduler(row SchedulerRow) { r.scheduler.add(row) }
func (r *Recorder) Host(row HostRow)           { r.host.add(row) }

func (r *Recorder) Restore(row RestoreRow) { r.restores.add(row) }
func (r *Recorder) Replay(row ReplayRow)   { r.replays.add(row) }
func (r *Recorder) Sandbox(row SandboxRow) { r.sandboxes.add(row) }

// Dropped counts the rows that neither memory nor disk had room for.
func (r *Recorder) Dropped() (rows int64) {
	for _, t := range r.all() {
		rows += t.lost()
	}
	return rows
}

// Close writes what is in memory to Dir and stops. Idempotent; rows recorded
// afterwards stay in memory.
func (r *Recorder) Close() error {
	var err error
	r.stop.Do(func() {
		close(r.done)
		r.wg.Wait()
		for _, t := range r.all() {
			err = errors.Join(err, t.flush())
		}
	})
	return err
}

// Table describes one table.
type Table struct {
	Name, Description string
	Rows              int64
	Columns           []Column
}

// Column describes one column.
type Column struct {
	Name, Type, Description string
	// Unit of the values; empty: none.
	Unit string
	// Null says what a null means; empty: there are none.
	Null string
}

// Tables lists the tables with their present number of rows.
func (r *Recorder) Tables() []Table {
	nodes := columnsOf(nodesTable.name, nodesTable.doc, nodesTable.schema)
	if r.options.Nodes != nil {
		nodes.Rows = int64(r.options.Nodes.Count())
	}
	tables := make([]Table, 0, len(r.all())+1)
	for _, t := range r.all() {
		tables = append(tables, describe(t))
	}
	return slices.Insert(tables, 1, nodes)
}

func describe(t table) Table {
	described := columnsOf(t.definition())
	described.Rows = t.count()
	return described
}

func columnsOf(name, doc string, schema *arrow.Schema) Table {
	t := Table{Name: name, Description: doc}
	for _, f := range schema.Fields() {
		c := Column{Name: f.Name, Type: typeName(f.Type)}
		c.Description, _ = f.Metadata.GetValue("description")
		c.Unit, _ = f.Metadata.GetValue("unit")
		c.Null, _ = f.Metadata.GetValue("null")
		t.Columns = append(t.Columns, c)
	}
	return t
}

func typeName(t arrow.DataType) string {
	switch t := t.(type) {
	case *arrow.DictionaryType:
		return "dictionary<" + t.IndexType.String() + ", " + t.ValueType.String() + ">"
	case *arrow.TimestampType:
		return "timestamp[" + t.Unit.String() + ", " + t.TimeZone + "]"
	}
	return t.String()
}

// Schema gives a table's schema. fault.NotFound names the tables there are, fault.Invalid what of the filter it has no column for.
func (r *Recorder) Schema(name string, f Filter) (*arrow.Schema, error) {
	_, schema, _, err := r.find(name, f)
	return schema, err
}

// find gives a table (nil: "nodes"), its schema, and which rows of a batch the filter wants (nil: all).
func (r *Recorder) find(name string, f Filter) (found table, schema *arrow.Schema, wanted wanted, err error) {
	names := make([]string, 0, len(r.all())+1)
	for _, t := range r.all() {
		known, _, is := t.definition()
		if names = append(names, known); known == name {
			found, schema = t, is
		}
	}
	if name == Nodes {
		schema = nodesTable.schema
	}
	if schema == nil {
		return nil, nil, nil, fault.New(fault.NotFound, "no_such_table", "there is no table %.64q", name).
			WithHint("tables are %s", strings.Join(slices.Insert(names, 1, Nodes), ", "))
	}
	wanted, err = f.of(name, schema)
	return found, schema, wanted, err
}

// Export writes the rows of a table that the filter wants as one Arrow IPC stream.
func (r *Recorder) Export(ctx context.Context, name string, f Filter, w io.Writer) error {
	var out *ipc.Writer
	err := r.Read(ctx, name, f, func(schema *arrow.Schema) func(arrow.Record) error {
		out = ipc.NewWriter(w, ipc.WithSchema(schema))
		return out.Write
	})
	if err != nil {
		return err // without the end of the stream, which would say that it is whole
	}
	return out.Close()
}

// Read gives the rows of a table that the filter wants, batch by batch, to what begin makes of its schema.
func (r *Recorder) Read(ctx context.Context, name string, f Filter, begin func(*arrow.Schema) (emit func(arrow.Record) error)) error {
	t, schema, wanted, err := r.find(name, f)
	if err != nil {
		return err
	}
	emit := begin(schema)
	if wanted != nil {
		whole := emit
		emit = func(rec arrow.Record) error {
			if rec = only(rec, wanted(rec)); rec == nil {
				return nil
			}
			return whole(rec)
		}
	}
	if t == nil {
		return r.readNodes(ctx, f.Tree, emit)
	}
	return t.each(ctx, emit)
}

// readNodes holds no more than one batch of nodes at a time.
func (r *Recorder) readNodes(ctx context.Context, of ids.Tree, emit func(arrow.Record) error) error {
	var rows []NodeRow
	give := func(all bool) error {
		for len(rows) >= batchRows || all && len(rows) > 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
			rec, taken := nodesTable.record(rows)
			if err := emit(rec); err != nil {
				return err
			}
			rows = rows[taken:]
		}
		return nil
	}
	if r.options.Nodes != nil {
		for row, err := range r.options.Nodes.Each(of) {
			if err != nil {
				return err
			}
			rows = append(rows, row)
			if err := give(false); err != nil {
				return err
			}
		}
	}
	return give(true)
}
