package service

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/engine/check"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	boxwoodv1 "github.com/boxwood-rl/boxwood/proto/boxwood/v1"
	"github.com/boxwood-rl/boxwood/tree"
)

// What is kept of processes, in the state folder and in memory: each way in which it can be wrong is
// found, said and mended, and what is lost is withheld and named.
func TestCheckOfProcessStates(t *testing.T) {
	testenv.Require(t, testenv.CRIU)
	dir := stateDir(t)
	d := startDaemon(t, dir)
	d.importRoot(t)
	_, sb := d.newTree(t)
	d.open(t, sb.GetId(), "main")
	node := map[string]string{}
	for _, name := range []string{"shell gone", "shell changed", "shell kept"} {
		n := d.say(t, sb.GetId(), "main", "x='"+name+"'").GetNode()
		d.kept(t, n, shellsKind)
		node[name] = n.GetId()
	}
	for _, name := range []string{"dump gone", "dump changed", "dump lacks a file", "dump has a file more", "dump spoiled in memory", "dump spoiled on the disk", "dump kept"} {
		n := d.run(t, sb.GetId(), "sleep 1000 >/dev/null 2>&1 & true").GetNode()
		d.saved(t, n.GetId())
		node[name] = n.GetId()
	}
	run := engine.FindRunDir(dir)
	memory := filepath.Join(t.TempDir(), "memory")
	if err := os.CopyFS(memory, os.DirFS(engine.MemoryDir(run))); err != nil {
		t.Fatal(err)
	}
	free(t, d, sb)
	d.stop()

	s := &stopped{t: t, o: check.Options{State: dir, Cgroup: "boxwood-test-" + filepath.Base(dir)}}
	state := func(name string) (p *tree.ProcessState) {
		t.Helper()
		k := s.checkpoint(ids.Node(node[name]))
		s.store(func(st *tree.Store) (err error) { p, err = st.View().Process(k.State); return err })
		return p
	}
	onDisk := func(name string) string { return filepath.Join(dir, "processes", string(state(name).ID)) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	flip := func(path string) {
		t.Helper()
		b, err := os.ReadFile(path)
		must(err)
		b[len(b)/2] ^= 1
		must(os.Remove(path)) // other dumps may have it, too
		must(os.WriteFile(path, b, 0o444))
	}
	inMemory := func(name string) string { // as a daemon that was killed leaves it
		t.Helper()
		to := filepath.Join(engine.MemoryDir(run), string(state(name).ID))
		must(os.MkdirAll(filepath.Dir(to), 0o700))
		must(os.CopyFS(to, os.DirFS(filepath.Join(memory, filepath.Base(to)))))
		return to
	}
	if r, err := check.Run(ctx(t), s.o); err != nil || len(r.Findings) != 0 {
		t.Fatalf("a clean state: %+v, %v", r, err)
	}
	must(os.Mkdir(run, 0o700)) // as a killed daemon's: one that stops leaves none
	must(os.Mkdir(filepath.Join(run, "boxes"), 0o711))
	lost := map[string]bool{}
	for _, c := range []struct {
		kind, what string
		spoil      func()
	}{
		{"orphan_state", "beside the states", func() { must(os.WriteFile(filepath.Join(dir, "processes", "beside the states"), nil, 0o600)) }},
		{"orphan_state", "half.new", func() { must(os.MkdirAll(filepath.Join(dir, "processes", "half.new", "images"), 0o700)) }},
		{"orphan_state", "in memory", func() { must(os.MkdirAll(filepath.Join(engine.MemoryDir(run), "in memory"), 0o700)) }},
		{"lost_state", "shell gone", func() { must(os.RemoveAll(onDisk("shell gone"))) }},
		{"lost_state", "shell changed", func() { flip(filepath.Join(onDisk("shell changed"), "content")) }},
		{"lost_state", "dump gone", func() { must(os.RemoveAll(onDisk("dump gone"))) }},
		{"lost_state", "dump changed", func() { flip(filepath.Join(onDisk("dump changed"), "images", "pstree.img")) }},
		{"lost_state", "dump lacks a file", func() { must(os.Remove(filepath.Join(onDisk("dump lacks a file"), "witness.json"))) }},
		{"lost_state", "dump has a file more", func() {
			must(os.WriteFile(filepath.Join(onDisk("dump has a file more"), "images", "more"), nil, 0o600))
		}},
		{"damaged_copy", "dump spoiled in memory", func() { flip(filepath.Join(inMemory("dump spoiled in memory"), "sums")) }},
		{"damaged_copy", "dump spoiled on the disk", func() {
			inMemory("dump spoiled on the disk")
			flip(filepath.Join(onDisk("dump spoiled on the disk"), "sums"))
		}},
	} {
		t.Run(c.kind+" "+c.what, func(t *testing.T) {
			s.t = t
			named := c.what // of an orphan its path, else the state
			if node[c.what] != "" {
				named = string(state(c.what).ID)
			}
			c.spoil()
			r, err := check.Run(ctx(t), s.o)
			must(err)
			if !slices.ContainsFunc(r.Findings, func(f check.Finding) bool { return f.Kind == c.kind && strings.Contains(f.What, named) && f.Fix != "" }) {
				t.Fatalf("found %v", r.Findings)
			}
			var said []string
			left, err := check.Repair(ctx(t), s.o, func(f check.Finding) { said = append(said, f.Kind) })
			must(err)
			if len(left.Findings) != 0 || !slices.Contains(said, c.kind) {
				t.Fatalf("the repair said %v and left %v", said, left.Findings)
			}
			lost[c.what] = c.kind == "lost_state"
		})
	}
	s.t = t
	d = startDaemon(t, dir)
	for name, id := range node {
		n := d.node(t, id)
		if lost[name] {
			if n.GetCapture() != boxwoodv1.CaptureStatus_CAPTURE_STATUS_WITHHELD || !strings.HasPrefix(n.GetWithheldReason(), "state lost") {
				t.Errorf("%s: %v %s", name, n.GetCapture(), n.GetWithheldReason())
			}
			continue
		}
		free(t, d, d.fork(t, id, 1)...) // held against what was saved
	}
}
