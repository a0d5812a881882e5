package tree

import (
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// files are what a store's folder "state" has, by path.
type files map[string][]byte

func filesOf(t testing.TB, disk vfs.FS) files {
	t.Helper()
	all := files{}
	for _, dir := range []string{"state", "state/log"} {
		names, err := disk.List(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if p := dir + "/" + name; p != "state/log" {
				if all[p], err = readAll(disk, p); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	return all
}

func (fs files) disk(t testing.TB) *vfs.MemFS {
	t.Helper()
	disk := vfs.NewMem()
	if err := disk.MkdirAll("state/log", 0o700); err != nil {
		t.Fatal(err)
	}
	for p, b := range fs {
		f, err := disk.Create(p, vfs.WriteCategoryUnspecified)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write(b); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return disk
}

// wantAllOrDamage opens a store whose files were damaged: what was acknowledged is there, or it is said that
// something isn't.
func (fs files) wantAllOrDamage(t *testing.T, what string, acknowledged []ids.Node) {
	t.Helper()
	s, err := Open("state", Options{FS: fs.disk(t)})
	if err != nil {
		if f := fault.As(err); f.Reason != "log_damaged" && f.Reason != "state_dir" {
			t.Errorf("%s: opening gives %v, of no reason that is known", what, err)
		}
		return
	}
	defer s.Close()
	for _, id := range acknowledged {
		if _, err := s.FullNode(id); err != nil && fault.As(err).Reason != "log_damaged" {
			t.Errorf("%s: the store opens, and of an acknowledged node it says: %v", what, err)
			return
		}
	}
}

// acknowledged is a store in memory with nodes in a table and in its write-ahead file: as a kill leaves it, and closed.
func acknowledged(t testing.TB) (killed, closed files, nodes []ids.Node) {
	disk := vfs.NewMem()
	s, err := Open("state", Options{FS: disk})
	if err != nil {
		t.Fatal(err)
	}
	tr := mustTree(t, s)
	grow := func(n int) {
		for range n {
			root, err := s.View().Node(tr.Root)
			if err != nil {
				t.Fatal(err)
			}
			c := typicalNode(root)
			c.Observation.Stdout = make([]byte, 1000) // so that the file has several blocks
			mustUpdate(t, s, func(tx *Tx) error { _, err := tx.AddNode(c); return err })
			nodes = append(nodes, c.ID)
		}
	}
	grow(200)
	if err := s.log.db.Flush(); err != nil {
		t.Fatal(err)
	}
	grow(50)
	killed = filesOf(t, disk)
	mustClose(t, s)
	return killed, filesOf(t, disk), nodes
}

// If it fails, a damaged file is taken for a torn end or for a new store, and what was acknowledged is silently
// gone: each file of a store, damaged in each way, after an orderly end and after a kill.
func TestCorruptionTable(t *testing.T) {
	killed, closed, nodes := acknowledged(t)
	flip := func(at func(size int) int) func(b []byte) []byte {
		return func(b []byte) []byte { b[at(len(b))] ^= 0xff; return b }
	}
	for end, all := range map[string]files{"killed": killed, "closed": closed} {
		all.wantAllOrDamage(t, end, nodes)
		for p := range all {
			newest := end == "killed" && strings.HasSuffix(p, ".log")
			for what, c := range map[string]struct {
				spoil func(b []byte) []byte // nil: it is removed
				torn  bool                  // of a file that a kill left it may be a torn end
			}{
				"removed":            {nil, true},
				"emptied":            {func([]byte) []byte { return nil }, true},
				"cut off":            {func(b []byte) []byte { return b[:len(b)/2] }, true},
				"turned over first":  {flip(func(int) int { return 0 }), false},
				"turned over early":  {flip(func(n int) int { return n / 3 }), false},
				"turned over midway": {flip(func(n int) int { return n / 2 }), false},
				"turned over last":   {flip(func(n int) int { return n - 1 }), true},
			} {
				if newest && c.torn || len(all[p]) == 0 && c.spoil != nil || path.Base(p) == endName && c.spoil == nil {
					continue
				}
				damaged := files{}
				for q, b := range all {
					switch {
					case q != p:
						damaged[q] = b
					case c.spoil != nil:
						damaged[q] = c.spoil(slices.Clone(b))
					}
				}
				damaged.wantAllOrDamage(t, end+", "+p+" "+what, nodes)
			}
		}
	}
}

// FuzzLogFrames: whatever bytes of the newest write-ahead file are turned over, nothing that was acknowledged is
// gone without a word, and nothing panics.
func FuzzLogFrames(f *testing.F) {
	_, all, nodes := acknowledged(f)
	log := ""
	for p := range all {
		if strings.HasSuffix(p, ".log") {
			log = max(log, p)
		}
	}
	size := len(all[log])
	for _, at := range []int{0, 4, 6, 8, 15, size / 2, walBlock - 3, walBlock, size - 30, size - 1} {
		f.Add(uint32(at), []byte{0xff})
	}
	f.Add(uint32(100), make([]byte, 100))
	f.Fuzz(func(t *testing.T, at uint32, mask []byte) {
		b := slices.Clone(all[log])
		for i, m := range mask {
			b[(int(at)+i)%size] ^= m
		}
		damaged := files{log: b}
		for p, b := range all {
			if p != log {
				damaged[p] = b
			}
		}
		damaged.wantAllOrDamage(t, "turned over", nodes)
	})
}
