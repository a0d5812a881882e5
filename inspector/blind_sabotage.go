//go:build sabotage_events

package inspector

// Pages and transactions: as in enum blindness of bpf/box.h.
const alwaysBlind = 1<<0 | 1<<2
