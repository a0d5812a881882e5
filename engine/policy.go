package engine

import (
	"context"
	"errors"

	"github.com/boxwood-rl/boxwood/tree"
)

// A tree's capture policy says which of its nodes get a checkpoint. It never makes a node anything that it isn't:
// one that is left out is withheld, unless nothing changed since the last that is captured (laws 2 and 6).

// kindsOf are the kinds of process state that are saved under a policy, in the order in which they are tried.
func kindsOf(p tree.CapturePolicy) []tree.ProcessKind {
	switch p {
	case tree.Full:
		return []tree.ProcessKind{tree.Empty, tree.Dump}
	case tree.FilesOnly:
		return []tree.ProcessKind{tree.Empty}
	default:
		return kinds
	}
}

// leftOut says why a state that isn't that of the last checkpoint isn't captured by its tree's policy; empty: it is.
func (e *Engine) leftOut(p tree.CapturePolicy, b *body) string {
	switch p {
	case tree.Uncaptured:
		return "the capture policy of its tree is uncaptured: nothing is saved"
	case tree.FilesOnly:
		switch _, err := (emptyKeeper{e}).prepare(context.Background(), b); {
		case errors.Is(err, errOtherKind):
			return "the capture policy of its tree is files, and there are processes or kernel objects beside them"
		case err != nil:
			return "the capture policy of its tree is files, and it isn't known that no process is beside them: " + err.Error()
		}
	}
	return ""
}
