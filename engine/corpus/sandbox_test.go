package corpus

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/engine/criu"
	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/inspector"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/miniroot"
	"github.com/boxwood-rl/boxwood/internal/seccomp"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/tree"
)

func TestMain(m *testing.M) {
	if os.Geteuid() == 0 {
		if err := engine.PrivateMounts(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// tap passes boxes on and remembers them, for the oracle's sake.
type tap struct {
	engine.Boxes
	mu  sync.Mutex
	box map[string]box.Box
}

func (t *tap) Start(ctx context.Context, root box.Root, id box.Identity) (box.Box, error) {
	b, err := t.Boxes.Start(ctx, root, id)
	if err == nil {
		t.mu.Lock()
		t.box[id.Generation] = b
		t.mu.Unlock()
	}
	return b, err
}

// host is a whole engine in this process, and the node that sandboxes stand at.
type host struct {
	e     *engine.Engine
	boxes *tap
	pool  pool.Pool
	node  ids.Node
	state string // its folder
}

// options of a host: the share of turns to audit, and what stands between the
// inspector and the engine.
type options struct {
	audit float64
	wrap  func(inspector.Inspector) inspector.Inspector
}

func bounded(t testing.TB) context.Context {
	c, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return c
}

const poolSize = 4 << 30

// fastest is a folder with room for so much, in memory if there is: each turn waits until its
// node and its capture are durable, which on a busy disk is most of the time that it takes.
func fastest(room uint64) string {
	var shm unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &shm); err == nil && shm.Type == unix.TMPFS_MAGIC && shm.Bavail*uint64(shm.Bsize) > room {
		return "/dev/shm"
	}
	return "/var/tmp"
}

func mustHost(t testing.TB, o options) *host {
	t.Helper()
	testenv.Require(t, testenv.Root, testenv.BPF, testenv.Btrfs, testenv.CRIU, testenv.Program("gcc"), testenv.Program("python3"))
	dir, err := os.MkdirTemp(fastest(poolSize), "bwc")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	state := filepath.Join(dir, "s")
	h := &host{state: state, boxes: &tap{box: map[string]box.Box{}}}
	must(t, os.MkdirAll(state+"/run", 0o700))
	var p engine.Parts
	p.Store, err = tree.Open(state+"/tree", tree.Options{AllowTmpfs: true})
	must(t, err)
	p.Pool, err = pool.OpenBtrfs(pool.Options{Dir: state, SizeBytes: poolSize})
	must(t, err)
	p.Inspector, err = inspector.Open(inspector.Options{})
	must(t, err)
	if o.wrap != nil {
		p.Inspector = o.wrap(p.Inspector)
	}
	limits := tree.Limits{MemoryBytes: 1 << 30, Pids: 256, DiskBytes: 1 << 30}
	real, err := box.Open(box.Config{RunDir: state + "/run", Zygotes: 4, Limits: limits, CgroupRoot: fmt.Sprintf("boxwood-corpus-%d", os.Getpid())})
	must(t, err)
	h.boxes.Boxes = real
	p.Boxes, h.pool = h.boxes, p.Pool
	p.CRIU, err = criu.Open(testenv.CRIUPath())
	must(t, err)
	p.Stats, err = stats.New(stats.Options{Dir: state + "/stats"})
	must(t, err)
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	h.e, err = engine.New(bounded(t), p, engine.Config{StateDir: state, RunDir: state + "/run", Limits: limits, Log: log, Audit: o.audit})
	must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := h.e.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	_, err = h.e.ImportImage(bounded(t), image(t, dir), "corpus", func(string, int64, int64) {})
	must(t, err)
	made, err := h.e.CreateTree(bounded(t), engine.NewTree{
		Start: engine.Start{Image: "corpus"}, WithSandbox: true, Defaults: tree.Defaults{Limits: tree.Limits{Calls: seccomp.All}},
	}, nil)
	must(t, err)
	// The same files again, as the sandbox's own instead of the image's.
	r, err := h.e.RunTurn(bounded(t), made.Sandbox.ID, engine.Command{Shell: "cp -a /w /u"}, engine.NodeInput{}, 0, nil)
	must(t, err)
	if c := r.Node.Observation; c.ExitCode != 0 {
		t.Fatalf("preparing: %s", c.Stderr)
	}
	n, err := h.e.WaitCaptured(bounded(t), []ids.Node{r.Node.ID})
	must(t, err)
	if n[0].Capture == tree.Withheld {
		t.Fatal(n[0].WithheldReason)
	}
	h.node = r.Node.ID
	_, err = h.e.Release(bounded(t), []ids.Sandbox{made.Sandbox.ID})
	must(t, err)
	return h
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// image is the small root with Python, the programs and the files they act on.
func image(t testing.TB, dir string) string {
	t.Helper()
	root := filepath.Join(dir, "image")
	do := func(name string, args ...string) string {
		t.Helper()
		c := exec.CommandContext(bounded(t), name, args...)
		out, err := c.Output()
		if err != nil {
			t.Fatalf("%s %v: %v: %s", name, args, err, out)
		}
		return string(out)
	}
	do("cp", "-a", miniroot.Make(t), root)
	must(t, os.MkdirAll(root+"/opt", 0o755))
	do("gcc", "-O1", "-w", "-static", "-pthread", "-o", root+"/opt/ways", "../../inspector/testdata/ways.c")
	do("cp", "testdata/ways.py", "testdata/ways.sh", root+"/opt/")
	// What this Python loads for the program, and no more: a whole one makes each
	// walk of the oracle longer.
	files := strings.Fields(do("python3", "-ISc", `import ctypes, errno, fcntl, mmap, os, signal, socket, struct, sys, threading
import encodings.utf_8, encodings.ascii, encodings.latin_1
print(os.path.realpath(sys.executable))
for m in list(sys.modules.values()):
    if getattr(m, "__file__", None): print(m.__file__)`))
	python := files[0]
	for _, f := range files[:len(files):len(files)] {
		if strings.Contains(filepath.Base(f), ".so") || f == python {
			for _, m := range regexp.MustCompile(`(?m)(?:=>\s+|^\s+)(/\S+)`).FindAllStringSubmatch(do("ldd", f), -1) {
				files = append(files, m[1])
			}
		}
	}
	for _, f := range files {
		to := root + f
		if strings.HasPrefix(f, "/usr/bin/") {
			to = root + "/bin/" + filepath.Base(f)
		}
		must(t, os.MkdirAll(filepath.Dir(to), 0o755))
		do("cp", "-L", f, to)
	}
	home := strings.TrimSpace(do("python3", "-ISc", "import sys; print(sys.base_prefix)"))
	must(t, os.WriteFile(root+"/opt/py", fmt.Appendf(nil, "#!/bin/bash\nPYTHONHOME=%s PYTHONDONTWRITEBYTECODE=1 exec %s -sSB /opt/ways.py \"$@\"\n", home, python), 0o755))
	w := root + "/w"
	for _, d := range []string{"/d", "/e"} {
		must(t, os.MkdirAll(w+d, 0o755))
	}
	for name, content := range map[string]string{
		"old": strings.Repeat("a", 8192), "other": strings.Repeat("b", 8192),
		"big": strings.Repeat("c", 1<<18), "empty": "", "x": "x", "d/f": "f",
	} {
		must(t, os.WriteFile(filepath.Join(w, name), []byte(content), 0o644))
	}
	do("mkfifo", w+"/req", w+"/ack")
	must(t, unix.Setxattr(w+"/x", "user.k", []byte("v"), 0))
	return root
}

// sandbox is one that the corpus runs turns in.
type sandbox struct {
	h      *host
	t      testing.TB
	ctx    context.Context // bounds its life
	cancel context.CancelFunc
	id     ids.Sandbox
	gen    string
	pid1   int
	upper  string
	base   state // at its last successful capture
}

var pidOf = regexp.MustCompile(`/proc/(\d+)/root`)

func (h *host) sandbox(t testing.TB) *sandbox {
	t.Helper()
	s := &sandbox{h: h, t: t}
	s.ctx, s.cancel = context.WithTimeout(context.Background(), 30*time.Minute)
	err := h.e.Fork(s.ctx, time.Now(), []engine.Want{{Node: h.node, Count: 1}}, engine.ForkOptions{}, func(c engine.Child) {
		must(t, c.Err)
		s.id, s.gen = c.Sandbox.ID, string(c.Sandbox.Generation)
		h.boxes.mu.Lock()
		b := h.boxes.box[s.gen]
		h.boxes.mu.Unlock()
		if b == nil {
			t.Fatalf("no box of generation %s was started", c.Sandbox.Generation)
		}
		root, err := b.Root()
		must(t, err)
		defer root.Close()
		s.pid1, err = strconv.Atoi(pidOf.FindStringSubmatch(root.Name())[1])
		must(t, err)
		up, err := h.pool.FindUpper(c.Sandbox.Generation)
		must(t, err)
		s.upper = up.Dir
	})
	must(t, err)
	s.arrived()
	s.base = s.look()
	return s
}

// arrived waits until pid 1 has let go of the root before its own: a sandbox is handed
// out while that is still on its way, and its mounts look different until then.
func (s *sandbox) arrived() {
	t := s.t
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; {
		mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", s.pid1))
		must(t, err)
		roots := 0
		for line := range strings.Lines(string(mounts)) {
			if f := strings.Fields(line); len(f) > 4 && f[4] == "/" {
				roots++
			}
		}
		if roots == 1 && strings.Contains(string(mounts), " - overlay ") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("pid 1 isn't in its root:\n%s", mounts)
		}
	}
}

func (s *sandbox) look() state { s.t.Helper(); return look(s.t, s.pid1, s.upper) }

func (s *sandbox) release() {
	defer s.cancel()
	if _, err := s.h.e.Release(s.ctx, []ids.Sandbox{s.id}); err != nil {
		s.t.Error(err)
	}
	s.h.boxes.mu.Lock()
	delete(s.h.boxes.box, s.gen)
	s.h.boxes.mu.Unlock()
}
