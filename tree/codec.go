package tree

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/boxwood-rl/boxwood/internal/ids"
)

// Values in the log are protobuf wire format, written by hand. One layout
// function per record names its fields for both directions, so that what is
// written and what is read can't drift apart:
//
//	value  := field*            in ascending order of field number
//	field  := tag payload       as protobuf: varint, fixed64 or length-delimited
//
// A field that is zero is left out. A reader skips numbers it doesn't know;
// that only happens within one format version (see log.go), as an unknown
// version isn't opened at all. A number is never used again for another thing.
type coder struct {
	out []byte // what was encoded

	decoding bool
	in       []byte // what is left to decode
	num      protowire.Number
	typ      protowire.Type
	err      error
}

// past is above every field number: nothing is left.
const past = protowire.MaxValidNumber + 1

var errOrder = errors.New("fields out of order")

func encode[T any](v *T, layout func(*coder, *T)) []byte {
	c := coder{out: make([]byte, 0, 512)}
	layout(&c, v)
	return c.out
}

func decode[T any](b []byte, layout func(*coder, *T)) (*T, error) {
	v := new(T)
	if err := decodeInto(v, b, layout); err != nil {
		return nil, err
	}
	return v, nil
}

func decodeInto[T any](v *T, b []byte, layout func(*coder, *T)) error {
	c := coder{decoding: true, in: b}
	c.peek()
	layout(&c, v)
	c.at(past)
	return c.err
}

// peek reads the tag in front.
func (c *coder) peek() {
	if c.err != nil || len(c.in) == 0 {
		c.num = past
		return
	}
	num, typ, n := protowire.ConsumeTag(c.in)
	if n < 0 {
		c.fail(protowire.ParseError(n))
		return
	}
	if num < c.num {
		c.fail(errOrder)
		return
	}
	c.num, c.typ, c.in = num, typ, c.in[n:]
}

func (c *coder) fail(err error) {
	if c.err == nil {
		c.err = err
	}
	c.num, c.in = past, nil
}

// at skips to field n and says whether it is there.
func (c *coder) at(n protowire.Number) bool {
	for c.num < n {
		size := protowire.ConsumeFieldValue(c.num, c.typ, c.in)
		if size < 0 {
			c.fail(protowire.ParseError(size))
			break
		}
		c.in = c.in[size:]
		c.peek()
	}
	return c.num == n && n != past
}

// want is at, and the field has this wire type.
func (c *coder) want(n protowire.Number, t protowire.Type) bool {
	if !c.at(n) {
		return false
	}
	if c.typ != t {
		c.fail(fmt.Errorf("field %d has wire type %d instead of %d", n, c.typ, t))
		return false
	}
	return true
}

func (c *coder) takeBytes(n protowire.Number) ([]byte, bool) {
	if !c.want(n, protowire.BytesType) {
		return nil, false
	}
	b, size := protowire.ConsumeBytes(c.in)
	if size < 0 {
		c.fail(protowire.ParseError(size))
		return nil, false
	}
	c.in = c.in[size:]
	c.peek()
	return b, true
}

func (c *coder) takeVarint(n protowire.Number) (uint64, bool) {
	if !c.want(n, protowire.VarintType) {
		return 0, false
	}
	v, size := protowire.ConsumeVarint(c.in)
	if size < 0 {
		c.fail(protowire.ParseError(size))
		return 0, false
	}
	c.in = c.in[size:]
	c.peek()
	return v, true
}

func (c *coder) putBytes(n protowire.Number, b []byte) {
	c.out = protowire.AppendBytes(protowire.AppendTag(c.out, n, protowire.BytesType), b)
}

func (c *coder) putVarint(n protowire.Number, v uint64) {
	c.out = protowire.AppendVarint(protowire.AppendTag(c.out, n, protowire.VarintType), v)
}

func text[T ~string](c *coder, n protowire.Number, p *T) {
	if c.decoding {
		if b, ok := c.takeBytes(n); ok {
			*p = T(b)
		}
	} else if *p != "" {
		c.out = protowire.AppendString(protowire.AppendTag(c.out, n, protowire.BytesType), string(*p))
	}
}

// name is an id, as the 16 bytes of ids.Binary. Format 1 wrote the text, which no id
// has 16 bytes of.
func name[T ~string](c *coder, n protowire.Number, p *T, prefix string) {
	if c.decoding {
		b, ok := c.takeBytes(n)
		if ok && len(b) == 16 {
			*p = T(ids.Text(prefix, [16]byte(b)))
		} else if ok {
			*p = T(b)
		}
		return
	}
	if b, ok := ids.Binary(string(*p), prefix); ok {
		c.putBytes(n, b[:])
	} else {
		text(c, n, p)
	}
}

// digest is a sha256 in hex, as its 32 bytes. Format 1 wrote the text.
func (c *coder) digest(n protowire.Number, p *string) {
	if c.decoding {
		b, ok := c.takeBytes(n)
		if ok && len(b) == sha256.Size {
			*p = hex.EncodeToString(b)
		} else if ok {
			*p = string(b)
		}
		return
	}
	if b, err := hex.DecodeString(*p); err == nil && len(b) == sha256.Size && hex.EncodeToString(b) == *p {
		c.putBytes(n, b)
	} else {
		text(c, n, p)
	}
}

func texts[T ~string](c *coder, n protowire.Number, p *[]T) {
	if !c.decoding {
		for _, s := range *p {
			c.putBytes(n, []byte(s))
		}
		return
	}
	for c.at(n) {
		if b, ok := c.takeBytes(n); ok {
			*p = append(*p, T(b))
		}
	}
}

func (c *coder) blob(n protowire.Number, p *[]byte) {
	if c.decoding {
		if b, ok := c.takeBytes(n); ok {
			*p = slices.Clone(b)
		}
	} else if len(*p) > 0 {
		c.putBytes(n, *p)
	}
}

func (c *coder) blobs(n protowire.Number, p *[][]byte) {
	if !c.decoding {
		for _, b := range *p {
			c.putBytes(n, b)
		}
		return
	}
	for c.at(n) {
		if b, ok := c.takeBytes(n); ok {
			*p = append(*p, append([]byte{}, b...))
		}
	}
}

func signed[T ~int32 | ~int64 | ~int](c *coder, n protowire.Number, p *T) {
	if c.decoding {
		if v, ok := c.takeVarint(n); ok {
			*p = T(protowire.DecodeZigZag(v))
		}
	} else if *p != 0 {
		c.putVarint(n, protowire.EncodeZigZag(int64(*p)))
	}
}

func unsigned[T ~uint8 | ~uint64](c *coder, n protowire.Number, p *T) {
	if c.decoding {
		if v, ok := c.takeVarint(n); ok {
			*p = T(v)
		}
	} else if *p != 0 {
		c.putVarint(n, uint64(*p))
	}
}

func (c *coder) flag(n protowire.Number, p *bool) {
	if c.decoding {
		if v, ok := c.takeVarint(n); ok {
			*p = v != 0
		}
	} else if *p {
		c.putVarint(n, 1)
	}
}

func (c *coder) real(n protowire.Number, p *float64) {
	if !c.decoding {
		if bits := math.Float64bits(*p); bits != 0 {
			c.out = protowire.AppendFixed64(protowire.AppendTag(c.out, n, protowire.Fixed64Type), bits)
		}
		return
	}
	if !c.want(n, protowire.Fixed64Type) {
		return
	}
	if len(c.in) < 8 {
		c.fail(protowire.ParseError(-1))
		return
	}
	*p = math.Float64frombits(binary.LittleEndian.Uint64(c.in))
	c.in = c.in[8:]
	c.peek()
}

// instant is nanoseconds since the Unix epoch; the zero time is left out.
func (c *coder) instant(n protowire.Number, p *time.Time) {
	if c.decoding {
		if v, ok := c.takeVarint(n); ok {
			*p = time.Unix(0, protowire.DecodeZigZag(v)).UTC()
		}
	} else if !p.IsZero() {
		c.putVarint(n, protowire.EncodeZigZag(p.UnixNano()))
	}
}

// nested is a record in a record; an empty one is left out.
func nested[T any](c *coder, n protowire.Number, p *T, layout func(*coder, *T)) {
	if c.decoding {
		if b, ok := c.takeBytes(n); ok {
			if err := decodeInto(p, b, layout); err != nil {
				c.fail(fmt.Errorf("in field %d: %w", n, err))
			}
		}
	} else {
		c.message(n, false, func() { layout(c, p) })
	}
}

// message appends what body appends, as field n.
func (c *coder) message(n protowire.Number, evenEmpty bool, body func()) {
	start := len(c.out)
	c.out = protowire.AppendTag(c.out, n, protowire.BytesType)
	mark := len(c.out)
	body()
	size := len(c.out) - mark
	if size == 0 && !evenEmpty {
		c.out = c.out[:start]
		return
	}
	// The length goes in front of what is there already.
	room := protowire.SizeVarint(uint64(size))
	c.out = slices.Grow(c.out, room)[:mark+size+room]
	copy(c.out[mark+room:], c.out[mark:mark+size])
	protowire.AppendVarint(c.out[:mark], uint64(size))
}

func list[T any](c *coder, n protowire.Number, p *[]T, layout func(*coder, *T)) {
	if !c.decoding {
		for i := range *p {
			c.message(n, true, func() { layout(c, &(*p)[i]) })
		}
		return
	}
	for c.at(n) {
		b, ok := c.takeBytes(n)
		if !ok {
			return
		}
		var v T
		if err := decodeInto(&v, b, layout); err != nil {
			c.fail(fmt.Errorf("in field %d: %w", n, err))
			return
		}
		*p = append(*p, v)
	}
}

// pair is one entry of a map; entries are written in the order of their keys,
// so that equal records have equal bytes.
type pair[V any] struct {
	key   string
	value V
}

func table[V any](c *coder, n protowire.Number, p *map[string]V, value func(*coder, protowire.Number, *V)) {
	layout := func(c *coder, e *pair[V]) {
		text(c, 1, &e.key)
		value(c, 2, &e.value)
	}
	if !c.decoding {
		for _, k := range slices.Sorted(maps.Keys(*p)) {
			c.message(n, true, func() { layout(c, &pair[V]{k, (*p)[k]}) })
		}
		return
	}
	var entries []pair[V]
	list(c, n, &entries, layout)
	if len(entries) == 0 {
		return
	}
	*p = make(map[string]V, len(entries))
	for _, e := range entries {
		(*p)[e.key] = e.value
	}
}

func (c *coder) labels(n protowire.Number, p *map[string]string) { table(c, n, p, text[string]) }
func (c *coder) scores(n protowire.Number, p *map[string]float64) {
	table(c, n, p, (*coder).real)
}
