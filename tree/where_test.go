package tree

import (
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

// If it fails, a node is listed by a label that it hasn't, or is lost with another label, since the two are found by the same hash.
func TestLabelsOfOneHash(t *testing.T) {
	s := mustOpen(t, "state", memory())
	tr := mustTree(t, s)
	one, other := map[string]string{"a\x00b": "c"}, map[string]string{"a": "b\x00c"}
	k, _ := keyOf(tr.ID, "tr_")
	if labelHash(k, "a\x00b", "c") != labelHash(k, "a", "b\x00c") {
		t.Fatal("these labels have two hashes: find others")
	}
	a, b, both := mustNode(t, s, tr.Root).ID, mustNode(t, s, tr.Root).ID, mustNode(t, s, tr.Root).ID
	label := func(id ids.Node, labels map[string]string) {
		mustUpdate(t, s, func(tx *Tx) error { return tx.Annotate([]Annotation{{Node: id, Labels: labels}}) })
	}
	want := func(labels map[string]string, want ...ids.Node) {
		t.Helper()
		if got := idsOf(s.View().NodesWhere(tr.ID, Where{Labels: labels})); !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", labels, got, want)
		}
	}
	label(a, one)
	label(b, other)
	label(both, one)
	label(both, other)
	want(one, a, both)
	want(other, b, both)
	label(both, map[string]string{"a": ""})
	want(one, a, both)
	want(other, b)
	label(both, map[string]string{"a\x00b": ""})
	want(one, a)
	mustPrune(t, s, b, false)
	want(other)
}

// If it fails, nodes are silently missing from lists: what finds them is the write that made them, and damage gave two the same.
func TestNodesOfOneWriteAreDamage(t *testing.T) {
	o := Options{FS: vfs.NewCrashableMem(), AllowTmpfs: true}
	s, err := Open("state", o)
	if err != nil {
		t.Fatal(err)
	}
	tr := mustTree(t, s)
	n := mustNode(t, s, tr.Root)
	twin := *n
	twin.ID = ids.NewNode()
	b := s.log.db.NewBatch()
	_ = b.Set(rowKey(nodeRows, string(twin.ID)), bytesOf(encodeNode(&twin)), nil)
	if err := s.log.commit(b); err != nil {
		t.Fatal(err)
	}
	mustClose(t, s)
	_, err = Open("state", o)
	wantFault(t, err, fault.DataLoss, "log_damaged")
	if text := err.Error(); !contains(text, string(n.ID)) || !contains(text, string(twin.ID)) {
		t.Errorf("both nodes are named by %s", text)
	}
}
