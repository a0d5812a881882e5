package tree

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/boxwood-rl/boxwood/internal/fault"
	"github.com/boxwood-rl/boxwood/internal/ids"
	"github.com/boxwood-rl/boxwood/internal/sabotage"
)

// edit gives a node that may be changed and put again. Its maps are still the
// store's: replace them, don't write to them.
func (tx *Tx) edit(id ids.Node, change func(n *Node) error) error {
	old, err := tx.Node(id)
	if err != nil {
		return err
	}
	n := *old
	if err := change(&n); err != nil {
		return err
	}
	return tx.rewrite(old, n)
}

// SetCaptured stores k and makes it the checkpoint of its node, which becomes
// Captured, or Proven if k is. frozenAt is the instant of the freeze, survivorsRan
// whether processes ran between the observation and it, took how long it was.
// A checkpoint that the node had of its own is dropped.
func (tx *Tx) SetCaptured(k Checkpoint, frozenAt time.Time, survivorsRan bool, took time.Duration) error {
	if err := tx.PutCheckpoint(k); err != nil {
		return err
	}
	return tx.edit(k.Node, func(n *Node) error {
		if n.Tree != k.Tree {
			return invalid("checkpoint %s is of tree %s and its node %s of tree %s", k.ID, k.Tree, n.ID, n.Tree)
		}
		n.Checkpoint, n.WithheldReason = k.ID, ""
		n.Capture = Captured
		if k.Proven {
			n.Capture = Proven
		}
		n.FrozenAt, n.SurvivorsRan, n.Timings.Capture = frozenAt, survivorsRan, took
		return nil
	})
}

// SetProven marks a checkpoint and the nodes that have it, of any tree: it has been restored once
// and found equal. Idempotent.
func (tx *Tx) SetProven(id ids.Checkpoint) error {
	k, err := tx.Checkpoint(id)
	if err != nil || k.Proven {
		return err
	}
	users, err := tx.UsersOf(id)
	if err != nil {
		return err
	}
	proven := *k
	proven.Proven = true
	if err := tx.PutCheckpoint(proven); err != nil {
		return err
	}
	for _, n := range users {
		if n.Capture != Captured {
			continue
		}
		if err := tx.edit(n.ID, func(n *Node) error { n.Capture = Proven; return nil }); err != nil {
			return err
		}
	}
	return nil
}

// SetWithheld marks a node as not restorable exactly, and why. It may use the space that is kept for
// removals: somebody may wait for the node to be decided.
func (tx *Tx) SetWithheld(id ids.Node, reason string) error {
	tx.removes = true
	if reason == "" {
		return invalid("node %s can't be withheld without a reason", id)
	}
	return tx.edit(id, func(n *Node) error {
		n.Capture, n.Checkpoint, n.WithheldReason = Withheld, "", reason
		return nil
	})
}

// Pin keeps a node from being pruned until Unpin. Both are idempotent.
func (tx *Tx) Pin(id ids.Node) error   { return tx.setPinned(id, true) }
func (tx *Tx) Unpin(id ids.Node) error { return tx.setPinned(id, false) }

func (tx *Tx) setPinned(id ids.Node, pinned bool) error {
	n, err := tx.Node(id)
	if err != nil || n.Pinned == pinned {
		return err
	}
	return tx.edit(id, func(n *Node) error { n.Pinned = pinned; return nil })
}

// Annotation changes what the trainer knows of a node; what is nil stays.
type Annotation struct {
	Node          ids.Node
	Rewards       map[string]float64 // added to those there, by name
	Value         *float64
	Visits        *int64
	Labels        map[string]string // added; an empty value removes the label
	PolicyVersion *string
	Payload       *[]byte // empty removes it
}

// Annotate changes many nodes; one bad annotation and none is changed (return
// the error from the function given to Update).
func (tx *Tx) Annotate(as []Annotation) error {
	for _, a := range as {
		if err := tx.edit(a.Node, func(n *Node) error { return tx.annotate(n, a) }); err != nil {
			return err
		}
	}
	return nil
}

func (tx *Tx) annotate(n *Node, a Annotation) error {
	n.Rewards = merged(n.Rewards, a.Rewards)
	n.Labels = merged(n.Labels, a.Labels)
	maps.DeleteFunc(n.Labels, func(_, v string) bool { return v == "" })
	if a.Value != nil {
		n.Value = *a.Value
	}
	if a.Visits != nil {
		n.Visits = *a.Visits
	}
	if a.PolicyVersion != nil {
		n.PolicyVersion = *a.PolicyVersion
	}
	if a.Payload == nil {
		return nil
	}
	n.PayloadDigest, n.PayloadBytes = "", int64(len(*a.Payload))
	if len(*a.Payload) == 0 {
		return nil
	}
	var err error
	n.PayloadDigest, err = tx.PutPayload(*a.Payload)
	return err
}

// merged is a new map.
func merged[V any](a, b map[string]V) map[string]V {
	m := make(map[string]V, len(a)+len(b))
	maps.Copy(m, a)
	maps.Copy(m, b)
	return m
}

// BackupRule says how a value v is carried up a path. Each node of the path,
// the leaf included, also gets one visit more.
type BackupRule uint8

const (
	Sum        BackupRule = iota + 1 // value += v
	Mean                             // value = mean of all v seen, that is value += (v - value) / visits
	Max                              // value = max(value, v); a node without visits takes v
	Discounted                       // value += v * discount^(distance from the leaf)
)

// BackupItem is one leaf (any node may be one) and its value.
type BackupItem struct {
	Node  ids.Node
	Value float64
}

// Backup carries values to the root, as if item by item in their order (but for the rounding of sums); it says how
// many nodes changed. discount is for Discounted, above 0 and at most 1.
//
// Each node of the paths is read and written once, however many items come through it, and there is a
// bound: other changes wait meanwhile. Several items that would change more than 100,000
// nodes (about a second) are refused as Invalid "too_many"; one is always taken.
func (tx *Tx) Backup(items []BackupItem, rule BackupRule, discount float64) (changed int, err error) {
	if rule < Sum || rule > Discounted {
		return 0, invalid("there is no backup rule %d", rule)
	}
	if rule == Discounted && !(discount > 0 && discount <= 1) {
		return 0, invalid("a discount of %v: it must be above 0 and at most 1", discount)
	}
	carried := map[ids.Node]*carrier{}
	var order []*carrier
	for i, item := range items {
		if !isFinite(item.Value) {
			return 0, invalid("the value of node %s is %v: it must be a finite number", item.Node, item.Value)
		}
		for id := item.Node; id != "" && carried[id] == nil; {
			n, err := tx.Node(id)
			if err != nil {
				return 0, err
			}
			c := &carrier{node: n}
			carried[id], order = c, append(order, c)
			if i > 0 && len(order) > tx.s.o.maxBackup {
				return 0, fault.New(fault.Invalid, "too_many", "the values of %d items would change more than %d nodes", len(items), tx.s.o.maxBackup).
					WithHint("make several calls of it")
			}
			id = n.Parent
		}
		carried[item.Node].take(1, item.Value, rule)
	}
	deepest := func(a, b *carrier) int { return cmp.Compare(b.node.Depth, a.node.Depth) }
	for _, c := range slices.SortedStableFunc(slices.Values(order), deepest) {
		if up := carried[c.node.Parent]; up != nil {
			v := c.value
			if rule == Discounted {
				v *= discount
			}
			up.take(c.visits, v, rule)
		}
	}
	for _, c := range order {
		n, sum := *c.node, carrier{visits: c.node.Visits, value: c.node.Value}
		if sabotage.On("backup") { // what others have changed since the last flush is lost
			if was, err := tx.s.View().Node(n.ID); err == nil {
				sum = carrier{visits: was.Visits, value: was.Value}
			}
		}
		sum.take(c.visits, c.value, rule)
		if n.Visits, n.Value = sum.visits, sum.value; !isFinite(n.Value) {
			return 0, fault.New(fault.Precondition, "value_overflow", "the value of node %s would not be a finite number", n.ID)
		}
		if err := tx.rewrite(c.node, n); err != nil {
			return 0, err
		}
	}
	return len(order), nil
}

// carrier is what items together carry to a node.
type carrier struct {
	node   *Node
	visits int64
	value  float64
}

// take adds what some visits carry, v together.
func (c *carrier) take(visits int64, v float64, rule BackupRule) {
	c.visits += visits
	switch rule {
	case Sum, Discounted:
		c.value += v
	case Mean:
		c.value += (v - c.value) / (float64(c.visits) / float64(visits))
	case Max:
		if c.visits == visits {
			c.value = v
		} else {
			c.value = math.Max(c.value, v)
		}
	}
}
