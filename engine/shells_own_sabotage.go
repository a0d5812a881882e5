//go:build sabotage_sibling

package engine

import "sync"

var sibling struct {
	sync.Mutex
	content []byte
}

// swapShells gives the text that was restored before.
func swapShells(content []byte) []byte {
	sibling.Lock()
	defer sibling.Unlock()
	other := sibling.content
	sibling.content = content
	if other == nil {
		return content
	}
	return other
}
