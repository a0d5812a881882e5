package tree

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/record"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/wal"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
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

// ---- what pebble doesn't notice --------------------------------------------

// intact refuses a log in which pebble would find less than was acknowledged, and
// say nothing: it takes a folder without its marker for a new store, and what is damaged in
// the last block of the newest write-ahead file for a torn end.
func intact(fs vfs.FS, logDir string) error {
	if sabotage.On("end") {
		return nil
	}
	there, err := pebble.Peek(logDir, fs)
	if err != nil {
		return err
	}
	names, err := fs.List(logDir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if ext := filepath.Ext(name); !there.Exists && (ext == ".log" || ext == ".sst") {
			return damagedAt("%s is there, and the marker that names the manifest is gone", fs.PathJoin(logDir, name))
		}
	}
	logs, err := wal.Scan(wal.Dir{FS: fs, Dirname: logDir})
	if err != nil || len(logs) == 0 {
		return err
	}
	newest := logs[len(logs)-1]
	path := fs.PathJoin(logDir, newest.Num.String()+".log")
	b, err := readAll(fs, path)
	if err != nil {
		return err
	}
	if at := torn(b, uint32(newest.Num)); promised(b[at:], uint32(newest.Num), uint64(at)) {
		return damagedAt("%s, from byte %d on, though what follows was written after that was flushed", path, at)
	}
	return nil
}

func damagedAt(format string, args ...any) *fault.Error {
	return fault.New(fault.DataLoss, "log_damaged", "the log is damaged: "+format, args...).
		WithHint("keep a copy of the directory before anything else is tried")
}

func readAll(fs vfs.FS, path string) ([]byte, error) {
	f, err := fs.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}

// A write-ahead file is pebble's blocks of chunks; a chunk is within one block:
//
//	crc32c, masked (4 bytes) · length (2) · kind, 9 to 12 (1) · number of the file (4) · flushed up to here (8) · bytes
//
// little-endian; the sum is over all that follows it. Less than a header at the end of a block is zeros.
const (
	walBlock  = 32 << 10
	walHeader = 19
)

// walChunk is the size of the chunk that a block goes on with, and up to where the file was flushed when it was
// written.
func walChunk(block []byte, file uint32) (size int, flushed uint64, ok bool) {
	if len(block) < walHeader || block[6] < 9 || block[6] > 12 || binary.LittleEndian.Uint32(block[7:]) != file {
		return 0, 0, false
	}
	size = walHeader + int(binary.LittleEndian.Uint16(block[4:]))
	if size > len(block) {
		return 0, 0, false
	}
	sum := crc32.Checksum(block[6:size], crc32.MakeTable(crc32.Castagnoli))
	if (sum>>15|sum<<17)+0xa282ead8 != binary.LittleEndian.Uint32(block) {
		return 0, 0, false
	}
	return size, binary.LittleEndian.Uint64(block[11:]), true
}

// torn is the offset of the first chunk that can't be read.
func torn(b []byte, file uint32) (at int) {
	for at < len(b) {
		end := min(at/walBlock*walBlock+walBlock, len(b))
		size, _, ok := walChunk(b[at:end], file)
		switch {
		case ok:
			at += size
		case end-at < walHeader && end < len(b):
			at = end
		default:
			return at
		}
	}
	return at
}

// promised: there is a chunk in rest, wherever it begins, that was written when more than at bytes were flushed.
func promised(rest []byte, file uint32, at uint64) bool {
	number := binary.LittleEndian.AppendUint32(nil, file)
	for from := 0; ; from++ {
		i := bytes.Index(rest[from:], number)
		if i < 0 {
			return false
		}
		if from += i; from < 7 {
			continue
		}
		if _, flushed, ok := walChunk(rest[from-7:], file); ok && flushed > at {
			return true
		}
	}
}

// endName is a file beside the log with the index of the last write when the store was last closed:
// no log that is whole ends before it.
const endName = "log.end"

// reaches refuses a log that has lost its end, or all.
func reaches(fs vfs.FS, dir string, last uint64) error {
	end, err := endOf(fs, dir)
	if err == nil && last < end && !sabotage.On("end") {
		return damagedAt("what is in %s ends with write %d, and had %d when it was closed", fs.PathJoin(dir, "log"), last, end).
			WithHint("a file of it is gone or cut off; if an older copy was put back on purpose, remove %s", fs.PathJoin(dir, endName))
	}
	return err
}

// endOf is 0 for a store that was never closed.
func endOf(fsys vfs.FS, dir string) (uint64, error) {
	path := fsys.PathJoin(dir, endName)
	b, err := readAll(fsys, path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fault.New(fault.Internal, "state_dir", "reading %s: %w", path, err)
	}
	end, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0, damagedAt("%s has no number", path)
	}
	return end, nil
}

// closedAt writes endName anew, never with less than it says.
func closedAt(fs vfs.FS, dir string, last uint64) error {
	if end, err := endOf(fs, dir); err != nil || end >= last {
		return err
	}
	path := fs.PathJoin(dir, endName)
	f, err := fs.Create(path+".new", vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, last)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := fs.Rename(path+".new", path); err != nil {
		return err
	}
	return syncDir(fs, dir)
}
