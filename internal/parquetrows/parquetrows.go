// Package parquetrows reads rows of Parquet files as JSON objects: those of
// their columns that hold text, in lists and structures as they come. Other
// columns are left out; who reads trajectories needs none of them.
//
// Files are not trusted. Whatever one says of itself, a page takes at most
// maxPage bytes, all pages that are held at once maxHeld, a row maxRow, and
// the metadata what it is long; each loop ends with what it reads. This is why
// arrow's reader isn't used here: it allocates what a damaged file asks for,
// may not come back from one, and panics in goroutines of its own.
//
// Read are the encodings that writers use for text (plain, dictionary, delta
// lengths), pages of both versions, and snappy, gzip and zstd. Others are
// refused by name.
package parquetrows

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Magic begins and ends a file.
const Magic = "PAR1"

const (
	maxFooter = 16 << 20
	maxHeader = 1 << 20
	maxPage   = 512 << 20
	maxHeld   = 1 << 30
	maxRow    = 256 << 20
	// maxValues of one column in one row.
	maxValues = 1 << 20
	// maxColumns that are read of a file.
	maxColumns = 256
)

// Reader goes through the rows of a file.
type Reader struct {
	file io.ReadSeeker
	size int64
	root *node
	// leaves are read, others have no reader.
	leaves []*node
	groups []fields

	group   int // the next
	rows    int64
	columns []*column
	held    int64
}

// Open reads a file's footer. Of its columns those at the top are read that
// want says yes to.
func Open(file io.ReadSeeker, want func(column string) bool) (*Reader, error) {
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	r := &Reader{file: file, size: size}
	tail, err := r.at(size-8, 8)
	if err != nil || string(tail[4:]) != Magic {
		if err == nil && string(tail[4:]) == "PARE" {
			return nil, errors.New("it is encrypted")
		}
		return nil, errors.New("its end is missing")
	}
	n := int64(binary.LittleEndian.Uint32(tail))
	if n > maxFooter {
		return nil, fmt.Errorf("its footer is larger than %d MiB", maxFooter>>20)
	}
	data, err := r.at(size-8-n, int(n))
	if err != nil {
		return nil, fmt.Errorf("its footer: %w", errShort)
	}
	footer, err := (&compact{data: data}).structure(0)
	if err == nil {
		err = r.schema(footer.list(2), want)
	}
	if err != nil {
		return nil, fmt.Errorf("its footer: %w", err)
	}
	for _, g := range footer.list(4) {
		group, ok := g.(fields)
		if !ok {
			return nil, errors.New("its footer: a row group that is none")
		}
		r.groups = append(r.groups, group)
	}
	return r, nil
}

// at reads n bytes at an offset.
func (r *Reader) at(offset int64, n int) ([]byte, error) {
	if offset < 0 || int64(n) > r.size-offset {
		return nil, errShort
	}
	if _, err := r.file.Seek(offset, io.SeekStart); err != nil {
		return nil, err
	}
	data := make([]byte, n)
	_, err := io.ReadFull(r.file, data)
	return data, err
}

// Has says whether the file has a column of text, by its path: "messages" or
// "messages.role". Lists have no names of their own in it.
func (r *Reader) Has(path string) bool {
	for _, l := range r.leaves {
		if l.path == path || len(l.path) > len(path) && l.path[:len(path)+1] == path+"." {
			return true
		}
	}
	return false
}

// Next gives the next row; io.EOF: there is none. After any other error the
// rows of the next group go on.
func (r *Reader) Next() ([]byte, error) {
	for r.rows == 0 {
		if r.group == len(r.groups) {
			return nil, io.EOF
		}
		g := r.groups[r.group]
		r.group++
		if err := r.begin(g); err != nil {
			r.rows, r.columns = 0, nil
			return nil, fmt.Errorf("row group %d: %w", r.group, err)
		}
	}
	r.rows--
	row := &value{}
	taken := 0
	for _, c := range r.columns {
		n, err := c.row(row)
		if taken += n; err == nil && taken > maxRow {
			err = fmt.Errorf("a row is larger than %d MiB", maxRow>>20)
		}
		if err != nil {
			r.rows, r.columns = 0, nil // where its next row begins isn't known
			return nil, fmt.Errorf("row group %d, column %s: %w", r.group, c.leaf.path, err)
		}
	}
	var b bytes.Buffer
	r.root.write(&b, row)
	return b.Bytes(), nil
}

// begin makes readers for a row group's columns.
func (r *Reader) begin(group fields) error {
	r.held, r.columns = 0, nil
	chunks := group.list(1)
	if r.rows = group.number(3); r.rows < 0 {
		return fmt.Errorf("%d rows", r.rows)
	}
	for _, leaf := range r.leaves {
		if leaf.chunk >= len(chunks) {
			return fmt.Errorf("column %s is missing", leaf.path)
		}
		chunk, _ := chunks[leaf.chunk].(fields)
		if chunk.has(1) {
			return fmt.Errorf("column %s is in another file", leaf.path)
		}
		meta := chunk.inner(3)
		if meta == nil || meta.number(1) != typeBytes {
			return fmt.Errorf("column %s is encrypted or not what the schema says", leaf.path)
		}
		at := meta.number(9)
		if dict := meta.number(11); dict > 0 && dict < at {
			at = dict
		}
		c := &column{reader: r, leaf: leaf, at: at, codec: meta.number(4), left: meta.number(5)}
		if c.left < 0 || at < 0 {
			return fmt.Errorf("column %s: a size that is negative", leaf.path)
		}
		r.columns = append(r.columns, c)
	}
	if len(r.columns) == 0 {
		r.rows = 0
	}
	return nil
}
