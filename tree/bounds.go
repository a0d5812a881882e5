package tree

import "math"

// The bounds of what a trainer hangs on a node: it all stays in memory.
const (
	MaxLabels     = 64
	MaxLabelBytes = 4 << 10 // key and value together
	MaxRewards    = 64
)

// bounded refuses a new node that is larger than nodes are.
func bounded(n *Node) error {
	argv := 0
	for _, a := range n.Action.Argv {
		argv += len(a)
	}
	switch {
	case len(n.Action.Text) > MaxAction:
		return invalid("the action of node %s has %d bytes, and %d are kept", n.ID, len(n.Action.Text), MaxAction)
	case argv > MaxObservation:
		return invalid("the arguments of node %s have %d bytes, and at most %d are kept", n.ID, argv, MaxObservation)
	case len(n.Observation.Stdout) > MaxObservation || len(n.Observation.Stderr) > MaxObservation:
		return invalid("the output kept of node %s is over %d bytes", n.ID, MaxObservation)
	case len(n.Effects) > MaxEffects:
		return invalid("node %s has %d effects, and the first %d are kept", n.ID, len(n.Effects), MaxEffects)
	}
	return finite(n)
}

// finite refuses labels and rewards without bound, and numbers that a mean or
// a maximum could never get rid of again.
func finite(n *Node) error {
	if err := CheckLabels(n.Labels); err != nil {
		return err
	}
	if len(n.PolicyVersion) > MaxLabelBytes {
		return invalid("the policy version of node %s is over %d bytes", n.ID, MaxLabelBytes)
	}
	if len(n.Rewards) > MaxRewards {
		return invalid("node %s has %d rewards; at most %d are kept", n.ID, len(n.Rewards), MaxRewards)
	}
	for k, v := range n.Rewards {
		if !isFinite(v) || len(k) > MaxLabelBytes {
			return invalid("reward %.64q of node %s is %v: it must be a finite number", k, n.ID, v)
		}
	}
	if !isFinite(n.Value) || n.Visits < 0 {
		return invalid("node %s would have value %v and %d visits", n.ID, n.Value, n.Visits)
	}
	return nil
}

// CheckLabels refuses labels that no node takes, before there is a node.
func CheckLabels(labels map[string]string) error {
	if len(labels) > MaxLabels {
		return invalid("%d labels are too many: a node takes %d", len(labels), MaxLabels)
	}
	for k, v := range labels {
		if len(k)+len(v) > MaxLabelBytes {
			return invalid("the label %.64q is over %d bytes", k, MaxLabelBytes)
		}
	}
	return nil
}

func isFinite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }
