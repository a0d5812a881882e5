// Package tree keeps every rollout: trees, nodes, checkpoints, sandboxes,
// images, replies. It promises:
//
//   - Durable before the reply. Update returns nil only after its change is on
//     the disk. The order is always log, then memory, then watchers: no reader and
//     no watcher ever sees what a crash could take back.
//   - One change at a time. Functions given to Update run one after the other,
//     each seeing all before it; each change is whole or absent, also after a crash.
//   - Reads never wait for writes. A View is one instant of the store.
//   - Nothing in use is deleted. Prune refuses what is pinned, stood on or built
//     upon and says by what; file state is named as condemned in the same change
//     that removes its last user, so that a crash never leaks or tears it.
//
// Records given out are constants: whoever wants to change one copies it and
// puts the copy. Records put are copied: the caller may go on using its own.
//
// What a turn did (action, output, effects, reasons) can be large and is rarely
// read, so it stays on disk: Node gives a node without it, FullNode with it.
//
// docs/TREE.md draws the format.
package tree
