package parquetrows

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// Physical types, repetitions and annotations, as numbered by Parquet.
const (
	typeBytes = 6

	optional = 1
	repeated = 2

	annotatedList = 3
	logicalList   = 3
)

// maxDepth of a column below its file.
const maxDepth = 16

// node of a schema. A column's values carry two levels: how many of its
// optional and repeated nodes are there, and which repeated one goes on.
type node struct {
	name string
	path string
	// defined is the level at which it is there; repeats that of its nearest
	// repeated node, itself included.
	defined, repeats   int
	optional, repeated bool
	// list says that it is one of its only child's children, by annotation.
	list bool
	// wraps says that it is of a list, and each of its items its only child.
	wraps    bool
	children []*node
	parents  []*node // from the top
	// chunk of a leaf: which of all leaves it is.
	chunk int
}

// schema reads the schema's elements, which are in order of a walk.
func (r *Reader) schema(elements []any, want func(string) bool) error {
	if len(elements) == 0 {
		return errors.New("there is no schema")
	}
	at, chunk := 0, 0
	var walk func(parents []*node, read bool) (*node, error)
	walk = func(parents []*node, read bool) (*node, error) {
		if len(parents) > maxDepth {
			return nil, errors.New("the schema is nested too deep")
		}
		if at >= len(elements) {
			return nil, errors.New("the schema has fewer columns than it says")
		}
		e, _ := elements[at].(fields)
		at++
		n := &node{name: e.text(4), path: e.text(4), parents: parents, chunk: -1}
		if len(parents) > 0 {
			up := parents[len(parents)-1]
			n.defined, n.repeats = up.defined, up.repeats
			n.optional, n.repeated = e.number(3) == optional, e.number(3) == repeated
			if n.optional || n.repeated {
				n.defined++
			}
			if n.repeated {
				n.repeats++
			}
			if len(parents) == 1 {
				read = want(n.name)
			} else if n.path = up.path; !up.list && !up.wraps {
				n.path += "." + n.name
			}
		}
		count := e.number(5)
		if count < 0 || count > int64(len(elements)) {
			return nil, fmt.Errorf("a column with %d columns", count)
		}
		if count == 0 && len(parents) > 0 {
			if n.chunk = chunk; read && e.number(1) == typeBytes && e.has(1) {
				if r.leaves = append(r.leaves, n); len(r.leaves) > maxColumns {
					return nil, fmt.Errorf("more than %d columns of text", maxColumns)
				}
			}
			chunk++
			return n, nil
		}
		n.wraps = len(parents) > 1 && count == 1 && n.repeated && parents[len(parents)-1].list
		n.list = len(parents) > 0 && count == 1 && (e.number(6) == annotatedList && e.has(6) || e.inner(10).has(logicalList))
		below := append(append([]*node{}, parents...), n)
		for range count {
			child, err := walk(below, read)
			if err != nil {
				return nil, err
			}
			n.children = append(n.children, child)
		}
		n.list = n.list && n.children[0].repeated
		return n, nil
	}
	root, err := walk(nil, false)
	if err != nil {
		return err
	}
	if at != len(elements) {
		return errors.New("the schema has more columns than it says")
	}
	r.root = root
	return nil
}

// value is what a row has at a node: nothing, or what is there of it.
type value struct {
	there bool
	text  []byte
	below map[*node]*value
	items []*value // of a repeated node
}

func (v *value) child(n *node) *value {
	if v.below == nil {
		v.below = map[*node]*value{}
	}
	if v.below[n] == nil {
		v.below[n] = &value{}
	}
	return v.below[n]
}

// write writes a value of a node as JSON.
func (n *node) write(b *bytes.Buffer, v *value) {
	if n.repeated {
		b.WriteByte('[')
		for i, item := range v.items {
			if i > 0 {
				b.WriteByte(',')
			}
			n.writeOne(b, item)
		}
		b.WriteByte(']')
		return
	}
	n.writeOne(b, v)
}

func (n *node) writeOne(b *bytes.Buffer, v *value) {
	switch {
	case n.chunk >= 0 && v.there:
		text, _ := json.Marshal(string(v.text)) // which is valid UTF-8
		b.Write(text)
	case n.chunk < 0 && n.list && v.there:
		n.writeList(b, v)
	case n.chunk < 0 && (v.there || len(n.parents) == 0):
		b.WriteByte('{')
		first := true
		for _, c := range n.children {
			below := v.below[c]
			if below == nil {
				continue // nothing of it is read
			}
			if !first {
				b.WriteByte(',')
			}
			first = false
			name, _ := json.Marshal(c.name)
			b.Write(name)
			b.WriteByte(':')
			c.write(b, below)
		}
		b.WriteByte('}')
	default:
		b.WriteString("null")
	}
}

// writeList writes what is annotated as a list: its child's items or, if each
// is a structure of one member, as writers do it today, these members.
func (n *node) writeList(b *bytes.Buffer, v *value) {
	c := n.children[0]
	below := v.below[c]
	if below == nil {
		below = &value{}
	}
	if !c.wraps {
		c.write(b, below)
		return
	}
	b.WriteByte('[')
	for i, item := range below.items {
		if i > 0 {
			b.WriteByte(',')
		}
		if inner := item.below[c.children[0]]; inner != nil {
			c.children[0].write(b, inner)
		} else {
			b.WriteString("null")
		}
	}
	b.WriteByte(']')
}
