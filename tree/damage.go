package tree

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/record"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/wal"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// Damage is where a log is damaged: in one of its files, from an offset on, or
// in the rows of one of its tables.
//
// A torn end of the newest write-ahead file is none: what lies there was never
// acknowledged.
type Damage struct {
	File string
	// Offset in bytes of the first record that can't be read; -1 in a table, where Rows
	// says which are concerned.
	Offset int64
	Rows   string
}

func (d Damage) String() string {
	if d.Offset < 0 {
		return fmt.Sprintf("%s, among the rows %s", d.File, d.Rows)
	}
	return fmt.Sprintf("%s, from byte %d on", d.File, d.Offset)
}

// isDamage tells bytes that aren't what was written from a disk that fails.
func isDamage(err error) bool { return pebble.IsCorruptionError(err) || record.IsInvalidRecord(err) }

// damaged makes "log_damaged" of a failure that comes of damage, and names where it
// is; others stay as they are.
func damaged(dir string, err error) error {
	var known *fault.Error
	if err == nil || !isDamage(err) || errors.As(err, &known) {
		return err
	}
	where := "the log in " + dir
	if at, ok := locate(dir, err); ok {
		where = at.String()
	}
	what, _, _ := strings.Cut(err.Error(), "\n")
	return fault.New(fault.DataLoss, "log_damaged", "the log is damaged: %s: %s", where, what).
		WithHint("keep a copy of the directory before anything else is tried; `boxwood check` lists what is damaged")
}

func locate(dir string, err error) (Damage, bool) {
	if info := pebble.ExtractDataCorruptionInfo(err); info != nil {
		return Damage{File: info.Path, Offset: -1, Rows: fmt.Sprintf("%s to %s", rowName(info.Bounds.Start), rowName(info.Bounds.End.Key))}, true
	}
	return locateInWAL(filepath.Join(dir, "log"))
}

func rowName(key []byte) string {
	if len(key) == 0 {
		return "?"
	}
	return fmt.Sprintf("%c%.64q", key[0], key[1:])
}

// locateInWAL finds the first record of the write-ahead files that is there and
// can't be read.
func locateInWAL(dir string) (Damage, bool) {
	logs, err := wal.Scan(wal.Dir{FS: vfs.Default, Dirname: dir})
	if err != nil {
		return Damage{}, false
	}
	for i, l := range logs {
		offset, err := readWAL(l)
		torn := errors.Is(err, record.ErrUnexpectedEOF) && i == len(logs)-1
		if err != nil && !torn && isDamage(err) {
			return Damage{File: offset.PhysicalFile, Offset: offset.Physical}, true
		}
	}
	return Damage{}, false
}

// readWAL reads a file to its end, or to the first record that can't be read.
func readWAL(l wal.LogicalLog) (at wal.Offset, err error) {
	r := l.OpenForRead()
	defer r.Close()
	for {
		rec, offset, err := r.NextRecord()
		if err == nil {
			_, err = io.Copy(io.Discard, rec)
		}
		if errors.Is(err, io.EOF) {
			return offset, nil
		}
		if err != nil {
			return offset, err
		}
	}
}
