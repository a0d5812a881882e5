package tree

import (
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/seccomp"
)

var update = flag.Bool("update", false, "write the golden files of the format again")

// layouts has each record's format, with encode and decode hidden behind it.
type layoutTest struct {
	name   string
	sample func() any // every field set
	encode func(any) []byte
	decode func([]byte) (any, error)
}

func layoutOf[T any](name string, layout func(*coder, *T), only ...string) layoutTest {
	return layoutTest{name,
		func() any {
			v := new(T)
			f := filler{}
			f.fill(reflect.ValueOf(v).Elem())
			if len(only) > 0 { // fields that this layout has
				w := reflect.New(reflect.TypeFor[T]()).Elem()
				for _, path := range only {
					from, to := reflect.ValueOf(v).Elem(), w
					for _, p := range strings.Split(path, ".") {
						from, to = from.FieldByName(p), to.FieldByName(p)
					}
					to.Set(from)
				}
				reflect.ValueOf(v).Elem().Set(w)
			}
			return v
		},
		func(v any) []byte { return encode(v.(*T), layout) },
		func(b []byte) (any, error) { return decode(b, layout) },
	}
}

var detailFields = []string{"Action", "Observation.Stdout", "Observation.Stderr", "Reasons", "Effects", "Recipe"}

func layouts() []layoutTest {
	var nodeFields []string
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Node]()) {
		switch f.Name {
		case "Action", "Reasons", "Effects", "Observation", "Recipe":
		default:
			nodeFields = append(nodeFields, f.Name)
		}
	}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Observation]()) {
		if f.Name != "Stdout" && f.Name != "Stderr" {
			nodeFields = append(nodeFields, "Observation."+f.Name)
		}
	}
	return []layoutTest{
		layoutOf("tree", layoutTree),
		layoutOf("run", layoutRun),
		layoutOf("node", layoutNode, nodeFields...),
		layoutOf("detail", layoutDetail, detailFields...),
		layoutOf("checkpoint", layoutCheckpoint),
		layoutOf("process", layoutProcess),
		layoutOf("sandbox", layoutSandbox),
		layoutOf("image", layoutImage),
		layoutOf("setup", layoutSetup),
		layoutOf("reply", layoutFullReply),
		layoutOf("condemned", layoutCondemned),
		layoutOf("removal", layoutRemoval),
	}
}

var prefixes = map[reflect.Type]string{
	reflect.TypeFor[ids.Node](): "nd_", reflect.TypeFor[ids.Tree](): "tr_", reflect.TypeFor[ids.Checkpoint](): "ck_",
	reflect.TypeFor[ids.Sandbox](): "sb_",
}

// filler sets every field of a record to something of its own.
type filler struct{ n int }

func (f *filler) fill(v reflect.Value) {
	f.n++
	if v.Type() == reflect.TypeFor[time.Time]() {
		v.Set(reflect.ValueOf(time.Unix(1900000000+int64(f.n), int64(f.n)).UTC()))
		return
	}
	if prefix, ok := prefixes[v.Type()]; ok {
		v.SetString(ids.Text(prefix, [16]byte{1, 15: byte(f.n)}))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprintf("s%d\xff", f.n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int32, reflect.Int64:
		v.SetInt(int64(f.n) * (1 - 2*int64(f.n%2)))
	case reflect.Uint8, reflect.Uint64:
		v.SetUint(uint64(f.n))
	case reflect.Float64:
		v.SetFloat(float64(f.n) / 3)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			f.fill(v.Index(i))
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range 2 {
			k, e := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			f.fill(k)
			f.fill(e)
			v.SetMapIndex(k, e)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			f.fill(v.Field(i))
		}
	default:
		panic("no sample for " + v.Type().String())
	}
}

// If it fails, a field was added to a record and not to its layout: it
// would be lost at the first restart, or already in memory.
func TestEveryFieldIsKept(t *testing.T) {
	for _, l := range layouts() {
		t.Run(l.name, func(t *testing.T) {
			want := l.sample()
			got, err := l.decode(l.encode(want))
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("got\n%+v\nwant\n%+v", got, want)
			}
			zero := reflect.New(reflect.TypeOf(want).Elem()).Interface()
			least := map[string]int{"tree": 2}[l.name] // that its programs gain no rights
			if b := l.encode(zero); len(b) != least {
				t.Errorf("an empty record has %d bytes", len(b))
			}
		})
	}
}

// If it fails, the format has changed: states on disk can't be read any more.
// Raise formatVersion and read the old one, too.
func TestFormatIsGolden(t *testing.T) {
	for _, l := range layouts() {
		t.Run(l.name, func(t *testing.T) {
			file := filepath.Join("testdata", fmt.Sprintf("v%d-%s.hex", formatVersion, l.name))
			got := l.encode(l.sample())
			if *update {
				if err := os.WriteFile(file, []byte(wrap(hex.EncodeToString(got))), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			want, err := hex.DecodeString(strings.ReplaceAll(string(text), "\n", ""))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("encoded as\n%x\nwant\n%x", got, want)
			}
			v, err := l.decode(want)
			if err != nil || !reflect.DeepEqual(v, l.sample()) {
				t.Errorf("decoded as\n%+v, %v", v, err)
			}
		})
	}
}

// If it fails, a row of an older format can't be read any more.
func TestOlderFormatsAreRead(t *testing.T) {
	for v := 1; v < formatVersion; v++ {
		for _, l := range layouts() {
			text, err := os.ReadFile(filepath.Join("testdata", fmt.Sprintf("v%d-%s.hex", v, l.name)))
			if os.IsNotExist(err) {
				continue // a record that came later
			}
			if err != nil {
				t.Fatal(err)
			}
			b, err := hex.DecodeString(strings.ReplaceAll(string(text), "\n", ""))
			if err != nil {
				t.Fatal(err)
			}
			got, err := l.decode(b)
			if err != nil {
				t.Errorf("%s of format %d: %v", l.name, v, err)
				continue
			}
			if tr, ok := got.(*Tree); ok && v < 7 && tr.Defaults.Limits.Calls&seccomp.Setuid == 0 {
				t.Errorf("programs of a tree of format %d gain no rights any more", v)
			}
			if again, err := l.decode(l.encode(got)); err != nil || !reflect.DeepEqual(again, got) {
				t.Errorf("%s of format %d became %+v, %v; it was %+v", l.name, v, again, err, got)
			}
		}
	}
}

func wrap(s string) string {
	var b strings.Builder
	for len(s) > 96 {
		b.WriteString(s[:96] + "\n")
		s = s[96:]
	}
	return b.String() + s + "\n"
}

// If it fails, a field that a later program of the same format added makes
// this one refuse or misread the record.
func TestUnknownFieldsAreSkipped(t *testing.T) {
	for _, l := range layouts() {
		b := l.encode(l.sample())
		b = protowire.AppendTag(b, 1000, protowire.BytesType)
		b = protowire.AppendString(b, "from the future")
		b = protowire.AppendVarint(protowire.AppendTag(b, 1001, protowire.VarintType), 7)
		got, err := l.decode(b)
		if err != nil || !reflect.DeepEqual(got, l.sample()) {
			t.Errorf("%s: %+v, %v", l.name, got, err)
		}
	}
}

func TestDamagedRecordsAreErrors(t *testing.T) {
	for _, l := range layouts() {
		whole := l.encode(l.sample())
		for n := 1; n < len(whole); n++ {
			v, err := l.decode(whole[:n])
			if err == nil && reflect.DeepEqual(v, l.sample()) {
				t.Errorf("%s: cut at %d of %d, nothing is missing", l.name, n, len(whole))
			}
		}
	}
	for name, b := range map[string][]byte{
		"wrong wire type": protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 1),
		"out of order":    protowire.AppendString(protowire.AppendTag(protowire.AppendString(protowire.AppendTag(nil, 2, protowire.BytesType), "x"), 1, protowire.BytesType), "y"),
		"no tag":          {0xff},
		"long length":     {0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f},
	} {
		if _, err := decode(b, layoutNode); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// FuzzDecode: no bytes make a decoder panic, and what it accepts is written
// back to what it accepts as the same.
func FuzzDecode(f *testing.F) {
	ls := layouts()
	for i, l := range ls {
		f.Add(uint8(i), l.encode(l.sample()))
	}
	f.Fuzz(func(t *testing.T, which uint8, b []byte) {
		l := ls[int(which)%len(ls)]
		v, err := l.decode(b)
		if err != nil {
			return
		}
		once := l.encode(v)
		again, err := l.decode(once)
		if err != nil {
			t.Fatalf("%s: what was written can't be read: %v", l.name, err)
		}
		if twice := l.encode(again); !bytes.Equal(once, twice) {
			t.Fatalf("%s: %x became %x", l.name, once, twice)
		}
	})
}
