package stats

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/apache/arrow/go/v17/parquet/file"
	"github.com/apache/arrow/go/v17/parquet/pqarrow"
)

// segment is one file. Its name says all that is kept here.
type segment struct {
	path  string
	first int64 // Unix ns; also its place in the order
	rows  int64
	sum   uint32 // CRC-32C of its bytes; the library that reads Parquet isn't made for damaged ones. Arrow files have none
	bytes int64
}

// segmentName is the name of a file: its place, rows and sum.
const segmentName = "%020d-%d-%08x.parquet"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// partition is the folder of a table's files whose first row was recorded on the day of at, in UTC.
func (s *series[R]) partition(at time.Time) string {
	return filepath.Join(s.options.Dir, fmt.Sprintf("%s-v%d", s.def.name, SchemaVersion), "date="+at.UTC().Format(time.DateOnly))
}

// segments finds the files of a table, oldest first, and removes what a recorder that was killed left incomplete. Files of the
// releases that wrote Arrow IPC, all in one folder, are of the table, too.
func (s *series[R]) segments() ([]segment, error) {
	var found []segment
	table := fmt.Sprintf("%s-v%d", s.def.name, SchemaVersion)
	for _, place := range []struct {
		pattern, before, format string
		parts                   int
	}{
		{table + "-*", table + "-", "%020d-%d.arrow", 2},
		{table + "/date=*/*", "", segmentName, 3},
	} {
		paths, err := fs.Glob(os.DirFS(s.options.Dir), place.pattern)
		if err != nil {
			return nil, err
		}
		for _, path := range paths {
			path = filepath.Join(s.options.Dir, path)
			if strings.HasSuffix(path, ".tmp") {
				os.Remove(path)
				continue
			}
			seg := segment{path: path}
			name := strings.TrimPrefix(filepath.Base(path), place.before)
			parts := []any{&seg.first, &seg.rows, &seg.sum}[:place.parts]
			fmt.Sscanf(name, place.format, parts...)
			if name != fmt.Sprintf(place.format, []any{seg.first, seg.rows, seg.sum}[:place.parts]...) {
				continue // nothing of ours
			}
			if info, err := os.Stat(path); err == nil {
				seg.bytes = info.Size()
			}
			found = append(found, seg)
		}
	}
	slices.SortFunc(found, func(a, b segment) int { return cmp.Compare(a.first, b.first) })
	return found, nil
}

// rowsAtOnce bounds a row group, and so what a reader of a file must hold: with the longest text 40 MiB, usually 2.
const rowsAtOnce = 8 << 10

// writeSegment makes a file of batches: aside, synced, renamed. first is its place in the order, in Unix ns.
func (s *series[R]) writeSegment(day time.Time, first int64, batches []arrow.Record) (seg segment, err error) {
	seg.first = first
	for _, rec := range batches {
		seg.rows += rec.NumRows()
	}
	folder := s.partition(day)
	aside := filepath.Join(folder, fmt.Sprintf("%020d.tmp", first))
	defer func() {
		if err != nil {
			err = fmt.Errorf("writing %s: %w", aside, err)
		}
	}()
	if _, err := os.Stat(s.options.Dir); err != nil {
		return seg, err // it was there: who took it away doesn't want it
	}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return seg, err
	}
	f, err := os.OpenFile(aside, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return seg, err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(aside)
		}
	}()
	sum := crc32.New(castagnoli)
	w, err := parquetWriter(s.def.schema, io.MultiWriter(f, sum))
	if err != nil {
		return seg, err
	}
	for _, rec := range batches {
		if err := w.WriteBuffered(rec); err != nil { // a writer's row groups are smaller than all of a file
			return seg, err
		}
	}
	if err := w.Close(); err != nil {
		return seg, err
	}
	info, err := f.Stat()
	if err != nil {
		return seg, err
	}
	if err := f.Sync(); err != nil {
		return seg, err
	}
	seg.bytes, seg.sum = info.Size(), sum.Sum32()
	seg.path = filepath.Join(folder, fmt.Sprintf(segmentName, seg.first, seg.rows, seg.sum))
	return seg, os.Rename(aside, seg.path)
}

// removeSegment removes a file, and its partition if it was the last one there.
func removeSegment(seg segment) {
	os.Remove(seg.path)
	if folder := filepath.Dir(seg.path); strings.HasPrefix(filepath.Base(folder), "date=") {
		os.Remove(folder)
	}
}

// readSegment gives the rows of a file in the columns of today, in batches as bounded as those of rows.
func (s *series[R]) readSegment(ctx context.Context, seg segment, emit func(arrow.Record) error) error {
	f, err := os.Open(seg.path)
	if err != nil {
		return err
	}
	defer f.Close()
	var schema *arrow.Schema
	var batches int
	var batch func(int) (arrow.Record, error)
	if filepath.Ext(seg.path) == ".arrow" {
		r, err := ipc.NewFileReader(f)
		if err != nil {
			return err
		}
		defer r.Close()
		schema, batches, batch = r.Schema(), r.NumRecords(), r.RecordAt
	} else {
		sum := crc32.New(castagnoli)
		if _, err := io.Copy(sum, f); err != nil {
			return err
		}
		if sum.Sum32() != seg.sum {
			return errors.New("it is damaged; the rest can be exported when it is gone")
		}
		p, err := file.NewParquetReader(f)
		if err != nil {
			return err
		}
		defer p.Close()
		r, err := pqarrow.NewFileReader(p, pqarrow.ArrowReadProperties{}, memory.DefaultAllocator)
		if err != nil {
			return err
		}
		if schema, err = r.Schema(); err != nil {
			return err
		}
		batches, batch = p.NumRowGroups(), func(i int) (arrow.Record, error) { return rowGroup(ctx, r, i) }
	}
	at, err := s.def.places(schema)
	if err != nil {
		return err
	}
	for i := range batches {
		if err := ctx.Err(); err != nil {
			return err
		}
		rec, err := batch(i)
		if err != nil {
			return err
		}
		if rec, err = s.def.adopt(rec, at); err != nil {
			return err
		}
		if err := inBatches(rec, emit); err != nil {
			return err
		}
	}
	return nil
}

// inBatches gives rec in pieces within the bounds of a batch.
func inBatches(rec arrow.Record, emit func(arrow.Record) error) error {
	bytes := int64(0)
	for _, c := range rec.Columns() {
		bytes += 9 * rec.NumRows()
		if text, ok := c.(*array.String); ok && text.Len() > 0 {
			bytes += int64(text.ValueOffset(text.Len()) - text.ValueOffset(0))
		}
	}
	n := rec.NumRows()
	if n <= 1 || n <= batchRows && bytes <= batchBytes+batchBytes/2 {
		return emit(rec)
	}
	half := n / 2
	if n > batchRows {
		half = min(half, batchRows)
	}
	for _, piece := range []arrow.Record{rec.NewSlice(0, half), rec.NewSlice(half, n)} {
		if err := inBatches(piece, emit); err != nil {
			return err
		}
	}
	return nil
}

// rowGroup reads a row group as one batch.
func rowGroup(ctx context.Context, r *pqarrow.FileReader, i int) (arrow.Record, error) {
	all := make([]int, r.ParquetReader().MetaData().Schema.NumColumns())
	for c := range all {
		all[c] = c
	}
	t, err := r.RowGroup(i).ReadTable(ctx, all)
	if err != nil {
		return nil, err
	}
	defer t.Release()
	columns := make([]arrow.Array, t.NumCols())
	for c := range columns {
		chunks := t.Column(c).Data().Chunks()
		if columns[c] = chunks[0]; len(chunks) > 1 {
			if columns[c], err = array.Concatenate(chunks, memory.DefaultAllocator); err != nil {
				return nil, err
			}
		}
	}
	return array.NewRecord(t.Schema(), columns, t.NumRows()), nil
}
