package tree

import (
	"context"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// FuzzRow: no row that a log may have makes a start, a check or a read panic; what can't be read is a
// typed error. A row is a letter, an id and a value (docs/TREE.md).
func FuzzRow(f *testing.F) {
	tr, n := ids.NewTree(), ids.NewNode()
	tk, _ := keyOf(tr, "tr_")
	nk, _ := keyOf(n, "nd_")
	two := slices.Concat(tk[:], nk[:])
	for _, r := range []struct {
		letter byte
		id     string
		layout string
	}{
		{'t', string(tr), "tree"}, {'R', "run", "run"}, {'n', string(n), "node"}, {'d', string(n), "detail"}, {'c', string(ids.NewCheckpoint()), "checkpoint"},
		{'o', string(ids.NewProcess()), "process"}, {'s', string(ids.NewSandbox()), "sandbox"}, {'i', "sha256:0", "image"}, {'u', "setup", "setup"},
		{'r', "key", "reply"}, {'x', string(ids.NewSnapshot()), "condemned"}, {'w', "\x00\x00\x00\x00\x00\x00\x00\x01", "removal"}, {'a', string(two), "node"},
	} {
		for _, l := range layouts() {
			if l.name == r.layout {
				b := l.encode(l.sample())
				f.Add(r.letter, r.id, b)
				f.Add(r.letter, r.id, b[:len(b)/2])
				f.Add(r.letter, r.id[:len(r.id)/2], b)
			}
		}
	}
	f.Add(byte('m'), "index", []byte{0xff})
	f.Add(byte('m'), "format", varint(99))
	f.Add(byte('b'), string(nk[:]), tk[:])
	f.Add(byte('k'), string(two), []byte{})
	f.Add(byte('h'), string(two), []byte{})

	// One tree, in a log that each input gets a copy of.
	disk := vfs.NewCrashableMem()
	s, err := Open("state", Options{FS: disk, AllowTmpfs: true})
	if err != nil {
		f.Fatal(err)
	}
	mustNode(f, s, mustTree(f, s).Root)
	mustClose(f, s)

	typed := func(t *testing.T, what string, err error) {
		if err != nil && fault.As(err).Kind == fault.Internal {
			t.Fatalf("%s: not a typed error: %v", what, err)
		}
	}
	f.Fuzz(func(t *testing.T, letter byte, id string, value []byte) {
		o := Options{FS: disk.CrashClone(vfs.CrashCloneCfg{}), AllowTmpfs: true}
		s, err := Open("state", o)
		if err != nil {
			t.Fatal(err)
		}
		b := s.log.db.NewBatch()
		_ = b.Set(append([]byte{letter}, id...), value, nil)
		if err := s.log.commit(b); err != nil {
			t.Fatal(err)
		}
		mustClose(t, s)
		if s, err = Open("state", o); err != nil {
			typed(t, "open", err)
			return
		}
		defer s.Close()
		_, err = s.Check(context.Background())
		typed(t, "check", err)
		v := s.View()
		for tr := range v.Trees() {
			typed(t, "load", v.Load(tr.ID))
			for n := range v.NodesOf(tr.ID) {
				_, err := v.FullNode(n.ID)
				typed(t, "node", err)
			}
		}
		_, err = v.Reply(id)
		typed(t, "reply", err)
		_, err = s.Payload(id)
		typed(t, "payload", err)
		_, err = s.ArchiveIdle(context.Background(), 0)
		typed(t, "archive", err)
	})
}
