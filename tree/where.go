package tree

import (
	"bytes"
	"encoding/binary"
	"iter"
	"slices"

	"github.com/boxwood-rl/boxwood/internal/ids"
)

// Where says which nodes of a tree are wanted: those that fit all of it. Zero values: any.
type Where struct {
	Capture []Capture         // one of these
	Labels  map[string]string // all of these; an empty value: not this label
	Depth   *int32
}

// Fits says whether a node is wanted.
func (w Where) Fits(n *Node) bool {
	for k, v := range w.Labels {
		if n.Labels[k] != v {
			return false
		}
	}
	return (w.Depth == nil || n.Depth == *w.Depth) && (len(w.Capture) == 0 || slices.Contains(w.Capture, n.Capture))
}

// NodesWhere are a tree's nodes that are wanted, in creation order. It costs what the smallest of the sets that they must be
// in has, however large the tree is.
func (r reader) NodesWhere(id ids.Tree, w Where) iter.Seq[*Node] {
	return func(yield func(*Node) bool) {
		k, ok := keyOf(id, "tr_")
		if !ok {
			return
		}
		all := &cursor{r: r, t: nodesByTree, prefix: k[:]}
		sets := append(w.sets(r, k), set{all})
		for at, ok := first(sets, 0); ok; at, ok = first(sets, at+1) {
			row, there := r.row(nodeKey(all.key[24:]))
			if !there {
				panic("an index of nodes has one that isn't there")
			}
			if n := row.node(); w.Fits(n) && !yield(n) {
				return
			}
		}
	}
}

// NodesWhere are a tree's nodes that are wanted, in creation order.
func (v *View) NodesWhere(id ids.Tree, w Where) iter.Seq[*Node] { return v.of(id).NodesWhere(id, w) }

func (w Where) sets(r reader, tree nodeKey) (sets []set) {
	if w.Depth != nil {
		sets = append(sets, set{{r: r, t: nodesByDepth, prefix: binary.BigEndian.AppendUint32(tree[:16:16], uint32(*w.Depth))}})
	}
	for k, v := range w.Labels {
		if v != "" {
			sets = append(sets, set{{r: r, t: nodesByLabel, prefix: binary.BigEndian.AppendUint64(nil, labelHash(tree, k, v))}})
		}
	}
	var of set
	for c := Recorded; c <= Withheld; c++ {
		if slices.Contains(w.Capture, c) {
			of = append(of, &cursor{r: r, t: nodesByCapture, prefix: append(tree[:16:16], byte(c))})
		}
	}
	if len(w.Capture) > 0 {
		sets = append(sets, of)
	}
	return sets
}

// A set is the CreateIndexes that an index has under any of some prefixes.
type set []*cursor

// first is the first number from at on that all sets have.
func first(sets []set, at uint64) (uint64, bool) {
	for i := 0; i < len(sets); i++ {
		n, ok := sets[i].from(at)
		if !ok {
			return 0, false
		}
		if n > at {
			at, i = n, -1 // what others have of it
		}
	}
	return at, true
}

func (s set) from(at uint64) (n uint64, ok bool) {
	for _, c := range s {
		if at, there := c.from(at); there && (!ok || at < n) {
			n, ok = at, true
		}
	}
	return n, ok
}

// cursor goes up through what an index has under a prefix.
type cursor struct {
	r      reader
	t      paged[struct{}]
	prefix []byte
	page   *page[struct{}]
	key    []byte // that it is at; nil: at none
}

// from moves to the first key whose number isn't below at, which is never less than before.
func (c *cursor) from(at uint64) (n uint64, ok bool) {
	if c.key != nil && c.number() >= at {
		return c.number(), true
	}
	low := c.t.padded(binary.BigEndian.AppendUint64(slices.Clip(c.prefix), at), 0)
	var next func() *page[struct{}]
	if c.page == nil || bytes.Compare(low, c.page.upto) > 0 {
		next = c.t.from(c.r, low)
		c.page = next()
	}
	for c.key = nil; c.page != nil; c.page = next() {
		if i, _ := c.t.search(c.page, low); i < len(c.page.vals) {
			if k := c.t.at(c.page, i); bytes.HasPrefix(k, c.prefix) {
				c.key = k
				return c.number(), true
			}
			return 0, false
		}
		if next == nil {
			next = c.t.from(c.r, c.page.upto)
			next()
		}
	}
	return 0, false
}

func (c *cursor) number() uint64 { return binary.BigEndian.Uint64(c.key[len(c.prefix):]) }
