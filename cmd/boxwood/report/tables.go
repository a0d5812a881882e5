// Package report makes figures of the tables of statistics and of what replays
// print, and draws them: as one page that stands alone, as pictures for papers,
// and as JSON.
//
// Memory grows with the rows, by some hundred bytes each; what is written is
// bounded, however many there are: what doesn't fit a figure is aggregated or
// left out, and the figure says so. Text came out of sandboxes: all of it passes
// package printable, and the page escapes it.
package report

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/apache/arrow/go/v17/parquet/file"
	"github.com/apache/arrow/go/v17/parquet/pqarrow"

	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/internal/fault"
)

// Tables are those that a report reads; rows of others are passed over.
var Tables = []string{stats.Nodes, stats.Turns, stats.Captures, stats.Forks}

// Data is what a report is made of. The zero value is empty.
type Data struct {
	nodes    map[string]*node
	turns    []turn
	captures []capture
	forks    []fork
	replays  []trajectory
	endless  map[string]bool     // trees of trajectories whose replay has no end
	replayed map[string]replayed // by node
	words    map[string]string
}

type node struct {
	id, tree, parent, sandbox       string
	tool                            string // the program that its action ran
	verdict, capture, kind, policy  string
	depth, ordinal, bytes, from, to int64
	own                             bool // whether its checkpoint was made for it
}

type turn struct {
	node, tree string
	wait       int64 // exposed delay
}

type capture struct {
	node, tree string
	from, took int64
}

type fork struct {
	tree, outcome string
	ready, batch  int64
}

// Trees are those that replays grew; none: there is no replay.
func (d *Data) Trees() []string {
	var trees []string
	for _, r := range d.replays {
		trees = append(trees, r.tree)
	}
	return trees
}

// AddFile reads a table from a file that `boxwood stats` or a tool of Arrow wrote,
// or what `boxwood replay --json` printed.
func (d *Data) AddFile(path string) (table bool, err error) {
	f, err := os.Open(path)
	if err != nil {
		return false, fault.New(fault.NotFound, "bad_file", "opening: %w", err)
	}
	defer f.Close()
	bad := func(err error) error {
		if err != nil {
			return fault.New(fault.Invalid, "bad_file", "%s: %w", path, err)
		}
		return nil
	}
	switch ext := filepath.Ext(path); ext {
	case ".arrows":
		return true, bad(d.AddStream(f))
	case ".arrow":
		return true, bad(d.addArrowFile(f))
	case ".parquet":
		return true, bad(d.addParquet(f))
	case ".json", ".jsonl":
		return false, bad(d.addReplay(f))
	default:
		return false, fault.New(fault.Invalid, "bad_file", "%s is neither a table (.parquet, .arrow, .arrows) nor what \"replay --json\" printed (.json, .jsonl)", path)
	}
}

// AddStream reads a table as one Arrow IPC stream.
func (d *Data) AddStream(r io.Reader) (err error) {
	defer recovered(&err)
	in, err := ipc.NewReader(bufio.NewReader(r))
	if err != nil {
		return err
	}
	defer in.Release()
	for in.Next() {
		if err := d.add(in.Schema(), in.Record()); err != nil {
			return err
		}
	}
	return in.Err()
}

func (d *Data) addArrowFile(f *os.File) (err error) {
	defer recovered(&err)
	in, err := ipc.NewFileReader(f)
	if err != nil {
		return err
	}
	defer in.Close()
	for i := range in.NumRecords() {
		rec, err := in.Record(i)
		if err == nil {
			err = d.add(in.Schema(), rec)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (d *Data) addParquet(f *os.File) (err error) {
	defer recovered(&err)
	p, err := file.NewParquetReader(f)
	if err != nil {
		return err
	}
	in, err := pqarrow.NewFileReader(p, pqarrow.ArrowReadProperties{BatchSize: 8192}, memory.DefaultAllocator)
	if err != nil {
		return err
	}
	schema, err := in.Schema()
	if err != nil {
		return err
	}
	rows, err := in.GetRecordReader(context.Background(), nil, nil)
	if err != nil {
		return err
	}
	defer rows.Release()
	for rows.Next() {
		if err := d.add(schema, rows.Record()); err != nil {
			return err
		}
	}
	if err := rows.Err(); err != nil && err != io.EOF {
		return err
	}
	return nil
}

// recovered makes an error of a panic: Arrow's readers have some for files that
// are damaged.
func recovered(err *error) {
	if broken := recover(); broken != nil {
		*err = fmt.Errorf("it is damaged: %v", broken)
	}
}

// add takes in a batch of the table that a schema names.
func (d *Data) add(schema *arrow.Schema, rec arrow.Record) error {
	table, ok := schema.Metadata().GetValue("boxwood.table")
	if !ok {
		return fmt.Errorf("it is no table of boxwood: its schema lacks boxwood.table")
	}
	if d.nodes == nil {
		d.nodes, d.words = map[string]*node{}, map[string]string{}
	}
	c := columns{rec, d.words}
	switch table {
	case stats.Nodes:
		id, tree, parent, sandbox, action := c.text("node"), c.text("tree"), c.text("parent"), c.text("sandbox"), c.raw("action")
		verdict, status, kind, policy := c.text("verdict"), c.text("capture"), c.text("process_kind"), c.text("capture_policy")
		depth, ordinal, bytes, from, to := c.number("depth"), c.number("ordinal"), c.number("checkpoint_bytes"), c.number("started_at"), c.number("ended_at")
		own := c.text("own_checkpoint")
		for i := range int(rec.NumRows()) {
			d.nodes[id(i)] = &node{id: id(i), tree: tree(i), parent: parent(i), sandbox: sandbox(i), tool: d.word(program(action(i))), verdict: verdict(i),
				capture: status(i), kind: kind(i), policy: policy(i), depth: depth(i), ordinal: ordinal(i), bytes: bytes(i), from: from(i), to: to(i), own: own(i) == "true"}
		}
	case stats.Turns:
		node, tree, wait := c.text("node"), c.text("tree"), c.number("capture_wait_ns")
		for i := range int(rec.NumRows()) {
			d.turns = append(d.turns, turn{node(i), tree(i), wait(i)})
		}
	case stats.Captures:
		node, tree, from := c.text("node"), c.text("tree"), c.number("started_at")
		flush, freeze, finish := c.number("flush_ns"), c.number("freeze_ns"), c.number("finish_ns")
		for i := range int(rec.NumRows()) {
			d.captures = append(d.captures, capture{node(i), tree(i), from(i), flush(i) + freeze(i) + finish(i)})
		}
	case stats.Forks:
		tree, outcome, ready, batch := c.text("tree"), c.text("outcome"), c.number("ready_ns"), c.number("batch")
		for i := range int(rec.NumRows()) {
			d.forks = append(d.forks, fork{tree(i), outcome(i), ready(i), batch(i)})
		}
	}
	return nil
}

func (d *Data) word(s string) string { return columns{words: d.words}.word(s) }

// columns are those of a batch, by name; one that isn't there is all null.
type columns struct {
	arrow.Record
	words map[string]string
}

func (c columns) find(name string) arrow.Array {
	if at := c.Schema().FieldIndices(name); len(at) == 1 {
		return c.Column(at[0])
	}
	return array.NewNull(int(c.NumRows()))
}

// word is a string of its own, and one for all that are equal: a batch's strings
// hold the whole batch.
func (c columns) word(s string) string {
	if w, ok := c.words[s]; ok {
		return w
	}
	s = strings.Clone(s)
	c.words[s] = s
	return s
}

// text gives the values of a column; "" is null.
func (c columns) text(name string) func(i int) string {
	raw := c.raw(name)
	return func(i int) string { return c.word(raw(i)) }
}

// raw is text that may not outlive the batch.
func (c columns) raw(name string) func(i int) string {
	col := c.find(name)
	return func(i int) string {
		if col.IsNull(i) {
			return ""
		}
		switch col := col.(type) {
		case *array.String:
			return col.Value(i)
		case *array.Dictionary:
			return col.Dictionary().ValueStr(col.GetValueIndex(i))
		case *array.Boolean:
			return fmt.Sprint(col.Value(i))
		}
		return ""
	}
}

// number gives the values of a column, times as nanoseconds; 0 is null, too.
func (c columns) number(name string) func(i int) int64 {
	col := c.find(name)
	return func(i int) int64 {
		if col.IsNull(i) {
			return 0
		}
		switch col := col.(type) {
		case *array.Int64:
			return col.Value(i)
		case *array.Timestamp:
			return int64(col.Value(i))
		}
		return 0
	}
}
