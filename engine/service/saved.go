package service

import (
	"sync"
	"time"

	"github.com/boxwood-rl/boxwood/engine"
	"github.com/boxwood-rl/boxwood/internal/fault"
)

// saved is what the states of each account's trees hold, as of a moment ago: counting goes through all of them, which no
// turn should wait for.
type saved struct {
	mu      sync.Mutex
	bytes   map[string]int64 // by the account's name; nil: never counted
	again   time.Time        // when to count again
	running bool
}

const (
	savedFor   = time.Second // that a count is good for, and
	savedShare = 50          // as many times as long as it took
)

// of is the count for an account. The first is waited for.
func (s *saved) of(e *engine.Engine, name string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.bytes == nil:
		began := time.Now()
		s.took(began, e.SavedBytes())
	case !s.running && time.Now().After(s.again):
		s.running = true
		go func() {
			began := time.Now()
			bytes := e.SavedBytes()
			s.mu.Lock()
			defer s.mu.Unlock()
			s.running = false
			s.took(began, bytes)
		}()
	}
	return s.bytes[name]
}

// took takes a count in. The caller holds mu.
func (s *saved) took(began time.Time, bytes map[string]int64) {
	took := time.Since(began)
	s.bytes, s.again = bytes, time.Now().Add(max(savedFor, savedShare*took))
}

// savesStates names the calls after which there is more saved than before.
var savesStates = map[string]bool{
	"RunTurn": true, "BeginTurn": true, "WriteFile": true, "Upload": true, "OpenSession": true, "CreateTree": true, "Fork": true, "ImportTree": true,
}

// room refuses what would save more once an account has saved as much as it may. What has begun goes on.
func (c *caller) room() error {
	if c.MaxSavedBytes == 0 || c.repeated || !savesStates[c.method] {
		return nil
	}
	if have := c.s.access.saved.of(c.s.e, c.Name); have >= c.MaxSavedBytes {
		return fault.New(fault.Exhausted, "quota", "the states that are saved for client %s have %d bytes, and may have %d", c.Name, have, c.MaxSavedBytes).
			WithHint("prune trees, or the states below a node that isn't needed any more: prune(states_only=True)")
	}
	return nil
}
