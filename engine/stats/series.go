package stats

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/ipc"
)

// series is the rows of one table, oldest first: files, then batches in
// memory, then rows that are not a batch yet. A batch in memory becomes a file
// or is dropped; it is in exactly one place whenever mu is free.
type series[R any] struct {
	def     *definition[R]
	options Options

	mu      sync.Mutex
	files   []segment
	batches []arrow.Record
	batched int // rows in batches
	pending []R
	dropped int64
	wake    chan struct{} // has room for one: batches want to be spilled
	spill   sync.Mutex    // one spill at a time; taken before mu
}

// segment is one file. Its name says all that is kept here.
type segment struct {
	path  string
	first int64 // Unix ns; also its place in the order
	rows  int64
	bytes int64
}

func openSeries[R any](def *definition[R], o Options) (*series[R], error) {
	s := &series[R]{def: def, options: o, wake: make(chan struct{}, 1)}
	if o.Dir == "" {
		return s, nil
	}
	entries, err := os.ReadDir(o.Dir) // sorted by name, so by time
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		path := filepath.Join(o.Dir, e.Name())
		if strings.HasPrefix(e.Name(), s.prefix()) && strings.HasSuffix(e.Name(), ".tmp") {
			os.Remove(path) // of a recorder that was killed; incomplete
			continue
		}
		if seg, ok := s.parse(path); ok {
			if info, err := e.Info(); err == nil {
				seg.bytes = info.Size()
			}
			s.files = append(s.files, seg)
		}
	}
	return s, nil
}

func (s *series[R]) prefix() string { return fmt.Sprintf("%s-v%d-", s.def.name, SchemaVersion) }

func (s *series[R]) parse(path string) (segment, bool) {
	rest, ok := strings.CutPrefix(filepath.Base(path), s.prefix())
	rest, isArrow := strings.CutSuffix(rest, ".arrow")
	first, rows, both := strings.Cut(rest, "-")
	if !ok || !isArrow || !both {
		return segment{}, false
	}
	seg := segment{path: path}
	var err1, err2 error
	seg.first, err1 = strconv.ParseInt(first, 10, 64)
	seg.rows, err2 = strconv.ParseInt(rows, 10, 64)
	return seg, err1 == nil && err2 == nil
}

func (s *series[R]) definition() (string, string, *arrow.Schema) {
	return s.def.name, s.def.doc, s.def.schema
}

func (s *series[R]) add(row R) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending = append(s.pending, row)
	// Small limits (tests, tiny hosts) must not wait for a full batch.
	if len(s.pending) < min(batchRows, max(1, s.options.MaxRowsInMemory/4)) {
		return
	}
	s.batch()
	if s.options.Dir != "" && s.batched >= s.options.MaxRowsInMemory/2 {
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
	for s.batched > s.options.MaxRowsInMemory && len(s.batches) > 0 {
		s.dropped += s.batches[0].NumRows()
		s.drop(1)
	}
}

// batch turns the pending rows into batches. mu is held.
func (s *series[R]) batch() {
	for len(s.pending) > 0 {
		rec, taken := s.def.record(s.pending)
		s.batches = append(s.batches, rec)
		s.batched += taken
		s.pending = s.pending[taken:]
	}
	s.pending = make([]R, 0, min(batchRows, s.options.MaxRowsInMemory))
}

// drop forgets the first n batches. mu is held. Readers may still hold them:
// nothing is changed in place.
func (s *series[R]) drop(n int) {
	for _, rec := range s.batches[:n] {
		s.batched -= int(rec.NumRows())
	}
	s.batches = append([]arrow.Record(nil), s.batches[n:]...)
}

func (s *series[R]) count() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := int64(s.batched + len(s.pending))
	for _, f := range s.files {
		n += f.rows
	}
	return n
}

func (s *series[R]) lost() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dropped
}

func (s *series[R]) keepSpilling(stop <-chan struct{}) {
	failing := false // one line in the log for a row of failures
	for {
		select {
		case <-stop:
			return
		case <-s.wake:
			err := s.spillBatches()
			if err != nil && !failing {
				slog.Error("writing statistics to disk failed; rows stay in memory until it is full",
					"table", s.def.name, "error", err)
			}
			failing = err != nil
		}
	}
}

func (s *series[R]) flush() error {
	if s.options.Dir == "" {
		return nil
	}
	s.mu.Lock()
	s.batch()
	s.mu.Unlock()
	return s.spillBatches()
}

// spillBatches writes the batches in memory as one file. mu is free meanwhile.
func (s *series[R]) spillBatches() error {
	s.spill.Lock()
	defer s.spill.Unlock()
	s.mu.Lock()
	batches := s.batches
	first := time.Now().UnixNano()
	if n := len(s.files); n > 0 && first <= s.files[n-1].first {
		first = s.files[n-1].first + 1 // clocks go back; the order must not
	}
	s.mu.Unlock()
	if len(batches) == 0 {
		return nil
	}
	var rows int64
	for _, rec := range batches {
		rows += rec.NumRows()
	}
	seg := segment{first: first, rows: rows}
	seg.path = filepath.Join(s.options.Dir, fmt.Sprintf("%s%020d-%d.arrow", s.prefix(), first, rows))
	var err error
	if seg.bytes, err = writeSegment(seg.path, s.def.schema, batches); err != nil {
		return fmt.Errorf("writing %s: %w", seg.path, err)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	// While the file was written, add may have dropped some of these batches as
	// the oldest: they are in the file now, so they were not lost after all.
	for _, rec := range batches {
		if len(s.batches) > 0 && s.batches[0] == rec {
			s.drop(1)
		} else {
			s.dropped -= rec.NumRows()
		}
	}
	s.files = append(s.files, seg)
	s.prune()
	return nil
}

// prune removes the oldest files beyond MaxDiskBytes, never the newest. mu is held.
func (s *series[R]) prune() {
	var sum int64
	for _, f := range s.files {
		sum += f.bytes
	}
	for len(s.files) > 1 && sum > s.options.MaxDiskBytes {
		sum -= s.files[0].bytes
		os.Remove(s.files[0].path)
		s.files = append([]segment(nil), s.files[1:]...)
	}
}

// writeSegment writes aside, syncs and renames.
func writeSegment(path string, schema *arrow.Schema, batches []arrow.Record) (size int64, err error) {
	f, err := os.OpenFile(path+".tmp", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	w, err := ipc.NewFileWriter(f, ipc.WithSchema(schema), ipc.WithZstd())
	if err != nil {
		return 0, err
	}
	for _, rec := range batches {
		if err := w.Write(rec); err != nil {
			return 0, err
		}
	}
	if err := w.Close(); err != nil {
		return 0, err
	}
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if err := f.Sync(); err != nil {
		return 0, err
	}
	return info.Size(), os.Rename(f.Name(), path)
}

// each calls emit for every batch, oldest first, as of the moment of the call.
// A file that was pruned meanwhile is passed over; one that can't be read is
// an error, not a gap.
func (s *series[R]) each(ctx context.Context, emit func(arrow.Record) error) error {
	s.mu.Lock()
	files, batches := s.files, s.batches
	pending := append([]R(nil), s.pending...)
	s.mu.Unlock()

	for _, f := range files {
		if err := s.eachInFile(ctx, f, emit); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("reading %s: %w", f.path, err)
		}
	}
	for _, rec := range batches {
		if err := errors.Join(ctx.Err(), emit(rec)); err != nil {
			return err
		}
	}
	for len(pending) > 0 {
		rec, taken := s.def.record(pending)
		if err := errors.Join(ctx.Err(), emit(rec)); err != nil {
			return err
		}
		pending = pending[taken:]
	}
	return nil
}

func (s *series[R]) eachInFile(ctx context.Context, seg segment, emit func(arrow.Record) error) error {
	f, err := os.Open(seg.path)
	if err != nil {
		return err
	}
	defer f.Close()
	r, err := ipc.NewFileReader(f)
	if err != nil {
		return err
	}
	defer r.Close()
	at, err := s.def.places(r.Schema())
	if err != nil {
		return err
	}
	for i := range r.NumRecords() {
		if err := ctx.Err(); err != nil {
			return err
		}
		rec, err := r.RecordAt(i)
		if err != nil {
			return err
		}
		if rec, err = s.def.adopt(rec, at); err != nil {
			return err
		}
		if err := emit(rec); err != nil {
			return err
		}
	}
	return nil
}
