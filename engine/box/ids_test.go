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

// The folder lies where anybody may make one: what is somebody else's, or a link, is left alone, and a link in it leads nowhere.
func TestIDsAreSharedOutInAFolderOfOnesOwn(t *testing.T) {
	dir := t.TempDir()
	foreign, open, link, own := filepath.Join(dir, "foreign"), filepath.Join(dir, "open"), filepath.Join(dir, "link"), filepath.Join(dir, "own")
	victim := filepath.Join(dir, "victim")
	for _, err := range []error{
		os.Mkdir(foreign, 0o700), os.Chown(foreign, 1000, 1000), os.Mkdir(open, 0o700), os.Chmod(open, 0o777), os.Symlink(dir, link),
		os.Mkdir(own, 0o700), os.WriteFile(victim, []byte("kept"), 0o600), os.Symlink(victim, filepath.Join(own, "0")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, bad := range []string{foreign, open, link} {
		if _, err := openBlocks(bad, dir); fault.As(err) == nil || fault.As(err).Reason != "foreign_folder" {
			t.Errorf("%s: %v", bad, err)
		}
	}
	b, err := openBlocks(own, dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.take(0); err == nil {
		t.Error("a link is taken for a block")
	}
	if text, err := os.ReadFile(victim); err != nil || string(text) != "kept" {
		t.Errorf("the file that it leads to has %q, %v", text, err)
	}
}
