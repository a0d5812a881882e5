package parquetrows

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
)

// Thrift's compact protocol, in which Parquet writes its footer and its pages'
// headers. A structure becomes its fields by id; what a field means is up to
// who asks for it. No more is made than the input has bytes for.

// maxNesting of structures and lists in the metadata; Parquet has 7.
const maxNesting = 24

var errShort = errors.New("it ends in the middle of a value")

// fields of a structure: int64, bool, []byte, []any or fields.
type fields map[int16]any

// compact reads values from the start of data.
type compact struct {
	data []byte
	at   int
}

func (c *compact) byte() (byte, error) {
	if c.at >= len(c.data) {
		return 0, errShort
	}
	c.at++
	return c.data[c.at-1], nil
}

func (c *compact) uvarint() (uint64, error) {
	v, n := binary.Uvarint(c.data[c.at:])
	if n == 0 {
		return 0, errShort
	}
	if n < 0 {
		return 0, errors.New("a number is too large")
	}
	c.at += n
	return v, nil
}

func (c *compact) varint() (int64, error) {
	v, err := c.uvarint()
	return int64(v>>1) ^ -int64(v&1), err
}

func (c *compact) bytes(n uint64) ([]byte, error) {
	if n > uint64(len(c.data)-c.at) {
		return nil, errShort
	}
	c.at += int(n)
	return c.data[c.at-int(n) : c.at], nil
}

// structure reads fields up to the one that ends them.
func (c *compact) structure(depth int) (fields, error) {
	if depth > maxNesting {
		return nil, errors.New("it is nested too deep")
	}
	f := fields{}
	for id := int16(0); ; {
		head, err := c.byte()
		if err != nil {
			return nil, err
		}
		kind := head & 15
		if kind == 0 {
			return f, nil
		}
		if delta := head >> 4; delta != 0 {
			id += int16(delta)
		} else {
			v, err := c.varint()
			if err != nil {
				return nil, err
			}
			id = int16(v)
		}
		if kind <= 2 { // a bool is in its field's type
			f[id] = kind == 1
		} else if f[id], err = c.value(kind, depth); err != nil {
			return nil, err
		}
	}
}

func (c *compact) value(kind byte, depth int) (any, error) {
	switch kind {
	case 1, 2, 3: // of a list, a bool is a byte
		b, err := c.byte()
		return int64(int8(b)), err
	case 4, 5, 6:
		return c.varint()
	case 7:
		return c.bytes(8)
	case 8:
		n, err := c.uvarint()
		if err != nil {
			return nil, err
		}
		return c.bytes(n)
	case 9, 10:
		return c.list(depth + 1)
	case 12:
		return c.structure(depth + 1)
	}
	return nil, fmt.Errorf("a value of type %d", kind) // 11 is a map, which Parquet has none of
}

func (c *compact) list(depth int) ([]any, error) {
	if depth > maxNesting {
		return nil, errors.New("it is nested too deep")
	}
	head, err := c.byte()
	if err != nil {
		return nil, err
	}
	n, kind := uint64(head>>4), head&15
	if n == 15 {
		if n, err = c.uvarint(); err != nil {
			return nil, err
		}
	}
	if n > uint64(len(c.data)-c.at) { // each takes a byte at least
		return nil, errShort
	}
	var all []any
	for range n {
		v, err := c.value(kind, depth)
		if err != nil {
			return nil, err
		}
		all = append(all, v)
	}
	return all, nil
}

// number is a field's, or 0.
func (f fields) number(id int16) int64 { n, _ := f[id].(int64); return n }

// size is a field's number if it may be a size of something in memory.
func (f fields) size(id int16) (int, error) {
	n, ok := f[id].(int64)
	if !ok || n < 0 || n > maxPage {
		return 0, fmt.Errorf("a size of %d", n)
	}
	return int(n), nil
}

func (f fields) has(id int16) bool     { _, ok := f[id]; return ok }
func (f fields) text(id int16) string  { b, _ := f[id].([]byte); return string(b) }
func (f fields) list(id int16) []any   { l, _ := f[id].([]any); return l }
func (f fields) inner(id int16) fields { s, _ := f[id].(fields); return s }
func (f fields) truth(id int16, or bool) bool {
	if b, ok := f[id].(bool); ok {
		return b
	}
	return or
}

// hybrid reads numbers that are written as runs and in groups of eight, of
// a width in bits each.
type hybrid struct {
	data  []byte
	width int
	// A run: left times value. A group: left numbers from bit on.
	left   uint64
	run    bool
	value  uint32
	packed []byte
	bit    int
}

func newHybrid(data []byte, width int) (*hybrid, error) {
	if width < 0 || width > 32 {
		return nil, fmt.Errorf("numbers of %d bits", width)
	}
	return &hybrid{data: data, width: width}, nil
}

func (h *hybrid) next() (uint32, error) {
	for h.left == 0 {
		if err := h.begin(); err != nil {
			return 0, err
		}
	}
	h.left--
	if h.run {
		return h.value, nil
	}
	var v uint32
	for i := 0; i < h.width; {
		b, within := h.packed[h.bit/8], h.bit%8
		take := min(8-within, h.width-i)
		v |= uint32(b>>within) & (1<<take - 1) << i
		i += take
		h.bit += take
	}
	return v, nil
}

func (h *hybrid) begin() error {
	if h.width == 0 && len(h.data) == 0 {
		h.left, h.run, h.value = 1<<62, true, 0
		return nil
	}
	head, n := binary.Uvarint(h.data)
	if n <= 0 {
		return errShort
	}
	h.data = h.data[n:]
	if h.run = head&1 == 0; h.run {
		size := (h.width + 7) / 8
		if len(h.data) < size {
			return errShort
		}
		h.left, h.value = head>>1, 0
		for i, b := range h.data[:size] {
			h.value |= uint32(b) << (8 * i)
		}
		h.data = h.data[size:]
		return nil
	}
	groups := head >> 1
	if groups > uint64(len(h.data)) && h.width > 0 || groups > 1<<32 {
		return errShort
	}
	size := min(int(groups)*h.width, len(h.data)) // the last group may be cut
	if h.packed, h.bit = h.data[:size], 0; h.width > 0 {
		h.left = uint64(size * 8 / h.width)
	} else {
		h.run, h.left, h.value = true, groups*8, 0
	}
	h.data = h.data[size:]
	return nil
}

func widthOf(most int) int { return bits.Len(uint(most)) }
