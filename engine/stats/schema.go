package stats

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
)

// SchemaVersion of all tables; it grows when a column's name, type, unit or
// meaning changes. Files of another version are left alone and not exported. Columns and words
// that come after those that were there, and other descriptions, need none: see added and adopt.
const SchemaVersion = 1

// The tables, in the order in which they are listed.
const (
	Turns    = "turns"
	Nodes    = "nodes"
	Forks    = "forks"
	Captures = "captures"
	Audits   = "audits"

	Scheduler = "scheduler"
	Host      = "host"

	Restores  = "restores"
	Replays   = "replays"
	Sandboxes = "sandboxes"
)

// TreeColumn names the tree of a row, in the tables whose rows are of one.
const TreeColumn = "tree"

// The bounds of one batch: its rows, and its bytes before encoding. Columns
// hold at most maxText bytes of text a row (objects maxObject), so that no
// batch passes 2 MiB.
const (
	batchRows  = 4096
	batchBytes = 1 << 20
	maxText    = 1 << 10
	maxObject  = 64 << 10
)

// column is one column of a table with rows R: its description and how a row
// fills it.
type column[R any] struct {
	name, unit, doc, null string
	typ                   arrow.DataType
	vocabulary            []string // dictionary columns: value i+1 is vocabulary[i]
	width                 int      // bytes a row, text apart
	appendTo              func(array.Builder, *R) (textBytes int)
}

// text is a column of strings; an empty one is null.
func text[R any](name, doc, null string, get func(*R) string) column[R] {
	return column[R]{name: name, doc: doc, null: null, typ: arrow.BinaryTypes.String, width: 5,
		appendTo: func(b array.Builder, r *R) int {
			s := get(r)
			if s == "" {
				b.AppendNull()
				return 0
			}
			s = bounded(s)
			b.(*array.StringBuilder).Append(s)
			return len(s)
		}}
}

// bounded cuts text to maxText and makes it valid UTF-8, which Arrow demands
// and what comes out of a sandbox need not be.
func bounded(s string) string {
	if len(s) > maxText {
		s = s[:maxText-3] + "..."
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// number is a column of signed integers that is never null.
func number[R any](name, unit, doc string, get func(*R) int64) column[R] {
	return column[R]{name: name, unit: unit, doc: doc, typ: arrow.PrimitiveTypes.Int64, width: 8,
		appendTo: func(b array.Builder, r *R) int {
			b.(*array.Int64Builder).Append(get(r))
			return 0
		}}
}

// optional is a column of signed integers; get says whether there is one.
func optional[R any](name, unit, doc, null string, get func(*R) (int64, bool)) column[R] {
	return column[R]{name: name, unit: unit, doc: doc, null: null, typ: arrow.PrimitiveTypes.Int64, width: 9,
		appendTo: func(b array.Builder, r *R) int {
			if v, ok := get(r); ok {
				b.(*array.Int64Builder).Append(v)
			} else {
				b.AppendNull()
			}
			return 0
		}}
}

// nanos is a duration; zero is a measured zero unless null says otherwise.
func nanos[R any](name, doc string, get func(*R) time.Duration) column[R] {
	return number(name, "ns", doc, func(r *R) int64 { return int64(get(r)) })
}

// object is a column of JSON objects; an empty one is null. Unlike text it is
// never cut in the middle: asJSON leaves whole members out.
func object[R any, V any](name, doc string, get func(*R) map[string]V) column[R] {
	return column[R]{name: name, doc: doc, null: "none was given", typ: arrow.BinaryTypes.String, width: 5,
		appendTo: func(b array.Builder, r *R) int {
			members := get(r)
			if len(members) == 0 {
				b.AppendNull()
				return 0
			}
			s := asJSON(members)
			b.(*array.StringBuilder).Append(s)
			return len(s)
		}}
}

// asJSON writes members in the order of their names, as many as fit maxObject.
// A number that JSON doesn't know (NaN, infinity) is written as null.
func asJSON[V any](members map[string]V) string {
	var b strings.Builder
	b.WriteByte('{')
	for _, name := range slices.Sorted(maps.Keys(members)) {
		key, _ := json.Marshal(name)
		value, err := json.Marshal(members[name])
		if err != nil {
			value = []byte("null")
		}
		if b.Len()+len(key)+len(value)+3 > maxObject {
			break
		}
		if b.Len() > 1 {
			b.WriteByte(',')
		}
		b.Write(key)
		b.WriteByte(':')
		b.Write(value)
	}
	b.WriteByte('}')
	return b.String()
}

// real64 is a column of floating point numbers that is never null.
func real64[R any](name, unit, doc string, get func(*R) float64) column[R] {
	return column[R]{name: name, unit: unit, doc: doc, typ: arrow.PrimitiveTypes.Float64, width: 8,
		appendTo: func(b array.Builder, r *R) int {
			b.(*array.Float64Builder).Append(get(r))
			return 0
		}}
}

func flag[R any](name, doc string, get func(*R) bool) column[R] {
	return column[R]{name: name, doc: doc, typ: arrow.FixedWidthTypes.Boolean, width: 1,
		appendTo: func(b array.Builder, r *R) int {
			b.(*array.BooleanBuilder).Append(get(r))
			return 0
		}}
}

// instant is a point in time; the zero time is null.
func instant[R any](name, doc, null string, get func(*R) time.Time) column[R] {
	return column[R]{name: name, unit: "ns since 1970-01-01 UTC", doc: doc, null: null,
		typ: &arrow.TimestampType{Unit: arrow.Nanosecond, TimeZone: "UTC"}, width: 9,
		appendTo: func(b array.Builder, r *R) int {
			if t := get(r); t.IsZero() {
				b.AppendNull()
			} else {
				b.(*array.TimestampBuilder).Append(arrow.Timestamp(t.UnixNano()))
			}
			return 0
		}}
}

// word is a column with a fixed vocabulary; value 0, and what has no word, is null.
func word[R any](name, doc, null string, vocabulary []string, get func(*R) uint8) column[R] {
	return column[R]{name: name, doc: doc, null: null, vocabulary: vocabulary, width: 2,
		typ: &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.BinaryTypes.String},
		appendTo: func(b array.Builder, r *R) int {
			// The builder is of the indices; table.record adds the dictionary.
			if v := int(get(r)); v == 0 || v > len(vocabulary) {
				b.AppendNull()
			} else {
				b.(*array.Int8Builder).Append(int8(v - 1))
			}
			return 0
		}}
}

// added is a column that the table did not have at first: null in rows that were written before.
func added[R any](c column[R]) column[R] {
	c.null = strings.TrimPrefix(c.null+"; or not measured yet by the daemon that recorded the row", "; or ")
	c.width++
	return c
}

// definition is a table's schema and how rows become batches of it.
type definition[R any] struct {
	name, doc string
	columns   []column[R]
	schema    *arrow.Schema
	words     []arrow.Array // the constant dictionary of each dictionary column
	width     int
}

func define[R any](name, doc string, columns ...column[R]) *definition[R] {
	d := &definition[R]{name: name, doc: doc, columns: columns, words: make([]arrow.Array, len(columns))}
	fields := make([]arrow.Field, len(columns))
	for i, c := range columns {
		meta := map[string]string{"description": c.doc}
		if c.unit != "" {
			meta["unit"] = c.unit
		}
		if c.null != "" {
			meta["null"] = c.null
		}
		fields[i] = arrow.Field{Name: c.name, Type: c.typ, Nullable: c.null != "", Metadata: arrow.MetadataFrom(meta)}
		if c.vocabulary != nil {
			b := array.NewStringBuilder(memory.DefaultAllocator)
			b.AppendValues(c.vocabulary, nil)
			d.words[i] = b.NewArray()
		}
		d.width += c.width
	}
	meta := arrow.MetadataFrom(map[string]string{
		"boxwood.table":          name,
		"boxwood.schema_version": strconv.Itoa(SchemaVersion),
		"boxwood.description":    doc,
	})
	d.schema = arrow.NewSchema(fields, &meta)
	return d
}

// places says where the columns are in a file, which another release of this version may have written: -1 for one that was added since.
func (d *definition[R]) places(in *arrow.Schema) ([]int, error) {
	at := make([]int, len(d.columns))
	for i, f := range d.schema.Fields() {
		found := in.FieldIndices(f.Name)
		switch {
		case len(found) == 0 && f.Nullable:
			at[i] = -1
		case len(found) != 1 || !sameType(in.Field(found[0]).Type, f.Type):
			return nil, fmt.Errorf("its column %q is not that of version %d", f.Name, SchemaVersion)
		default:
			at[i] = found[0]
		}
	}
	return at, nil
}

// sameType says whether a column that was read has the type of the table's: of dictionaries, which Parquet gives other
// indices, the type of the words.
func sameType(read, is arrow.DataType) bool {
	if is, ok := is.(*arrow.DictionaryType); ok {
		read, ok := read.(*arrow.DictionaryType)
		return ok && arrow.TypeEqual(read.ValueType, is.ValueType)
	}
	return arrow.TypeEqual(read, is)
}

// adopt makes a batch that was read from a file one like all others: with these columns, and these words.
func (d *definition[R]) adopt(rec arrow.Record, at []int) (arrow.Record, error) {
	arrays := make([]arrow.Array, len(at))
	for i, from := range at {
		if from < 0 {
			arrays[i] = array.MakeArrayOfNull(memory.DefaultAllocator, d.columns[i].typ, int(rec.NumRows()))
			continue
		}
		arrays[i] = rec.Column(from)
		old, ok := arrays[i].(*array.Dictionary)
		if !ok {
			continue
		}
		known := old.Dictionary().(*array.String)
		now := make([]int8, known.Len())
		for k := range now {
			word := slices.Index(d.columns[i].vocabulary, known.Value(k))
			if word < 0 {
				return nil, fmt.Errorf("the word %q of its column %q is none of version %d", known.Value(k), d.columns[i].name, SchemaVersion)
			}
			now[k] = int8(word)
		}
		indices := array.NewInt8Builder(memory.DefaultAllocator)
		indices.Reserve(old.Len())
		for k := range old.Len() {
			if old.IsNull(k) {
				indices.AppendNull()
			} else {
				indices.Append(now[old.GetValueIndex(k)])
			}
		}
		arrays[i] = array.NewDictionaryArray(d.columns[i].typ, indices.NewArray(), d.words[i])
	}
	return array.NewRecord(d.schema, arrays, rec.NumRows()), nil
}

// record makes one batch of rows and says how many of them it took: those that
// fit the bounds, at least one.
func (d *definition[R]) record(rows []R) (arrow.Record, int) {
	builders := make([]array.Builder, len(d.columns))
	for i, c := range d.columns {
		if c.vocabulary != nil {
			builders[i] = array.NewInt8Builder(memory.DefaultAllocator)
		} else {
			builders[i] = array.NewBuilder(memory.DefaultAllocator, c.typ)
		}
		builders[i].Reserve(min(len(rows), batchRows))
	}
	taken, bytes := 0, 0
	for taken < len(rows) && taken < batchRows && bytes < batchBytes {
		bytes += d.width
		for i := range d.columns {
			bytes += d.columns[i].appendTo(builders[i], &rows[taken])
		}
		taken++
	}
	arrays := make([]arrow.Array, len(builders))
	for i, b := range builders {
		arrays[i] = b.NewArray()
		if d.words[i] != nil {
			arrays[i] = array.NewDictionaryArray(d.columns[i].typ, arrays[i], d.words[i])
		}
	}
	return array.NewRecord(d.schema, arrays, int64(taken)), taken
}

// only makes a batch of those rows of rec that is says; nil if there are none.
func only(rec arrow.Record, is func(row int) bool) arrow.Record {
	var rows []int
	for i := range int(rec.NumRows()) {
		if is(i) {
			rows = append(rows, i)
		}
	}
	switch len(rows) {
	case 0:
		return nil
	case int(rec.NumRows()):
		return rec
	}
	arrays := make([]arrow.Array, rec.NumCols())
	for i, col := range rec.Columns() {
		arrays[i] = take(col, rows)
	}
	return array.NewRecord(rec.Schema(), arrays, int64(len(rows)))
}

// take copies the named rows of a column of one of the types that tables have.
func take(col arrow.Array, rows []int) arrow.Array {
	if d, ok := col.(*array.Dictionary); ok {
		return array.NewDictionaryArray(d.DataType(), take(d.Indices(), rows), d.Dictionary())
	}
	b := array.NewBuilder(memory.DefaultAllocator, col.DataType())
	b.Reserve(len(rows))
	for _, r := range rows {
		if col.IsNull(r) {
			b.AppendNull()
			continue
		}
		switch c := col.(type) {
		case *array.String:
			b.(*array.StringBuilder).Append(c.Value(r))
		case *array.Int64:
			b.(*array.Int64Builder).Append(c.Value(r))
		case *array.Int8:
			b.(*array.Int8Builder).Append(c.Value(r))
		case *array.Float64:
			b.(*array.Float64Builder).Append(c.Value(r))
		case *array.Boolean:
			b.(*array.BooleanBuilder).Append(c.Value(r))
		case *array.Timestamp:
			b.(*array.TimestampBuilder).Append(c.Value(r))
		default:
			panic(fmt.Sprintf("stats: no table has a column of type %s", col.DataType()))
		}
	}
	return b.NewArray()
}
