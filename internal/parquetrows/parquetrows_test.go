package parquetrows

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/apache/arrow/go/v17/parquet"
	"github.com/apache/arrow/go/v17/parquet/compress"
	"github.com/apache/arrow/go/v17/parquet/pqarrow"
)

func all(string) bool { return true }

// read gives the rows of a file, a line each.
func read(data []byte, want func(string) bool) (rows []string, err error) {
	r, err := Open(bytes.NewReader(data), want)
	for err == nil {
		var row []byte
		if row, err = r.Next(); err == nil {
			rows = append(rows, string(row))
		}
	}
	if err == io.EOF {
		err = nil
	}
	return rows, err
}

var text = arrow.BinaryTypes.String

func nullable(name string, t arrow.DataType) arrow.Field {
	return arrow.Field{Name: name, Type: t, Nullable: true}
}

// conversations has every shape that rows of trajectories have: texts, lists
// of structures in lists of structures, nulls and empty lists at each level,
// and columns that aren't read.
var conversations = arrow.NewSchema([]arrow.Field{
	nullable("id", text),
	nullable("n", arrow.PrimitiveTypes.Int64),
	nullable("messages", arrow.ListOf(arrow.StructOf(
		arrow.Field{Name: "role", Type: text},
		nullable("mask", arrow.FixedWidthTypes.Boolean),
		nullable("content", text),
		nullable("calls", arrow.ListOf(arrow.StructOf(nullable("name", text), nullable("at", arrow.StructOf(nullable("x", text)))))),
	))),
	nullable("words", arrow.ListOf(text)),
}, nil)

const someRows = `[
{"id": "a", "n": 1, "messages": [{"role": "user", "mask": true, "content": "", "calls": []}, {"role": "agent", "content": null, "calls": [{"name": "f", "at": {"x": "1"}}, {"name": null, "at": null}, {"name": "g", "at": {"x": null}}]}], "words": ["p", null, "", "q"]},
{"id": null, "n": null, "messages": null, "words": null},
{"id": "c<>&\u00e9", "n": 3, "messages": [], "words": []},
{"id": "d", "n": 4, "messages": [{"role": "user", "content": "the same", "calls": null}, {"role": "user", "content": "the same", "calls": [{"name": "h", "at": {"x": "2"}}]}, {"role": "x", "content": "the same", "calls": []}], "words": ["the same"]}
]`

// want is what a reader that leaves numbers and bools out makes of someRows.
func want(t testing.TB, rows string) []any {
	t.Helper()
	var all []any
	if err := json.Unmarshal([]byte(rows), &all); err != nil {
		t.Fatal(err)
	}
	for _, row := range all {
		row := row.(map[string]any)
		delete(row, "n")
		if messages, ok := row["messages"].([]any); ok {
			for _, m := range messages {
				delete(m.(map[string]any), "mask")
			}
		}
	}
	return all
}

func write(t testing.TB, schema *arrow.Schema, rows string, options ...parquet.WriterProperty) []byte {
	t.Helper()
	return writeGroups(t, schema, rows, 3, options...)
}

func writeGroups(t testing.TB, schema *arrow.Schema, rows string, group int64, options ...parquet.WriterProperty) []byte {
	t.Helper()
	record, _, err := array.RecordFromJSON(memory.DefaultAllocator, schema, strings.NewReader(rows))
	if err != nil {
		t.Fatal(err)
	}
	defer record.Release()
	table := array.NewTableFromRecords(schema, []arrow.Record{record})
	defer table.Release()
	var b bytes.Buffer
	if err := pqarrow.WriteTable(table, &b, group, parquet.NewWriterProperties(options...), pqarrow.DefaultWriterProps()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

var written = map[string][]parquet.WriterProperty{
	"default":           nil,
	"no dictionary":     {parquet.WithDictionaryDefault(false)},
	"version 2":         {parquet.WithDataPageVersion(parquet.DataPageV2), parquet.WithVersion(parquet.V2_LATEST)},
	"version 2, packed": {parquet.WithDataPageVersion(parquet.DataPageV2), parquet.WithCompression(compress.Codecs.Zstd), parquet.WithDictionaryDefault(false)},
	"snappy":            {parquet.WithCompression(compress.Codecs.Snappy)},
	"gzip":              {parquet.WithCompression(compress.Codecs.Gzip)},
	"zstd":              {parquet.WithCompression(compress.Codecs.Zstd)},
	"small pages":       {parquet.WithDataPageSize(16), parquet.WithBatchSize(1), parquet.WithDictionaryDefault(false)},
	"delta lengths":     deltaLengths(),
}

func deltaLengths() []parquet.WriterProperty {
	options := []parquet.WriterProperty{parquet.WithDictionaryDefault(false)}
	for _, column := range strings.Fields("id messages.list.element.role messages.list.element.content messages.list.element.calls.list.element.name " +
		"messages.list.element.calls.list.element.at.x words.list.element") {
		options = append(options, parquet.WithEncodingFor(column, parquet.Encodings.DeltaLengthByteArray))
	}
	return options
}

// TestRows would fail if a row weren't what its writer, which isn't ours, was
// given.
func TestRows(t *testing.T) {
	for name, options := range written {
		t.Run(name, func(t *testing.T) {
			rows, err := read(write(t, conversations, someRows, options...), all)
			if err != nil {
				t.Fatal(err)
			}
			var got []any
			if err := json.Unmarshal([]byte("["+strings.Join(rows, ",")+"]"), &got); err != nil {
				t.Fatalf("%v in %s", err, rows)
			}
			for i, want := range want(t, someRows) {
				if i >= len(got) || !reflect.DeepEqual(got[i], want) {
					t.Errorf("row %d: got\n%s\nwant\n%v", i, rows[i], want)
				}
			}
		})
	}
	t.Run("many", func(t *testing.T) {
		var b strings.Builder
		for i := range 5000 {
			fmt.Fprintf(&b, `,{"id": "%d", "messages": [{"role": "r%d", "calls": [{"name": "%s"}]}], "words": ["w%d"]}`, i, i%300, strings.Repeat("x", i%40), i/7)
		}
		for _, name := range []string{"default", "delta lengths"} {
			rows, err := read(writeGroups(t, conversations, "["+b.String()[1:]+"]", 1999, written[name]...), func(c string) bool { return c == "messages" })
			if err != nil || len(rows) != 5000 {
				t.Fatalf("%d rows, %v", len(rows), err)
			}
			for i, row := range rows {
				want := fmt.Sprintf(`{"messages":[{"role":"r%d","content":null,"calls":[{"name":"%s","at":null}]}]}`, i%300, strings.Repeat("x", i%40))
				if row != want {
					t.Fatalf("%s: row %d is %s, want %s", name, i, row, want)
				}
			}
		}
	})
}

func TestColumns(t *testing.T) {
	r, err := Open(bytes.NewReader(write(t, conversations, someRows)), func(c string) bool { return c != "words" })
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{
		"id": true, "messages": true, "messages.role": true, "messages.calls.at.x": true, "messages.calls": true,
		"n": false, "words": false, "messages.mask": false, "message": false, "role": false,
	} {
		if r.Has(path) != want {
			t.Errorf("column %s: %v", path, !want)
		}
	}
}

// thriftOf writes compact thrift: numbers, texts, lists of structures and
// structures, whose fields count from 1; nil leaves one out.
func thriftOf(structure ...any) []byte {
	var b []byte
	last := 0
	for i, v := range structure {
		if v == nil {
			continue
		}
		head := byte(i+1-last) << 4
		last = i + 1
		switch v := v.(type) {
		case int:
			b = binary.AppendVarint(append(b, head|6), int64(v))
		case string:
			b = append(binary.AppendUvarint(append(b, head|8), uint64(len(v))), v...)
		case [][]byte:
			b = binary.AppendUvarint(append(b, head|9, 0xfc), uint64(len(v)))
			b = append(b, bytes.Join(v, nil)...)
		case []byte: // a structure
			b = append(append(b, head|12), v...)
		}
	}
	return append(b, 0)
}

// fileOf makes a file of a page and a footer.
func fileOf(page, footer []byte) []byte {
	file := append([]byte(Magic), page...)
	file = append(file, footer...)
	return append(binary.LittleEndian.AppendUint32(file, uint32(len(footer))), Magic...)
}

// oneColumn is a file with one column of required text.
func oneColumn(rows, values, codec int, page []byte) []byte {
	meta := thriftOf(6, nil, nil, codec, values, nil, nil, nil, 4)
	return fileOf(page, thriftOf(1, [][]byte{thriftOf(nil, nil, nil, "root", 1), thriftOf(6, nil, 0, "x")}, rows,
		[][]byte{thriftOf([][]byte{thriftOf(nil, 0, meta)}, 0, rows)}))
}

func dataPage(full, values, encoding int, data []byte) []byte {
	return append(thriftOf(0, full, len(data), nil, thriftOf(values, encoding, 3, 3)), data...)
}

// TestHostileFiles would fail if what a file says of itself were believed: it
// would take the memory, or the time, that the file asks for.
func TestHostileFiles(t *testing.T) {
	const huge = 1<<31 - 1
	zstd := compress.Codecs.Zstd
	codec, err := compress.GetCodec(zstd)
	if err != nil {
		t.Fatal(err)
	}
	bomb := codec.Encode(nil, make([]byte, 64<<20))
	deep := bytes.Repeat([]byte{0x1c}, 1<<20)
	element := thriftOf(nil, nil, nil, "a", 1)
	long := binary.LittleEndian.AppendUint32(nil, 1<<20)
	long = append(long, bytes.Repeat([]byte("x"), 1<<20)...)
	for _, c := range []struct {
		name string
		file []byte
		want string
	}{
		{"empty", nil, "its end is missing"},
		{"only the beginning", []byte("PAR1"), "its end is missing"},
		{"encrypted", []byte("PARE....PARE"), "it is encrypted"},
		{"a footer larger than the file", []byte("PAR1\xff\xff\x0f\x00PAR1"), "its footer: it ends in the middle"},
		{"a footer that is too large", []byte("PAR1\xff\xff\xff\x7fPAR1"), "its footer is larger than 16 MiB"},
		{"a footer nested without end", fileOf(nil, deep), "its footer: it is nested too deep"},
		{"a list longer than the file", fileOf(nil, []byte{0x19, 0xfc, 0xff, 0xff, 0xff, 0xff, 0x07}), "its footer: it ends in the middle"},
		{"a text longer than the file", fileOf(nil, []byte{0x18, 0xff, 0xff, 0xff, 0xff, 0x07}), "its footer: it ends in the middle"},
		{"no schema", fileOf(nil, thriftOf(1)), "there is no schema"},
		{"a column of many columns", fileOf(nil, thriftOf(1, [][]byte{thriftOf(nil, nil, nil, "root", huge)})), "a column with 2147483647 columns"},
		{"a schema that ends early", fileOf(nil, thriftOf(1, [][]byte{thriftOf(nil, nil, nil, "root", 1)})), "the schema has fewer columns"},
		{"a schema that is too deep", fileOf(nil, thriftOf(1, copies(element, 1<<16))), "the schema is nested too deep"},
		{"rows without values", oneColumn(huge, 0, 0, nil), "it has fewer rows than it says"},
		{"a page that isn't there", oneColumn(1, 1, 0, nil), "row group 1, column x: a page"},
		{"a page of huge size", oneColumn(1, 1, int(zstd), dataPage(huge, 1, 0, bomb)), "a size of 2147483647"},
		{"a page with more than it says", oneColumn(1, 1, int(zstd), dataPage(5, 1, 0, bomb)), "a page that is not as large as it says"},
		{"a page of more values than there are", oneColumn(1, 1, 0, dataPage(4, huge, 0, make([]byte, 4))), "a page of 2147483647 values, where 1 are left"},
		{"texts longer than the page", oneColumn(1, 1, 0, dataPage(4, 1, 0, []byte{0xff, 0xff, 0xff, 0xff})), "it ends in the middle of a value"},
		{"bytes that are no text", oneColumn(1, 1, 0, dataPage(5, 1, 0, []byte{1, 0, 0, 0, 0xff})), "a byte that is not UTF-8"},
		{"no dictionary", oneColumn(1, 1, 0, dataPage(3, 1, 8, []byte{1, 2, 0})), "a place 0 in a dictionary of 0"},
		{"an unknown encoding", oneColumn(1, 1, 0, dataPage(2, 1, 7, []byte{1, 2})), "DELTA_BYTE_ARRAY is not one that is read"},
		{"an unknown compression", oneColumn(1, 1, 4, dataPage(2, 1, 0, []byte{1, 2})), "BROTLI is not one that is read"},
		{"lengths without end", oneColumn(1, 1, 0, dataPage(9, 1, 6, []byte{0x80, 1, 4, 0xff, 0xff, 0xff, 0x7f, 0, 0})), "lengths that are damaged"},
		{"a dictionary of more than it has", oneColumn(1, 1, 0, append(thriftOf(2, 4, 4, nil, nil, nil, thriftOf(huge, 0)), 0, 0, 0, 0)), "a dictionary of 2147483647 values in 4 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := read(c.file, all)
			runtime.ReadMemStats(&after)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if took := after.TotalAlloc - before.TotalAlloc; took > 64<<20 {
				t.Errorf("it took %d MiB", took>>20)
			}
		})
	}
	t.Run("one text many times", func(t *testing.T) {
		dict := append(thriftOf(2, len(long), len(long), nil, nil, nil, thriftOf(1, 0)), long...)
		levels := func(v byte) []byte { // 1 << 20 times
			run := append(binary.AppendUvarint(nil, 1<<21), v)
			return append(binary.LittleEndian.AppendUint32(nil, uint32(len(run))), run...)
		}
		data := append(levels(1), levels(1)...) // all go on; and are there
		data = append(append(data, 1), append(binary.AppendUvarint(nil, 1<<21), 0)...)
		meta := thriftOf(6, nil, nil, 0, 1<<20, nil, nil, nil, 4)
		footer := thriftOf(1, [][]byte{thriftOf(nil, nil, nil, "root", 1), thriftOf(6, nil, 2, "x")}, 1, [][]byte{thriftOf([][]byte{thriftOf(nil, 0, meta)}, 0, 1)})
		first := bytes.Replace(data, levels(1), append([]byte{7, 0, 0, 0, 2, 0}, levels(1)[4:]...), 1)
		_, err := read(fileOf(append(dict, dataPage(len(first), 1<<20, 8, first)...), footer), all)
		if err == nil || !strings.Contains(err.Error(), "a row is larger than 256 MiB") {
			t.Errorf("got %v", err)
		}
	})
}

func copies(one []byte, n int) (many [][]byte) {
	for range n {
		many = append(many, one)
	}
	return many
}

// TestAfterADamage would fail if what is broken in one group of rows took
// those of others with it.
func TestAfterADamage(t *testing.T) {
	file := write(t, conversations, someRows, parquet.WithDictionaryDefault(false), parquet.WithStats(false))
	at := bytes.Index(file, []byte("agent"))
	file[at-4] = 0xff // its length
	r, err := Open(bytes.NewReader(file), all)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for range 4 {
		row, err := r.Next()
		if got = append(got, string(row)); err != nil {
			got[len(got)-1] = err.Error()
		}
	}
	if !strings.Contains(got[0], "row group 1, column messages.role: it ends in the middle") || !strings.Contains(got[1], `"d"`) || got[2] != "EOF" {
		t.Errorf("got %q", got)
	}
}

// TestEveryByte would fail if a file with one byte changed, or cut anywhere,
// could end the program or keep it.
func TestEveryByte(t *testing.T) {
	for _, name := range []string{"default", "version 2, packed"} {
		good := writeGroups(t, conversations, someRows, 9, written[name]...)
		for i := range good {
			bad := bytes.Clone(good)
			bad[i] ^= 0x41
			_, _ = read(bad, all)
			if _, err := read(good[:i], all); err == nil {
				t.Fatalf("%s: cut at %d of %d, nothing is missing", name, i, len(good))
			}
		}
	}
}

func FuzzRows(f *testing.F) {
	for _, options := range written {
		f.Add(write(f, conversations, someRows, options...))
	}
	f.Add(oneColumn(1, 1, 0, dataPage(5, 1, 0, []byte{1, 0, 0, 0, 'x'})))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := Open(bytes.NewReader(data), all)
		for range 2000 { // rows that have nothing cost a file nothing
			if err != nil {
				break
			}
			var row []byte
			if row, err = r.Next(); err == nil && !json.Valid(row) {
				t.Fatalf("not JSON: %s", row)
			}
		}
		if err != nil && !errors.Is(err, io.EOF) && strings.Contains(err.Error(), "\n") {
			t.Errorf("not one line: %v", err)
		}
	})
}
