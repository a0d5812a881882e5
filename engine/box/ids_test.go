package box

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

// Daemons of one host have blocks of their own, and keep those in which boxes of theirs live on.
func TestIDsAreSharedOut(t *testing.T) {
	dir := t.TempDir()
	open := func(run string) *idBlocks {
		t.Helper()
		b, err := openBlocks(dir, filepath.Join(dir, run))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(b.close)
		return b
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	a, b := open("a"), open("b")
	must(a.more())
	must(b.more())
	must(a.more())
	if got := fmt.Sprint(a.held, b.held); got != "[0 2] [1]" {
		t.Fatalf("the blocks are %s", got)
	}
	if ok, err := b.take(2); ok || err != nil {
		t.Errorf("a block that another has: %v, %v", ok, err)
	}
	if a.slot(0) != 0 || a.slot(slotsEach) != 2*slotsEach || b.slot(1) != slotsEach+1 {
		t.Errorf("slots %d, %d, %d", a.slot(0), a.slot(slotsEach), b.slot(1))
	}
	// a is killed, and a box of it lives on in block 2.
	must(os.MkdirAll(filepath.Join(dir, "a", controlFolder, fmt.Sprint(2*slotsEach+7)), 0o700))
	a.close()
	c := open("c")
	must(c.more())
	must(c.more())
	if got := fmt.Sprint(c.held); got != "[0 3]" {
		t.Errorf("a third has blocks %s", got)
	}
	again := open("a")
	if ok, err := again.take(2); !ok || err != nil {
		t.Errorf("who had a block before: %v, %v", ok, err)
	}
	for range blocksMax {
		if err := again.more(); err != nil {
			if fault.As(err).Reason != "no_slot" {
				t.Error(err)
			}
			return
		}
	}
	t.Error("there are more blocks than there are")
}

// A second daemon on one cgroup would sweep the first one's boxes.
func TestOneDaemonHasACgroup(t *testing.T) {
	h := openHost(t)
	second, err := Open(Config{RunDir: t.TempDir(), CgroupRoot: h.cfg.CgroupRoot})
	if err == nil {
		second.Close()
	}
	if fault.As(err).Reason != "cgroup_in_use" {
		t.Errorf("a second daemon on the cgroup came to %v", err)
	}
	other := openHost(t)
	one, two := startBox(t, h), startBox(t, other)
	if one.rec.Slot == two.rec.Slot {
		t.Errorf("boxes of two daemons have the ids of slot %d", one.rec.Slot)
	}
	must(t, one, "true")
	must(t, two, "true")
}
