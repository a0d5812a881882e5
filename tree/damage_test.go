package tree

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// spoilBiggest turns one byte over in the largest file of a kind, at its 1/part.
func spoilBiggest(t *testing.T, dir, kind string, part int) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "log", kind))
	if err != nil || len(files) == 0 {
		t.Fatalf("no %s: %v", kind, err)
	}
	var name string
	var content []byte
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if len(b) > len(content) {
			name, content = f, b
		}
	}
	content[len(content)/part] ^= 0xff
	if err := os.WriteFile(name, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func grown(t *testing.T, dir string, flush bool) []ids.Node {
	t.Helper()
	s, err := Open(dir, Options{AllowTmpfs: true})
	if err != nil {
		t.Fatal(err)
	}
	tr := mustTree(t, s)
	var list []ids.Node
	for range 1500 {
		list = append(list, mustNode(t, s, tr.Root).ID)
	}
	if flush {
		if err := s.log.db.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	mustClose(t, s)
	return list
}

// Damage in the middle of the write-ahead log is told from a torn end, and named by
// file and offset.
func TestDamageInTheMiddleOfTheLog(t *testing.T) {
	dir := t.TempDir()
	grown(t, dir, false)
	file := spoilBiggest(t, dir, "*.log", 2)
	_, err := Open(dir, Options{AllowTmpfs: true})
	wantFault(t, err, fault.DataLoss, "log_damaged")
	if !strings.Contains(err.Error(), filepath.Base(file)+", from byte ") {
		t.Errorf("the failure must name file and offset: %v", err)
	}
}

// Damage in a table is an error for who reads just that, and for nobody else: the
// rest can be read and written.
func TestDamageInATableLeavesTheRest(t *testing.T) {
	dir := t.TempDir()
	list := grown(t, dir, true)
	file := spoilBiggest(t, dir, "*.sst", 5) // details come before nodes
	s, err := Open(dir, Options{AllowTmpfs: true})
	if err != nil {
		t.Fatalf("details aren't read at the start: %v", err)
	}
	defer s.Close()
	lost := 0
	for _, id := range list {
		_, err := s.FullNode(id)
		if err == nil {
			continue
		}
		wantFault(t, err, fault.DataLoss, "log_damaged")
		lost++
	}
	wrong, err := s.Check(context.Background())
	if err != nil {
		t.Fatalf("a check of a damaged log: %v", err)
	}
	if lost == 0 || lost > len(list)/2 || len(wrong) == 0 {
		t.Fatalf("%d of %d nodes can't be read, the check says %q", lost, len(list), wrong)
	}
	if !strings.Contains(strings.Join(wrong, "\n"), filepath.Base(file)) {
		t.Errorf("the check must name the file %s: %q", file, wrong)
	}
	tr := mustTree(t, s)
	mustNode(t, s, tr.Root)
}
