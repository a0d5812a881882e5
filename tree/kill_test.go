package tree

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
)

const killWriters = 8

// writeUntilKilled is the child process: writers that add nodes in pairs and
// say each acknowledged pair on stdout.
func writeUntilKilled(dir string) {
	s, err := Open(dir, Options{AllowTmpfs: true})
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	tr := Tree{ID: ids.NewTree(), Root: ids.NewNode()}
	if _, err := s.Update(context.Background(), func(tx *Tx) error {
		if err := tx.PutTree(tr); err != nil {
			return err
		}
		_, err := tx.AddNode(Node{ID: tr.Root, Tree: tr.ID, Capture: Recorded})
		return err
	}); err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	var mu sync.Mutex
	for range killWriters {
		go func() {
			parent := tr.Root
			for {
				var pair [2]ids.Node
				_, err := s.Update(context.Background(), func(tx *Tx) error {
					p, err := tx.Node(parent)
					for i := range pair {
						if err != nil {
							return err
						}
						n := typicalNode(p)
						n.Checkpoint, n.Capture = "", Recorded
						p, err = tx.AddNode(n)
						pair[i] = n.ID
					}
					return err
				})
				mu.Lock()
				if err != nil {
					fmt.Println("error", err)
				} else {
					fmt.Println("ack", pair[0], pair[1])
				}
				mu.Unlock()
				parent = pair[1]
			}
		}()
	}
	select {}
}

// If it fails, an acknowledged node was lost by kill -9, or a change is there
// by half.
func TestAcknowledgedSurvivesKill(t *testing.T) {
	rounds := 12
	if testing.Short() {
		rounds = 3
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	dir := t.TempDir()
	acked := map[ids.Node]ids.Node{} // pairs over all rounds
	for round := range rounds {
		cmd := exec.Command(os.Args[0], "-test.run=^$")
		cmd.Env = append(os.Environ(), childEnv+"=write", childDir+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		killed := false
		lines, killAfter := 0, 1+random.IntN(400)
		for r := bufio.NewReader(out); ; {
			line, err := r.ReadString('\n')
			if err != nil {
				break
			}
			var a, b ids.Node
			if _, err := fmt.Sscanf(line, "ack %s %s", &a, &b); err != nil {
				t.Errorf("the child said %q", line)
				_ = cmd.Process.Kill()
				break
			}
			acked[a] = b
			if lines++; lines == killAfter {
				killed = true
				if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			}
		}
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
		if !killed {
			t.Fatalf("round %d: the child ended on its own after %d lines", round, lines)
		}
		s := mustOpen(t, dir, Options{})
		v := s.View()
		for a, b := range acked {
			if _, err := v.FullNode(a); err != nil {
				t.Fatalf("round %d: acknowledged: %v", round, err)
			}
			if n, err := v.FullNode(b); err != nil || n.Parent != a {
				t.Fatalf("round %d: acknowledged: %v, parent %v", round, err, n)
			}
		}
		if n := v.NodeCount("") - v.TreeCount(); n%2 != 0 {
			t.Fatalf("round %d: %d nodes from changes of two", round, n)
		}
		mustCheck(t, s)
		mustClose(t, s)
	}
	t.Logf("%d kills, %d acknowledged changes, all there", rounds, len(acked))
}

// If it fails, the reply goes out before the flush: the power's loss would take back what
// a client was told. The saboteur fsync must turn it red.
func TestAcknowledgedSurvivesPowerLoss(t *testing.T) {
	fs := vfs.NewCrashableMem()
	s := mustOpen(t, "state", Options{FS: fs})
	tr := mustTree(t, s)
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	for i := range 40 {
		a := mustNode(t, s, tr.Root)
		cfg := vfs.CrashCloneCfg{}
		if i%2 == 1 { // some of what wasn't flushed made it, too
			cfg = vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: newRand(uint64(seed) + uint64(i))}
		}
		want := frozen(t, s)
		after := mustOpen(t, "state", Options{FS: fs.CrashClone(cfg)})
		if _, err := after.FullNode(a.ID); err != nil {
			t.Fatalf("change %d was acknowledged, and after a power loss: %v", i, err)
		}
		wantEqual(t, "after a power loss", frozen(t, after), want)
		mustCheck(t, after)
		mustClose(t, after)
	}
}

// If it fails, a fault of the disk at some instant loses what was acknowledged,
// shows what wasn't, or leaves half of a change. Every I/O operation of a
// script fails once, then everything after it.
func TestFaultAtEachOperation(t *testing.T) {
	for _, mode := range []string{"once", "from then on"} {
		t.Run(mode, func(t *testing.T) {
			for k := int32(0); ; k++ {
				if done := faultAt(t, k, mode == "once"); done || t.Failed() {
					t.Logf("%d operations", k)
					break
				}
			}
		})
	}
}

// faultAt runs a script with operation k failing; done: the script had no
// operation k.
func faultAt(t *testing.T, k int32, once bool) (done bool) {
	disk := vfs.NewCrashableMem()
	var at atomic.Int32
	at.Store(k)
	hit := atomic.Bool{}
	boom := errors.New("injected fault")
	fs := errorfs.Wrap(disk, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() != errorfs.OpIsWrite {
			return nil
		}
		n := at.Add(-1)
		if n == -1 || n < -1 && !once {
			hit.Store(true)
			return boom
		}
		return nil
	}))
	acked := map[ids.Node]bool{}
	unsure := map[ids.Node]bool{}
	s, err := Open("state", Options{FS: fs})
	if err == nil {
		tr := Tree{ID: ids.NewTree(), Root: ids.NewNode()}
		for i := range 12 {
			n := Node{ID: tr.Root, Tree: tr.ID, Capture: Recorded}
			if i > 0 {
				n.ID, n.Parent = ids.NewNode(), tr.Root
			}
			twin := n
			twin.ID, twin.Parent = ids.NewNode(), n.ID
			_, err := s.Update(context.Background(), func(tx *Tx) error {
				if i == 0 {
					if err := tx.PutTree(tr); err != nil {
						return err
					}
				}
				if _, err := tx.AddNode(n); err != nil {
					return err
				}
				_, err := tx.AddNode(twin)
				return err
			})
			v := s.View()
			_, seen := v.Node(n.ID)
			if err == nil {
				acked[n.ID], acked[twin.ID] = true, true
				if seen != nil {
					t.Errorf("operation %d: acknowledged and not visible: %v", k, seen)
				}
				continue
			}
			if seen == nil {
				t.Errorf("operation %d: the change failed and is visible", k)
			}
			wantFault(t, err, fault.Unavailable, "store_failed")
			unsure[n.ID], unsure[twin.ID] = true, true
		}
		_ = s.Close()
	} else if !hit.Load() {
		t.Fatalf("operation %d: opening: %v", k, err)
	}
	// What a crash at this instant leaves.
	after := mustOpen(t, "state", Options{FS: disk.CrashClone(vfs.CrashCloneCfg{})})
	v := after.View()
	for id := range acked {
		if _, err := v.FullNode(id); err != nil {
			t.Errorf("operation %d: acknowledged, and after the crash: %v", k, err)
		}
	}
	for tr := range v.Trees() {
		for n := range v.NodesOf(tr.ID) {
			if !acked[n.ID] && !unsure[n.ID] {
				t.Errorf("operation %d: node %s comes from nowhere", k, n.ID)
			}
		}
	}
	if n := v.NodeCount(""); n%2 != 0 {
		t.Errorf("operation %d: half of a change: %d nodes", k, n)
	}
	mustCheck(t, after)
	mustClose(t, after)
	return !hit.Load()
}

// If it fails, a full disk ends the store, or leaves something half-written.
func TestFullDiskIsRefusedAndRecovers(t *testing.T) {
	disk := vfs.NewCrashableMem()
	disk.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 1 << 30})
	o := Options{FS: disk}
	s := mustOpen(t, "state", o)
	tr := mustTree(t, s)
	lost := mustNode(t, s, tr.Root)
	before := frozen(t, s)
	disk.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 1 << 20})
	_, err := s.Update(context.Background(), func(tx *Tx) error { return tx.Pin(tr.Root) })
	wantFault(t, err, fault.Exhausted, "disk_full")
	if !fault.As(err).Retryable() {
		t.Error("a full disk isn't retryable")
	}
	_, err = prune(s, lost.ID, false)
	wantFault(t, err, fault.Exhausted, "disk_full")
	wantEqual(t, "on a full disk", frozen(t, s), before)
	disk.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 32 << 20})
	_, err = s.Update(context.Background(), func(tx *Tx) error { return tx.Pin(tr.Root) })
	wantFault(t, err, fault.Exhausted, "disk_full")
	mustPrune(t, s, lost.ID, false)                                                               // that is how space comes back
	mustUpdate(t, s, func(tx *Tx) error { return tx.SetWithheld(tr.Root, "its capture failed") }) // somebody waits for that
	disk.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 1 << 30})
	mustNode(t, s, tr.Root)
}

// If it fails, an append that the disk refuses is acknowledged, shown, or takes
// the daemon down; readers must go on.
func TestFailedFlushIsSticky(t *testing.T) {
	disk := vfs.NewCrashableMem()
	broken := atomic.Bool{}
	fs := errorfs.Wrap(disk, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if broken.Load() && strings.HasSuffix(op.Path, ".log") && op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			return syscall.ENOSPC
		}
		return nil
	}))
	s, err := Open("state", Options{FS: fs})
	if err != nil {
		t.Fatal(err)
	}
	tr := mustTree(t, s)
	kept := mustNode(t, s, tr.Root)
	before := frozen(t, s)
	broken.Store(true)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			_, err := s.Update(context.Background(), func(tx *Tx) error {
				p, _ := tx.Node(tr.Root)
				_, err := tx.AddNode(typicalNode(p))
				return err
			})
			if f := fault.As(err); f == nil || f.Reason != "store_failed" || !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("got %v, want store_failed with its cause", err)
			}
		})
	}
	wg.Wait()
	wantEqual(t, "after a failed flush", frozen(t, s), before)
	broken.Store(false)
	_, err = s.Update(context.Background(), func(tx *Tx) error { return tx.Pin(tr.Root) })
	wantFault(t, err, fault.Unavailable, "store_failed")
	wantFault(t, s.Close(), fault.Unavailable, "store_failed")
	after := mustOpen(t, "state", Options{FS: disk.CrashClone(vfs.CrashCloneCfg{})})
	if _, err := after.FullNode(kept.ID); err != nil {
		t.Fatal(err)
	}
}

// If it fails, an answer that rests on another's change is given before that change is durable: a node
// is said to be pinned, or to be gone, and isn't after a crash.
func TestAnswersRestOnWhatIsDurable(t *testing.T) {
	disk := vfs.NewCrashableMem()
	var armed atomic.Bool
	flushing, fail := make(chan struct{}), make(chan struct{})
	fs := errorfs.Wrap(disk, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if strings.HasSuffix(op.Path, ".log") && op.Kind.ReadOrWrite() == errorfs.OpIsWrite && armed.CompareAndSwap(true, false) {
			close(flushing)
			<-fail
			return syscall.EIO
		}
		return nil
	}))
	s, err := Open("state", Options{FS: fs})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	tr := mustTree(t, s)
	lost := mustNode(t, s, tr.Root)
	armed.Store(true)
	var wg sync.WaitGroup
	broken := func(what string, change func(tx *Tx) error) {
		if _, err := s.Update(context.Background(), change); err == nil || fault.As(err).Reason != "store_failed" {
			t.Errorf("%s: got %v, want store_failed", what, err)
		}
	}
	wg.Go(func() {
		broken("the change itself", func(tx *Tx) error {
			if err := tx.Pin(tr.Root); err != nil {
				return err
			}
			_, err := tx.Prune(lost.ID, false)
			return err
		})
	})
	<-flushing
	var ran sync.WaitGroup
	answer := func(what string, change func(tx *Tx) error) {
		ran.Add(1)
		once := sync.OnceFunc(ran.Done)
		wg.Go(func() {
			broken(what, func(tx *Tx) error {
				defer once()
				return change(tx)
			})
		})
	}
	answer("pinned already", func(tx *Tx) error { return tx.Pin(tr.Root) })
	answer("pruned already", func(tx *Tx) error { return tx.Pin(lost.ID) })
	ran.Wait()
	close(fail)
	wg.Wait()
}

// If it fails, a disk that can't be written any more is told wrongly, ends readers, or leaves half of something; or a
// store doesn't come back with the disk.
func TestDiskThatRefusesWrites(t *testing.T) {
	for _, cause := range []error{syscall.EROFS, syscall.EIO, syscall.EDQUOT, syscall.ENOSPC} {
		t.Run(cause.Error(), func(t *testing.T) {
			disk := vfs.NewCrashableMem()
			var refuses atomic.Bool
			o := Options{FS: errorfs.Wrap(disk, errorfs.InjectorFunc(func(op errorfs.Op) error {
				if refuses.Load() && op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
					return cause
				}
				return nil
			}))}
			s, err := Open("state", o)
			if err != nil {
				t.Fatal(err)
			}
			tr := mustTree(t, s)
			before := frozen(t, s)
			refuses.Store(true)
			_, err = s.Update(context.Background(), func(tx *Tx) error { return tx.Pin(tr.Root) })
			wantFault(t, err, fault.Unavailable, "store_failed")
			if !errors.Is(err, cause) {
				t.Errorf("%v doesn't say %v", err, cause)
			}
			wantEqual(t, "on a disk that refuses writes", frozen(t, s), before)
			_ = s.Close()
			disk = disk.CrashClone(vfs.CrashCloneCfg{})
			_, err = Open("state", Options{FS: errorfs.Wrap(disk, errorfs.InjectorFunc(func(op errorfs.Op) error {
				if op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
					return cause
				}
				return nil
			}))})
			wantFault(t, err, fault.Internal, "state_dir")
			if !errors.Is(err, cause) {
				t.Errorf("opening: %v doesn't say %v", err, cause)
			}
			// The disk is back. Whether the change that failed is there isn't known, what was acknowledged is.
			s = mustOpen(t, "state", Options{FS: disk})
			if n, err := s.View().Node(tr.Root); err != nil || n.Checkpoint == "" {
				t.Fatalf("the root is %+v, %v", n, err)
			}
			mustNode(t, s, tr.Root)
		})
	}
}

// If it fails, a disk that hangs in a flush holds up readers, or a change is said to be made that isn't durable.
func TestSlowDiskHoldsUpOnlyWrites(t *testing.T) {
	disk := newGate()
	s := mustOpen(t, "state", Options{FS: disk})
	t.Cleanup(disk.open)
	tr := mustTree(t, s)
	before := frozen(t, s)
	answers := make(chan error, 3)
	write := func(ran func()) {
		_, err := s.Update(context.Background(), func(tx *Tx) error {
			defer ran()
			p, err := tx.Node(tr.Root)
			if err != nil {
				return err
			}
			_, err = tx.AddNode(typicalNode(p))
			return err
		})
		answers <- err
	}
	disk.armed.Store(true)
	for range cap(answers) {
		ran := make(chan struct{})
		go write(sync.OnceFunc(func() { close(ran) }))
		<-ran
	}
	<-disk.reached
	wantEqual(t, "while the disk hangs", frozen(t, s), before)
	late, cancel := context.WithTimeout(context.Background(), 1)
	defer cancel()
	_, err := s.Update(late, func(*Tx) error { t.Error("a change was made after its deadline"); return nil })
	wantFault(t, err, fault.Deadline, "deadline")
	select {
	case err := <-answers:
		t.Fatalf("answered with %v before the flush", err)
	default:
	}
	disk.open()
	for range cap(answers) {
		if err := <-answers; err != nil {
			t.Error(err)
		}
	}
	if n := s.View().NodeCount(tr.ID); n != 1+cap(answers) {
		t.Errorf("%d nodes, want %d", n, 1+cap(answers))
	}
}
