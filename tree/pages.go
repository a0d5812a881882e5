package tree

import (
	"bytes"
	"iter"
	"slices"
	"sort"

	"github.com/hashicorp/go-memdb"
)

// A row costs an index of go-memdb some 400 bytes: two radix nodes, each with a
// channel. That is twice what a node's record takes, and nodes are what there are
// many of. So what there is one of per node lies in pages: a memdb row is a run of
// up to pageSize keys in order, with a value each.
//
//	table:  ..., page{upto: k3, keys: k1 k2 k3}, page{upto: k9, keys: k7 k8}, page{upto: ff...ff, keys: ka}
//
// A page has the keys up to and including upto and above the page before; pages are
// constants like all rows: a change makes a new one in its place. Only what the group made that
// is still open is written to, since nobody but the group's own changes can see it: a page is copied
// once a group, not once a change.
const pageSize = 64

type page[V any] struct {
	upto []byte // the row's key; shares nothing with keys
	keys []byte // all of one size, ascending, back to back
	vals []V
	made uint64 // by the group of this number; 0: at the start
}

// paged is a table of pages. Keys have exactly size bytes.
type paged[V any] struct {
	name string
	size int
	slot int // in recent
}

func (t paged[V]) schema() *memdb.TableSchema {
	return tableOf(t.name, unique(byID, func(p *page[V]) []byte { return p.upto }))
}

// from gives the page that a key belongs to and those after it.
func (t paged[V]) from(r reader, key []byte) func() *page[V] {
	rows, err := r.txn.LowerBound(t.name, byID, key)
	if err != nil {
		panic(err) // a table or index that isn't in the schema
	}
	return func() *page[V] {
		p, _ := rows.Next().(*page[V])
		return p
	}
}

// recent are pages that the changes of a group have just looked up, four of each table: changes
// that come together are mostly of the same trees, and have the same labels. What lies between a key that was
// looked up and the end of its page belongs to that page, until the table's pages change.
type recent [12]struct {
	pages [4]struct {
		low  [48]byte
		page any
	}
	next int // to be given away
}

// home is the page that a key belongs to; nil: none.
func (t paged[V]) home(r reader, key []byte) *page[V] {
	if r.recent == nil {
		return t.from(r, key)()
	}
	known := &r.recent[t.slot]
	for i := range known.pages {
		e := &known.pages[i]
		if p, ok := e.page.(*page[V]); ok && bytes.Compare(e.low[:t.size], key) <= 0 && bytes.Compare(key, p.upto) <= 0 {
			known.next = (i + 1) % len(known.pages)
			return p
		}
	}
	p := t.from(r, key)()
	if p != nil {
		e := &known.pages[known.next]
		copy(e.low[:], key)
		e.page, known.next = p, (known.next+1)%len(known.pages)
	}
	return p
}

// replace is Tx's.
func (t paged[V]) replace(tx *Tx, before, after *page[V]) {
	clear(tx.recent[t.slot].pages[:])
	tx.replace(t.name, row(before), row(after))
}

func (t paged[V]) at(p *page[V], i int) []byte { return p.keys[i*t.size : (i+1)*t.size] }

// search is where a key is in a page, or where it would be.
func (t paged[V]) search(p *page[V], key []byte) (i int, there bool) {
	i = sort.Search(len(p.vals), func(i int) bool { return bytes.Compare(t.at(p, i), key) >= 0 })
	return i, i < len(p.vals) && bytes.Equal(t.at(p, i), key)
}

func (t paged[V]) get(r reader, key []byte) (v V, ok bool) {
	if p := t.home(r, key); p != nil {
		if i, there := t.search(p, key); there {
			return p.vals[i], true
		}
	}
	return v, false
}

// padded is prefix and then as many of b as a key has room for.
func (t paged[V]) padded(prefix []byte, b byte) []byte {
	k := make([]byte, t.size)
	for i := copy(k, prefix); i < len(k); i++ {
		k[i] = b
	}
	return k
}

// scan gives the keys that start with prefix, in order.
func (t paged[V]) scan(r reader, prefix []byte) iter.Seq2[[]byte, V] {
	return t.scanFrom(r, prefix, prefix)
}

// scanFrom is scan from a key, or the start of one, on.
func (t paged[V]) scanFrom(r reader, prefix, from []byte) iter.Seq2[[]byte, V] {
	return func(yield func([]byte, V) bool) {
		low := t.padded(from, 0)
		next := t.from(r, low)
		for p := next(); p != nil; p = next() {
			i := 0
			if low != nil {
				i, _ = t.search(p, low)
				low = nil
			}
			for ; i < len(p.vals); i++ {
				if k := t.at(p, i); !bytes.HasPrefix(k, prefix) || !yield(k, p.vals[i]) {
					return
				}
			}
		}
	}
}

// first is the lowest key that starts with prefix.
func (t paged[V]) first(r reader, prefix []byte) (k []byte, ok bool) {
	for k := range t.scan(r, prefix) {
		return k, true
	}
	return nil, false
}

// last is the highest key that starts with prefix.
func (t paged[V]) last(r reader, prefix []byte) (k []byte, ok bool) {
	high := t.padded(prefix, 0xff)
	below := func(p *page[V]) ([]byte, bool) {
		i, there := t.search(p, high)
		if !there {
			i--
		}
		if i < 0 {
			return nil, false
		}
		return t.at(p, i), true
	}
	p := t.home(r, high)
	if p != nil {
		k, ok = below(p)
	}
	if !ok { // it is the end of a page before this one
		rows, err := r.txn.ReverseLowerBound(t.name, byID, high)
		if err != nil {
			panic(err)
		}
		if p, _ := rows.Next().(*page[V]); p != nil {
			k, ok = below(p)
		}
	}
	return k, ok && bytes.HasPrefix(k, prefix)
}

// put adds a key or gives it another value.
func (t paged[V]) put(tx *Tx, key []byte, v V) {
	p := t.home(tx.reader, key)
	if p == nil {
		p = &page[V]{upto: t.padded(nil, 0xff), made: tx.group}
		t.replace(tx, nil, p)
	} else if p.made != tx.group {
		// Some room, as more keys are likely to follow.
		q := &page[V]{p.upto, make([]byte, 0, len(p.keys)+pageRoom*t.size), make([]V, 0, len(p.vals)+pageRoom), tx.group}
		q.keys, q.vals = append(q.keys, p.keys...), append(q.vals, p.vals...)
		t.replace(tx, p, q)
		p = q
	}
	i, there := t.search(p, key)
	if there {
		tx.rows = append(tx.rows, rowChange{before: p.vals[i], after: p, at: i})
		p.vals[i] = v
		return
	}
	p.keys, p.vals = slices.Insert(p.keys, i*t.size, key...), slices.Insert(p.vals, i, v)
	tx.rows = append(tx.rows, rowChange{after: p, at: i})
	n := len(p.vals)
	if n <= pageSize {
		return
	}
	// Where keys come in order, which is the rule, the page behind stays full.
	m := n / 2
	if i == n-1 {
		m = n * 7 / 8
	}
	t.replace(tx, nil, t.run(tx.group, p.keys[:m*t.size], p.vals[:m], nil))
	t.replace(tx, p, t.run(tx.group, p.keys[m*t.size:], p.vals[m:], p.upto))
}

const pageRoom = 8

// takeBack undoes a write to a page of the same change: of a key that was taken out, that was there, or that wasn't.
func (p *page[V]) takeBack(c rowChange) {
	v, was := c.before.(V)
	if c.gone != nil {
		p.keys, p.vals = slices.Insert(p.keys, c.at*len(c.gone), c.gone...), slices.Insert(p.vals, c.at, v)
		return
	}
	if was {
		p.vals[c.at] = v
		return
	}
	size := len(p.keys) / len(p.vals)
	p.keys, p.vals = slices.Delete(p.keys, c.at*size, (c.at+1)*size), slices.Delete(p.vals, c.at, c.at+1)
}

// run is a page with these keys; it shares nothing with them.
func (t paged[V]) run(made uint64, keys []byte, vals []V, upto []byte) *page[V] {
	if upto == nil {
		upto = bytes.Clone(keys[len(keys)-t.size:])
	}
	return &page[V]{upto, bytes.Clone(keys), slices.Clone(vals), made}
}

// drop takes keys out, in order, so that each page is written once. One that isn't there is an
// error of the caller's.
func (t paged[V]) drop(tx *Tx, keys ...[]byte) {
	if len(keys) == 1 && t.dropHere(tx, keys[0]) {
		return
	}
	for len(keys) > 0 {
		pages := t.from(tx.reader, keys[0])
		p := pages()
		if p == nil {
			panic("a key that is in no page")
		}
		q := &page[V]{p.upto, make([]byte, 0, len(p.keys)), make([]V, 0, len(p.vals)), tx.group}
		from := 0
		for len(keys) > 0 && bytes.Compare(keys[0], p.upto) <= 0 {
			i, there := t.search(p, keys[0])
			if !there {
				panic("a key that is in no page")
			}
			q.keys, q.vals = append(q.keys, p.keys[from*t.size:i*t.size]...), append(q.vals, p.vals[from:i]...)
			from, keys = i+1, keys[1:]
		}
		q.keys, q.vals = append(q.keys, p.keys[from*t.size:]...), append(q.vals, p.vals[from:]...)
		n := len(q.vals)
		if n == 0 {
			t.replace(tx, p, nil)
			continue
		}
		// What is left of a page goes to the next one, or pages would never go away.
		if n <= pageSize/4 {
			if after := pages(); after != nil && n+len(after.vals) <= pageSize*3/4 {
				t.replace(tx, p, nil)
				t.replace(tx, after, &page[V]{after.upto, slices.Concat(q.keys, after.keys), slices.Concat(q.vals, after.vals), tx.group})
				continue
			}
		}
		t.replace(tx, p, t.run(tx.group, q.keys, q.vals, p.upto))
	}
}

// dropHere takes a key out of a page that the group made and that stays large enough.
func (t paged[V]) dropHere(tx *Tx, key []byte) bool {
	p := t.home(tx.reader, key)
	if p == nil || p.made != tx.group || len(p.vals) <= pageSize/4+1 {
		return false
	}
	i, there := t.search(p, key)
	if !there {
		panic("a key that is in no page")
	}
	tx.rows = append(tx.rows, rowChange{before: p.vals[i], after: p, at: i, gone: key})
	p.keys, p.vals = slices.Delete(p.keys, i*t.size, (i+1)*t.size), slices.Delete(p.vals, i, i+1)
	return true
}

// fill makes pages of keys in order, back to back, in an empty table.
func (t paged[V]) fill(txn *memdb.Txn, keys []byte, vals []V) error {
	const full = pageSize * 7 / 8 // the first change of each need not split it
	for len(vals) > 0 {
		n := min(full, len(vals))
		var upto []byte
		if n == len(vals) {
			upto = t.padded(nil, 0xff)
		}
		p := t.run(0, keys[:n*t.size], vals[:n], upto)
		keys, vals = keys[n*t.size:], vals[n:]
		if err := txn.Insert(t.name, p); err != nil {
			return err
		}
	}
	return nil
}
