//go:build !sabotage_sibling

package engine

// swapShells is what a child is told of its sessions: what its own checkpoint says. The build tag sabotage_sibling gives it
// a sibling's instead; TestShellPayloads must then fail.
func swapShells(content []byte) []byte { return content }
