//go:build !sabotage_thread

package thread

// keepsFirst: the first thread is never given away. The build tag sabotage_thread breaks this on purpose; see scripts/saboteurs.txt.
const keepsFirst = true
