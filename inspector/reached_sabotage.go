//go:build sabotage_survivor

package inspector

// As in enum blindness of bpf/box.h.
const neverReached = 1 << 6
