//go:build !sabotage_flag

package inspector

// neverSet are flags that the kernel side sets in vain. A saboteur build drops one;
// TestProbes must then fail.
const neverSet signs = 0
