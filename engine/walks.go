package engine

import (
	"bufio"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/treewalk"
	"github.com/boxwood-rl/boxwood/tree"
)

const (
	walksDir = "walks" // of the state folder
	// walkLimit is how much longer than otherwise a sandbox stands frozen for its files to be looked at.
	walkLimit = 5 * time.Second
)

// walks hold what children see in their files against what their parent saw, for a share of the captures. In the freeze, package treewalk,
// which shares no code with the pool, overlays or captures, goes through the root as the sandbox sees it, names, contents and all; and
// again through the root of everything that is made of this checkpoint, before it is handed out (law 5). What differs is a
// failed child, counted and kept as a case.
//
// What was seen in a freeze lies in the state folder, a file for each snapshot, as long as that is there. It isn't flushed: one that is
// damaged by the end of the host says nothing.
type walks struct {
	dir   string
	share float64 // of the captures

	mu                                 sync.Mutex
	seen                               map[ids.Snapshot]bool
	taken, compared, differed, unclear int64
}

func openWalks(state string, share float64) (*walks, error) {
	w := &walks{dir: filepath.Join(state, walksDir), share: share, seen: map[ids.Snapshot]bool{}}
	if share <= 0 {
		return w, os.RemoveAll(w.dir)
	}
	if err := os.MkdirAll(w.dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the folder of what was seen in files: %w", err)
	}
	entries, err := os.ReadDir(w.dir)
	if err != nil {
		return nil, err
	}
	for _, d := range entries {
		w.seen[ids.Snapshot(d.Name())] = true
	}
	return w, nil
}

// due says whether the files of this capture are to be looked at.
func (w *walks) due() bool { return w.share > 0 && rand.Float64() < w.share }

func (w *walks) has(id ids.Snapshot) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seen[id]
}

func (w *walks) count(n *int64) {
	w.mu.Lock()
	*n++
	w.mu.Unlock()
}

// keep writes down what was seen beside a snapshot.
func (w *walks) keep(id ids.Snapshot, lines []string) error {
	f, err := os.OpenFile(filepath.Join(w.dir, string(id)), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	z := gzip.NewWriter(f)
	_, err = z.Write([]byte(strings.Join(lines, "\n")))
	if err = errors.Join(err, z.Close(), f.Close()); err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	w.mu.Lock()
	w.seen[id] = true
	w.taken++
	w.mu.Unlock()
	return nil
}

// read gives what keep wrote. A line that was cut off fails its sum.
func (w *walks) read(id ids.Snapshot) (lines []string, err error) {
	f, err := os.Open(filepath.Join(w.dir, string(id)))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return nil, err
	}
	in := bufio.NewScanner(z)
	in.Buffer(nil, 1<<20) // names and attributes are bounded by the kernel
	for in.Scan() {
		lines = append(lines, in.Text())
	}
	return lines, in.Err()
}

// drop forgets what was seen beside a snapshot that goes.
func (w *walks) drop(id ids.Snapshot) {
	w.mu.Lock()
	had := w.seen[id]
	delete(w.seen, id)
	w.mu.Unlock()
	if had {
		_ = os.Remove(filepath.Join(w.dir, string(id)))
	}
}

// reconcile forgets what is beside none of these.
func (w *walks) reconcile(keep map[ids.Snapshot]bool) {
	w.mu.Lock()
	var gone []ids.Snapshot
	for id := range w.seen {
		if !keep[id] {
			gone = append(gone, id)
		}
	}
	w.mu.Unlock()
	for _, id := range gone {
		w.drop(id)
	}
}

// capability tells the figures in Info.
func (w *walks) capability() Capability {
	w.mu.Lock()
	defer w.mu.Unlock()
	return Capability{Name: "verified files", State: 1, Detail: fmt.Sprintf("%g of the captures; %d walked, %d children compared, %d differed, %d unclear",
		w.share, w.taken, w.compared, w.differed, w.unclear)}
}

// walkRoot describes the files of a box as it sees them itself. It has to stand still.
func walkRoot(ctx context.Context, b box.Box) ([]string, error) {
	root, err := b.Root()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	return treewalk.Sandbox(root, b.PID1(), ctx.Err)
}

// walkFrozen looks at the files of a box that is frozen for a capture, if that is due; nil: it isn't, or it would take too long.
func (e *Engine) walkFrozen(ctx context.Context, b *body) []string {
	if !e.walks.due() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, walkLimit)
	defer cancel()
	lines, err := walkRoot(ctx, b.box)
	if err != nil {
		e.walks.count(&e.walks.unclear)
		e.log.WarnContext(ctx, "the files of a sandbox can't be looked at", "generation", b.gen, "error", err)
		return nil
	}
	return lines
}

// compareFiles holds a body in which nothing runs yet against what was seen beside its snapshot, if anything was.
func (e *Engine) compareFiles(ctx context.Context, b *body, ck *tree.Checkpoint) error {
	if !e.walks.has(ck.Snapshot) {
		return nil
	}
	was, err := e.walks.read(ck.Snapshot)
	if err != nil {
		e.walks.drop(ck.Snapshot)
		e.walks.count(&e.walks.unclear)
		e.log.WarnContext(ctx, "what was seen in the files of a sandbox can't be read", "snapshot", ck.Snapshot, "error", err)
		return nil
	}
	err = e.inOwnRoot(ctx, b)
	var is []string
	if err == nil {
		is, err = walkRoot(ctx, b.box)
	}
	if err != nil {
		return fmt.Errorf("looking at the files of a child: %w", err)
	}
	e.walks.count(&e.walks.compared)
	d := treewalk.Diff(was, is, 20)
	if len(d) == 0 && len(was) == len(is) {
		return nil
	}
	e.walks.count(&e.walks.differed)
	e.secrets.all().maskTexts(d)
	kept := e.keepCase(string(ck.ID), struct {
		Checkpoint  *tree.Checkpoint
		Generation  ids.Generation
		Differences []string
	}{ck, b.gen, d})
	e.log.ErrorContext(ctx, "the files of a child aren't those of its parent", "checkpoint", ck.ID, "differences", d, "case", kept)
	return fault.New(fault.DataLoss, "files_differ", "the files of a child aren't those of its parent: %s", strings.Join(d[:min(len(d), 3)], "; "))
}
