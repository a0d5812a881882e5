package inspector

import (
	"context"
	"sync"
	"sync/atomic"
)

// bases keeps the listings of snapshot folders, which never change, for all
// sandboxes that were made from them.
type bases struct {
	mu   sync.Mutex
	by   map[string]*base
	used []string // least lately used first
}

// base is one snapshot's folder of changes. Its fields are filled when first
// asked for, under mu.
type base struct {
	path string

	mu    sync.Mutex
	tree  *folder
	attrs map[uint64]attrs
	// like is a listing that may share directories, as they were at settled.
	like    *folder
	settled int64

	size atomic.Int64 // names kept
}

// Bounds of what is kept. A name takes about 80 bytes, its attributes as much
// again, and most names are shared with the listing that one was made from.
const (
	maxBases = 64
	maxNames = 500_000
)

// names kept, counting those twice whose attributes are kept, too.
func (b *bases) names() (n int64) {
	for _, base := range b.by {
		n += base.size.Load()
	}
	return n
}

func newBases() *bases { return &bases{by: map[string]*base{}} }

func (b *bases) get(path string) *base {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, p := range b.used {
		if p == path {
			b.used = append(append(b.used[:i:i], b.used[i+1:]...), path)
			return b.by[path]
		}
	}
	for len(b.used) > 0 && (len(b.used) >= maxBases || b.names() > maxNames) {
		delete(b.by, b.used[0])
		b.used = b.used[1:]
	}
	n := &base{path: path}
	b.by[path], b.used = n, append(b.used, path)
	return n
}

// hint offers a listing of the folder that the snapshot was made of.
func (b *base) hint(like *folder, settled int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tree == nil && like != nil {
		b.like, b.settled = like, settled
	}
}

// listed returns the tree if it was listed, or nil.
func (b *base) listed() *folder {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.tree
}

// list returns the tree.
func (b *base) list(ctx context.Context, max int) (*folder, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tree != nil {
		return b.tree, nil
	}
	l := lister{ctx: ctx, settled: b.settled, left: max}
	tree, err := l.list(b.path, b.like)
	if err != nil {
		return nil, err
	}
	b.tree, b.like = tree, nil
	b.size.Store(int64(max - l.left))
	return tree, nil
}

// inodes returns the attributes of every inode of the listed tree.
func (b *base) inodes(ctx context.Context, tree *folder) (map[uint64]attrs, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.attrs != nil {
		return b.attrs, nil
	}
	all := make(map[uint64]attrs, b.size.Load())
	err := inodes(ctx, b.path, tree, func(uint64) bool { return true }, func(_, _ string, ino uint64, a attrs) { all[ino] = a })
	if err != nil {
		return nil, err
	}
	b.attrs = all
	b.size.Add(int64(len(all)))
	return all, nil
}
