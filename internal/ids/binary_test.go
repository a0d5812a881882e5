package ids

import (
	"bytes"
	"crypto/rand"
	"strings"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
)

// If it fails, a record would come back from the log with another id.
func TestBinaryIsTheIDItself(t *testing.T) {
	var last [16]byte
	for range 1000 {
		id := string(NewNode())
		b, ok := Binary(id, "nd_")
		if !ok || Text("nd_", b) != id {
			t.Fatalf("%s became %x and %s", id, b, Text("nd_", b))
		}
		if want := ulid.MustParse(strings.ToUpper(id[3:])); b != want {
			t.Fatalf("%s is %x, want %x", id, b, want)
		}
		if bytes.Compare(last[:], b[:]) >= 0 {
			t.Fatalf("%x doesn't sort after %x", b, last)
		}
		last = b
	}
	for range 1000 {
		var b [16]byte
		_, _ = rand.Read(b[:])
		if got, ok := Binary(Text("tr_", b), "tr_"); !ok || got != b {
			t.Fatalf("%x became %x", b, got)
		}
	}
	good := string(NewNode())
	for _, bad := range []string{"", "nd_", good[3:], "tr_" + good[3:], strings.ToUpper(good), good + "0", good[:28], "nd_8" + good[4:], good[:28] + "u", good[:28] + "\xff"} {
		if b, ok := Binary(bad, "nd_"); ok {
			t.Errorf("%q became %x", bad, b)
		}
	}
}

// If it fails, a mistyped id is looked for and reported as gone, or refused with words that don't help.
func TestCheck(t *testing.T) {
	good := string(NewNode())
	if err := Check(good, "nd_", "node"); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"", "nd", "nd_", good[:len(good)-1], good + "0", good + "\n", " " + good, strings.ToUpper(good), "nd_" + strings.ToUpper(good[3:]),
		good[:10] + "u" + good[11:], "nd_8" + good[4:], "tr_" + good[3:], "nd_" + strings.Repeat("\xff", 26)} {
		err := Check(bad, "nd_", "node")
		if err == nil {
			t.Errorf("%q was taken for an id", bad)
		} else if text := err.Error(); !strings.Contains(text, "node") || strings.Contains(text, "\n") || strings.Contains(text, "ulid") {
			t.Errorf("%q is refused with %q", bad, text)
		}
	}
}

func TestMadeAt(t *testing.T) {
	before := time.Now().Truncate(time.Millisecond)
	made := MadeAt(string(NewSandbox()))
	if after := time.Now(); made.Before(before) || made.After(after) {
		t.Errorf("an id of between %v and %v says %v", before, after, made)
	}
	for _, id := range []string{"", "sb_", "sb_odd", "_"} {
		if made := MadeAt(id); !made.IsZero() {
			t.Errorf("%q says %v", id, made)
		}
	}
}
