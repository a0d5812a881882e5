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

	mu   sync.Mutex
	tree *folder
	// like is a listing that may share directories.
	like listing

	size atomic.Int64 // names kept
}

// listing is a tree as it was at a stamp: see lister.settled. Its zero value is none.
type listing struct {
	tree *folder
	at   int64
	size int // names
}

// Bounds of what is kept. A name takes about 80 bytes, and most are shared with the
// listing that one was made from.
const (
	maxBases = 64
	maxNames = 500_000
)

// names kept.
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

// know tells the base what is in it, if it hasn't looked yet.
func (b *base) know(l listing) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tree == nil {
		b.tree, b.like = l.tree, listing{}
		b.size.Store(int64(l.size))
	}
}

// hint offers a listing of the folder that the snapshot was made of.
func (b *base) hint(l listing) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tree == nil && l.tree != nil {
		b.like = l
	}
}

// listed returns the tree if it was listed, with no stamp: whoever asks knows since when
// it has stood.
func (b *base) listed() listing {
	b.mu.Lock()
	defer b.mu.Unlock()
	return listing{tree: b.tree, size: int(b.size.Load())}
}

// list returns the tree.
func (b *base) list(ctx context.Context, max int) (*folder, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tree != nil {
		return b.tree, nil
	}
	l := lister{ctx: ctx, settled: b.like.at, left: max}
	tree, err := l.list(b.path, b.like.tree)
	if err != nil {
		return nil, err
	}
	b.tree, b.like = tree, listing{}
	b.size.Store(int64(max - l.left))
	return tree, nil
}
