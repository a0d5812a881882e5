package inspector

import (
	"bytes"
	"testing"
	"unsafe"

	"github.com/boxwood-rl/boxwood/bpf"
	"github.com/boxwood-rl/boxwood/tree"
)

// Whatever the kernel's side says of a sandbox: what isn't known counts for both halves, with a reason (law 2), and what
// the processes call themselves can't break a line.
func FuzzSigns(f *testing.F) {
	f.Add(uint64(sawNames), uint64(0), uint64(1), []byte("sleep\x001000\x00"))
	f.Add(uint64(sawUnknown|sawObject|sawReach), uint64(sawLost), uint64(otherTable|7), []byte("\n\x1b[31m\xff\x00"))
	f.Fuzz(func(t *testing.T, epoch, turn, call uint64, cmdline []byte) {
		w := &watch{box: &bpf.InspectorBox{ObjectNr: call}, turn: signs(turn)}
		all, own := &finding{}, &finding{}
		w.judgeSigns(signs(epoch), all, own)
		for which, c := range map[string]struct {
			seen  signs
			found *finding
		}{"epoch": {signs(epoch), all}, "turn": {signs(turn), own}} {
			if unknown := c.seen&eitherHalf != 0; unknown != (c.found.verdict() == tree.Both) || unknown != (len(c.found.reasons) > 0) {
				t.Errorf("signs %#x of the %s make the verdict %v for %q", c.seen, which, c.found.verdict(), c.found.reasons)
			}
		}
		for _, reason := range all.reasons {
			if reason == "" {
				t.Error("a verdict without a reason")
			}
		}
		if line := (Survivor{Cmdline: cmdline}).String(); bytes.ContainsAny([]byte(line), "\n\r\x1b") {
			t.Errorf("%q is shown as %q", cmdline, line)
		}
	})
}

// What an iterator of the kernel writes is whole rows, or refused.
func FuzzRows(f *testing.F) {
	type row struct {
		A uint32
		B uint64
		C [12]byte
	}
	size := int(unsafe.Sizeof(row{}))
	f.Add(make([]byte, size))
	f.Add(make([]byte, 3*size+1))
	f.Fuzz(func(t *testing.T, data []byte) {
		rows, err := rowsOf[row](data)
		if (err == nil) != (len(data)%size == 0) || err == nil && len(rows) != len(data)/size {
			t.Errorf("%d bytes are %d rows, %v", len(data), len(rows), err)
		}
		for i, r := range rows {
			if !bytes.Equal(unsafe.Slice((*byte)(unsafe.Pointer(&r)), size), data[i*size:(i+1)*size]) {
				t.Fatalf("row %d is %+v", i, r)
			}
		}
	})
}
