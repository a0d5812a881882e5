// Package ids makes and checks the names of everything Boxwood keeps.
//
// An id is a kind's prefix, an underscore and a ULID in lower case:
// "nd_01jd9m...". Ids of one process sort in the order they were made, and
// they stay unique over restarts and hosts.
package ids

import (
	"bufio"
	"crypto/rand"
	"strings"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"

	"github.com/boxwood-rl/boxwood/internal/fault"
)

type (
	Tree       string // tr_
	Node       string // nd_
	Checkpoint string // ck_
	Snapshot   string // sn_
	Process    string // ps_: a saved process state
	Sandbox    string // sb_
	Generation string // gn_: one materialised sandbox
	Turn       string // tn_: an open turn
	Image      string // sha256:<64 hex>
	Layer      string // sha256:<64 hex>, the diff id
)

var (
	mu      sync.Mutex
	entropy = ulid.Monotonic(bufio.NewReader(rand.Reader), 0) // ids are names, no secrets
)

func next(prefix string) string {
	mu.Lock()
	defer mu.Unlock()
	return prefix + strings.ToLower(ulid.MustNew(ulid.Timestamp(time.Now()), entropy).String())
}

func NewTree() Tree             { return Tree(next("tr_")) }
func NewNode() Node             { return Node(next("nd_")) }
func NewCheckpoint() Checkpoint { return Checkpoint(next("ck_")) }
func NewSnapshot() Snapshot     { return Snapshot(next("sn_")) }
func NewProcess() Process       { return Process(next("ps_")) }
func NewSandbox() Sandbox       { return Sandbox(next("sb_")) }
func NewGeneration() Generation { return Generation(next("gn_")) }
func NewTurn() Turn             { return Turn(next("tn_")) }

// Check refuses what can't be an id of the kind with this prefix ("nd_"), so
// that a mistyped or swapped id is an error about the id and not "not found".
func Check(id, prefix, what string) error {
	if !strings.HasPrefix(id, prefix) {
		return fault.New(fault.Invalid, "bad_id", "%q is not the id of a %s: those start with %q", id, what, prefix)
	}
	if _, ok := Binary(id, prefix); !ok {
		return fault.New(fault.Invalid, "bad_id", "%q is not the id of a %s: after %q come 26 digits and lower-case letters; was it copied whole?", id, what, prefix)
	}
	return nil
}
