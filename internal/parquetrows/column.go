package parquetrows

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/golang/snappy"
	"github.com/klauspost/compress/zstd"
)

// column reads one column of a row group, a page after the other.
type column struct {
	reader *Reader
	leaf   *node
	codec  int64
	at     int64 // of the next page
	left   int64 // values, in pages to come

	dict     [][]byte
	dictSize int64
	page     page
	pageSize int64

	// A value that was looked at, to see whether it begins a row.
	peeked   bool
	rep, def int
	text     []byte
	// positions of it in the lists it is in, by level.
	positions [maxDepth + 2]int
}

// page is one that is being read; left counts its values.
type page struct {
	left     int
	rep, def *hybrid // nil: the level is 0
	values   source
}

// source gives a page's texts, which are those values that are there.
type source func() ([]byte, error)

// row puts the column's values of the next row where they belong, and tells
// how large they are.
func (c *column) row(into *value) (size int, err error) {
	for n := 0; ; n++ {
		if n > maxValues {
			return size, fmt.Errorf("a row with more than %d values", maxValues)
		}
		more, err := c.peek()
		if err != nil {
			return size, err
		}
		if !more {
			if n == 0 {
				return size, errors.New("it has fewer rows than it says")
			}
			return size, nil
		}
		if (c.rep == 0) != (n == 0) {
			if n == 0 {
				return size, errors.New("a row begins in the middle of another")
			}
			return size, nil
		}
		c.peeked = false
		if err := c.place(into); err != nil {
			return size, err
		}
		if size += len(c.text) + 64; size > maxRow {
			return size, fmt.Errorf("a row is larger than %d MiB", maxRow>>20)
		}
	}
}

// place puts the value at hand into a row.
func (c *column) place(row *value) error {
	if c.rep > 0 {
		c.positions[c.rep]++
	}
	clear(c.positions[c.rep+1:])
	path := append(c.leaf.parents[1:len(c.leaf.parents):len(c.leaf.parents)], c.leaf)
	v := row
	for _, n := range path {
		v = v.child(n)
		if c.def < n.defined && (n.optional || n.repeated) {
			return nil
		}
		if n.repeated {
			// What goes on at a level repeats that level's node: those above stay
			// at their last item, those below begin anew. Columns of one list must
			// agree on its length.
			i := c.positions[n.repeats]
			switch {
			case i < len(v.items):
			case i == len(v.items):
				v.items = append(v.items, &value{})
			default:
				return errors.New("columns of one list differ in length")
			}
			v = v.items[i]
		}
		v.there = true
	}
	v.text = bytes.Clone(c.text)
	return nil
}

// peek reads a value unless one is at hand; false: there is no more.
func (c *column) peek() (bool, error) {
	if c.peeked {
		return true, nil
	}
	for c.page.left == 0 {
		if c.left == 0 {
			return false, nil
		}
		if err := c.nextPage(); err != nil {
			return false, err
		}
	}
	c.page.left--
	var err error
	if c.rep, err = level(c.page.rep, c.leaf.repeats); err != nil {
		return false, err
	}
	if c.def, err = level(c.page.def, c.leaf.defined); err != nil {
		return false, err
	}
	c.text = nil
	if c.def == c.leaf.defined {
		if c.text, err = c.page.values(); err != nil {
			return false, err
		}
		if !utf8.Valid(c.text) {
			return false, errors.New("a byte that is not UTF-8")
		}
	}
	c.peeked = true
	return true, nil
}

func level(h *hybrid, most int) (int, error) {
	if h == nil {
		return 0, nil
	}
	v, err := h.next()
	if err == nil && int(v) > most {
		err = fmt.Errorf("a level of %d, of %d", v, most)
	}
	return int(v), err
}

// Kinds of pages and encodings, as numbered by Parquet.
const (
	pageData, pageDict, pageDataV2 = 0, 2, 3

	encPlain, encPlainDict, encRLE, encDeltaLength, encRLEDict = 0, 2, 3, 6, 8
)

var encodings = map[int64]string{4: "BIT_PACKED", 5: "DELTA_BINARY_PACKED", 7: "DELTA_BYTE_ARRAY", 9: "BYTE_STREAM_SPLIT"}

// nextPage reads the next page, and what comes before it.
func (c *column) nextPage() error {
	head, size, err := c.header()
	if err != nil {
		return fmt.Errorf("a page's header: %w", err)
	}
	c.at += int64(size)
	packed, err := head.size(3)
	if err != nil {
		return fmt.Errorf("a page with %w", err)
	}
	data, err := c.reader.at(c.at, packed)
	if err != nil {
		return fmt.Errorf("a page: %w", err)
	}
	c.at += int64(packed)
	full, err := head.size(2)
	if err != nil {
		return fmt.Errorf("a page with %w", err)
	}
	switch head.number(1) {
	case pageDict:
		return c.dictionary(head.inner(7), data, full)
	case pageData:
		return c.dataPage(head.inner(5), data, full)
	case pageDataV2:
		return c.dataPageV2(head.inner(8), data, full)
	}
	return nil
}

// header reads a page's header, whose size it only tells by its end.
func (c *column) header() (fields, int, error) {
	for size := 4 << 10; ; size *= 8 {
		rest := c.reader.size - c.at
		data, err := c.reader.at(c.at, int(min(int64(size), max(rest, 0))))
		if err != nil {
			return nil, 0, err
		}
		in := &compact{data: data}
		f, err := in.structure(0)
		if errors.Is(err, errShort) && int64(size) < rest && size < maxHeader {
			continue
		}
		return f, in.at, err
	}
}

// hold counts what is held in memory, in place of what was.
func (c *column) hold(was *int64, n int) error {
	c.reader.held += int64(n) - *was
	if *was = int64(n); c.reader.held > maxHeld {
		return fmt.Errorf("its pages take more than %d MiB", maxHeld>>20)
	}
	return nil
}

func (c *column) dictionary(head fields, data []byte, full int) error {
	if c.dict != nil {
		return errors.New("a second dictionary")
	}
	if err := c.hold(&c.dictSize, full); err != nil {
		return err
	}
	data, err := c.unpack(data, full)
	if err != nil {
		return err
	}
	n := head.number(1)
	if e := head.number(2); e != encPlain && e != encPlainDict {
		return fmt.Errorf("a dictionary of encoding %d", e)
	}
	if n < 0 || n > int64(len(data)/4) { // each has its length
		return fmt.Errorf("a dictionary of %d values in %d bytes", n, len(data))
	}
	next := plain(data)
	for range n {
		text, err := next()
		if err != nil {
			return err
		}
		c.dict = append(c.dict, text)
	}
	if c.dict == nil {
		c.dict = [][]byte{}
	}
	return nil
}

// begin makes a page of its parts.
func (c *column) begin(head fields, encoding int64, rep, def, values []byte) error {
	n := head.number(1)
	if n < 0 || n > c.left {
		return fmt.Errorf("a page of %d values, where %d are left", n, c.left)
	}
	p := page{left: int(n)}
	var err error
	if c.leaf.repeats > 0 {
		if p.rep, err = newHybrid(rep, widthOf(c.leaf.repeats)); err != nil {
			return err
		}
	}
	if c.leaf.defined > 0 {
		if p.def, err = newHybrid(def, widthOf(c.leaf.defined)); err != nil {
			return err
		}
	}
	switch encoding {
	case encPlain:
		p.values = plain(values)
	case encRLEDict, encPlainDict:
		p.values, err = c.indexed(values)
	case encDeltaLength:
		p.values, err = deltaLength(values)
	default:
		err = fmt.Errorf("its encoding %s is not one that is read", nameOf(encodings, encoding))
	}
	c.page = p
	c.left -= n
	return err
}

func (c *column) dataPage(head fields, data []byte, full int) error {
	if err := c.hold(&c.pageSize, full); err != nil {
		return err
	}
	data, err := c.unpack(data, full)
	if err != nil {
		return err
	}
	var levels [2][]byte
	for i, have := range []bool{c.leaf.repeats > 0, c.leaf.defined > 0} {
		if !have {
			continue
		}
		if e := head.number([]int16{4, 3}[i]); e != encRLE {
			return fmt.Errorf("levels of encoding %s, which is not read", nameOf(encodings, e))
		}
		if len(data) < 4 || uint64(binary.LittleEndian.Uint32(data)) > uint64(len(data)-4) {
			return errShort
		}
		n := int(binary.LittleEndian.Uint32(data))
		levels[i], data = data[4:4+n], data[4+n:]
	}
	return c.begin(head, head.number(2), levels[0], levels[1], data)
}

func (c *column) dataPageV2(head fields, data []byte, full int) error {
	def, err := head.size(5)
	if err != nil {
		return err
	}
	rep, err := head.size(6)
	if err != nil {
		return err
	}
	if rep+def > len(data) || rep+def > full {
		return errShort
	}
	if err := c.hold(&c.pageSize, full); err != nil {
		return err
	}
	values := data[rep+def:]
	if head.truth(7, true) && len(values) > 0 {
		if values, err = c.unpack(values, full-rep-def); err != nil {
			return err
		}
	}
	return c.begin(head, head.number(4), data[:rep], data[rep:rep+def], values)
}

var codecs = map[int64]string{3: "LZO", 4: "BROTLI", 5: "LZ4", 7: "LZ4_RAW"}

func nameOf(names map[int64]string, n int64) string {
	if name := names[n]; name != "" {
		return name
	}
	return fmt.Sprint(n)
}

// unpack decompresses a page, which must be as large as it says.
func (c *column) unpack(data []byte, full int) (out []byte, err error) {
	switch c.codec {
	case 0:
		out = data
	case 1:
		n, err := snappy.DecodedLen(data)
		if err != nil || n != full {
			return nil, errors.New("a page that is damaged: snappy")
		}
		out, err = snappy.Decode(nil, data)
		if err != nil {
			return nil, fmt.Errorf("a page that is damaged: %w", err)
		}
	case 2, 6:
		var in io.Reader
		if c.codec == 2 {
			in, err = gzip.NewReader(bytes.NewReader(data))
		} else {
			var d *zstd.Decoder
			d, err = zstd.NewReader(bytes.NewReader(data), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(128<<20))
			if err == nil {
				defer d.Close()
				in = d
			}
		}
		if err == nil {
			var b bytes.Buffer
			_, err = io.CopyN(&b, in, int64(full)+1)
			out = b.Bytes()
		}
		if err != nil && err != io.EOF {
			return nil, fmt.Errorf("a page that is damaged: %w", err)
		}
	default:
		return nil, fmt.Errorf("its compression %s is not one that is read", nameOf(codecs, c.codec))
	}
	if len(out) != full {
		return nil, errors.New("a page that is not as large as it says")
	}
	return out, nil
}

// plain reads texts that are written as length and bytes.
func plain(data []byte) source {
	return func() ([]byte, error) {
		if len(data) < 4 {
			return nil, errShort
		}
		n := binary.LittleEndian.Uint32(data)
		if uint64(n) > uint64(len(data)-4) {
			return nil, errShort
		}
		text := data[4 : 4+n]
		data = data[4+n:]
		return text, nil
	}
}

// indexed reads texts that are written as places in the dictionary.
func (c *column) indexed(data []byte) (source, error) {
	if len(data) == 0 {
		return func() ([]byte, error) { return nil, errShort }, nil
	}
	places, err := newHybrid(data[1:], int(data[0]))
	return func() ([]byte, error) {
		i, err := places.next()
		if err != nil {
			return nil, err
		}
		if int64(i) >= int64(len(c.dict)) {
			return nil, fmt.Errorf("a place %d in a dictionary of %d", i, len(c.dict))
		}
		return c.dict[i], nil
	}, err
}

// deltaLength reads texts that are written as all lengths, each by its
// difference from the one before, and then all bytes:
//
//	size of a block, miniblocks in one, how many, the first; blocks of:
//	the least difference, a width for each miniblock, differences above the least
func deltaLength(data []byte) (source, error) {
	in := &compact{data: data}
	var head [3]uint64
	for i := range head {
		var err error
		if head[i], err = in.uvarint(); err != nil {
			return nil, err
		}
	}
	first, err := in.varint()
	if err != nil {
		return nil, err
	}
	block, minis, n := head[0], head[1], head[2]
	if minis == 0 || block == 0 || block > 1<<20 || minis > block || block%minis != 0 || block/minis%8 != 0 || n > 1<<22 {
		return nil, errors.New("lengths that are damaged")
	}
	var lengths []int64
	if n > 0 {
		lengths = append(lengths, first)
	}
	for at := first; uint64(len(lengths)) < n; {
		least, err := in.varint()
		if err != nil {
			return nil, err
		}
		widths, err := in.bytes(minis)
		if err != nil {
			return nil, err
		}
		for _, w := range widths {
			if uint64(len(lengths)) == n {
				break
			}
			if w > 32 {
				return nil, fmt.Errorf("lengths of %d bits", w)
			}
			per := block / minis
			packed, err := in.bytes(per * uint64(w) / 8)
			if err != nil {
				return nil, err
			}
			h := hybrid{width: int(w), packed: packed, left: per}
			for range min(per, n-uint64(len(lengths))) {
				v, err := h.next()
				if err != nil {
					return nil, err
				}
				at += least + int64(v)
				lengths = append(lengths, at)
			}
		}
	}
	rest := data[in.at:]
	return func() ([]byte, error) {
		if len(lengths) == 0 || lengths[0] < 0 || lengths[0] > int64(len(rest)) {
			return nil, errShort
		}
		text := rest[:lengths[0]]
		rest, lengths = rest[lengths[0]:], lengths[1:]
		return text, nil
	}, nil
}
