package box

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// The kernel counts inotify instances and queued signals, which timers need, for each user of a box, and for all boxes together.
// Who takes all that he gets leaves enough for other boxes, and gets as much in a box that was restored.
func TestABoxLeavesCountedThingsToOthers(t *testing.T) {
	by, h := openCRIU(t), openHost(t)
	program := compile(t, "counts.c")
	text, err := os.ReadFile("/proc/sys/fs/inotify/max_user_instances")
	if err != nil {
		t.Fatal(err)
	}
	host, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	all := fmt.Sprintf("%d instances, 16384 timers", (host+3)/4)
	root := newRoot(t)
	started, err := h.Start(context.Background(), root, testIdentity)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mustKill(t, started) })
	install(t, started, program, "/tmp/counts")
	must(t, started, `mkfifo /root/in /root/never; (while :; do read -r x </root/never; done) &`)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := errors.Join(started.Part(ctx, by), started.Freeze(ctx)); err != nil {
		t.Fatal(err)
	}
	saved, err := started.Save(ctx, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	child := copyRoot(t, root)
	if err := errors.Join(started.Thaw(), started.Rejoin(ctx)); err != nil {
		t.Fatal(err)
	}
	restored, err := h.Restore(ctx, child, testIdentity, saved, by)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mustKill(t, restored) })
	if err := restored.Resume(); err != nil {
		t.Fatal(err)
	}
	neighbour := startBox(t, h)
	install(t, neighbour, program, "/tmp/counts")

	for name, b := range map[string]Box{"started": started, "restored": restored} {
		if got := must(t, b, `/tmp/counts 100000 <>/root/in >/root/said & until read -r line </root/said; do :; done 2>/dev/null; echo "$line"`); got != all {
			t.Errorf("%s: it takes %s, not %s", name, got, all)
		}
		if got, want := must(t, neighbour, "/tmp/counts 8 </dev/null"), "8 instances, 8 timers"; got != want {
			t.Errorf("%s: a neighbour then gets %s, not %s", name, got, want)
		}
	}
}
