package engine

import (
	"bytes"
	"testing"

	"pgregory.net/rapid"
)

// Whatever the chunks, head and tail are those of the whole stream.
func TestHeadTailKeepsBothEnds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(2, 64).Draw(t, "limit")
		h := newHeadTail(limit)
		var all []byte
		for range rapid.IntRange(0, 20).Draw(t, "chunks") {
			p := rapid.SliceOfN(rapid.Byte(), 0, 50).Draw(t, "chunk")
			all = append(all, p...)
			h.Write(p)
		}
		kept, omitted, cut := h.kept()
		if int64(len(kept))+omitted != int64(len(all)) {
			t.Fatalf("kept %d + omitted %d != %d", len(kept), omitted, len(all))
		}
		if omitted == 0 {
			if !bytes.Equal(kept, all) {
				t.Fatalf("nothing omitted, yet %q != %q", kept, all)
			}
			return
		}
		if len(kept) != limit {
			t.Fatalf("kept %d of a long stream, want %d", len(kept), limit)
		}
		want := append(append([]byte{}, all[:cut]...), all[len(all)-(limit-int(cut)):]...)
		if !bytes.Equal(kept, want) {
			t.Fatalf("kept %q, want %q", kept, want)
		}
	})
}
