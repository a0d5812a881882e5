package pool

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/boxwood-rl/boxwood/internal/btrfs"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/overlay"
	"github.com/boxwood-rl/boxwood/internal/testenv"
	"github.com/boxwood-rl/boxwood/tree"
)

func testOptions(dir string) Options {
	return Options{Dir: dir, SizeBytes: 2 << 30, LowWater: 64 << 20}
}

func mustOpen(t testing.TB, o Options) *Btrfs {
	t.Helper()
	testenv.Require(t, testenv.Btrfs)
	p, err := OpenBtrfs(o)
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

const testLayer = ids.Layer("sha256:00000000000000000000000000000000000000000000000000000000000000aa")

func fillTest(dir string) error {
	for i := range 50 {
		if err := os.WriteFile(fmt.Sprintf("%s/f%d", dir, i), []byte("image"), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func mustBase(t testing.TB, p *Btrfs) (ids.Snapshot, tree.Seal) {
	t.Helper()
	if err := p.AddLayer(t.Context(), testLayer, fillTest); err != nil {
		t.Fatal(err)
	}
	id := ids.NewSnapshot()
	seal, err := p.AddBase(t.Context(), id, []ids.Layer{testLayer})
	if err != nil {
		t.Fatal(err)
	}
	return id, seal
}

func mustClone(t testing.TB, p *Btrfs, from ids.Snapshot, seal tree.Seal, limit int64) *Upper {
	t.Helper()
	up, err := p.Clone(t.Context(), from, seal, ids.NewGeneration(), limit)
	if err != nil {
		t.Fatal(err)
	}
	return up
}

func writeRandom(t testing.TB, path string, size int) {
	t.Helper()
	b := make([]byte, size)
	rand.Read(b)
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
}

// loops counts the loop devices of a pool.
func loops(t testing.TB, dir string) int {
	t.Helper()
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(b), dir+"/") {
			n++
		}
	}
	return n
}

// eventually looks until ok or a deadline: kernel work that tells nobody.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for tick := time.NewTicker(5 * time.Millisecond); !ok(); {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s: not within 30 s", what)
		}
	}
}

// TestCrashChild is the process that TestCrash kills: it uses the pool until the
// step at which it kills itself.
func TestCrashChild(t *testing.T) {
	step, dir := os.Getenv("BOXWOOD_TEST_CRASH_AT"), os.Getenv("BOXWOOD_TEST_CRASH_DIR")
	if dir == "" {
		t.Skip("runs as a child of TestCrash only")
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatal(err)
	}
	o := testOptions(dir)
	o.hook = func(at string) {
		if at == step {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	p, err := OpenBtrfs(o)
	if err != nil {
		t.Fatal(err)
	}
	base, seal := mustBase(t, p)
	up := mustClone(t, p, base, seal, 0)
	writeRandom(t, up.Dir+"/x", 5<<20)
	pending, err := p.Snapshot(t.Context(), up.Generation, ids.NewSnapshot())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pending.Finish(t.Context()); err != nil {
		t.Fatal(err)
	}
	o.hook("end")
}

// A daemon killed at any step must leave a pool in which everything is whole or
// not there, no loop device, and nothing that keeps the next daemon from working.
func TestCrash(t *testing.T) {
	testenv.Require(t, testenv.Btrfs)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		step                     string
		layer                    bool
		snapshots, uppers, opens int
	}{
		{step: "layer filled"},
		{step: "numbers emptied"},
		{step: "layer sealed"},
		{step: "snapshot made", layer: true, snapshots: 1, uppers: 1},
		{step: "end", layer: true, snapshots: 2, uppers: 1},
	} {
		for _, apart := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, own namespace %v", tc.step, apart), func(t *testing.T) {
				dir := t.TempDir()
				cmd := exec.Command(self, "-test.run=^TestCrashChild$")
				cmd.Env = append(os.Environ(), "BOXWOOD_TEST_CRASH_AT="+tc.step, "BOXWOOD_TEST_CRASH_DIR="+dir)
				if apart {
					cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
				}
				t.Cleanup(func() { unix.Unmount(dir+"/pool", unix.MNT_DETACH) })
				out, err := cmd.CombinedOutput()
				var exit *exec.ExitError
				if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
					t.Fatalf("the child wasn't killed at its step: %v\n%s", err, out)
				}
				if apart {
					eventually(t, "the loop device clears itself", func() bool { return loops(t, dir) == 0 })
				} else if loops(t, dir) != 1 {
					t.Fatalf("%d loop devices after a kill", loops(t, dir))
				}
				p := mustOpen(t, testOptions(dir))
				if n := loops(t, dir); n != 1 {
					t.Errorf("%d loop devices for one file", n)
				}
				if p.HasLayer(testLayer) != tc.layer {
					t.Errorf("the layer is there: %v", !tc.layer)
				}
				u, err := p.Usage()
				if err != nil || u.Snapshots != tc.snapshots || u.Uppers != tc.uppers {
					t.Errorf("%d snapshots, %d uppers (%v), want %d, %d", u.Snapshots, u.Uppers, err, tc.snapshots, tc.uppers)
				}
				if err := p.Drain(t.Context()); err != nil {
					t.Fatal(err)
				}
				for _, d := range p.folders() {
					if hidden, _ := filepath.Glob(d.Name() + "/.*"); len(hidden) > 0 {
						t.Errorf("left behind: %v", hidden)
					}
				}
				base, seal := mustBase(t, p)
				mustClone(t, p, base, seal, 0)
				if err := p.Close(); err != nil {
					t.Fatal(err)
				}
				eventually(t, "the loop device goes with the last mount", func() bool { return loops(t, dir) == 0 })
			})
		}
	}
}

// Two daemons on one pool would remove each other's uppers.
func TestOneProcessAtATime(t *testing.T) {
	dir := t.TempDir()
	mustOpen(t, testOptions(dir))
	_, err := OpenBtrfs(testOptions(dir))
	if f := fault.As(err); f == nil || f.Reason != "pool_in_use" {
		t.Errorf("a second open: %v", err)
	}
}

// The pool is mounted without barriers: after a power cut anything may be missing
// from it, and must not be handed out as if it weren't.
func TestUnclean(t *testing.T) {
	dir := t.TempDir()
	p := mustOpen(t, testOptions(dir))
	base, seal := mustBase(t, p)
	needle := make([]byte, 64<<10)
	rand.Read(needle)
	up := mustClone(t, p, base, seal, 0)
	if err := os.WriteFile(up.Dir+"/needle", needle, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	var m mark
	b, err := os.ReadFile(dir + "/pool.json")
	if err != nil || json.Unmarshal(b, &m) != nil || !m.Clean {
		t.Fatalf("a closed pool is marked %s (%v)", b, err)
	}
	otherBoot := func() {
		if err := os.WriteFile(dir+"/pool.json", []byte(`{"boot_id":"another","clean":false}`), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	otherBoot()
	p = mustOpen(t, testOptions(dir)) // checked, found whole
	if err := p.Verify(base, seal); err != nil {
		t.Error(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the loop device goes", func() bool { return loops(t, dir) == 0 })
	refused := func(what string) {
		t.Helper()
		for _, forget := range []func(){otherBoot, func() { os.Remove(dir + "/pool.json") }} {
			forget()
			_, err = OpenBtrfs(testOptions(dir))
			if f := fault.As(err); f == nil || f.Kind != fault.DataLoss || f.Reason != "pool_unclean" || f.Hint == "" {
				t.Fatalf("opening a pool with %s: %v", what, err)
			}
			eventually(t, "the loop device goes", func() bool { return loops(t, dir) == 0 })
		}
	}
	damage(t, dir+"/pool.img", needle[4096:])
	refused("a flipped byte of data")
	damage(t, dir+"/pool.img", []byte("_BHRfS_M"))
	refused("a damaged super block")
	o := testOptions(dir)
	o.Unclean = Rebuild
	p = mustOpen(t, o)
	if p.HasLayer(testLayer) {
		t.Error("a rebuilt pool has layers")
	}
	mustBase(t, p)
}

// damage flips the byte in front of the first place in a sparse file that holds
// some content.
func damage(t *testing.T, path string, content []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	buf := make([]byte, 16<<20)
	for at := int64(0); ; {
		if at, err = unix.Seek(int(f.Fd()), at, unix.SEEK_DATA); err != nil {
			t.Fatalf("the content isn't in %s: %v", path, err)
		}
		n, _ := f.ReadAt(buf, at)
		if i := bytes.Index(buf[:n], content); i > 0 {
			if _, err := f.WriteAt([]byte{buf[i-1] ^ 1}, at+int64(i)-1); err != nil {
				t.Fatal(err)
			}
			return
		}
		at += int64(max(n-len(content), 1))
	}
}

func TestQuota(t *testing.T) {
	p := mustOpen(t, testOptions(t.TempDir()))
	if !p.Quotas() {
		testenv.Require(t, func() string { return "needs btrfs with simple quotas (Linux 6.7)" })
	}
	base, seal := mustBase(t, p)
	bounded, free := mustClone(t, p, base, seal, 8<<20), mustClone(t, p, base, seal, 0)
	junk := make([]byte, 32<<20)
	rand.Read(junk)
	if err := os.WriteFile(bounded.Dir+"/big", junk, 0o644); !errors.Is(err, unix.EDQUOT) {
		t.Errorf("32 MiB into a limit of 8: %v, want EDQUOT", err)
	}
	if err := os.WriteFile(free.Dir+"/big", junk, 0o644); err != nil {
		t.Errorf("a sibling without a limit: %v", err)
	}
	// The limit is one generation's: what it inherits doesn't count, what it writes does.
	pending, err := p.Snapshot(t.Context(), free.Generation, "sn_full")
	if err != nil {
		t.Fatal(err)
	}
	full, err := pending.Finish(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	child := mustClone(t, p, "sn_full", full, 8<<20)
	if err := os.WriteFile(child.Dir+"/some", junk[:4<<20], 0o644); err != nil {
		t.Errorf("4 MiB into a child's limit of 8: %v", err)
	}
	if err := os.WriteFile(child.Dir+"/more", junk, 0o644); !errors.Is(err, unix.EDQUOT) {
		t.Errorf("32 MiB more: %v, want EDQUOT", err)
	}
}

func TestWatermark(t *testing.T) {
	o := testOptions(t.TempDir())
	p := mustOpen(t, o)
	base, seal := mustBase(t, p)
	up := mustClone(t, p, base, seal, 0)
	p.opts.LowWater = 1 << 40
	p.asOf = time.Time{}
	_, cloneErr := p.Clone(t.Context(), base, seal, ids.NewGeneration(), 0)
	_, baseErr := p.AddBase(t.Context(), ids.NewSnapshot(), []ids.Layer{testLayer})
	layerErr := p.AddLayer(t.Context(), testLayer[:len(testLayer)-1]+"b", fillTest)
	for what, err := range map[string]error{"clone": cloneErr, "base": baseErr, "layer": layerErr} {
		if f := fault.As(err); f == nil || f.Kind != fault.Exhausted || f.Reason != "pool_full" || f.Hint == "" || !f.Retryable() {
			t.Errorf("%s below the watermark: %v", what, err)
		}
	}
	// What is there can still be captured and released.
	if pending, err := p.Snapshot(t.Context(), up.Generation, ids.NewSnapshot()); err != nil {
		t.Error(err)
	} else if _, err := pending.Finish(t.Context()); err != nil {
		t.Error(err)
	}
	if err := p.Release(up.Generation); err != nil {
		t.Error(err)
	}
}

// bestOf tries what compares times again where it fails, a few times: others of the host may stall either.
func bestOf(t *testing.T, tries int, try func() (failure string)) {
	t.Helper()
	var failure string
	for range tries {
		if failure = try(); failure == "" {
			return
		}
		t.Log(failure)
	}
	t.Error(failure)
}

// One sandbox that writes a lot must not slow the release, the capture or the
// sync of another. What flushing the neighbour's data costs is measured in the
// same run; none of these may come near it.
func TestNeighbourDirtyData(t *testing.T) {
	p := mustOpen(t, testOptions(t.TempDir()))
	base, seal := mustBase(t, p)
	bestOf(t, 3, func() string { return besideDirtyData(t, p, base, seal) })
}

func besideDirtyData(t *testing.T, p *Btrfs, base ids.Snapshot, seal tree.Seal) (failure string) {
	neighbour, own := mustClone(t, p, base, seal, 0), mustClone(t, p, base, seal, 0)
	m, err := overlay.Mount(overlay.Options{Lower: own.Layers, Upper: own.Dir, Work: own.Work})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	writeRandom(t, own.Dir+"/x", 1<<16)
	if err := btrfs.Sync(p.top); err != nil {
		t.Fatal(err)
	}
	writeRandom(t, neighbour.Dir+"/big", 400<<20)
	took := map[string]time.Duration{}
	timed := func(what string, fn func() error) time.Duration {
		t0 := time.Now()
		if err := fn(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		return time.Since(t0)
	}
	took["flush"] = timed("flush", func() error { return p.Flush(t.Context(), own.Generation) })
	took["snapshot"] = timed("snapshot", func() error {
		_, err := p.Snapshot(t.Context(), own.Generation, ids.NewSnapshot())
		return err
	})
	root, err := unix.Openat(int(m.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	took["syncfs inside"] = timed("syncfs", func() error { return unix.Syncfs(root) })
	unix.Close(root)
	took["unmount and release"] = timed("release", func() error {
		m.Close()
		return p.Release(own.Generation)
	})
	all := timed("flushing everything", func() error { return btrfs.Sync(p.top) })
	t.Logf("flushing everything %v, beside it: %v", all, took)
	if err := errors.Join(p.Release(neighbour.Generation), p.Drain(t.Context())); err != nil {
		t.Fatal(err)
	}
	for what, d := range took {
		if d > all/2 {
			failure = fmt.Sprintf("%s took %v, flushing the neighbour %v: it waited for it", what, d, all)
		}
	}
	return failure
}

// Flush must take the writing out of the freeze.
func TestFlush(t *testing.T) {
	p := mustOpen(t, testOptions(t.TempDir()))
	base, seal := mustBase(t, p)
	up := mustClone(t, p, base, seal, 0)
	bestOf(t, 3, func() string {
		writeRandom(t, up.Dir+"/big", 200<<20)
		t0 := time.Now()
		if err := p.Flush(t.Context(), up.Generation); err != nil {
			t.Fatal(err)
		}
		t1 := time.Now()
		if _, err := p.Snapshot(t.Context(), up.Generation, ids.NewSnapshot()); err != nil {
			t.Fatal(err)
		}
		flush, snapshot := t1.Sub(t0), time.Since(t1)
		t.Logf("flush of 200 MiB %v, snapshot after it %v", flush, snapshot)
		if snapshot > flush {
			return fmt.Sprintf("the snapshot took %v after a flush of %v: the flush wrote nothing", snapshot, flush)
		}
		return ""
	})
}

// Captured bytes must be what a capture added: they are what sparse captures are
// measured by.
func TestExclusiveBytes(t *testing.T) {
	p := mustOpen(t, testOptions(t.TempDir()))
	base, seal := mustBase(t, p)
	up := mustClone(t, p, base, seal, 0)
	capture := func() int64 {
		id := ids.NewSnapshot()
		pending, err := p.Snapshot(t.Context(), up.Generation, id)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := pending.Finish(t.Context()); err != nil {
			t.Fatal(err)
		}
		return p.ExclusiveBytes(id)
	}
	for i := range 3 {
		writeRandom(t, fmt.Sprintf("%s/f%d", up.Dir, i), 1<<20)
		if got := capture(); got < 1<<20 || got > 5<<18 {
			t.Errorf("capture %d of 1 MiB new data holds %d bytes", i, got)
		}
		if got := capture(); got > 64<<10 {
			t.Errorf("a capture of nothing new holds %d bytes", got)
		}
	}
}

// Space must come back, or a training run ends with a full disk.
func TestDrain(t *testing.T) {
	p := mustOpen(t, testOptions(t.TempDir()))
	base, seal := mustBase(t, p)
	up := mustClone(t, p, base, seal, 1<<30)
	writeRandom(t, up.Dir+"/big", 100<<20)
	if err := btrfs.Sync(p.top); err != nil {
		t.Fatal(err)
	}
	used := func() int64 {
		p.mu.Lock()
		p.asOf = time.Time{}
		p.mu.Unlock()
		u, err := p.Usage()
		if err != nil {
			t.Fatal(err)
		}
		return u.Used
	}
	before := used()
	if err := p.Release(up.Generation); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := p.Drain(ctx); err != nil {
		t.Fatal(err)
	}
	if p.PendingRemovals() != 0 {
		t.Errorf("%d removals pending after a drain", p.PendingRemovals())
	}
	if after := used(); before-after < 90<<20 {
		t.Errorf("releasing 100 MiB gave %d bytes back", before-after)
	}
}

// A pool on a btrfs of the host, at a folder.
func TestExistingBtrfs(t *testing.T) {
	outer := mustOpen(t, testOptions(t.TempDir()))
	dir := outer.Dir() + "/theirs"
	p := mustOpen(t, Options{Dir: t.TempDir(), ExistingBtrfs: dir, LowWater: 1 << 20})
	base, seal := mustBase(t, p)
	mustClone(t, p, base, seal, 0)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); err != nil {
		t.Errorf("closing took the host's folder away: %v", err)
	}
	if _, err := OpenBtrfs(Options{Dir: t.TempDir(), ExistingBtrfs: t.TempDir()}); fault.As(err).Reason != "not_btrfs" {
		t.Errorf("a folder that isn't on btrfs: %v", err)
	}
}

// A pool that is full to its last block, of data and of metadata: what is released comes back,
// although taking its name away may need room that isn't there.
func TestReleaseOnAFullPool(t *testing.T) {
	o := testOptions(t.TempDir())
	o.SizeBytes = 512 << 20
	p := mustOpen(t, o)
	base, seal := mustBase(t, p)
	hog := mustClone(t, p, base, seal, 0)
	writeRandom(t, hog.Dir+"/much", 100<<20)
	var others []*Upper
	for range 8 {
		others = append(others, mustClone(t, p, base, seal, 0))
	}
	snap := ids.NewSnapshot()
	pending, err := p.Snapshot(t.Context(), hog.Generation, snap)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pending.Finish(t.Context()); err != nil {
		t.Fatal(err)
	}
	fill := func(size int) error {
		b := make([]byte, size)
		rand.Read(b)
		for i := 0; ; i++ {
			if err := os.WriteFile(fmt.Sprintf("%s/%d.%d", hog.Dir, size, i), b, 0o644); err != nil {
				return err
			}
		}
	}
	for _, size := range []int{8 << 20, 64 << 10, 1900, 1} {
		if err := fill(size); !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("filling with files of %d bytes: %v", size, err)
		}
	}
	for _, u := range append(others, hog) {
		if err := p.Release(u.Generation); err != nil {
			t.Error(err)
		}
	}
	if err := p.Remove(snap); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := p.Drain(ctx); err != nil {
		t.Fatal(err)
	}
	if again := mustClone(t, p, base, seal, 0); p.PendingRemovals() != 0 {
		t.Errorf("%d removals pending beside %s", p.PendingRemovals(), again.Generation)
	}
}
