package tree

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/boxwood-rl/boxwood/internal/ids"
)

// asFormat1 is a node's row as format 1 wrote it: ids and digests as text, its own id in front.
func asFormat1(t *testing.T, id string, row []byte) []byte {
	t.Helper()
	out := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), id)
	prefixes := map[protowire.Number]string{2: "tr_", 3: "nd_", 11: "ck_", 25: "sb_"}
	n, err := decode(row, layoutNode)
	if err != nil {
		t.Fatal(err)
	}
	for len(row) > 0 {
		num, typ, size := protowire.ConsumeTag(row)
		whole := size + protowire.ConsumeFieldValue(num, typ, row[size:])
		switch field := row[:whole]; {
		case prefixes[num] != "":
			b, _ := protowire.ConsumeBytes(field[size:])
			out = protowire.AppendString(append(out, field[:size]...), ids.Text(prefixes[num], [16]byte(b)))
		case num == 18:
			out = protowire.AppendString(append(out, field[:size]...), n.PayloadDigest)
		default:
			out = append(out, field...)
		}
		row = row[whole:]
	}
	return out
}

// If it fails, the state of an older boxwood isn't read as it was, or is left in a form that
// both would misread.
func TestFormat1Opens(t *testing.T) {
	fs := vfs.NewCrashableMem()
	s := mustOpen(t, "state", Options{FS: fs})
	tr := mustTree(t, s)
	n := mustNode(t, s, tr.Root)
	sb, payload := ids.NewSandbox(), []byte("tokens")
	mustUpdate(t, s, func(tx *Tx) error {
		p, _ := tx.Node(n.ID)
		child := typicalNode(p)
		child.Sandbox = sb
		if _, err := tx.AddNode(child); err != nil {
			return err
		}
		return tx.Annotate([]Annotation{{Node: child.ID, Payload: &payload}})
	})
	want := frozen(t, s)
	b := s.log.db.NewBatch()
	if err := s.log.each(nodeRows, func(id, row []byte) error {
		return b.Set(rowKey(nodeRows, string(id)), asFormat1(t, string(id), row), nil)
	}); err != nil {
		t.Fatal(err)
	}
	_ = b.Set(formatKey, varint(1), nil)
	if err := s.log.commit(b); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	old := mustOpen(t, "state", Options{FS: fs})
	wantEqual(t, "from format 1", frozen(t, old), want)
	mustCheck(t, old)
	if v, err := old.log.number(formatKey); v != formatVersion || err != nil {
		t.Fatalf("the state says format %d, %v, and may have rows of %d", v, err, formatVersion)
	}
	mustPrune(t, old, n.ID, false)
	mustNode(t, old, tr.Root)
	mustCheck(t, old)
}
