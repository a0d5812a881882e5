package box

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/boxwood-rl/boxwood/engine/criu"
	"github.com/boxwood-rl/boxwood/engine/witness"
	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/testenv"
)

func openCRIU(t testing.TB) *criu.Program {
	t.Helper()
	testenv.Require(t, testenv.CRIU)
	p, err := criu.Open(testenv.CRIUPath())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// copyRoot copies what a snapshot would hold.
func copyRoot(t testing.TB, from Root) Root {
	t.Helper()
	to := newRoot(t)
	if out, err := exec.Command("cp", "-a", from.Upper+"/.", to.Upper).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return to
}

// see looks at a frozen box.
func see(t testing.TB, b Box) *witness.State {
	t.Helper()
	pids, err := cgroup.Pids(b.(*box).group.Run)
	if err != nil {
		t.Fatal(err)
	}
	w, err := witness.Of(b.PID1(), pids)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// What a box runs is there twice after a dump: in itself, where it goes on, and in a
// child with an identity of its own, which looked the same before it ran.
func TestDumpAndRestore(t *testing.T) {
	by, h := openCRIU(t), openHost(t)
	root := newRoot(t)
	b, err := h.Start(context.Background(), root, testIdentity)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mustKill(t, b) })
	must(t, b, `mkfifo /root/in; exec 8>/root/log; echo first >&8; (while :; do read -r line </root/in; echo "got $line" >&8; done) &`)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	dead := b.Part(ctx, by)
	if err := errors.Join(dead, b.Freeze(ctx)); err != nil {
		t.Fatal(err)
	}
	before := see(t, b)
	saved, err := b.Save(ctx, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	after := see(t, b)
	if d := append(witness.Diff(before, after), witness.Moved(before, after)...); len(d) > 0 {
		t.Errorf("saving changed the box:\n%s", strings.Join(d, "\n"))
	}
	child := copyRoot(t, root)
	if err := errors.Join(b.Thaw(), b.Rejoin(ctx)); err != nil {
		t.Fatal(err)
	}

	id := testIdentity
	id.Hostname, id.MachineID, id.Generation = "elm", strings.Repeat("ab", 16), "gn_x"
	restored, err := h.Restore(ctx, child, id, saved, by)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mustKill(t, restored) })
	if d := witness.Diff(before, see(t, restored)); len(d) > 0 {
		t.Errorf("the child looks otherwise:\n%s", strings.Join(d, "\n"))
	}
	if err := restored.Resume(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		at   Box
		line string
		want string
	}{
		{b, "parent", "first\ngot parent\noak\n" + testIdentity.MachineID},
		{restored, "child", "first\ngot child\nelm\n" + id.MachineID},
	} {
		got := must(t, c.at, `echo `+c.line+` >/root/in; until grep -q `+c.line+` /root/log; do :; done; cat /root/log; uname -n; cat /etc/machine-id`)
		if got = strings.ReplaceAll(got, "got \n", ""); got != c.want { // a call that is made anew reads the end of file
			t.Errorf("it says\n%s\nnot\n%s", got, c.want)
		}
	}
	if n := restored.Commands(); n != 1 {
		t.Errorf("the child counts %d commands, not 1", n)
	}
}

// A daemon is killed while a box is frozen. Nobody takes over, and the box goes on all
// the same; the next daemon finds it as it was.
func TestAFrozenBoxOutlivesItsDaemon(t *testing.T) {
	h := openHost(t) // for its clean-up
	root := newRoot(t)
	t.Setenv("BOXWOOD_TEST_WINDOW", "1")
	cmd, rec := startDaemon(t, h.cfg.RunDir, h.cfg.CgroupRoot+"x", root)
	t.Cleanup(func() { removeGroups(t, h.cfg.RunDir, h.cfg.CgroupRoot+"x") })
	var r record
	if err := json.Unmarshal(rec, &r); err != nil {
		t.Fatal(err)
	}
	groups, err := cgroup.OpenRoot(h.cfg.CgroupRoot + "x")
	if err != nil {
		t.Fatal(err)
	}
	dir := groups.Leftover(fmt.Sprint(r.Slot)).Dir
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := cgroup.Await(ctx, dir, "frozen", 1); err != nil {
		t.Fatal(err)
	}
	cmd.Process.Kill()
	cmd.Wait()
	if err := cgroup.Await(ctx, dir, "frozen", 0); err != nil {
		t.Fatalf("nobody thaws the box: %v", err)
	}
	h2, err := Open(Config{RunDir: h.cfg.RunDir, CgroupRoot: h.cfg.CgroupRoot + "x"})
	if err != nil {
		t.Fatal(err)
	}
	defer h2.Close()
	b, err := h2.Adopt(ctx, rec)
	if err != nil {
		t.Fatal(err)
	}
	defer mustKill(t, b)
	if procs, err := b.Survivors(); err != nil || len(procs) != 1 {
		t.Errorf("survivors: %+v, %v", procs, err)
	}
	if got := must(t, b, "hostname"); got != "oak" {
		t.Errorf("got %q", got)
	}
	if _, err := h2.Sweep(ctx); err != nil {
		t.Error(err)
	}
}
