//go:build sabotage_none

package inspector

import (
	"sync/atomic"

	"github.com/boxwood-rl/boxwood/tree"
)

var pronounced atomic.Int64

func pronounce(r Report) Report {
	if pronounced.Add(1)%100 == 0 {
		r.Verdict, r.Turn = tree.None, tree.None
	}
	return r
}
