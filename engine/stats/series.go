package stats

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"sync"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
)

// series is the rows of one table, oldest first: files, then batches in
// memory, then rows that are not a batch yet. A batch in memory becomes part of a file
// or is dropped; it is in exactly one place whenever mu is free.
type series[R any] struct {
	def     *definition[R]
	options Options

	mu      sync.Mutex
	files   []segment
	batches []arrow.Record
	batched int // rows in batches
	pending []R
	since   time.Time // when the first row in memory was recorded
	dropped int64
	wake    chan struct{} // has room for one: batches want to be spilled
	spill   sync.Mutex    // one spill at a time; taken before mu
}

func openSeries[R any](def *definition[R], o Options) (s *series[R], err error) {
	s = &series[R]{def: def, options: o, wake: make(chan struct{}, 1)}
	if o.Dir != "" {
		s.files, err = s.segments()
	}
	return s, err
}

func (s *series[R]) definition() (string, string, *arrow.Schema) {
	return s.def.name, s.def.doc, s.def.schema
}

func (s *series[R]) add(row R) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.pending) == 0 && len(s.batches) == 0 {
		s.since = time.Now()
	}
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

// keepSpilling writes files when memory is half full, and at the end of each interval of Options.Rotate.
func (s *series[R]) keepSpilling(stop <-chan struct{}) {
	failing := false // one line in the log for a row of failures
	for {
		now := time.Now()
		end := time.NewTimer(now.Truncate(s.options.Rotate).Add(s.options.Rotate).Sub(now))
		var err error
		select {
		case <-stop:
			end.Stop()
			return
		case <-s.wake:
			err = s.spillBatches()
		case <-end.C:
			err = s.flush()
		}
		end.Stop()
		if err != nil && !failing {
			slog.Error("writing statistics to disk failed; rows stay in memory until it is full",
				"table", s.def.name, "error", err)
		}
		failing = err != nil
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
	begun := time.Now()
	s.mu.Lock()
	batches, since := s.batches, s.since
	first := begun.UnixNano()
	if n := len(s.files); n > 0 && first <= s.files[n-1].first {
		first = s.files[n-1].first + 1 // clocks go back; the order must not
	}
	s.mu.Unlock()
	if len(batches) == 0 {
		return nil
	}
	seg, err := s.writeSegment(since, first, batches)
	if err != nil {
		return err
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
	s.since = begun
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
		removeSegment(s.files[0])
		s.files = append([]segment(nil), s.files[1:]...)
	}
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
		if err := s.readSegment(ctx, f, emit); err != nil && !errors.Is(err, fs.ErrNotExist) {
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
