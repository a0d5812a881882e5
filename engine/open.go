package engine

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"

	"github.com/boxwood-rl/boxwood/engine/box"
	"github.com/boxwood-rl/boxwood/engine/criu"
	"github.com/boxwood-rl/boxwood/engine/pool"
	"github.com/boxwood-rl/boxwood/engine/stats"
	"github.com/boxwood-rl/boxwood/inspector"
	"github.com/boxwood-rl/boxwood/internal/cgroup"
	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/tree"
)

// OpenOptions are what the daemon's flags say.
type OpenOptions struct {
	Config
	// PoolBytes is the size of the pool's sparse file; 0: the default.
	PoolBytes int64
	// PoolDir is a folder on an existing btrfs to use instead of a file.
	PoolDir string
	// RebuildPool starts over with an empty pool if the old one is damaged.
	RebuildPool bool
	// Zygotes kept ready; 0: the default.
	Zygotes int
	// CRIU is the program that saves processes; empty: nodes with processes that CRIU would
	// have to save are withheld.
	CRIU string
	// Cgroup is the name of Boxwood's group; empty: "boxwood".
	Cgroup string
	// Share is what the daemon and all sandboxes together may use of the host.
	Share cgroup.Share
}

// Open opens the state folder with all real parts. The process must be root in a
// mount namespace of its own (see PrivateMounts).
func Open(ctx context.Context, o OpenOptions) (*Engine, error) {
	o.fill()
	if err := os.MkdirAll(o.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("making the state folder: %w", err)
	}
	if o.Zygotes == 0 {
		o.Zygotes = 64 // a usual batch: each holds 0.25 MiB
	}
	if o.Cgroup == "" {
		o.Cgroup = "boxwood"
	}
	var p Parts
	fail := func(err error) (*Engine, error) {
		return nil, errors.Join(err, (&Engine{Parts: p, cfg: o.Config, log: o.Log}).closeParts())
	}
	var err error
	if p.Store, err = tree.Open(filepath.Join(o.StateDir, "tree"), tree.Options{}); err != nil {
		return fail(fmt.Errorf("opening the tree store: %w", err))
	}
	// Not before the store, which one daemon has at a time.
	if o.RunDir == "" {
		o.RunDir = chooseRunDir(o.StateDir)
	}
	if err := os.MkdirAll(o.RunDir, 0o700); err != nil {
		return fail(fmt.Errorf("making the run folder: %w", err))
	}
	defer func() {
		if p.Boxes == nil {
			_ = os.Remove(o.RunDir) // unless a former daemon's boxes live on
		}
	}()
	unclean := pool.Check
	if o.RebuildPool {
		unclean = pool.Rebuild
	}
	files, err := pool.OpenBtrfs(pool.Options{Dir: o.StateDir, SizeBytes: o.PoolBytes, ExistingBtrfs: o.PoolDir, Unclean: unclean})
	if err != nil {
		return fail(fmt.Errorf("opening the pool: %w", err))
	}
	p.Pool = files
	if usage, err := files.Usage(); err != nil {
		return fail(fmt.Errorf("measuring the pool: %w", err))
	} else if o.Limits.DiskBytes > usage.Total/4 {
		o.Limits.DiskBytes = usage.Total / 4 // one sandbox can't fill a small pool
	}
	if p.Inspector, err = inspector.Open(inspector.Options{}); err != nil {
		p.Inspector = nil
		return fail(fmt.Errorf("opening the inspector: %w", err))
	}
	host, err := box.Open(box.Config{RunDir: o.RunDir, Zygotes: o.Zygotes, Limits: o.Limits, CgroupRoot: o.Cgroup, Share: o.Share})
	if err != nil {
		return fail(fmt.Errorf("opening the sandbox host: %w", err))
	}
	p.Boxes = host
	if o.CRIU != "" {
		if p.CRIU, err = criu.Open(o.CRIU); err != nil {
			o.Log.Warn("CRIU can't be used: nodes with processes that it would have to save are withheld", "error", err)
			p.CRIU = nil
		}
	}
	p.Capabilities = capabilities(files.Quotas(), host.Missing())
	if p.Stats, err = stats.New(stats.Options{Dir: filepath.Join(o.StateDir, "stats"), Nodes: nodeTable{p.Store}}); err != nil {
		p.Stats = nil
		return fail(fmt.Errorf("opening the statistics: %w", err))
	}
	e, err := New(ctx, p, o.Config)
	if err != nil {
		return fail(err)
	}
	return e, nil
}

// capabilities says what of its promises the engine can't keep on this host.
func capabilities(quotas bool, missing []string) []Capability {
	yes := func(ok bool) int {
		if ok {
			return 1
		}
		return 2
	}
	out := []Capability{{Name: "disk limits", State: yes(quotas), Detail: "what a sandbox may write is bounded by simple quotas of btrfs"}}
	for _, c := range []string{"memory", "pids", "cpu"} {
		out = append(out, Capability{Name: c + " limits", State: yes(!slices.Contains(missing, c)), Detail: "the cgroup controller " + c})
	}
	return out
}

// nodeTable is the table "nodes", read from the store.
type nodeTable struct{ s *tree.Store }

func (t nodeTable) Count() int { return t.s.View().NodeCount("") }

func (t nodeTable) Each(of ids.Tree) iter.Seq2[stats.NodeRow, error] {
	return func(yield func(stats.NodeRow, error) bool) {
		v := t.s.View()
		for t := range v.Trees() {
			if of != "" && t.ID != of {
				continue
			}
			for n := range v.NodesOf(t.ID) {
				full, err := v.FullNode(n.ID)
				if fault.Is(err, fault.NotFound) {
					continue // pruned since the view was taken
				}
				row := stats.NodeRow{Node: full, Policy: t.Defaults.Capture}
				if err == nil && n.Checkpoint != "" {
					row.Restores, _ = v.Checkpoint(n.Checkpoint)
				}
				if !yield(row, err) || err != nil {
					return
				}
			}
			if err := v.Err(); err != nil {
				yield(stats.NodeRow{}, err)
				return
			}
		}
	}
}

// closeParts lets go of the parts in the order in which they depend on each other.
func (e *Engine) closeParts() error {
	var errs []error
	if e.Boxes != nil {
		errs = append(errs, e.Boxes.Close())
		leaveRunDir(e.cfg.RunDir)
	}
	if e.CRIU != nil { // its mount namespace holds the pool
		errs = append(errs, e.CRIU.Close())
	}
	if e.Inspector != nil {
		errs = append(errs, e.Inspector.Close())
	}
	if e.Stats != nil {
		errs = append(errs, e.Stats.Close())
	}
	if e.Pool != nil {
		errs = append(errs, e.Pool.Close())
	}
	if e.Store != nil {
		errs = append(errs, e.Store.Close())
	}
	return errors.Join(errs...)
}
